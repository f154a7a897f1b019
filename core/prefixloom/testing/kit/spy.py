"""A spy: a component that takes the place of another, calls its hooks, and watches what they see, answer and touch.

The spy has the name, the manifest and the reach of the original, and overrides the hooks that the original overrides.
A test can have it raise in one hook, or listen in all hooks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from typing import Any

from ...compose.binding import bind
from ...contract.composition import Hooks
from ...contract.hookspecs import HOT_HOOKS, ComponentSpecs, hookimpl
from ...contract.values import Op
from .answers import Call, shown
from .machines import Machine, on_machine

HELPERS = {"the validator": "create_match_validator", "run_forward_op": "deferred_forward_ops"}
"""Hooks that the spy must override so that another one is called."""
PURE = ("the validator", "finalize_match_result")
"""Hooks that give the same answer whenever they are asked the same."""


class PlannedHookError(Exception):
    """The spy raises this in a hook on purpose."""


class Spy:
    """Watches one component.

    ``mistakes`` lists what the component did wrong, as (topic, sentence); ``trace`` lists all calls and answers.
    """

    def __init__(
        self, component: Any, raising: str = "", listening: bool = False, without: Collection[str] = ()
    ) -> None:
        self._component = component
        self.name, self.manifest, self.reach = component.name, component.manifest, component.reach
        self._hooks: Hooks = bind(component, f"component {component.name!r}")
        self._raising = raising
        self.calls_until_raise: int | None = None
        """At which call from now on the hook raises, once. 0: at none; None: at every call."""
        self.armed = False
        self.raised = 0
        self.mistakes: list[tuple[str, str]] = []
        self.trace: list[Call] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: Any = None
        self.machine: Machine | None = None
        """The machine on which hooks answer, if it is not this one."""
        self._asked: dict[tuple[str, int, str], tuple[Callable[..., Any], tuple[Any, ...], str]] = {}
        self._pool: Any = None
        self._thread = threading.get_ident()
        self.has_stream = False
        """Whether steps run on a thread beside the one that drives the cache, and write content meanwhile."""
        for name in HOT_HOOKS:
            forced = name == raising or name == HELPERS.get(raising)
            if name in without or (getattr(self._hooks, name) is None and not (forced or listening)):
                setattr(self, name, None)

    @property
    def original(self) -> Any:
        """The component that the spy replaces."""
        return self._component

    @property
    def pool(self) -> Any:
        return self._pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self._pool = pool
        if hasattr(self._component, "pool"):
            self._component.pool = pool

    @property
    def overridden(self) -> tuple[str, ...]:
        """The hooks that the component itself overrides."""
        return self._hooks.overridden

    # ------------------------------------------------------------ the hooks
    @hookimpl
    def create_match_validator(self, tiers: Any) -> Any:
        answer = self._call("create_match_validator", tiers)
        if answer is None and self._raising != "the validator":
            return None

        def validator(walk: Any) -> Any:
            self._raise_if_planned("the validator")
            if answer is None:
                return walk.boundary
            got = self._watched("the validator", answer, walk)
            if not isinstance(got, int) or isinstance(got, bool) or got > walk.boundary:
                self._report("validator", f"its validator answered {got!r} for the boundary {walk.boundary}")
            return got

        return validator

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> Any:
        answer = self._call("deferred_forward_ops", batch)
        return (*(answer or ()), Op("kit", self.name)) if self._raising == "run_forward_op" else answer

    def stop_raising(self) -> None:
        """Raise no more; do only what the component does."""
        self._raising = "nothing"

    # ------------------------------------------------------------ watching
    def _report(self, topic: str, sentence: str) -> None:
        if (topic, sentence) not in self.mistakes:
            self.mistakes.append((topic, sentence))

    def _raise_if_planned(self, hook: str) -> None:
        """Raise in this hook if it is the hook to raise in, and the planned call is this one."""
        if self._raising != hook:
            return
        if self.calls_until_raise is not None:
            self.calls_until_raise -= self.calls_until_raise > 0
            if self.calls_until_raise or not self.armed:
                return
            self.armed = False
        self.raised += 1
        raise PlannedHookError(hook)

    def arm(self, nth: int) -> None:
        """Raise at the nth call from now on and at no other; 0: at none."""
        self.calls_until_raise, self.armed = nth, nth > 0

    def _call(self, hook: str, *args: Any) -> Any:
        self.calls.append((hook, args))
        self._raise_if_planned(hook)
        function = getattr(self._hooks, hook)
        if hook == "run_forward_op" and args[0].kind == "kit":
            return None
        return None if function is None else self._watched(hook, function, *args)

    def _watched(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        is_op = hook == "run_forward_op"
        given = args[:1] if is_op else args
        before = repr(given)
        state = self._state()
        try:
            with on_machine(self.machine):
                answer = function(*args)
        except Exception as error:
            self._report("raise", f"{hook} raised {type(error).__name__}: {error}")
            raise
        if repr(given) != before:
            self._report("mutate", f"{hook} was shown {before}, and left {given!r}")
        self._compare(hook, state, args[0].dst if is_op else ())
        if not is_op:
            self.trace.append(Call(hook, args, shown(answer)))
            if hook in PURE:
                first = self._asked.setdefault((hook, id(function), before), (function, args, shown(answer)))[2]
                if shown(answer) != first:
                    told = f"{hook}{before} answered {first}, and asked again after other prompts {shown(answer)}"
                    self._report("impure", told)
        return answer

    def ask_again(self) -> None:
        """Ask once more, in the reverse order, what must have the same answer at any time."""
        for (hook, _, _), (function, args, _) in reversed(tuple(self._asked.items())):
            self._watched(hook, function, *args)

    def _compare(self, hook: str, before: Any, but: Any) -> None:
        """Report what a hook changed of its pool."""
        free, content = before
        if free is not None and free != tuple(self._pool.free_ids()):
            self._report("mutate", f"{hook} changed the free list of its pool: it takes or gives back slots itself")
        elif content is not None and (slots := self.memory.changed(content, but)):
            told = f"{hook} changed the content of {len(slots)} slots of its pool, the first is {slots[0]}"
            self._report("mutate", told + ("; its op does not name it in dst" if hook == "run_forward_op" else ""))

    def _state(self) -> tuple[tuple[int, ...] | None, Any]:
        """Return the free list and the content of the pool, as far as only the hook that is called may change them."""
        if self._pool is None or self.memory is None:
            return None, None
        driving = threading.get_ident() == self._thread
        free = tuple(self._pool.free_ids()) if driving else None
        return free, None if driving and self.has_stream else self.memory.snapshot()


def _calling(hook: str) -> Any:
    """Return the implementation of a hook that only calls the component's."""

    def implementation(self: Spy, *args: Any) -> Any:
        return self._call(hook, *args)

    implementation.__signature__ = inspect.signature(getattr(ComponentSpecs, hook))  # type: ignore[attr-defined]
    return hookimpl(implementation)


for _hook in HOT_HOOKS:
    if not hasattr(Spy, _hook):
        setattr(Spy, _hook, _calling(_hook))
