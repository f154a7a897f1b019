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

Serve = Mapping[str, str]
"""Layer kind -> the component that serves it, where several installed ones do."""


def resolve_profile(model: object, registry: Registry, serve: Serve | None = None) -> Profile:
    """Return the profile for the model given to ``compose``: a Profile, a .toml path, facts, or a model config.

    For a config, installed profile plugins are asked first, in the order of their names.
    """
    serve = {} if serve is None else serve
    if not isinstance(serve, Mapping) or not all(isinstance(each, str) for pair in serve.items() for each in pair):
        raise CompositionError(f"serve must map layer kinds to the components that serve them, got {serve!r}")
    if isinstance(model, ModelFacts):
        return profile_from_facts(model, registry, serve)
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".toml"):
        return profile_from_toml(model, registry, serve)
    if isinstance(model, Profile):
        return _without_choice(model, serve, "the Profile")
    config = load_config(model)
    found = registry.profile_of(config)
    if found is not None:
        return _without_choice(found[1], serve, f"profile plugin {found[0]!r}, which knows this config,")
    return profile_from_facts(read_facts(config), registry, serve)


def _without_choice(profile: Profile, serve: Serve, whose: str) -> Profile:
    """Return a profile that somebody wrote. ``serve`` is refused, because there are no layers to serve."""
    if serve:
        raise CompositionError(
            f"serve={dict(serve)!r} chooses who serves the layers of a model config, and {whose} names its components "
            f"itself. Name them there"
        )
    return profile


def profile_from_facts(facts: ModelFacts, registry: Registry, serve: Serve | None = None) -> Profile:
    """Return the components that serve the model's layers. Each layer kind has one component type, or ``serve`` chooses
    one.
    """
    serve = serve or {}
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
    for layer_kind, chosen in serve.items():
        if chosen not in served.get(layer_kind, ()):
            raise CompositionError(
                f"serve: component {chosen!r} does not serve layers of kind {layer_kind!r}. Served: {_listed(served)}"
            )
        if layer_kind not in kinds:
            raise CompositionError(
                f"serve: the model has no layers of kind {layer_kind!r}. It has {', '.join(map(repr, kinds))}"
            )
    chosen_by = {kind: serve.get(kind, served[kind][0]) for kind in kinds}
    for layer_kind in kinds:
        if len(served[layer_kind]) > 1 and layer_kind not in serve:
            raise CompositionError(
                f"layers of kind {layer_kind!r} are served by several installed components: "
                f"{', '.join(served[layer_kind])}. Choose one: compose(..., serve={{{layer_kind!r}: "
                f"{served[layer_kind][0]!r}}}), or the same in a .toml profile"
            )
    layers: dict[str, list[LayerFacts]] = {}
    for layer in facts.layers:
        layers.setdefault(chosen_by[layer.kind], []).append(layer)
    specs: list[ComponentSpec] = []
    warnings = list(facts.warnings)
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
    served = _listed(registry.kinds_by_layer())
    broken = [offer for offer in registry.offers() if offer.offer == "component" and offer.status == "broken"]
    text = (
        f"model type {facts.model_type!r} has layers of a kind that no installed component serves: {listed}. "
        f"Served: {served}. Install a plugin for it, or pass a Profile that names one"
    )
    if broken:
        text += ". Installed but broken: " + "; ".join(dict.fromkeys(offer.reason for offer in broken))
    return text


def _listed(served: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{layer_kind} by {' and '.join(kinds)}" for layer_kind, kinds in served.items()) or "none"


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


def profile_from_toml(path: str | os.PathLike[str], registry: Registry, serve: Serve | None = None) -> Profile:
    """Read a profile from a file with ``name``, ``page_size``, ``max_rewind`` and ``[[components]]`` tables, each with
    ``kind``, ``name`` and ``options``.

    With ``model``, the path of a model config beside the file, the components of the model come first. ``serve`` of
    the caller, and then of the file, chooses who serves its layers.
    """
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    where = f"profile {os.fspath(path)!r}"
    try:
        data: dict[str, Any] = toml.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompositionError(f"there is no {where}") from error
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise CompositionError(f"{where} cannot be read: {error}") from error
    _only(data, ("name", "page_size", "max_rewind", "model", "serve", "components"), where)
    config = _typed(data, "model", str, where)
    tables = data.get("components", [] if config else None)
    if not isinstance(tables, list) or not (tables or config) or not all(isinstance(table, dict) for table in tables):
        raise CompositionError(f"{where} needs a model, or at least one [[components]] table with a kind")
    chosen = {**(_typed(data, "serve", dict, where) or {}), **(serve or {})}
    if config:
        model = resolve_profile(load_config(Path(path).parent / config), registry, chosen)
    else:
        model = _without_choice(Profile(()), chosen, where)
    specs = list(model.components)
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
        page_size=_typed({"page_size": model.page_size, **data}, "page_size", int, where),
        max_rewind=_typed({"max_rewind": model.max_rewind, **data}, "max_rewind", int, where),
        name=_typed(data, "name", str, where) or Path(path).stem,
        warnings=model.warnings,
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
