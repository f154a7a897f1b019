"""The state machine for Hypothesis, if it is installed: Hypothesis chooses and shrinks the same operations.

    from prefixloom.testing import ComponentCase, Pit, state_machine

    TestMine = state_machine(Pit(ComponentCase(make))).TestCase

The seeded scripts of ``writer.py`` need nothing installed. Hypothesis explores further combinations, keeps the examples
that failed, and also shrinks the arguments of an operation.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .machine import Arena
from .operations import Operations
from .sequence_operations import DOCUMENTS, document
from .writer import EXTRA_KEYS, NAMESPACES

NUMBER = st.integers(0, 4)
"""A number that selects one of the sequences, leases or plans."""


def arguments(longest: int) -> dict[str, tuple[st.SearchStrategy[Any], ...]]:
    """Return the argument strategies of each operation, in the form that ``Writer`` uses."""
    small, salt = st.integers(0, 8), st.integers(0, 15)
    prompt = st.builds(
        lambda number, length: document(number)[:length], st.integers(0, DOCUMENTS - 1), st.integers(0, longest)
    )
    extra = st.sampled_from(((), (), *(((0, 1, key),) for key in EXTRA_KEYS)))
    asked = (st.sampled_from(NAMESPACES), prompt.filter(len), st.sampled_from((0, 1, 3)), extra)
    return {
        "open": (*asked, st.integers(0, 2), salt),
        "match": asked,
        "plan": asked,
        "open_plan": (NUMBER, salt),
        "lease": (NUMBER,),
        "release": (NUMBER, st.integers(0, 2)),
        "grow": (NUMBER, st.integers(-2, longest)),
        "advance": (NUMBER, st.integers(1, longest)),
        "arrive": (NUMBER, st.integers(1, longest)),
        "append": (NUMBER, st.integers(1, 9)),
        "step": (st.integers(1, 31), small),
        "commit": (NUMBER, st.integers(0, 5)),
        "publish": (NUMBER, st.integers(-1, 7)),
        "rewind": (NUMBER, st.integers(0, 8), salt),
        "close": (NUMBER, st.integers(0, 4)),
        "evict": (st.integers(0, 6), st.integers(0, 30)),
        "drop_namespace": (st.sampled_from(NAMESPACES),),
        "want": (NUMBER, salt),
        "expire": (salt,),
        "flush": (),
        "poll": (),
        "illegal": (NUMBER, NUMBER),
    }


def state_machine(arena: Arena, **options: Any) -> type[RuleBasedStateMachine]:
    """Return a machine whose rules are the operations on a cache of this arena. Each example gets a new cache.

    ``options`` are those of ``hypothesis.settings``.
    """
    known = arguments(arena.longest)

    class CacheStateMachine(RuleBasedStateMachine):
        world: Operations

        @initialize()
        def composed(self) -> None:
            self.world = Operations(arena.compose())

        @rule(request=st.tuples(*known["open"]), chunk=st.integers(1, arena.longest), end=st.integers(0, 2))
        def turn(self, request: tuple[Any, ...], chunk: int, end: int) -> None:
            """Run one whole request, from start to end, which single operations rarely produce."""
            for op in (("open", *request), ("grow", -1, chunk), ("step", 31, 0), ("publish", -1, -1)):
                self.world.apply(op)
            for op in (("grow", -1, -1), ("step", 31, 0), *([("close", -1, 0)] if end else [])):
                self.world.apply(op)

        @rule(number=NUMBER, tokens=st.integers(1, 4), back=st.integers(0, 3))
        def decode(self, number: int, tokens: int, back: int) -> None:
            """Run a small step and rewind part of it."""
            for op in (
                ("append", number, tokens),
                ("grow", number, tokens),
                ("step", 31, 0),
                ("rewind", number, back, 1),
            ):
                self.world.apply(op)

        def teardown(self) -> None:
            if hasattr(self, "world"):
                self.world.finish()

    for name, strategies in known.items():

        def operation(self: Any, args: tuple[Any, ...], name: str = name) -> None:
            self.world.apply((name, *args))

        operation.__name__ = name
        setattr(CacheStateMachine, name, rule(args=st.tuples(*strategies))(operation))
    usual = {"deadline": None, "max_examples": 40, "stateful_step_count": 30, "report_multiple_bugs": False}
    CacheStateMachine.TestCase.settings = settings(suppress_health_check=list(HealthCheck), **(usual | options))
    return CacheStateMachine
