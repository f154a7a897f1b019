"""Profiles: which components a model needs, according to its config, a TOML file, or a ``Profile`` made in Python.

A layer kind is served by the installed component type that names it. No component is known by name here. A layer kind
that no installed component names is refused, with its layers and a list of the kinds that are served.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..contract.values import ComponentSpec, LayerFacts, ModelFacts, Profile
from ..errors import CompositionError
from .binding import naming
from .model_config import read_facts
from .registry import Registry

Serve = Mapping[str, str]
"""Layer kind -> the component that serves it, where several installed ones do."""

FIELDS: Mapping[str, type] = {
    "name": str, "page_size": int, "max_rewind": int, "model": str, "serve": dict, "components": list,
}  # fmt: skip
"""The keys of a profile's file, and the types of their values."""

COMPONENT_FIELDS: Mapping[str, type] = {"kind": str, "name": str, "options": dict}
"""The keys of each of its components."""


def resolve_profile(model: object, registry: Registry, serve: Serve | None = None) -> Profile:
    """Return the profile for the model given to ``compose``: a Profile, a .toml path, facts, or a model config."""
    serve = {} if serve is None else serve
    if not isinstance(serve, Mapping) or not all(isinstance(each, str) for pair in serve.items() for each in pair):
        raise CompositionError(f"serve must map layer kinds to the components that serve them, got {serve!r}")
    if isinstance(model, ModelFacts):
        return profile_from_facts(model, registry, serve)
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".toml"):
        return profile_from_toml(model, registry, serve)
    if isinstance(model, Profile):
        return _without_choice(model, serve, "the Profile")
    return profile_from_facts(read_facts(model), registry, serve)


def _without_choice(profile: Profile, serve: Serve, whose: str) -> Profile:
    """Return a profile that somebody wrote. ``serve`` is refused, because there are no layers to serve."""
    if serve:
        raise CompositionError(
            f"serve={dict(serve)!r} chooses who serves the layers of a model config, and {whose} names its components "
            f"itself. Name them there"
        )
    return profile


# ---------------------------------------------------------------- from layers


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
    told = ", ".join(f"{kind} by {' and '.join(names)}" for kind, names in served.items()) or "none"
    unserved = "; ".join(f"{kind!r} ({_ranges(layers)})" for kind, layers in kinds.items() if kind not in served)
    if unserved:
        broken = [each.reason for each in registry.offers() if each.offer == "component" and each.status == "broken"]
        raise CompositionError(
            f"model type {facts.model_type!r} has layers of a kind that no installed component serves: {unserved}. "
            f"Served: {told}. Install a plugin for it, or pass a Profile that names one"
            + (". Installed but broken: " + "; ".join(dict.fromkeys(broken)) if broken else "")
        )
    for kind, chosen in serve.items():
        if chosen not in served.get(kind, ()):
            raise CompositionError(
                f"serve: component {chosen!r} does not serve layers of kind {kind!r}. Served: {told}"
            )
        if kind not in kinds:
            raise CompositionError(
                f"serve: the model has no layers of kind {kind!r}. It has {', '.join(map(repr, kinds))}"
            )
    by_component: dict[str, list[LayerFacts]] = {}
    for layer in facts.layers:
        names = served[layer.kind]
        if len(names) > 1 and layer.kind not in serve:
            raise CompositionError(
                f"layers of kind {layer.kind!r} are served by several installed components: {', '.join(names)}. Choose "
                f"one: compose(..., serve={{{layer.kind!r}: {names[0]!r}}}), or the same in a .toml profile"
            )
        by_component.setdefault(serve.get(layer.kind, names[0]), []).append(layer)
    specs: list[ComponentSpec] = []
    warnings = list(facts.warnings)
    for name, layers in by_component.items():
        specs += specs_of(registry, name, facts, tuple(layers))
        warnings += map(str, _ask(registry, name, "caveats", facts, tuple(layers)) or ())
    return Profile(specs, name=facts.model_type or "model", warnings=tuple(dict.fromkeys(warnings)))


def specs_of(registry: Registry, kind: str, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> list[ComponentSpec]:
    """Return the component for these layers, or several of one kind if the component type asks for them."""
    answer = _ask(registry, kind, "from_layers", facts, layers)
    what = f"component {kind!r} ({registry.source('component', kind)}): from_layers must"
    pairs = [("", answer)] if isinstance(answer, Mapping) else answer
    if not isinstance(pairs, list | tuple) or not all(map(_is_pair, pairs)):
        raise CompositionError(
            f"{what} return a mapping of option names, or a list of (name suffix, mapping), got {answer!r}"
        )
    suffixes = [suffix for suffix, _ in pairs]
    if not pairs or len(set(suffixes)) < len(suffixes):
        raise CompositionError(f"{what} name each component differently, got suffixes {suffixes}")
    return [ComponentSpec(kind, f"{kind}_{suffix}" if suffix else kind, dict(options)) for suffix, options in pairs]


def _is_pair(pair: object) -> bool:
    """Return whether an answer is a suffix with options by name."""
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Mapping):
        return False
    return all(isinstance(name, str) for name in (pair[0], *pair[1]))


def _ask(
    registry: Registry, kind: str, question: Literal["from_layers", "caveats"], facts: ModelFacts,
    layers: tuple[LayerFacts, ...],
) -> Any:  # fmt: skip
    """Ask a component type about these layers, if it can be asked. The error for what it raises names it."""
    function = getattr(registry.component(kind), question)
    if function is None:
        return None
    did = f"could not {'read' if question == 'from_layers' else 'judge'} {_ranges(layers)} of {facts.model_type!r}"
    with naming(f"component {kind!r} ({registry.source('component', kind)})", did, "Report it, or pass a Profile"):
        return function(facts, layers)


def _ranges(layers: list[LayerFacts] | tuple[LayerFacts, ...]) -> str:
    """Return layer numbers in words: "layer 3", "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for index in sorted({layer.index for layer in layers}):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs)
    return f"layer {text}" if text.isdigit() else f"layers {text}"


# ---------------------------------------------------------------- from a file


def profile_from_toml(path: str | os.PathLike[str], registry: Registry, serve: Serve | None = None) -> Profile:
    """Read a profile from a file with ``name``, ``page_size``, ``max_rewind`` and ``[[components]]`` tables, each with
    ``kind``, ``name`` and ``options``.

    With ``model``, the path of a model config beside the file, the components of the model come first. ``serve`` of
    the caller, and then of the file, chooses who serves its layers.
    """
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    where = f"profile {os.fspath(path)!r}"
    try:
        data: dict[str, Any] = toml.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompositionError(f"there is no {where}") from error
    except (OSError, ValueError) as error:  # of TOML as well
        raise CompositionError(f"{where} cannot be read: {error}") from error
    tables, config = data.get("components", []), data.get("model")
    if not isinstance(tables, list) or not (tables or config) or not all(isinstance(table, dict) for table in tables):
        raise CompositionError(f"{where} needs a model, or at least one [[components]] table with a kind")
    _check(data, FIELDS, where)
    chosen = {**data.get("serve", {}), **(serve or {})}
    if config:
        model = profile_from_facts(read_facts(Path(path).parent / config), registry, chosen)
    else:
        model = _without_choice(Profile(()), chosen, where)
    specs = list(model.components)
    for number, table in enumerate(tables, 1):
        here = f"{where}, component {number}"
        _check(table, COMPONENT_FIELDS, here)
        if not table.get("kind"):
            raise CompositionError(f"{here} needs a kind: the name of an installed component")
        specs.append(ComponentSpec(table["kind"], table.get("name", ""), table.get("options", {})))
    return Profile(
        specs,
        page_size=data.get("page_size", model.page_size),
        max_rewind=data.get("max_rewind", model.max_rewind),
        name=data.get("name") or Path(path).stem,
        warnings=model.warnings,
    )


def _check(table: Mapping[str, object], fields: Mapping[str, type], where: str) -> None:
    """Refuse unknown keys, and values of another type."""
    unknown = [key for key in table if key not in fields]
    if unknown:
        raise CompositionError(f"{where} has unknown keys: {', '.join(unknown)}. Allowed: {', '.join(fields)}")
    for key, value in table.items():
        if not isinstance(value, fields[key]) or isinstance(value, bool):
            raise CompositionError(f"{where}: {key} must be of type {fields[key].__name__}, got {value!r}")
