"""A component under test, and the errors of laws. It imports neither torch nor pytest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from ...compose.registry import default_registry
from ...contract.manifest import Manifest, TierManifest
from ...contract.reach import Reach
from ...contract.values import Component
from ...errors import CompositionError, PrefixloomError
from .truth import Truth, offered_truth


class LawBroken(AssertionError):
    """A component breaks a law. The error has the law, its clauses in docs/hooks.md, a sentence, and a script."""

    def __init__(self, sentence: str, script: str = "", law: str = "", clauses: tuple[str, ...] = ()) -> None:
        self.sentence, self.script, self.law, self.clauses = sentence, script, law, clauses
        head = f"{law} ({', '.join(clauses)}): " if law else ""
        super().__init__(f"{head}{sentence}" + (f"\n\n{script}" if script else ""))


class NotApplicable(Exception):
    """A law does not apply to a component; the text says why."""


class Wasteful(Exception):
    """A component is right, and costs more than it must; the text says what and how much."""


@attrs.define(eq=False)
class ComponentCase:
    """A component to be tested: ``make()`` returns a new instance each time.

    ``truth``      what its layers do
    ``page_size``  the cache's page size, if the component has none of its own
    ``seed``       the seed of the random scripts
    ``effort``     how many random scripts of each kind are played
    ``believe``    whether facts that ``truth`` leaves out may be believed as the component says them
    """

    make: Callable[[], Any]
    truth: Truth = attrs.field(factory=Truth)
    label: str = "component"
    page_size: int = 4
    seed: int = 0
    effort: int = 2
    believe: bool = False
    source: tuple[str, dict[str, Any]] | None = attrs.field(default=None, init=False)
    """The name and the options of an installed component."""
    options: dict[str, Any] = attrs.field(factory=dict, init=False)
    """All options of an installed component, with their defaults."""
    memo: dict[str, Any] = attrs.field(factory=dict, init=False, repr=False)

    @classmethod
    def installed(cls, name: str, truth: Truth | None = None, **options: Any) -> ComponentCase:
        """Return a case of an installed component, found by the name of its entry point and made with these options.

        Its distribution says the truth (``prefixloom_truth``), if ``truth`` is not given.
        """
        make, with_defaults = maker_of(name, options)
        said = ", ".join(f"{option}={value!r}" for option, value in options.items())
        label = f"{name}({said})" if said else name
        case = cls(make, offered_truth(name, with_defaults) if truth is None else truth, label=label)
        case.source = (name, options)
        case.options = {option: value for option, value in with_defaults.items() if option != "name"}
        return case

    def otherwise(self, **options: Any) -> ComponentCase:
        """Return a case of the same installed component, made with these options in place of its own."""
        assert self.source is not None
        name, given = self.source
        case = ComponentCase.installed(name, **given | options)
        case.seed, case.page_size = self.seed, self.page_size
        return case

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

    @property
    def believed(self) -> tuple[str, ...]:
        """The facts about its layers that only the component itself states."""
        return self.truth.untold(self.manifest, self.has_states)

    def only_pages(self) -> None:
        """Leave a law that does not apply to states."""
        if self.has_states:
            raise NotApplicable("a state belongs to a boundary and has no positions")

    def __str__(self) -> str:
        return self.label


def made(case: ComponentCase) -> Any:
    """Make a new instance of the case's component. An error while making it is reported as the component's mistake."""
    if not callable(case.make) or isinstance(case.make, str):
        raise CompositionError(
            f"a case takes a function that makes a new component each time, such as `lambda: Ring(8)`, got "
            f"{case.make!r}. An installed component is ComponentCase.installed(NAME)"
        )
    if not isinstance(case.truth, Truth):
        raise CompositionError(
            f"the truth about a component's layers is a prefixloom.testing.Truth, got {case.truth!r}"
        )
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
            own = type(component).__name__  # its repr may need what is missing
            hint = f": does {own}.__init__ call super().__init__(name, manifest, reach)?"
            raise CompositionError(
                f"{case.label}: what was made is a {own}, which has no {attribute} that is a {kind.__name__}. A "
                f"component has a name, a manifest and a reach{hint if isinstance(component, Component) else ''}"
            )
    return component


def maker_of(name: str, options: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a function that makes an installed component with the given options, and all options that it has then.

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
    return lambda: make(options), _with_defaults(component_type.make, {"name": name, **options})


def _with_defaults(make: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(make).bind(**options)
    except (TypeError, ValueError):  # it has no signature in Python
        return options
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():  # what ``**options`` takes are options like the others
        found |= value if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found


def _completed(make: Any, component_type: Any, options: dict[str, Any], error: CompositionError) -> dict[str, Any]:
    """Return ``options`` completed from a small model's. ``error`` is raised if no small model's options fit."""
    unread: list[str] = []
    for small in small_options(component_type, unread):
        try:
            make(small | options)
        except CompositionError as told:
            if set(options) <= set(small):
                error = told
        else:
            return small | options
    if unread:
        raise CompositionError(f"{_flat(error)}. {'. '.join(unread)}") from error
    raise error


def _flat(error: object) -> str:
    return " ".join(str(error).split())


def small_options(component_type: Any, unread: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the options that a component type takes from the config of a toy model, for each kind of its layers.

    ``unread`` is told of kinds that need more than this config has.
    """
    from ...compose.model_config import read_facts
    from ..toy.model import toy_config

    for kind in sorted(component_type.layer_kinds):
        facts = read_facts(toy_config([kind, kind]))
        layers = tuple(layer for layer in facts.layers if layer.kind in component_type.layer_kinds)
        try:
            found = component_type.from_layers(facts, layers)
        except Exception as error:
            unread.append(f"From layers of kind {kind!r} of a small config, from_layers makes no options: {error!r}")
        else:
            yield dict(found) if hasattr(found, "keys") else dict(found[0][1])
