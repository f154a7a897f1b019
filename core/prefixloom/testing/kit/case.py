"""A component under test, what is true of its layers, and the errors of laws. It imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from ...compose.registry import default_registry
from ...contract.manifest import Manifest, TierManifest
from ...contract.reach import Reach
from ...errors import CompositionError, PrefixloomError


@attrs.frozen
class Truth:
    """What the layers really do, stated independently of the component. Laws compare the component with this.

    ``reads(q)``          the positions before q whose entries are read to compute the token at q
    ``ahead``             how many tokens after p the entry at p depends on
    ``grid``              content is exact only at multiples of this
    ``buffers``           the names of the buffers that the layers write
    ``layers``            the numbers of the layers that write entries of their own
    ``tokens_per_entry``  how many tokens one entry stands for

    Where a fact is None, the kit believes what the component says and cannot find a mistake in it.
    """

    reads: Callable[[int], Iterable[int]] | None = None
    ahead: int | None = None
    grid: int | None = None
    buffers: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    tokens_per_entry: int | None = None

    def untold(self) -> list[str]:
        """Return the names of the facts that only the component states."""
        return [field.name for field in attrs.fields(Truth) if getattr(self, field.name) is None]


class LawBroken(AssertionError):
    """A component breaks a law. The error has the law, its clauses in docs/hooks.md, a sentence, and a script."""

    def __init__(self, sentence: str, script: str = "", law: str = "", clauses: tuple[str, ...] = ()) -> None:
        self.sentence, self.script, self.law, self.clauses = sentence, script, law, clauses
        head = f"{law} ({', '.join(clauses)}): " if law else ""
        super().__init__(f"{head}{sentence}" + (f"\n\n{script}" if script else ""))


class NotApplicable(Exception):
    """A law does not apply to a component; the text says why."""


@attrs.define(eq=False)
class ComponentCase:
    """A component to be tested: ``make()`` returns a new instance each time.

    ``truth``      what its layers do
    ``page_size``  the cache's page size, if the component has none of its own
    ``seed``       the seed of the random scripts
    ``effort``     how many random scripts of each kind are played
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
        """Return a case of an installed component, found by the name of its entry point and made with these options."""
        make = maker_of(name, options)
        return cls(make, truth or Truth(), label=name)

    def component(self) -> Any:
        """Return an instance to read facts from; no cache is made with it."""
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
        """Leave a law that does not apply to states."""
        if self.has_states:
            raise NotApplicable("a state belongs to a boundary and has no positions")

    def __str__(self) -> str:
        return self.label


def made(case: ComponentCase) -> Any:
    """Make a new instance of the case's component. An error while making it is reported as the component's mistake."""
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
    """Return a function that makes an installed component with the given options.

    Options that are missing get their defaults, or else the values of a small model.
    """
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
    """Return ``options`` completed from a small model's. ``error`` is raised if no small model's options fit."""
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
    """Yield the options that a component type takes from the config of a toy model, for each kind of its layers."""
    from ...compose.model_config import read_facts
    from ..toy.model import NUMBERS, toy_config

    for kind in sorted(component_type.layer_kinds):
        if kind in NUMBERS or kind == "full_attention":
            facts = read_facts(toy_config([kind, kind]))
            layers = tuple(layer for layer in facts.layers if layer.kind in component_type.layer_kinds)
            found = component_type.from_layers(facts, layers)
            yield dict(found) if hasattr(found, "keys") else dict(found[0][1])
