"""An admission policy under test: the case, the states that it is asked about, and its laws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs

from ...compose.entry import compose
from ...compose.registry import default_registry
from ...contract.admission import ADMISSIONS, AdmissionPolicy, StateView
from ...contract.manifest import Buffer, Manifest
from ...contract.reach import Path, Point
from ...contract.values import Component
from ...errors import CompositionError
from ..kit.case import LawBroken, NotApplicable
from ..kit.machines import Machine, on_machine


@attrs.define(eq=False)
class AdmissionCase:
    """An admission policy to be tested; ``make()`` returns it."""

    make: Callable[[], AdmissionPolicy]
    label: str = "admission"
    seed: int = 0
    untested: ClassVar = ("whether what it keeps is worth keeping: how many tokens hit with it",)

    @classmethod
    def installed(cls, name: str) -> AdmissionCase:
        return cls(lambda: ADMISSIONS.get(name) or default_registry().admission(name), label=f"admission:{name}")

    @property
    def laws(self) -> tuple[Any, ...]:
        return tuple(law for name, law in globals().items() if name.startswith("law_"))

    def policy(self) -> AdmissionPolicy:
        policy = self.make()
        if not isinstance(policy, AdmissionPolicy):
            raise CompositionError(f"{self.label}: what was made is {policy!r}, and must be an AdmissionPolicy")
        return policy

    def views(self) -> Iterator[StateView]:
        """Yield states of all kinds that a policy can be asked about."""
        chance = random.Random(f"views {self.seed}")
        for number in range(300):
            kept = chance.randrange(4)
            above = 4 * chance.randrange(1, 40) if kept else 0
            boundary = above + 4 * chance.randrange(1, 1 + 10 ** chance.randrange(1, 4))
            yield StateView(
                chance.choice(("state", "conv")), chance.choice(("", "b")), boundary, above, kept,
                chance.randrange(3) == 0, number % 3 == 0, prompt_end=number % 4 == 0,
            )  # fmt: skip

    def __str__(self) -> str:
        return self.label


def _answers(case: AdmissionCase, views: list[StateView]) -> list[Any]:
    admit = case.policy().admit
    if admit is None:
        raise NotApplicable("it has no admit")
    return [admit(view) for view in views]


def law_every_state_gets_an_answer(case: AdmissionCase) -> None:
    """For every state, ``admit`` returns True or False, and does not raise.

    Clauses: O15, O17.
    """
    admit = case.policy().admit
    if admit is None:
        raise NotApplicable("it has no admit")
    for view in case.views():
        try:
            answer = admit(view)
        except Exception as error:
            raise LawBroken(f"of {view} it raises {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise LawBroken(f"of {view} it answers {answer!r}, not True or False")


def law_the_answer_follows_from_the_view(case: AdmissionCase) -> None:
    """The same view gets the same answer in any order of calls, from every instance, at any time and on every rank.

    Clauses: H6, O15.
    """
    views = list(case.views())
    first = _answers(case, views)
    state = random.getstate()
    try:
        random.seed(7)
        with on_machine(Machine(case.seed)):
            again = _answers(case, views[::-1])[::-1]
    finally:
        random.setstate(state)
    for view, one, other in zip(views, first, again, strict=True):
        if one != other:
            raise LawBroken(f"of {view} it answers {one}, and asked again {other}")


def law_serving_goes_on_with_it(case: AdmissionCase) -> None:
    """A cache with the policy serves requests, counts no error of the policy, and gets every slot back.

    Clauses: O14, O15, O16, M10.
    """
    manifest = Manifest([Buffer("content", (), "int64")], admission=case.policy())
    path = Component("path", Manifest([Buffer("content", (), "int64")]), Path())
    plugins, capacity = [path, Component("state", manifest, Point())], {"path": 400, "state": 12}
    cache = compose(None, plugins=plugins, page_size=4, capacity=capacity, debug=True)
    for turn in range(12):
        tokens = [*range(8 + 4 * (turn % 5)), *range(1000 * turn, 1000 * turn + 4 * (turn % 3)), turn]
        with cache.open(tokens, leave=1) as sequence:
            while sequence.reserved < len(tokens):
                sequence.grow(min(4, len(tokens) - sequence.reserved))
                with cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
    stats = cache.stats()
    if stats.plugin_errors:
        raise LawBroken(f"{stats.plugin_errors} of its answers were none, and were counted as its fault")
    cache.evict({name: capacity[name] for name in capacity})
    left = {name: figures.capacity - figures.free for name, figures in cache.stats().components.items()}
    if any(left.values()):
        raise LawBroken(f"in the end slots are nobody's: {left}")
