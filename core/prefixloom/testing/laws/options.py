"""Laws of what a distribution offers: its component under another name, with other options, and from a model's config.

They apply to installed components only. They serve no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ...compose.model_config import read_facts
from ...compose.profiles import specs_of
from ...compose.registry import default_registry
from ...contract.manifest import DTYPE_BYTES
from ...contract.values import ComponentType, LayerFacts, ModelFacts
from ...errors import CompositionError
from ..kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful
from ..kit.probes import FAR, Answers
from ..toy.model import toy_config
from . import arithmetic, facts
from .reach import uncovered

OTHER = "another_name"
"""The name under which a component is made once more."""
WATCHED = 64
"""The longest prompt at which layers that are run are asked what they read, since this is slow."""


def law_it_has_the_name_that_it_is_given(case: ComponentCase) -> None:
    """A component that is made under another name has this name, since a model may need two of a kind.

    Clauses: C3, O6.
    """
    name, _ = _installed(case)
    made = default_registry().component(name).make(name=OTHER, **case.options)
    if made.name != OTHER:
        raise LawBroken(f"make(name={OTHER!r}) returned a component whose name is {made.name!r}")


def law_its_options_do_what_the_truth_says(case: ComponentCase) -> None:
    """With other options, the component is still what its distribution says of the layers with these options.

    Clauses: O6, O21.
    """
    _installed(case)
    for option, was in case.options.items():
        for value in _others(was):
            try:
                other = case.otherwise(**{option: value})
                other.component()
            except CompositionError:
                continue  # it cannot be made so
            told = _told(other, (was, value))
            if told is not None:
                raise LawBroken(f"made with {option}={value!r} in place of {was!r}: {told}")


def _installed(case: ComponentCase) -> tuple[str, dict[str, Any]]:
    if case.source is None:
        raise NotApplicable("it is made by a function of a test, and not by the name of its entry point")
    return case.source


def _others(value: Any) -> Iterator[Any]:
    """Yield other values of an option: numbers that are larger and smaller, another dtype, fewer layers."""
    if isinstance(value, bool):
        return
    if isinstance(value, int) and value > 0:
        yield 2 * value
        if value > 1:
            yield value // 2
    elif isinstance(value, str) and value in DTYPE_BYTES:
        yield "bfloat16" if value == "float32" else "float32"
    elif isinstance(value, list | tuple) and len(value) > 1 and all(type(each) is int for each in value):
        yield value[:-1]


def _told(case: ComponentCase, numbers: tuple[Any, ...]) -> str | None:
    """Return how a component differs from what is said of its layers, near these numbers; None if it does not."""
    laws: list[Callable[[ComponentCase], None]] = [
        facts.law_the_manifest_has_all_that_the_layers_write,
        facts.law_the_manifest_says_what_content_depends_on,
        arithmetic.law_layers_go_on_from_what_is_stored,
    ]
    for law in laws:
        try:
            law(case)
        except LawBroken as broken:
            return broken.sentence
        except (NotApplicable, Wasteful):
            pass
    if case.has_states or (case.truth.reads is None and case.truth.layers is None):
        return None
    answers = Answers(case)
    most = WATCHED if answers.watched else FAR
    sizes = [number for number in numbers if isinstance(number, int)]
    near = {size * times + beside for size in sizes for times in (1, 2, 3) for beside in (-1, 0, 1)}
    boundaries = sorted(n for n in {*near, *range(8)} if 0 <= n <= most)
    return uncovered(case, answers, boundaries, lambda n: (n, n + 1, *(n + size for size in sizes if n + size <= most)))


# ---------------------------------------------------------------- a model's config


class _Asked(dict[str, Any]):
    """Options of a layer that note which of them ``from_layers`` asks for."""

    def __init__(self, given: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(given)
        self._asked = asked

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)


def law_a_config_gives_each_layer_to_a_component(case: ComponentCase) -> None:
    """What ``from_layers`` makes of a model's config stores each layer of its kinds, or shares it, and no other layer.

    Clauses: O6.
    """
    name, _ = _installed(case)
    offered = default_registry().component(name)
    if offered.from_layers is None:
        raise NotApplicable("it says no layer_kinds, so no model's config selects it")
    for kind in sorted(offered.layer_kinds):
        facts = read_facts(toy_config(["unknown", kind, "unknown", kind, kind]))
        asked: set[str] = set()
        alike = _layers(facts, offered, lambda number, given, asked=asked: _Asked(given, asked))
        if not _is_read(case, kind, facts, alike):
            continue
        _all_are_stored(case, kind, facts, alike)
        differing = _layers(facts, offered, lambda number, _, asked=asked: dict.fromkeys(asked, 16 << number))
        if asked and _is_read(case, kind, facts, differing):
            _all_are_stored(case, kind, facts, differing)


def _layers(facts: ModelFacts, offered: ComponentType, options: Callable[..., Any]) -> tuple[LayerFacts, ...]:
    """Return the layers of a component's kinds, with such options."""
    mine = [layer for layer in facts.layers if layer.kind in offered.layer_kinds]
    return tuple(attrs.evolve(layer, options=options(number, layer.options)) for number, layer in enumerate(mine))


def _is_read(case: ComponentCase, kind: str, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> bool:
    """Return whether ``from_layers`` reads these layers. It may ask for what a small config does not have."""
    offered = default_registry().component(_installed(case)[0])
    assert offered.from_layers is not None
    try:
        offered.from_layers(facts, layers)
    except Exception as error:
        case.memo["config"] = f"layers of kind {kind!r}: from_layers raises {type(error).__name__}: {error}"
        return False
    return True


def _all_are_stored(case: ComponentCase, kind: str, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> None:
    registry, (name, _) = default_registry(), _installed(case)
    wanted = [layer.index for layer in layers]
    stored: set[int] = set()
    for spec in specs_of(registry, name, facts, layers):
        try:
            made = registry.component(name).make(name=spec.name, **spec.options)
        except CompositionError as error:  # it refuses what a small config says
            case.memo["config"] = f"layers of kind {kind!r}: {' '.join(str(error).split())}"
            return
        except Exception as error:
            raise LawBroken(
                f"of the layers {wanted} of a config, from_layers makes the options {dict(spec.options)!r}, and make "
                f"raises {type(error).__name__}: {error}"
            ) from error
        for buffer in made.manifest.buffers:
            stored |= {*buffer.layers, *buffer.shared}
    if stored != set(wanted):
        said = [dict(layer.options) for layer in layers]
        raise LawBroken(
            f"a config has layers of kind {kind!r} at {wanted}, with the options {said}, and what from_layers makes of "
            f"it stores the layers {sorted(stored)}. Buffer.layers are the numbers that the layers have in the model"
        )
