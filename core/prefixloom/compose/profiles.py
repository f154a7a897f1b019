"""Profiles: which components a model needs, according to its config, a TOML file, or a ``Profile`` made in Python.

A layer kind is served by the installed component type that names it. No component is known by name here. A layer kind
that no installed component names is refused, with its layers and a list of the kinds that are served.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..contract.values import ComponentSpec, LayerFacts, ModelFacts, Profile
from ..errors import CompositionError
from .model_config import load_config, read_facts
from .registry import Registry


def resolve_profile(model: object, registry: Registry) -> Profile:
    """Return the profile for the model given to ``compose``: a Profile, a .toml path, facts, or a model config.

    For a config, installed profile plugins are asked first, in the order of their names.
    """
    if isinstance(model, Profile):
        return model
    if isinstance(model, ModelFacts):
        return profile_from_facts(model, registry)
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".toml"):
        return profile_from_toml(model)
    config = load_config(model)
    for plugin in registry.profile_plugins():
        profile = plugin.read(config)
        if profile is not None:
            return profile
    return profile_from_facts(read_facts(config), registry)


def profile_from_facts(facts: ModelFacts, registry: Registry) -> Profile:
    """Return the components that serve the model's layers. Each layer kind must have one component type."""
    kinds: dict[str, list[LayerFacts]] = {}
    for layer in facts.layers:
        kinds.setdefault(layer.kind, []).append(layer)
    if not kinds:
        raise CompositionError(
            f"model type {facts.model_type!r} has no layer that remembers: there is nothing to cache"
        )
    served = registry.kinds_by_layer()
    unserved = {kind: layers for kind, layers in kinds.items() if kind not in served}
    if unserved:
        raise CompositionError(_unserved(facts, unserved, registry))
    for layer_kind in kinds:
        if len(served[layer_kind]) > 1:
            raise CompositionError(
                f"layers of kind {layer_kind!r} are served by several installed components: "
                f"{', '.join(served[layer_kind])}. Choose with a Profile, or a .toml profile"
            )
    layers: dict[str, list[LayerFacts]] = {}
    for layer in facts.layers:
        layers.setdefault(served[layer.kind][0], []).append(layer)
    specs: list[ComponentSpec] = []
    warnings: list[str] = []
    for kind, mine in layers.items():
        specs += specs_of(registry, kind, facts, tuple(mine))
        warnings += _caveats(registry, kind, facts, tuple(mine))
    return Profile(specs, name=facts.model_type or "model", warnings=tuple(dict.fromkeys(warnings)))


def specs_of(registry: Registry, kind: str, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> list[ComponentSpec]:
    """Return the component for these layers, or several of one kind if the component type asks for them."""
    from_layers = registry.component(kind).from_layers
    assert from_layers is not None, "ComponentType refuses layer_kinds without from_layers"
    what = _owner(registry, kind)
    answer = _call_plugin(from_layers, "read", what, facts, layers)
    pairs = [("", answer)] if isinstance(answer, Mapping) else answer
    if not _are_pairs(pairs):
        raise CompositionError(
            f"{what}: from_layers must return a mapping of option names, or a list of (name suffix, mapping), got "
            f"{answer!r}"
        )
    suffixes = [suffix for suffix, _ in pairs]
    if not pairs or len(set(suffixes)) < len(suffixes):
        raise CompositionError(f"{what}: from_layers must name each component differently, got suffixes {suffixes}")
    return [ComponentSpec(kind, f"{kind}_{suffix}" if suffix else kind, dict(options)) for suffix, options in pairs]


def _are_pairs(pairs: object) -> bool:
    return isinstance(pairs, list | tuple) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], Mapping)
        and all(isinstance(key, str) for key in pair[1])
        for pair in pairs
    )


def _caveats(registry: Registry, kind: str, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> list[str]:
    caveats = registry.component(kind).caveats
    if caveats is None:
        return []
    return [str(text) for text in _call_plugin(caveats, "judge", _owner(registry, kind), facts, layers)]


def _owner(registry: Registry, kind: str) -> str:
    return f"component {kind!r} ({registry.source('component', kind)})"


def _call_plugin(
    function: Callable[[ModelFacts, tuple[LayerFacts, ...]], Any],
    verb: str,
    what: str,
    facts: ModelFacts,
    layers: tuple[LayerFacts, ...],
) -> Any:
    """Call a plugin's function for these layers. The error for what it raises names the plugin."""
    try:
        return function(facts, layers)
    except CompositionError as error:
        raise CompositionError(f"{what}: {error}") from error
    except Exception as error:
        raise CompositionError(
            f"{what} could not {verb} {_ranges(layers)} of model type {facts.model_type!r}: {type(error).__name__}: "
            f"{error}. Report it there, or pass a Profile"
        ) from error


def _unserved(facts: ModelFacts, unserved: Mapping[str, list[LayerFacts]], registry: Registry) -> str:
    listed = "; ".join(f"{kind!r} ({_ranges(layers)})" for kind, layers in unserved.items())
    served = ", ".join(
        f"{layer_kind} by {' and '.join(kinds)}" for layer_kind, kinds in registry.kinds_by_layer().items()
    )
    broken = [offer for offer in registry.offers() if offer.offer == "component" and offer.status == "broken"]
    text = (
        f"model type {facts.model_type!r} has layers of a kind that no installed component serves: {listed}. "
        f"Served: {served or 'none'}. Install a plugin for it, or pass a Profile that names one"
    )
    if broken:
        text += ". Installed but broken: " + "; ".join(dict.fromkeys(offer.reason for offer in broken))
    return text


def _ranges(layers: Iterable[LayerFacts]) -> str:
    """Layer numbers in words: "layer 3", "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for index in sorted({layer.index for layer in layers}):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs)
    return f"layer {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"layers {text}"


# ---------------------------------------------------------------- TOML


def profile_from_toml(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file with ``name``, ``page_size``, ``max_rewind`` and ``[[components]]`` tables, each with
    ``kind``, ``name`` and ``options``.
    """
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    where = f"profile {os.fspath(path)!r}"
    try:
        data: dict[str, Any] = toml.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompositionError(f"there is no {where}") from error
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise CompositionError(f"{where} cannot be read: {error}") from error
    _only(data, ("name", "page_size", "max_rewind", "components"), where)
    tables = data.get("components")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise CompositionError(f"{where} needs at least one [[components]] table with a kind")
    specs: list[ComponentSpec] = []
    for number, table in enumerate(tables, 1):
        here = f"{where}, component {number}"
        _only(table, ("kind", "name", "options"), here)
        kind = _typed(table, "kind", str, here)
        if not kind:
            raise CompositionError(f"{here} needs a kind: the name of an installed component")
        options = _typed(table, "options", dict, here) or {}
        specs.append(ComponentSpec(kind, _typed(table, "name", str, here) or "", options))
    return Profile(
        specs,
        page_size=_typed(data, "page_size", int, where),
        max_rewind=_typed(data, "max_rewind", int, where) or 0,
        name=_typed(data, "name", str, where) or Path(path).stem,
    )


def _only(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in allowed]
    if unknown:
        raise CompositionError(f"{where} has unknown keys: {', '.join(unknown)}. Allowed: {', '.join(allowed)}")


def _typed(table: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = table.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise CompositionError(f"{where}: {key} must be of type {kind.__name__}, got {value!r}")
    return value
