"""Plugin calls: every call of a hook goes through here, so that an error of a plugin always has the same consequence.

A hook that an operation depends on fails it with a ``PluginError`` that names the component. A hook that serving must
not depend on is counted and logged, and the default holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..contract.values import Op
from ..device.pool import PageSpan
from ..errors import PluginError, PrefixloomError

if TYPE_CHECKING:
    from ..contract.admission import StateView
    from ..contract.composition import Hooks
    from ..tree.lane import Lane

log = logging.getLogger("prefixloom")

T = TypeVar("T")


def _are_places(places: Any) -> bool:
    """Return whether ``places`` are positions, places of a state, or spans that somebody minted."""
    return isinstance(places, tuple) and all(
        isinstance(place, PageSpan) or (place.__class__ is int and place >= 0) for place in places
    )


def _are_sources(op: Op) -> bool:
    """Return whether the sources of ``op`` are places or, with a selector, tuples of places to choose from."""
    if op.selector is None:
        return _are_places(op.src)
    return isinstance(op.src, tuple) and all(choices and _are_places(choices) for choices in op.src)


def _places_of(op: Op) -> tuple[Any, ...]:
    return (*op.dst, *(op.src if op.selector is None else chain.from_iterable(op.src)))


def _shown(error: object) -> str:
    """Return a plugin's error or answer in words, even if its own repr raises."""
    try:
        return repr(error)
    except Exception:
        return f"a {type(error).__name__} whose repr raises"


class Asked(Protocol):
    """The owner of hooks: a component or its lane, or a tier."""

    @property
    def name(self) -> str: ...
    @property
    def hooks(self) -> Hooks: ...


class PluginCalls:
    """The plugin calls of one cache. ``errors`` counts the failed calls after which serving went on."""

    __slots__ = ("errors",)

    def __init__(self) -> None:
        self.errors = 0

    def call(self, name: str, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a plugin. What it raises becomes a ``PluginError`` that names it."""
        try:
            return function(*args)
        except Exception as error:
            raise PluginError(f"component {name!r}: {hook} raised {_shown(error)}, and its operation failed") from error

    def ask(self, asked: Asked, hook: str, kind: type[T], *args: Any) -> T | None:
        """Call a hook if it is overridden, and check that the answer is of ``kind`` or None."""
        function = getattr(asked.hooks, hook)
        if function is None:
            return None
        answer = self.call(asked.name, hook, function, *args)
        if answer is not None and not isinstance(answer, kind):
            raise self.bad_answer(asked.name, hook, f"{kind.__name__} or None", answer)
        return answer

    def ask_softly(self, asked: Asked, hook: str, kind: type[T], *args: Any) -> T | None:
        """Call a hook on which serving must not depend: an error is counted and logged, and the default holds."""
        try:
            return self.ask(asked, hook, kind, *args)
        except PrefixloomError as error:
            self.go_on_without(error)
            return None

    def ask_admission(self, policy: str, admit: Callable[[StateView], bool], view: StateView) -> bool:
        """Return what an admission policy answers. An error is counted and logged, and the state is taken."""
        try:
            answer = admit(view)
        except Exception as error:
            wrong = f"raised {_shown(error)}"
        else:
            if answer is True or answer is False:
                return answer
            wrong = f"must answer True or False, got {_shown(answer)}"
        self.go_on_without(PluginError(f"admission policy {policy!r} of component {view.component!r}: admit {wrong}"))
        return True

    def go_on_without(self, error: PrefixloomError) -> None:
        self.errors += 1
        log.warning("%s; going on without its answer", error)

    @staticmethod
    def bad_answer(name: str, hook: str, wanted: str, got: object) -> PluginError:
        return PluginError(f"component {name!r}: {hook} must answer {wanted}, got {_shown(got)}")

    def check_ops(self, lane: Lane, hook: str, ops: Iterable[Op], batch: int | None = None) -> tuple[Op, ...]:
        """Check that the ops of a plugin name places of its own, and return them.

        ``batch``: how many sequences they may name; None: they are claimed for the one that is opened.
        """
        checked = tuple(ops)
        for op in checked:
            wanted = _wanted_of(lane, op, batch)
            if wanted:
                raise self.bad_answer(lane.name, hook, wanted, op)
        return checked


def _wanted_of(lane: Lane, op: Any, batch: int | None) -> str:
    """Return what the op of a plugin should have been, or nothing if it can be run."""
    if not isinstance(op, Op) or op.component != lane.name:
        return f"ops of {lane.name!r}"
    if not (_are_places(op.dst) and _are_sources(op)):
        return "places from 0 up"
    unnamed = op.sequence is None and (batch is None or all(isinstance(at, PageSpan) for at in _places_of(op)))
    if not unnamed and not (op.sequence.__class__ is int and 0 <= op.sequence < (batch or 0)):
        told = "no sequence, since it is the one that is opened" if batch is None else "a sequence of the batch"
        return f"ops that name {told}"
    if op.kind not in ("copy", "clear", "track"):
        return "" if lane.hooks.run_forward_op is not None else f"ops that {lane.name!r} has a run_forward_op for"
    if op.kind != "clear" and len(op.src) != len(op.dst):
        return "copies with as many sources as destinations"
    if op.selector is not None:
        alike = len({len(choices) for choices in op.src}) < 2
        if not alike or tuple(getattr(op.selector, "shape", ())) != (len(op.dst),):
            return "equally many choices, and a selector for each destination"
    return ""
