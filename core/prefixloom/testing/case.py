"""A component under test, what is true of its layers, and how a broken law is told. No torch, and no pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from ..compose.registry import default_registry
from ..contract.manifest import Manifest, TierManifest
from ..contract.reach import Reach
from ..errors import CompositionError, PrefixloomError


@attrs.frozen
class Truth:
    """What the layers really do, said without the component: what it says of itself is held against this.

    ``reads(q)``          positions before q whose entries computing the token at q reads
    ``ahead``             tokens after p on which the entry at p depends
    ``grid``              content is exact at multiples of this only
    ``buffers``           names of what the layers write
    ``layers``            numbers of the layers that write entries of their own
    ``tokens_per_entry``  tokens that one entry stands for

    What is None is believed as the component says it; a kit cannot find a mistake in what nobody said twice.
    """

    reads: Callable[[int], Iterable[int]] | None = None
    ahead: int | None = None
    grid: int | None = None
    buffers: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    tokens_per_entry: int | None = None

    def untold(self) -> list[str]:
        """The facts that only the component tells."""
        return [field.name for field in attrs.fields(Truth) if getattr(self, field.name) is None]


class LawBroken(AssertionError):
    """A component breaks a law: which one, the clauses of docs/hooks.md behind it, how, and a script that shows it."""

    def __init__(self, sentence: str, script: str = "", law: str = "", clauses: tuple[str, ...] = ()) -> None:
        self.sentence, self.script, self.law, self.clauses = sentence, script, law, clauses
        head = f"{law} ({', '.join(clauses)}): " if law else ""
        super().__init__(f"{head}{sentence}" + (f"\n\n{script}" if script else ""))


class NotApplicable(Exception):
    """A law has nothing to say of a component; the text says why."""


@attrs.define(eq=False)
class ComponentCase:
    """A component to be tested: ``make()`` returns a new instance each time.

    ``truth``      what its layers do; ``page_size``: where it has no page size of its own; ``seed``: of the scripts.
    ``effort``     how many random scripts of each kind are played.
    """

    make: Callable[[], Any]
    truth: Truth = attrs.field(factory=Truth)
    label: str = "component"
    page_size: int = 4
    seed: int = 0
    effort: int = 2
    memo: dict[str, Any] = attrs.field(factory=dict, init=False, repr=False)

    @classmethod
    def installed(cls, name: str, truth: Truth | None = None, **options: Any) -> ComponentCase:
        """An installed component, by the name of its entry point, made with these options."""
        make = maker_of(name, options)
        return cls(make, truth or Truth(), label=name)

    def component(self) -> Any:
        """An instance whose facts are looked at; no cache is made of it."""
        if "component" not in self.memo:
            self.memo["component"] = made(self)
        return self.memo["component"]

    @property
    def name(self) -> str:
        return str(self.component().name)

    @property
    def manifest(self) -> Manifest:
        found = self.component().manifest
        assert isinstance(found, Manifest)
        return found

    @property
    def reach(self) -> Reach:
        found = self.component().reach
        assert isinstance(found, Reach)
        return found

    @property
    def has_states(self) -> bool:
        return self.reach.unit == "boundary"

    def only_pages(self) -> None:
        """Leave a law that has nothing to say of states."""
        if self.has_states:
            raise NotApplicable("a state belongs to a boundary and has no positions")

    def __str__(self) -> str:
        return self.label


def made(case: ComponentCase) -> Any:
    """A new instance of the case's component; whatever goes wrong is told as the component's."""
    try:
        component = case.make()
    except PrefixloomError:
        raise
    except Exception as error:
        raise CompositionError(f"{case.label}: it cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(getattr(component, "manifest", None), TierManifest):
        raise CompositionError(
            f"{case.label} is a tier below the device and no component: the kit has laws for components, and suites "
            f"for stores (storage:NAME) and policies"
        )
    for attribute, kind in (("name", str), ("manifest", Manifest), ("reach", Reach)):
        if not isinstance(getattr(component, attribute, None), kind):
            raise CompositionError(
                f"{case.label}: what was made is {component!r}, which has no {attribute} that is a {kind.__name__}. "
                f"A component has a name, a manifest and a reach"
            )
    return component


def maker_of(name: str, options: dict[str, Any]) -> Callable[[], Any]:
    """What makes an installed component: with the options that are given, its defaults, or those of a small model."""
    registry = default_registry()
    component_type = registry.component(name)
    origin = registry.source("component", name)

    def make(given: dict[str, Any]) -> Any:
        try:
            return component_type.make(name=name, **given)
        except Exception as error:
            raise CompositionError(
                f"component {name!r} ({origin}) cannot be made with the options {given!r}: {_flat(error)}"
            ) from error

    try:
        make(options)
    except CompositionError as error:
        options = _completed(make, component_type, options, error)
    return lambda: make(options)


def _completed(make: Any, component_type: Any, options: dict[str, Any], error: CompositionError) -> dict[str, Any]:
    """What is given, and what it lacks from the options of a small model; ``error`` says what was wrong without."""
    for small in small_options(component_type):
        try:
            make(small | options)
        except CompositionError as told:
            if set(options) <= set(small):
                error = told
        else:
            return small | options
    raise error


def _flat(error: object) -> str:
    return " ".join(str(error).split())


def small_options(component_type: Any) -> Iterator[dict[str, Any]]:
    """The options that a component type takes from the configs of toy models, one for each kind of its layers."""
    from ..compose.model_config import read_facts
    from .toy import NUMBERS, toy_config

    for kind in sorted(component_type.layer_kinds):
        if kind in NUMBERS or kind == "full_attention":
            facts = read_facts(toy_config([kind, kind]))
            layers = tuple(layer for layer in facts.layers if layer.kind in component_type.layer_kinds)
            found = component_type.from_layers(facts, layers)
            yield dict(found) if hasattr(found, "keys") else dict(found[0][1])
