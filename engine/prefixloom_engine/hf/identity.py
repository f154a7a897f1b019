"""The identity of a transformers model: what its content depends on beside tokens, and whether that has changed.

Weights are hashed once for each model object, and again only where they change. Adapters are those of PEFT, which puts
its layers into the model's modules: the active ones count, with their configs, weights and scales, and the others do
not. A model's code counts by the version of transformers. What is put into its way on the model object, a forward hook
or another ``forward``, counts by itself, and only in this process, since nobody can tell what it computes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, proxy, ref

from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd
from transformers import __version__ as transformers_version

from prefixloom import CompositionError, Identity

from ..contract.weights import WatchedWeights, combined
from .refusals import refuse, refuse_loaded

NO_CONTENT = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields of a config that change nothing of what layers write."""
NO_CONTENT_OF_ADAPTERS = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "revision", "target_modules",
    "task_type",
})  # fmt: skip
"""Fields of an adapter's config that change nothing of what it computes where it stands."""
CAST = frozenset({"pos_encoding"})
"""The buffers that a model's own code casts to the dtype of its weights."""
ONLY_LOOK = frozenset({"prefixloom_engine.hf.session", "transformers.utils.output_capturing"})
"""The modules whose forward hooks change nothing of what a model computes."""
INSTEAD_OF_CLASS = ("forward", "_compiled_call_impl")
"""The code that a module object may have in place of its class's."""
WRAPPED = "base_layer"
"""The name that PEFT gives to the layer that an adapter wraps."""


class ModelIdentity:
    """Says the identity of one model object. ``identity_of`` gives the one that a model has."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.weights = WatchedWeights(lambda: tensors_of(model))
        self._adapters: dict[str, Any] = {}
        self._states: list[Any] = []
        self._kernels = ""
        self._config = ""
        self._code: list[Any] = []
        self._code_name = ""
        self.known: Identity | None = None
        """The identity when it was last asked for."""

    def now(self) -> Identity:
        """Return the identity of the model as it is. Called for every request."""
        check_evaluating(self._model)
        config = _config_text(self._model.config)
        known = self.known
        if known is not None and self._config == config and not self.changed() and self.weights.same():
            return known
        refuse(self._model.config)
        refuse_loaded(self._model)
        _refuse_hidden_weights(self._model)
        code = code_of(self._model)
        if code != self._code:
            self._code_name = (
                f", changed in process {secrets.token_hex(8)}" if any(each[-1] is not None for each in code) else ""
            )
        self._code, self._config = code, config
        digests = self.weights.digests()
        self._adapters = dict(_adapter_layers(self._model))
        self._states = [_adapter_state(layer) for layer in self._adapters.values()]
        self._kernels = _kernels(self._model.config)
        ours = {name: digest for name, digest in digests.items() if not self._adapter_at(name)}
        active = {name: digest for name, digest in digests.items() if self._is_active(name)}
        names = sorted({name for active_here, *_ in self._states for name in active_here})
        configs = [_digest_of_fields(self._model.peft_config[name].to_dict(), NO_CONTENT_OF_ADAPTERS) for name in names]
        states = hashlib.blake2b(repr((self._states, configs)).encode(), digest_size=16).digest()
        self.known = Identity(
            model=config + self._code_name,
            weights=combined(ours.items()),
            adapters=f"{', '.join(names)} {combined([('states', states), *active.items()])}" if names else "",
            precision=f"{self._model.dtype} {self._kernels}",
        )
        return self.known

    def recoded(self) -> bool:
        """Return whether the model has got or lost a forward hook or the like since the identity was last asked for."""
        return code_of(self._model) != self._code

    def changed(self) -> bool:
        """Return whether the identity may be another one than when last asked for. Called for every pass."""
        return (
            self.known is None
            or self._model.training
            or self.recoded()
            or not self.weights.seem_same()
            or [_adapter_state(layer) for layer in self._adapters.values()] != self._states
            or _kernels(self._model.config) != self._kernels
        )

    def _adapter_at(self, name: str) -> tuple[Any, str] | None:
        """Return the adapter layer that a tensor belongs to, and the adapter's name; None if it is the model's own."""
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
    """Return the ``ModelIdentity`` of a model object. It lives as long as the model: weights are hashed once."""
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
    """Return whether a module in training mode drops out anything, as a layer of torch or by a number of its own."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any(
        ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0
        for name, value in vars(module).items()
    )


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights and buffers, by their names in the model without adapters.

    Buffers that are not saved follow from the config, but not their dtype: a cast of the model rounds them. Those that
    the model's own code replaces are left out. This runs for every pass, and takes a quarter of the time of
    ``named_parameters`` and ``named_buffers``.
    """
    left: list[tuple[str, Any]] = [("", model)]
    while left:
        path, module = left.pop()
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield path + name, tensor
        if module._buffers:
            replaced = _replaced_by_code(module)
            for name, tensor in module._buffers.items():
                if tensor is not None and name not in replaced:
                    yield path + name, tensor
        for name, child in module._modules.items():
            if child is not None:
                left.append((path if name == WRAPPED else f"{path}{name}.", child))


def code_of(model: Any) -> list[tuple[Any, ...]]:
    """List what the modules of a model object, or torch for all modules, have in the way of the code of their classes.

    Each entry ends with a weak reference to code, or with None where an attention is said not to be causal.
    """
    every = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    found: list[tuple[Any, ...]] = _hooks_of(0, *every) if any(every) else []
    left, number = [model], 0
    while left:
        module = left.pop()
        number += 1
        own = module.__dict__
        if module._forward_pre_hooks or module._forward_hooks:
            found += _hooks_of(number, module._forward_pre_hooks, module._forward_hooks)
        for name in INSTEAD_OF_CLASS:
            if name in own:
                found.append((number, name, _reference(own[name])))
        if not own.get("is_causal", True):
            found.append((number, "is_causal", None))
        left += [child for child in module._modules.values() if child is not None]
    return found


def _hooks_of(number: int, *kinds: Mapping[int, Any]) -> list[tuple[Any, ...]]:
    return [
        (number, at, key, _reference(hook))
        for at, hooks in enumerate(kinds)
        for key, hook in hooks.items()
        if getattr(hook, "__module__", None) not in ONLY_LOOK
    ]


def _reference(code: Any) -> Any:
    try:
        return ref(code)
    except TypeError:  # some objects take none
        return code


def _replaced_by_code(module: Any) -> Collection[str]:
    """Return the buffers that a module replaces in its passes.

    Rotary frequencies that depend on the length, and tables of sines that grow, are computed anew.
    """
    kinds = getattr(module, "rope_type", "")
    lengths = {"dynamic", "longrope"}.intersection(kinds.values() if isinstance(kinds, dict) else (kinds,))
    unsaved: Collection[str] = module._non_persistent_buffers_set
    return unsaved if lengths or hasattr(module, "make_weights") else CAST.intersection(unsaved)


def _refuse_hidden_weights(model: Any) -> None:
    """Refuse a module that has weights and none of them in a parameter or buffer, as those of ``torch.ao`` do."""
    for name, module in model.named_modules():
        own = type(module)
        saves = (own._save_to_state_dict, own.get_extra_state) != (Module._save_to_state_dict, Module.get_extra_state)
        if saves and not module._parameters and not module._buffers:
            raise CompositionError(
                f"module {name!r} of {model.__class__.__name__} is a {own.__name__}, which keeps its weights in no "
                f"parameter and no buffer, so nobody can tell what a hit depends on. Use a quantization whose weights "
                f"are tensors"
            )


def _adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers that PEFT has put into a model, by name."""
    for name, module in model.named_modules():
        if getattr(type(module), "adapter_layer_names", None):
            _refuse_adapter_of_parameter(name, module)
            yield name.replace(f".{WRAPPED}", ""), module


def _refuse_adapter_of_parameter(name: str, layer: Any) -> None:
    if hasattr(layer, "parameter_name") and not (layer.disable_adapters or layer.merged):
        raise CompositionError(
            f"the adapter of {name!r} is one of a parameter (target_parameters), for which PEFT puts the parameter "
            f"into its place anew in each pass, so nobody can tell whether it has changed: call the layer's merge()"
        )


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    """Return the active adapters of a layer of PEFT's, those that are merged into the weights, and the scales."""
    merged = tuple(layer.merged_adapters)
    active = () if layer.disable_adapters else tuple(layer.active_adapters)
    scaling = getattr(layer, "scaling", {})
    return active, merged, tuple((name, scaling[name]) for name in active if name in scaling)


def _kernels(config: Any) -> str:
    """Return the implementations of attention of a model, and of its parts where it is made of several."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return " ".join(str(getattr(part, "_attn_implementation", "")) for part in parts)


def _config_text(config: Any) -> str:
    digest = _digest_of_fields(config.to_dict(), NO_CONTENT)
    return f"{config.model_type} {digest}, transformers {transformers_version}"


def _digest_of_fields(fields: dict[str, Any], without: frozenset[str]) -> str:
    counted = {name: value for name, value in fields.items() if name not in without}
    text = json.dumps(counted, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> object:
    """Return a value of a config in a form that is the same in every process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
