"""Asking plugins: every call of a hook goes through here, so that whatever a plugin does has one kind of consequence.

A hook that an operation depends on fails it with a ``PluginError`` that names the component, and the operation is
undone. A hook that serving must not depend on is counted and logged, and the default holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..contract.values import Op
from ..errors import PluginError, PrefixloomError

if TYPE_CHECKING:
    from ..tree.lane import Lane

log = logging.getLogger("prefixloom")

T = TypeVar("T")


def _are_slots(slots: Any, capacity: int) -> bool:
    return isinstance(slots, tuple) and all(slot.__class__ is int and 0 <= slot < capacity for slot in slots)


def _are_sources(op: Op, capacity: int) -> bool:
    """With a selector, of each a tuple to choose from."""
    if op.selector is None:
        return _are_slots(op.src, capacity)
    return isinstance(op.src, tuple) and all(choices and _are_slots(choices, capacity) for choices in op.src)


def _shown(error: object) -> str:
    """A plugin's error or answer in words, even if its own repr raises."""
    try:
        return repr(error)
    except Exception:
        return f"a {type(error).__name__} whose repr raises"


class Named(Protocol):
    """Who is asked: a component's lane, or a tier."""

    @property
    def name(self) -> str: ...


class Asking:
    """The cache's way of calling plugins."""

    _plugin_errors: int
    _lanes: tuple[Lane, ...]

    def _call(self, name: str, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a plugin; whatever it raises becomes a PluginError that names it."""
        try:
            return function(*args)
        except Exception as error:
            raise PluginError(f"component {name!r}: {hook} raised {_shown(error)}; the operation was undone") from error

    def _ask(self, lane: Named, hook: str, kind: type[T], function: Callable[..., Any], *args: Any) -> T | None:
        """A hook's answer, checked: one of ``kind``, or None."""
        answer = self._call(lane.name, hook, function, *args)
        if answer is not None and not isinstance(answer, kind):
            raise self._bad_answer(lane.name, hook, f"{kind.__name__} or None", answer)
        return answer

    def _ask_softly(
        self, lane: Named, hook: str, kind: type[T], function: Callable[..., Any] | None, *args: Any
    ) -> T | None:
        """A hook that serving must not depend on: if it fails, it is counted and logged, and the default holds."""
        if function is None:
            return None
        try:
            return self._ask(lane, hook, kind, function, *args)
        except PrefixloomError as error:
            self._without_answer(error)
            return None

    def _ask_policy(
        self, policy: str, what: str, wanted: str, kind: Any, function: Callable[..., Any], view: Any
    ) -> Any:
        """A policy's answer, checked; None if there is none, which is counted and logged."""
        name = f"policy {policy!r} of component {view.component!r}"
        try:
            try:
                answer = function(view)
            except Exception as error:
                raise PluginError(f"admission {name}: {what} raised {_shown(error)}") from error
            if not isinstance(answer, kind) or answer != answer:
                raise PluginError(f"admission {name}: {what} must answer {wanted}, got {_shown(answer)}")
        except PluginError as error:
            self._without_answer(error)
            return None
        return answer

    def _without_answer(self, error: PrefixloomError) -> None:
        self._plugin_errors += 1
        log.warning("%s; going on without its answer", error)

    @staticmethod
    def _bad_answer(name: str, hook: str, wanted: str, got: object) -> PluginError:
        return PluginError(f"component {name!r}: {hook} must answer {wanted}, got {_shown(got)}")

    def _check_ops(self, lane: Lane, hook: str, ops: Iterable[Op]) -> tuple[Op, ...]:
        """Ops that a plugin wants run: each must be one that can be."""
        checked = tuple(ops)
        lanes = {other.name: other for other in self._lanes}
        for op in checked:
            if not isinstance(op, Op) or op.component not in lanes:
                raise self._bad_answer(lane.name, hook, f"ops of {', '.join(lanes)}", op)
            target = lanes[op.component]
            if op.kind not in ("copy", "clear", "track"):
                if target.hooks.run_forward_op is None:
                    raise self._bad_answer(lane.name, hook, f"ops that {op.component!r} has a run_forward_op for", op)
            elif not _are_slots(op.dst, target.live.capacity) or not _are_sources(op, target.live.capacity):
                raise self._bad_answer(lane.name, hook, f"slots from 0 to {target.live.capacity - 1}", op)
            elif op.kind != "clear" and len(op.src) != len(op.dst):
                raise self._bad_answer(lane.name, hook, "copies with as many sources as destinations", op)
            elif op.selector is not None and (
                len({len(choices) for choices in op.src}) > 1
                or tuple(getattr(op.selector, "shape", ())) != (len(op.dst),)
            ):
                raise self._bad_answer(lane.name, hook, "equally many choices, and a selector for each destination", op)
        return checked
