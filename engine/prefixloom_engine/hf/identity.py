"""The identity of a transformers model: what its content depends on beside tokens, and whether that has changed.

Weights are hashed once for each model object, and again only where they change. Adapters are those of PEFT, which puts
its layers into the model's modules: the active ones count, with their weights and scales, and the others do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, proxy

from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from prefixloom import CompositionError, Identity

from ..contract.weights import WatchedWeights, combined

NO_CONTENT = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields of a config that change nothing of what layers write."""
WRAPPED = "base_layer"
"""The name that PEFT gives to the layer that an adapter wraps."""


class ModelIdentity:
    """Says the identity of one model object. ``identity_of`` gives the one that a model has."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = WatchedWeights(lambda: tensors_of(model))
        self._adapters: dict[str, Any] = {}
        self._states: list[Any] = []
        self._kernels = ""
        self._known: Identity | None = None

    def now(self) -> Identity:
        """The identity of the model as it is. For every request."""
        check_evaluating(self._model)
        config = _config_text(self._model.config)
        known = self._known
        if known is not None and known.model == config and not self.changed() and self._weights.same_samples():
            return known
        digests = self._weights.digests()
        self._adapters = dict(_adapter_layers(self._model))
        self._states = [_adapter_state(layer) for layer in self._adapters.values()]
        self._kernels = _kernels(self._model.config)
        ours = {name: digest for name, digest in digests.items() if not self._adapter_at(name)}
        active = {name: digest for name, digest in digests.items() if self._is_active(name)}
        names = sorted({name for active_here, *_ in self._states for name in active_here})
        states = hashlib.blake2b(repr(self._states).encode(), digest_size=16).digest()
        self._known = Identity(
            model=config,
            weights=combined(ours.items()),
            adapters=f"{', '.join(names)} {combined([('states', states), *active.items()])}" if names else "",
            precision=f"{self._model.dtype} {self._kernels}",
        )
        return self._known

    def changed(self) -> bool:
        """Whether the identity may be another one than it was when last asked for. For every pass."""
        return (
            self._known is None
            or self._model.training
            or not self._weights.same()
            or [_adapter_state(layer) for layer in self._adapters.values()] != self._states
            or _kernels(self._model.config) != self._kernels
        )

    def _adapter_at(self, name: str) -> tuple[Any, str] | None:
        """The adapter layer that a tensor belongs to, and the adapter's name; None if it is the model's own."""
        for path, layer in self._adapters.items():
            if name.startswith(f"{path}."):
                kind, _, rest = name[len(path) + 1 :].partition(".")
                if kind in layer.adapter_layer_names:
                    return layer, rest.partition(".")[0]
        return None

    def _is_active(self, name: str) -> bool:
        found = self._adapter_at(name)
        return found is not None and found[1] in _adapter_state(found[0])[0]


_KNOWN: WeakKeyDictionary[Any, ModelIdentity] = WeakKeyDictionary()


def identity_of(model: Any) -> ModelIdentity:
    """The ``ModelIdentity`` of a model object. It lives as long as the model, so that its weights are hashed once."""
    known = _KNOWN.get(model)
    if known is None:
        known = _KNOWN[model] = ModelIdentity(proxy(model))  # which does not keep the model
    return known


def check_evaluating(model: Any) -> None:
    """Refuse a model that is being trained, or a part of it: dropout makes its outputs depend on chance."""
    for name, module in model.named_modules():
        if module.training and (not name or _drops_out(module)):
            what = f"{model.__class__.__name__} is" if not name else f"module {name!r} of {model.__class__.__name__} is"
            raise CompositionError(
                f"{what} in training mode, in which what it computes depends on chance: call model.eval()"
            )


def _drops_out(module: Any) -> bool:
    """Whether a module in training mode drops out anything, as a layer of torch or by a number of its own."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights, by their names in the model without adapters. Buffers that are not saved follow from the config."""
    yield from _below(model, "")


def _below(module: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """``named_parameters`` and ``named_buffers`` in a third of their time: this runs for every pass."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield path + name, tensor
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield path + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _below(child, path if name == WRAPPED else f"{path}{name}.")


def _adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers that PEFT has put into a model, by name."""
    for name, module in model.named_modules():
        if getattr(type(module), "adapter_layer_names", None):
            yield name.replace(f".{WRAPPED}", ""), module


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    """(active adapters, those that are merged into the weights, scales) of a layer of PEFT's."""
    merged = tuple(layer.merged_adapters)
    active = () if layer.disable_adapters else tuple(layer.active_adapters)
    scaling = getattr(layer, "scaling", {})
    return active, merged, tuple((name, scaling[name]) for name in active if name in scaling)


def _kernels(config: Any) -> str:
    """The implementations of attention of a model, and of its parts where it is made of several."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return " ".join(str(getattr(part, "_attn_implementation", "")) for part in parts)


def _config_text(config: Any) -> str:
    fields = {name: value for name, value in config.to_dict().items() if name not in NO_CONTENT}
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return f"{config.model_type} {digest}"
