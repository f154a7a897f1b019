"""Laws of an admission policy: what it answers is an answer, and follows from the view alone."""

from __future__ import annotations

import random
from typing import Any

from ..compose.entry import compose
from ..contract.admission import StateView
from ..contract.manifest import Buffer, Manifest
from ..contract.reach import Path, Point
from ..contract.values import Component
from .case import LawBroken, NotApplicable
from .laws_of_policies import clocks_off_by
from .policies import AdmissionCase


def _answers(case: AdmissionCase, views: list[StateView]) -> list[Any]:
    policy = case.policy()
    asked = [function for function in (policy.admit, policy.worth) if function is not None]
    if not asked:
        raise NotApplicable("it has neither admit nor worth")
    return [[function(view) for function in asked] for view in views]


def law_every_state_gets_an_answer(case: AdmissionCase) -> None:
    """``admit`` answers True or False and ``worth`` a number, whatever state they are asked about, and raise nothing.

    Clauses: O18, O19, O20.
    """
    policy = case.policy()
    wanted: tuple[tuple[Any, Any, str], ...] = (
        (policy.admit, bool, "True or False"),
        (policy.worth, (int, float), "a number"),
    )
    for function, kind, said in wanted:
        if function is None:
            continue
        for view in case.views():
            try:
                answer = function(view)
            except Exception as error:
                raise LawBroken(f"of {view} it raises {type(error).__name__}: {error}") from error
            if not isinstance(answer, kind) or answer != answer:
                raise LawBroken(f"of {view} it answers {answer!r}, not {said}")


def law_the_answer_follows_from_the_view(case: AdmissionCase) -> None:
    """The same view gets the same answer, in whatever order, by whichever instance, at any time and on every rank.

    Clauses: H6, O18, O19.
    """
    views = list(case.views())
    first = _answers(case, views)
    state = random.getstate()
    try:
        random.seed(7)
        with clocks_off_by(1e9):
            again = _answers(case, views[::-1])[::-1]
    finally:
        random.setstate(state)
    for view, one, other in zip(views, first, again, strict=True):
        if one != other:
            raise LawBroken(f"of {view} it answers {one}, and asked again {other}")


def law_serving_goes_on_with_it(case: AdmissionCase) -> None:
    """With the policy in a cache, requests are served, nothing is counted as its fault, and every slot comes back.

    Clauses: O17, O18, O19, M16.
    """
    manifest = Manifest([Buffer("content", (), "int64")], states_per_path=2, admission=case.policy())
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
