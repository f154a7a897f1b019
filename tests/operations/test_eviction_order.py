"""What eviction takes first: what was used longest ago, and before that what a later end of its own path has passed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from prefixloom import Cache, Claim, Component, NodeView, Path, Point, Reach, Sinks, Tier, Window, hookimpl
from prefixloom.contract.policy import BUILT_IN
from prefixloom.testing.schedules.simulated import Simulation
from prefixloom.tree import paged_reach
from tests.support.helpers import cache_of, held, part, run, serve, settle

A, B, C, D = ([name] * 64 for name in (1, 2, 3, 4))
DOCUMENTS = [[number] * 8 for number in range(7)]


# ---------------------------------------------------------------- recency


class Observing(Component):
    """It asks to be told of publications and evictions, and leaves them as they are."""

    @hookimpl
    def commit_insert(self, walk: Any) -> None: ...

    @hookimpl
    def evict_component(self, node: Any, tier: str) -> Claim:
        return Claim(keep=())


def used(cache: Any, tokens: list[int], how: int) -> None:
    """Use a document that is cached, in one of the ways in which it can be used."""
    if how == 0:  # hit, and go on with another token
        serve(cache, [*tokens, 50])
    elif how < 3:  # compute it again, while the tree has it, in one step or published before its end
        serve(cache, tokens, leave=len(tokens), chunk=4 if how == 2 else None)
    else:
        cache.lease(cache.match(tokens)).release()


@pytest.mark.parametrize("kind", [Component, Observing])
@pytest.mark.parametrize("reach", [Path(), Window(20), Point()], ids=repr)
@pytest.mark.parametrize("seed", range(6))
def test_the_least_recently_used_goes_first(seed: int, reach: Any, kind: type[Component]) -> None:
    """Documents of one leaf each, so that no leaf hides another."""
    rng = random.Random(seed)
    mine = part("mine", reach, kind=kind)
    cache = cache_of(mine, slots=24) if isinstance(reach, Path) else cache_of(part("keys", Path()), mine, slots=24)
    order = list(range(len(DOCUMENTS)))
    for number in order:
        serve(cache, DOCUMENTS[number])
    for _ in range(rng.randrange(12)):
        number = rng.choice(order)
        used(cache, DOCUMENTS[number], rng.randrange(4))
        order.remove(number)
        order.append(number)
    while order:
        for _ in range(4):  # a document that was split goes in parts
            cache.evict({"mine": 1})
            whole = [number for number in order if cache.peek(DOCUMENTS[number]) == 8]
            if whole != order:
                break
        assert whole == order[1:], f"{order[0]} was used before {order[1:]}"
        order = whole


# ---------------------------------------------------------------- what a later end has passed


class Near(Reach):
    """A window in plain Python, with no closed form."""

    unit = "page"
    raises = False

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        if self.raises:
            raise ArithmeticError("not now")
        return ((max(0, n - 4), n),) if n else ()

    def until(self, position: int) -> float:
        return position + 4


def with_states(slots: int, policy: str = "lru") -> Cache:
    return cache_of(part("path", Path()), part("state", Point()), tokens=4096, slots=slots, policy=policy)


ANSWERED = "answered"


@pytest.mark.parametrize("reach", [Point(), Window(4), Near()], ids=["state", "window", "plain"])
@pytest.mark.parametrize(
    ("served", "evicted", "left"),
    [
        ([(B, None), (A, 16), (C, None)], 2, [(A[:16], 0), (A[:32], 0), (A[:48], 48), (A, 64), (B, 64)]),
        ([(A, 16), ([*A[:32], *B], None), (C, None)], 1, [(A[:16], 0), (A[:32], 32), (A[:48], 48), (A, 64), (C, 64)]),
        ([(A, None), ([*A, *B], None), ([*A, *C], None), (D, None)], 1, [(A, 64), ([*A, *B], 64), ([*A, *C], 128)]),
        ([(A, 32), ([*A[:32], *B], None), (C, None)], 1, [(A, 32), (A[:32], 32), ([*A[:32], *B], 96), (C, 64)]),
        ([(B, None), (A, ANSWERED)], 1, [(B, 64), (A[:32], 32), (A, 32)]),
        ([(B, None), (A, ANSWERED), ([*A, *C], None)], 2, [(B, 64), (A[:32], 0), (A, 0), ([*A, *C], 128)]),
    ],
    ids=[
        "the first that was passed goes first", "one resumed at is taken back", "where prompts part none is passed",
        "one resumed at counts as used", "an answer goes before its prompt's end", "a next turn passes both ends",
    ],
)  # fmt: skip
def test_what_a_later_end_of_its_path_has_passed_goes_first(reach: Reach, served: Any, evicted: int, left: Any) -> None:
    """``served``: prompts with the tokens of their steps. ``left``: prompts with what they hit afterwards."""
    cache = cache_of(part("path", Path()), part("end", reach), tokens=4096, slots=64)
    for prompt, chunk in served:
        if chunk != ANSWERED:
            serve(cache, prompt, chunk=chunk)
            continue
        with cache.open(prompt[:32]) as sequence:
            run(sequence, 32)
            sequence.publish()
            sequence.append(prompt[32:])
            run(sequence, 32)
    cache.evict({"end": 4096}, unneeded=True)  # of windows, what no end needs
    for _ in range(evicted):
        cache.evict({"end": 1})
    assert [held(cache, [*prompt, 7]) for prompt, _ in left] == [length for _, length in left]
    settle(cache)


def test_an_answer_stays_where_another_component_has_nothing_at_its_prompts_end() -> None:
    """No step ends where the prompt does, so that there is no state, and the window there is of no use."""
    cache = cache_of(part("path", Path()), part("near", Window(4)), part("state", Point()), tokens=4096)
    with cache.open(A[:32]) as sequence:
        sequence.append(A[32:])
        for count in (24, 24, 16):
            run(sequence, count)
            sequence.publish()
    cache.evict({"near": 4096}, unneeded=True)
    for _ in range(2):
        cache.evict({"near": 1})
    assert held(cache, [*A, 7]) == 64


@pytest.mark.parametrize("named", [0, 3, 8])
def test_what_follows_a_much_shorter_prompt_is_no_answer(named: int) -> None:
    cache = cache_of(part("path", Path()), part("near", Window(4)), tokens=4096)
    serve(cache, B)
    with cache.open(A[:named]) as sequence:
        sequence.append(A[named:])
        for _ in range(4):
            run(sequence, 16)
            sequence.publish()
    cache.evict({"near": 4096}, unneeded=True)
    for _ in range(4):  # three ends of steps, and what was used longest ago
        cache.evict({"near": 1})
    assert [held(cache, [*prompt, 7]) for prompt in (A, B)] == [64, 0]


def test_an_eviction_asks_no_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_reach, "MOST", 0)  # nothing that it said is remembered for long
    near = Near()
    cache = cache_of(part("path", Path()), part("near", near), tokens=4096)
    serve(cache, A, chunk=16)
    lease = cache.lease(cache.match(A[:33]))
    near.raises = True
    assert cache.evict({"near": 64})["near"] > 0
    near.raises = False
    lease.release()
    settle(cache)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_long_prompt_costs_the_ends_of_others_nothing(policy: str) -> None:
    """Of its sixteen checkpoints all but the last are passed: five slots are enough."""
    cache = with_states(5, policy)
    for prompt in (A, B):
        serve(cache, prompt)
    serve(cache, [9] * 64, chunk=4)
    assert [held(cache, prompt) for prompt in (A, B, [9] * 64)] == [64, 64, 64]
    settle(cache)


def test_state_is_not_passed_any_more_when_the_step_fails_that_wrote_the_one_below() -> None:
    cache, sim = with_states(3), Simulation("forward")
    for prompt in (B, A[:32]):
        serve(cache, prompt)
    sequence = cache.open([*A[:32], *B[:32]])
    sequence.grow(32)
    with cache.step([sequence]) as step:
        step.run_ops(sim["forward"])
        sim["forward"].run(lambda: 1 / 0)
    sequence.close()  # it passes 32
    sim.drain()
    cache.poll()
    assert isinstance(sequence.failed, ZeroDivisionError)
    for prompt in (C, [9] * 64):
        serve(cache, prompt)
    assert [held(cache, [*prompt, 7]) for prompt in (B, A[:32], C)] == [0, 32, 64]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_passed_state_that_is_computed_again_is_as_good_as_others(policy: str) -> None:
    cache = with_states(8, policy)
    late = cache.open(A)
    serve(cache, A, chunk=32)  # 32 is passed
    run(late, 32)
    late.publish()
    run(late, 32)
    late.close()
    serve(cache, B, chunk=8)
    assert [held(cache, [*prompt, 7]) for prompt in (A, B)] == [64, 64]
    settle(cache)


def test_prompts_that_part_later_take_it_back() -> None:
    cache = with_states(8)
    serve(cache, A)
    both = [cache.open([*A, *more]) for more in (B, C)]
    for sequence in both:
        run(sequence, 64)
    for sequence in both:  # the first passes the end of A, the second parts from it there
        sequence.close()
    serve(cache, D)
    cache.evict({"state": 2})
    assert [held(cache, [*prompt, 7]) for prompt in (A, [*A, *C], D)] == [64, 64, 64]
    settle(cache)


def test_when_the_later_one_goes_the_state_is_not_passed_any_more() -> None:
    cache = with_states(8)
    serve(cache, A)
    serve(cache, [*A, *B], until=1.0)
    serve(cache, C)
    cache.expire(2.0)
    cache.evict({"state": 2})
    assert [held(cache, [*prompt, 7]) for prompt in (A, [*A, *B], C)] == [64, 64, 0]
    settle(cache)


class Keeps32(Component):
    @hookimpl
    def evict_component(self, node: tuple[NodeView, ...], tier: Tier) -> Claim:
        return Claim(keep=tuple(at for at, each in enumerate(node) if each.end == 32))


def test_a_passed_state_that_a_plugin_keeps_stays_while_others_may_go() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), kind=Keeps32), slots=4)
    serve(cache, B)
    serve(cache, C)
    serve(cache, A, chunk=32)
    cache.evict({"state": 1})
    assert [held(cache, [*prompt, 7]) for prompt in (A[:32], A, B, C)] == [32, 64, 0, 64]
    settle(cache)


@pytest.mark.parametrize("seed", range(6))
def test_no_end_and_nothing_resumed_at_goes_while_a_passed_state_may(seed: int) -> None:
    """Conversations at random, their states known from the public side alone."""
    rng = random.Random(seed)
    cache = with_states(12)
    talks: list[list[int]] = [[name] * 8 for name in range(6)]
    resumed = 0
    for _ in range(60):
        talk = rng.choice(talks)
        talk += [rng.randrange(1000, 2000) for _ in range(4 * rng.randrange(1, 6))]
        serve(cache, talk, chunk=rng.choice([None, 8]))
        ends = [each for each in talks if len(each) > 8]
        assert [held(cache, each) for each in ends] == [len(each) for each in ends], "six ends fit into twelve slots"
        passed = [talk[:n] for n in range(4, len(talk), 4) if held(cache, [*talk[:n], 7]) == n]
        if passed and rng.random() < 0.3:
            again = rng.choice(passed)
            cache.open([*again, 7]).abort()
            count = cache.stats().components["state"].cached - len(ends)  # all passed, and the end used longest ago
            assert cache.evict({"state": count}) == {"state": count}
            assert held(cache, [*again, 7]) == len(again), "it was used last"
            resumed += 1
            for each in talks:
                if held(cache, each) < len(each):
                    each[:] = [rng.randrange(1000, 2000) for _ in range(8)]
    assert resumed > 3
    settle(cache)


def test_a_state_that_the_tree_has_is_not_evicted_for_a_copy_when_it_is_published_again() -> None:
    cache = with_states(3)
    first, second = (cache.open(range(16)) for _ in range(2))
    for sequence in (first, second):
        run(sequence, 8)
    first.publish()
    run(first, 4)  # it has copied the state that it handed over
    second.publish()
    assert cache.stats().components["state"].evicted == 0
    for sequence in (first, second):
        sequence.close()
    assert cache.peek([*range(8), 99]) == 8


# ---------------------------------------------------------------- windows that a sequence only passed

LONG = list(range(100, 124))
OTHER = [7] * 8


@pytest.mark.parametrize(
    ("reach", "forks", "left"),
    [(Window(4), False, (0, 8, 24)), (Window(4), True, (8, 0, 24)), (Sinks(4) | Window(4), False, (8, 0, 24))],
    ids=["passed goes before an older end", "where prompts part", "needed at the end of the path"],
)
def test_windows_that_were_refilled_where_a_sequence_only_passed_go_first(
    reach: Reach, forks: bool, left: tuple[int, ...]
) -> None:
    """LONG ends at 8 and 24. Its windows were evicted, OTHER was served, and LONG was computed again in one step."""
    cache = cache_of(part("path", Path()), part("near", reach))
    serve(cache, LONG[:8])
    serve(cache, LONG)
    if forks:
        serve(cache, [*LONG[:8], 50, 51, 52, 53])
    cache.evict({"near": cache.stats().components["near"].cached})
    serve(cache, OTHER)
    assert serve(cache, LONG) == 0
    while cache.peek(LONG[:8]) and cache.peek(OTHER):
        cache.evict({"near": 1})
    assert (cache.peek(LONG[:8]), cache.peek(OTHER), cache.peek(LONG)) == left
