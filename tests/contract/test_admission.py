"""Admission: which states the tree takes, and policies that fail."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from prefixloom import (
    AdmissionPolicy,
    AnchorView,
    CapacityError,
    Claim,
    Component,
    CompositionError,
    Path,
    Point,
    StateView,
    WalkView,
    Window,
    hookimpl,
)
from prefixloom.cache.cache import Cache
from prefixloom.compose.registry import Registry
from prefixloom.contract.admission import ADMISSIONS
from prefixloom.testing.inside.backdoor import has_admission
from prefixloom.testing.schedules.simulated import SimulatedStream
from tests.support.composing import composed, paths, state
from tests.support.helpers import cache_of, held, part, run, serve, settle

TOKENS = list(range(64))


def stateful(admission: Any = "all", *, slots: int = 24, **facts: Any) -> Cache:
    return cache_of(part("path", Path()), part("state", Point(), **facts), slots=slots, admission=admission)


def states(cache: Cache, tokens: list[int] = TOKENS) -> list[int]:
    """The boundaries of ``tokens`` that can be resumed at, past 0."""
    return [low for low in range(4, len(tokens) + 1, 4) if held(cache, tokens[:low]) == low]


class Asked:
    """A policy that remembers what it was shown."""

    def __init__(self, admit: Callable[[StateView], Any] | None = None) -> None:
        self.views: list[StateView] = []
        self._admit = admit
        self.policy = AdmissionPolicy("asked", admit=self.admit)

    def admit(self, view: StateView) -> Any:
        self.views.append(view)
        return True if self._admit is None else self._admit(view)


# ---------------------------------------------------------------- what is built in


def test_by_default_every_state_is_taken_and_nobody_is_asked() -> None:
    cache = stateful()
    serve(cache, TOKENS[:32], chunk=8)
    assert states(cache) == [8, 16, 24, 32]
    assert not has_admission(cache)
    assert cache.composition.parts[1].admission is ADMISSIONS["all"]
    assert cache.composition.parts[0].admission is None


def test_branch_and_last_takes_where_prompts_part_and_where_a_sequence_ends() -> None:
    cache = stateful("branch-and-last")
    serve(cache, TOKENS[:32], chunk=8)
    assert states(cache) == [32]
    parting = [*TOKENS[:16], *range(100, 116)]
    with cache.open(parting) as sequence:
        assert (sequence.ready, sequence.branch) == (0, 16)
        for _ in range(4):
            run(sequence, 8)
            sequence.publish()
        assert states(cache, parting) == [16]
    assert states(cache, parting) == [16, 32]
    settle(cache)


@pytest.mark.parametrize("published", [False, True])
def test_the_last_state_is_taken_also_where_it_was_published_before_the_end(published: bool) -> None:
    """While it runs, nobody knows that it is the last; a state that was refused then is offered again at the end."""
    cache = stateful("branch-and-last")
    with cache.open(TOKENS[:32]) as sequence:
        for _ in range(4):
            run(sequence, 8)
            if published or sequence.committed < 32:
                sequence.publish()
        assert states(cache) == []
        assert sequence.published == (32 if published else 24)
    assert states(cache) == [32]
    settle(cache)


def test_the_last_state_is_the_deepest_that_was_kept_where_the_end_lies_off_the_boundaries() -> None:
    cache = stateful("branch-and-last", checkpoint_every=8)
    with cache.open(TOKENS[:30]) as sequence:
        for _ in range(15):
            run(sequence, 2)
    assert states(cache) == [24]
    settle(cache)


@pytest.mark.parametrize(
    ("prompt", "lookahead", "end"), [(32, 0, 32), (35, 0, 32), (36, 0, 36), (36, 1, 32), (3, 0, 0)]
)
def test_a_policy_is_told_where_the_prompt_ends(prompt: int, lookahead: int, end: int) -> None:
    asked = Asked(lambda view: view.prompt_end)
    parts = part("path", Path(), lookahead=lookahead), part("state", Point())
    cache = cache_of(*parts, slots=24, admission=asked.policy)
    with cache.open(TOKENS[:prompt]) as sequence:
        while sequence.reserved < prompt:
            run(sequence, min(4, prompt - sequence.reserved))
            sequence.publish()
        for token in TOKENS[prompt : prompt + 12]:
            sequence.append([token])
            run(sequence, 1)
            sequence.publish()
    assert len(asked.views) > 2, "it was asked in the answer too"
    assert (cache.peek(TOKENS), cache.stats().components["state"].cached) == (end, end > 0)
    settle(cache)


def test_an_aborted_sequence_leaves_no_last_state() -> None:
    cache = stateful("branch-and-last")
    sequence = cache.open(TOKENS[:16])
    run(sequence, 16)
    sequence.publish()
    sequence.abort()
    assert states(cache) == []
    settle(cache)


# ---------------------------------------------------------------- a stranger's


class Stranger:
    """A distribution that offers a policy: at most one state for every 16 tokens of a path, and the ends."""

    name, value = "admission:sparse", "stranger"

    def load(self) -> Any:
        return self

    @hookimpl
    def prefixloom_admission(self) -> AdmissionPolicy:
        return AdmissionPolicy("sparse", admit=lambda view: view.last or view.boundary - view.above >= 16)


def test_a_strangers_policy_is_chosen_by_name_for_the_composition() -> None:
    cache = cache_of(
        part("path", Path()), part("state", Point()), slots=24, admission="sparse", registry=Registry([Stranger()])
    )
    serve(cache, TOKENS[:60], chunk=8)
    assert states(cache) == [16, 32, 48, 60]
    settle(cache)


def test_a_component_may_name_a_policy_of_its_own() -> None:
    mine = AdmissionPolicy("none", admit=lambda view: False)
    parts = part("a", Point(), admission="sparse"), part("b", Point(), admission=mine), part("c", Point())
    registry = Registry([Stranger()])
    cache = cache_of(part("path", Path()), *parts, slots=24, admission="branch-and-last", registry=registry)
    serve(cache, TOKENS[:32], chunk=8)
    told = cache.stats().components
    assert [told[name].cached for name in "abc"] == [2, 0, 1]
    names = [p.admission and p.admission.name for p in cache.composition.parts]
    assert names == [None, "sparse", "none", "branch-and-last"]
    settle(cache)


def test_a_policy_sees_frozen_figures_of_the_state_and_of_its_path() -> None:
    asked = Asked()
    cache = stateful(asked.policy)
    serve(cache, TOKENS[:24], chunk=8, namespace="n")
    assert asked.views == [
        StateView("state", "n", 8),
        StateView("state", "n", 16, above=8, kept=1),
        StateView("state", "n", 24, above=16, kept=2, last=True, prompt_end=True),
    ]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        asked.views[0].boundary = 0  # type: ignore[misc]
    asked.views.clear()
    parting = [*TOKENS[:20], *[99] * 8]
    with cache.open(parting, namespace="n") as sequence:
        assert (sequence.ready, sequence.branch) == (16, 20)
        run(sequence, 4)
        sequence.publish()
        run(sequence, 6)
    assert asked.views == [StateView("state", "n", 20, above=16, kept=2, at_branch=True)], "it ended off a boundary"


def test_a_policy_is_asked_only_where_a_state_stands_for_the_boundary() -> None:
    asked = Asked()
    cache = stateful(asked.policy)
    with cache.open(TOKENS) as sequence:
        run(sequence, 10)
        assert sequence.publish() == 8
        run(sequence, 2)
        sequence.publish()
    assert [view.boundary for view in asked.views] == [12]


def test_admission_and_commit_insert_must_both_want_a_state() -> None:
    class Every16(Component):
        @hookimpl
        def commit_insert(self, walk: Any) -> Claim | None:
            return Claim(keep=()) if walk.boundary % 16 else None

    cache = cache_of(
        part("path", Path()),
        part("state", Point(), Every16, admission=AdmissionPolicy("late", admit=lambda view: view.boundary > 16)),
    )
    serve(cache, TOKENS[:48], chunk=8)
    assert states(cache) == [32, 48]


# ---------------------------------------------------------------- what fails


def raising(view: StateView) -> Any:
    raise LookupError("no idea")


BAD: list[Any] = [raising, lambda view: None, lambda view: "yes", lambda view: [1]]


@pytest.mark.parametrize("bad", [*BAD, lambda view: 1], ids=["raises", "none", "text", "list", "number"])
def test_a_policy_that_fails_is_counted_and_the_state_is_taken(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = stateful(AdmissionPolicy("bad", admit=bad))
    with caplog.at_level(logging.WARNING, "prefixloom"):
        serve(cache, TOKENS[:32], chunk=8)
    assert states(cache) == [8, 16, 24, 32]
    assert cache.stats().plugin_errors == len(caplog.records) == 4
    assert "admission policy 'bad' of component 'state': admit" in caplog.text
    settle(cache)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: AdmissionPolicy("x", admit=True), "AdmissionPolicy: admit must be a function, got True"),  # type: ignore[arg-type]
        (lambda: composed(paths(), admission="rare"), "an admission named 'rare'.*Built in: all, branch-and-last"),
        (lambda: composed(paths(), admission=3), "admission must be a name or an AdmissionPolicy, got 3"),
        (lambda: state(admission=3), "admission must be the name of a policy or an AdmissionPolicy, got 3"),
        (
            lambda: composed(paths(), state(admission="rare")),
            r"component 'state' \(.*named 'rare'.*Built in: all, branch-and-last",
        ),
        (lambda: composed(paths(admission="all")), "'whole'.*admission says which states the tree takes"),
    ],
)  # fmt: skip
def test_what_is_no_admission_policy_is_refused(made: Callable[[], Any], told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        made()


@pytest.mark.parametrize("every", [0, 8])
def test_whatever_a_policy_answers_the_books_are_right_after_every_operation(every: int) -> None:
    """Debug mode checks them; the policy wants some, refuses some, and fails now and then."""
    draw = random.Random(str(every))

    def fickle(view: StateView) -> Any:
        if draw.random() < 0.1:
            raise LookupError("no idea")
        return draw.random() < 0.5

    cache = cache_of(
        part("path", Path()),
        part("window", Window(9)),
        part("state", Point(), checkpoint_every=every),
        tokens=160,
        slots=12,
        admission=AdmissionPolicy("fickle", admit=fickle),
    )
    live: list[Any] = []
    for _ in range(300):
        live.append(cache.open([draw.randrange(2) for _ in range(draw.randrange(1, 40))]))
        for sequence in list(live):
            with contextlib.suppress(CapacityError):
                run(sequence, min(draw.choice((2, 4, 8)), sequence.named - sequence.reserved))
                if draw.random() < 0.5:
                    sequence.publish()
            if draw.random() < 0.3 or len(live) > 2:
                live.remove(sequence)
                sequence.close() if draw.random() < 0.8 else sequence.abort()
    for sequence in live:
        sequence.close()
    settle(cache)
    assert cache.stats().plugin_errors > 10
    assert cache.stats().hit_tokens > 100


# ---------------------------------------------------------------- with steps in flight


def test_a_last_state_that_is_still_being_written_is_taken_back_if_its_step_fails() -> None:
    """Refused while it ran, taken when the sequence closed; and only then its step turns out to have failed."""
    for fails in (False, True):
        cache, stream = stateful("branch-and-last"), SimulatedStream("forward")
        sequence = cache.open(TOKENS[:8])
        sequence.grow(8)
        with cache.step([sequence]) as step:
            step.run_ops(stream)
            stream.run(failing if fails else lambda: None)
        assert sequence.publish() == 8
        assert cache.stats().components["state"].cached == 0
        sequence.close()
        assert cache.stats().components["state"].cached == 1
        while stream.ready:
            stream.advance()
        cache.poll()
        assert states(cache, TOKENS[:8]) == ([] if fails else [8])
        assert cache.stats().components["state"].cached == (0 if fails else 1)
        settle(cache)
        assert cache.stats().components["state"].running == 0


def failing() -> None:
    raise ArithmeticError("on purpose")


class Locks(Component):
    """It asks for no more than is covered anyway, and remembers where hooks were called."""

    asked: list[tuple[str, int]]

    @hookimpl
    def acquire_component_lock(self, anchor: AnchorView) -> None:
        self.asked.append(("acquire", anchor.boundary))

    @hookimpl
    def commit_insert(self, walk: WalkView) -> None:
        self.asked.append(("insert", walk.boundary))


def test_close_publishes_nothing_when_the_tree_has_every_state() -> None:
    """The lock of a matched state that nobody had copied yet was never released."""
    asked, locks = Asked(), part("path", Path(), Locks)
    cache = cache_of(locks, part("state", Point()), admission=asked.policy)
    locks.asked = []
    serve(cache, TOKENS[:16])
    asked.views, locks.asked = [], []
    for steps in (0, 1):
        with cache.open(TOKENS[:16]) as sequence:
            for _ in range(steps):
                run(sequence, 0)
    assert (asked.views, locks.asked) == ([], [("acquire", 16)] * 2)
    settle(cache)


def test_publication_hands_over_no_checkpoint_that_the_policy_was_not_asked_of() -> None:
    asked = Asked(lambda view: view.boundary != 4)
    cache = stateful(asked.policy, checkpoint_every=4)
    for turn in (100, 200):  # they part at 4, where the tree has no state
        serve(cache, [*TOKENS[:4], *range(turn, turn + 4)])
    with cache.open([*TOKENS[:4], *range(300, 312)]) as sequence:
        run(sequence, 4)
        run(sequence, 4)
    assert (held(cache, TOKENS[:4]), held(cache, [*TOKENS[:4], *range(300, 304)])) == (0, 8)
    settle(cache)
