"""The state machine for Hypothesis, where it is installed: the same operations, chosen and shrunk by it.

    from prefixloom.testing import ComponentCase, Pit, state_machine

    TestMine = state_machine(Pit(ComponentCase(make))).TestCase

The seeded scripts of ``writer.py`` need nothing installed. Hypothesis looks for what was not thought of there, keeps
the examples that failed, and shrinks the arguments of an operation, too.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .machine import Arena
from .operations import Operations
from .steps import DOCUMENTS, document
from .writer import NAMESPACES

NUMBER = st.integers(0, 4)
"""Which of the sequences, leases or plans that there are."""


def arguments(longest: int) -> dict[str, tuple[st.SearchStrategy[Any], ...]]:
    """What each operation takes, as ``Writer`` says it."""
    small, salt = st.integers(0, 8), st.integers(0, 15)
    prompt = st.builds(
        lambda number, length: document(number)[:length], st.integers(0, DOCUMENTS - 1), st.integers(0, longest)
    )
    extra = st.sampled_from(((), (), ((0, 1, "image 0"),)))
    asked = (st.sampled_from(NAMESPACES), prompt.filter(len), st.sampled_from((0, 1, 3)), extra)
    return {
        "open": (*asked, st.integers(0, 2), salt),
        "match": asked,
        "plan": asked,
        "open_plan": (NUMBER, salt),
        "lease": (NUMBER,),
        "release": (NUMBER, st.integers(0, 2)),
        "grow": (NUMBER, st.integers(-2, longest)),
        "arrive": (NUMBER, st.integers(1, longest)),
        "append": (NUMBER, st.integers(1, 9)),
        "step": (st.integers(1, 31), small),
        "commit": (NUMBER, st.integers(0, 5)),
        "publish": (NUMBER, st.integers(-1, 7)),
        "rewind": (NUMBER, st.integers(0, 8), salt),
        "close": (NUMBER, st.integers(0, 4)),
        "evict": (st.integers(0, 6), st.integers(0, 30)),
        "drop_namespace": (st.sampled_from(NAMESPACES),),
        "flush": (),
        "poll": (),
        "illegal": (NUMBER, NUMBER),
    }


def state_machine(arena: Arena, **options: Any) -> type[RuleBasedStateMachine]:
    """A machine whose rules are the operations on a cache of this arena; a new cache for each example.

    ``options`` are those of ``hypothesis.settings``.
    """
    known = arguments(arena.longest)

    class Machine(RuleBasedStateMachine):
        world: Operations

        @initialize()
        def composed(self) -> None:
            self.world = Operations(arena.compose())

        @rule(request=st.tuples(*known["open"]), chunk=st.integers(1, arena.longest), end=st.integers(0, 2))
        def turn(self, request: tuple[Any, ...], chunk: int, end: int) -> None:
            """A request from its start to its end, in order, which single operations rarely come to."""
            for op in (("open", *request), ("grow", -1, chunk), ("step", 31, 0), ("publish", -1, -1)):
                self.world.apply(op)
            for op in (("grow", -1, -1), ("step", 31, 0), *([("close", -1, 0)] if end else [])):
                self.world.apply(op)

        @rule(number=NUMBER, tokens=st.integers(1, 4), back=st.integers(0, 3))
        def decode(self, number: int, tokens: int, back: int) -> None:
            """A small step, of which a part is taken back."""
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
        setattr(Machine, name, rule(args=st.tuples(*strategies))(operation))
    usual = {"deadline": None, "max_examples": 40, "stateful_step_count": 30, "report_multiple_bugs": False}
    Machine.TestCase.settings = settings(suppress_health_check=list(HealthCheck), **(usual | options))
    return Machine
