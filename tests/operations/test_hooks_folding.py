"""Folding: what a hook answers can narrow what is valid and widen what is protected, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import CapacityError, Claim, Component, Op, Path, Point, Window, hookimpl
from prefixloom.contract.values import SplitRule
from tests.support.helpers import cache_of, finish, held, part, run, serve, settle

TOKENS = list(range(40))


class Answering(Component):
    """Every hook that a test sets answers through a plain function; the others say nothing."""

    match: Callable[[Any], Any] = staticmethod(lambda walk: None)
    insert: Callable[[Any], Any] = staticmethod(lambda walk: None)
    evicting: Callable[[Any], Any] = staticmethod(lambda victims: None)
    splitting: Callable[[Any, Any], Any] = staticmethod(lambda parent, child: None)
    valid: Callable[[Any], Any] = staticmethod(lambda walk: walk.boundary)

    @hookimpl
    def create_match_validator(self, tiers: Any) -> Any:
        assert tiers == ("device",)
        return lambda walk: self.valid(walk)

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Any:
        return self.match(walk)

    @hookimpl
    def commit_insert(self, walk: Any) -> Any:
        return self.insert(walk)

    @hookimpl
    def evict_component(self, node: Any, tier: str) -> Any:
        return self.evicting(node)

    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> Any:
        return self.splitting(parent, child)

    @hookimpl
    def run_forward_op(self, op: Op, stream: Any) -> None: ...


def answering(name: str, reach: Any) -> Any:
    return part(name, reach, kind=Answering)


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize("wider", [lambda walk: walk.boundary + 4, lambda walk: 10**9, lambda walk: walk.key_tokens])
def test_a_validator_cannot_widen(wider: Any) -> None:
    mine = answering("mine", Path())
    cache = cache_of(mine, part("window", Window(10)))
    serve(cache, TOKENS, chunk=20)
    mine.valid = wider
    cache.evict({"window": 64})
    assert cache.peek(TOKENS) == 0
    assert cache.peek([*TOKENS, *range(8)]) == 0


def test_a_validator_that_lowers_page_by_page_walks_down_a_long_prompt() -> None:
    mine = answering("mine", Path())
    cache = cache_of(mine, tokens=8000, debug=False)
    serve(cache, range(8000))
    mine.valid = lambda walk: walk.boundary if walk.boundary <= 8 else walk.boundary - 4
    assert cache.peek(range(8000)) == 8


def test_a_validator_sees_the_walk_and_a_boundary_inside_of_a_page_is_floored() -> None:
    mine = answering("mine", Path())
    cache = cache_of(mine)
    serve(cache, TOKENS, namespace="n")
    seen: list[Any] = []
    mine.valid = lambda walk: seen.append(walk) or walk.boundary - 1
    mine.valid = lambda walk: (seen.append(walk), 19 if walk.boundary == 40 else walk.boundary)[1]
    assert cache.peek([*TOKENS, 1], namespace="n") == 16
    assert [(w.namespace, w.boundary, w.key_tokens, w.walked) for w in seen] == [("n", 40, 41, 40), ("n", 16, 41, 40)]


def test_needs_are_summed_with_the_derived_one() -> None:
    mine, state = answering("mine", Path()), answering("state", Point())
    cache = cache_of(mine, state, tokens=64, slots=4)
    mine.match = lambda walk: Claim(need=3)
    state.match = lambda walk: Claim(need=2)
    plan = cache.match(TOKENS)
    assert plan.need == {"mine": 3, "state": 3}
    state.match = lambda walk: Claim(need=4)
    with pytest.raises(CapacityError, match="state: needs 5 pages"):
        cache.open(TOKENS)
    settle(cache)


def test_ops_are_concatenated_after_the_derived_ones_in_the_order_of_composition() -> None:
    first, second = answering("first", Path()), answering("second", Point())
    cache = cache_of(first, second)
    first.match = lambda walk: Claim(ops=(Op("a", "first"), Op("b", "first")))
    second.match = lambda walk: Claim(ops=(Op("c", "second"),))
    with cache.open(TOKENS) as sequence:
        sequence.grow(4)
        with cache.step([sequence]) as step:
            assert [op.kind for op in step.ops] == ["clear", "a", "b", "c"]
            step.run_ops()
    settle(cache)


def test_a_claim_takes_nothing_but_ops_to_run() -> None:
    with pytest.raises(TypeError, match="ops must be Op values, got 'b'"):
        Claim(ops=(Op("a", "mine"), "b"))  # type: ignore[arg-type]


# ---------------------------------------------------------------- inserting


def test_what_is_kept_is_united_with_what_the_boundary_needs() -> None:
    mine = answering("mine", Window(9))
    cache = cache_of(part("path", Path()), mine, max_rewind=40)
    mine.insert = lambda walk: Claim(keep=((0, 2),))
    with cache.open(TOKENS) as sequence:
        finish(sequence)
        sequence.publish(40)
        pages = cache.match(TOKENS).pages("mine").tolist()
        assert cache.stats().components["mine"].cached == 3, "page 0 by request, two for the window"
        assert [p >= 0 for p in pages[-2:]] == [True, True]
    assert cache.peek(TOKENS) == 40
    settle(cache)


def test_an_insert_sees_the_span_that_is_published() -> None:
    mine = answering("mine", Path())
    cache = cache_of(mine)
    seen: list[tuple[int, int]] = []
    mine.insert = lambda walk: seen.append((walk.start, walk.boundary))
    serve(cache, TOKENS, chunk=12)
    assert seen == [(0, 12), (12, 24), (24, 36), (36, 40)]


def test_what_a_later_boundary_needs_is_not_given_back_because_an_earlier_one_does_not() -> None:
    """Needs that are not convex: boundary 32 needs nothing, boundary 40 needs [8, 12) again."""
    from prefixloom import Reach

    class Late(Reach):
        def needs(self, n: int) -> Any:
            return ((8, 12),) if n >= 40 else ()

    mine = answering("mine", Late())
    cache = cache_of(part("path", Path()), mine)
    mine.insert = lambda walk: Claim(keep=((walk.boundary - 1, walk.boundary),))
    with cache.open(TOKENS) as sequence:
        run(sequence, 32)
        sequence.publish()
        run(sequence, 8)
        assert sequence.pages("mine")[2] >= 0, "the running sequence still needs it"
    assert cache.peek(TOKENS) == 40


# ---------------------------------------------------------------- splitting, evicting


def test_a_state_may_be_dropped_when_its_node_is_split() -> None:
    mine = answering("mine", Point())
    cache = cache_of(part("path", Path()), mine)
    views: list[tuple[int, int, int]] = []

    def splitting(parent: Any, child: Any) -> SplitRule:
        views.append((parent.start, parent.end, child.end))
        return SplitRule("drop")

    mine.splitting = splitting
    serve(cache, TOKENS)
    plan = cache.match(TOKENS)
    serve(cache, [*TOKENS[:12], *[7] * 8])
    assert views == [(0, 12, 40)]
    assert plan.stale
    assert (cache.peek(TOKENS), cache.stats().components["mine"].cached) == (0, 1)
    settle(cache)


def test_a_state_that_a_lease_covers_is_not_dropped_on_a_split() -> None:
    mine = answering("mine", Point())
    cache = cache_of(part("path", Path()), mine)
    mine.splitting = lambda parent, child: SplitRule("drop")
    serve(cache, TOKENS)
    with cache.lease(cache.match(TOKENS)):
        serve(cache, [*TOKENS[:12], *[7] * 8])
        assert cache.peek(TOKENS) == 40
    settle(cache)


@pytest.mark.parametrize(("at", "halves"), [(20, (0, 3)), (32, (1, 2)), (36, (2, 1))])
def test_a_split_shows_how_many_pages_each_half_has(at: int, halves: tuple[int, int]) -> None:
    mine, shown = answering("mine", Window(10)), []
    cache = cache_of(part("path", Path()), mine)
    serve(cache, TOKENS)
    cache.evict({"mine": 7})  # what the window at 40 does not need
    mine.splitting = lambda parent, child: shown.append((parent.pages, child.pages))
    serve(cache, [*TOKENS[:at], *[1] * 4])
    assert shown == [halves]


@pytest.mark.parametrize("reach", [Path(), Window(20), Point()], ids=repr)
def test_a_victim_is_held_back_once_and_a_full_pool_still_makes_room(reach: Any) -> None:
    mine = answering("mine", reach)
    keys = [] if isinstance(reach, Path) else [part("keys", Path())]
    cache = cache_of(*keys, mine, slots=6)
    for i in range(3):
        serve(cache, [i] * 8)
    shown: list[list[int]] = []

    def evicting(victims: Any) -> Claim:
        shown.append([victim.end for victim in victims])
        return Claim(keep=tuple(range(len(victims))) if len(shown) == 1 else ())

    mine.evicting = evicting
    cache.evict({"mine": 1})
    assert [held(cache, [i] * 8) for i in range(3)] == [8, 0, 8], "the first was held back, the second went"
    assert shown == [[8], [8]]
    mine.evicting = lambda victims: Claim(keep=tuple(range(len(victims))))
    cache.evict({"mine": 100})
    assert cache.stats().components["mine"].cached == 0
    settle(cache)


def test_what_is_held_back_becomes_recent() -> None:
    mine = answering("mine", Path())
    cache = cache_of(mine)
    for i in range(3):
        serve(cache, [i] * 8)
    answers = iter([Claim(keep=(0,))])
    mine.evicting = lambda victims: next(answers, None)
    cache.evict({"mine": 1})
    mine.evicting = lambda victims: None
    cache.evict({"mine": 1})
    assert [held(cache, [i] * 8) for i in range(3)] == [8, 0, 0]
