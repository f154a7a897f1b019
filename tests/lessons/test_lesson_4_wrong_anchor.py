"""Lesson 4, wrong_anchor: a load started from a node that not every component accepted.

The deepest node that the host has and the deepest that all components accept were taken for one another: components
walked from the wrong one, and met nodes with no data. The invariants: one anchor for all; every source is pinned until
the copies are recorded; what is told never exceeds what all components have; on any fault the length is the deepest
candidate that is really ready, and nothing is left behind. The oracle is a set of boundaries, looked up cell by cell.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from typing import Any

import pytest

import prefixloom.tiers.host_copies
import prefixloom.tiers.restore
from prefixloom import CapacityError, Path, Point, Sinks, Window
from prefixloom.cache.cache import Cache
from prefixloom.testing.inside import backdoor
from prefixloom.tree.radix import Node
from tests.support.helpers import locks, part, settle, unprotected
from tests.support.tiers import Requests, compute, path_of, restorable, serve, tiered, wrong

PAGE = 4
CHUNK = 8
LONG = list(range(1, 65))
"""The path: eight nodes of two pages, each with a state and the window before it."""
NAMES = ("full", "near", "state")
whole = prefixloom.tiers.host_copies.copy_between


class Broken(RuntimeError):
    pass


def tower(kinds: Iterable[str] = NAMES, *, host: int = 4096, **options: Any) -> Cache:
    """LONG on the host alone."""
    reaches = {"full": Path(), "near": Window(10), "state": Point()}
    cache = tiered(*(part(name, reaches[name]) for name in kinds), host=host, **{"tokens": 128, "slots": 12} | options)
    for end in range(CHUNK, len(LONG) + 1, CHUNK):
        serve(cache, LONG[:end])
    cache.evict(dict.fromkeys(kinds, 1000))
    assert restorable(cache, LONG, tiers=False) == {0}
    assert max(restorable(cache, LONG)) == len(LONG)
    return cache


def lose(cache: Cache, name: str, *ends: int) -> None:
    """The host loses what one component has at the nodes that end there."""
    (lane,) = [lane for lane in backdoor.tier_lanes(cache) if lane.device.name == name]
    for node in path_of(cache, LONG):
        cell = node.cells[lane.index]
        if cell is not None and node.end in ends:
            lane.drop_cell(cell)
            cache.core.index.prune(node)
    cache.core.index.lose()


def restored(cache: Cache, tokens: list[int] = LONG, **options: Any) -> tuple[int, int, str]:
    """(wanted, ready, why) of one request, which goes on from there with right content and leaves nothing behind."""
    with cache.open([*tokens, 999], **options) as sequence:
        told = sequence.restore()
        goes_on(cache, sequence, [*tokens, 999])
        assert told.ready == sequence.ready
    settle(cache)
    nothing_is_covered(cache)
    return told.wanted, told.ready, told.why


def nothing_is_covered(cache: Cache) -> None:
    assert {name: figures.leased for name, figures in cache.stats().components.items() if figures.leased} == {}


def goes_on(cache: Cache, sequence: Any, tokens: list[int]) -> None:
    with cache.step([sequence]) as step:
        step.run_ops()
    assert wrong(cache, sequence, tokens) == []
    with contextlib.suppress(CapacityError):
        compute(cache, sequence, tokens, min(len(tokens), sequence.reserved + 3))


# ---------------------------------------------------------------- the anchor


@pytest.mark.parametrize("seed", range(30))
def test_all_components_load_from_the_deepest_boundary_that_all_accept(seed: int) -> None:
    """The host's path goes deeper than the last window or state that anybody could use, with holes in both."""
    draw = random.Random(seed)
    cache = tower()
    ends = [node.end for node in path_of(cache, LONG)]
    lose(cache, "state", *draw.sample(ends, draw.randrange(1, 7)), *ends[-draw.randrange(1, 4) :])
    lose(cache, "near", *draw.sample(ends, draw.randrange(4)))
    if seed % 3 == 0:
        lose(cache, "full", *ends[-draw.randrange(1, 5) :])
    wanted = max(restorable(cache, LONG))
    (full, *_) = backdoor.tier_lanes(cache)
    deepest = max((node.end for node in path_of(cache, LONG) if node.cells[full.index] is not None), default=0)
    assert deepest > wanted or seed % 3 == 0, "the path is no deeper: nothing is shown"
    assert cache.match([*LONG, 999]).restorable == wanted
    assert restored(cache)[:2] == (wanted, wanted)
    assert max(restorable(cache, LONG, tiers=False)) >= wanted


def test_five_may_be_restorable_while_four_and_three_are_not() -> None:
    cache = tower()
    lose(cache, "state", 24, 32, 48, 56, 64)
    assert restorable(cache, LONG) == {0, 8, 16, 40}
    assert restored(cache)[:2] == (40, 40)


# ---------------------------------------------------------------- reservations that fail


def room_for(cache: Cache, name: str, count: int) -> Any:
    """Somebody holds all pages of one component but ``count``; running states not counted."""
    pool = cache.core.shape.lane(name).pool
    return pool.mint(pool.free - count)


def lacking(cache: Cache, name: str, boundary: int) -> int:
    """Pages (states) that a resume there needs and that the device has not: all of them, here."""
    lane = cache.core.shape.lane(name)
    if lane.unit == "boundary":
        return 1
    return len({at // PAGE for low, high in lane.part.reach.needs(boundary) for at in range(low, high)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("holes", [(), (24, 32), (16, 24, 48, 64)], ids=str)
def test_without_room_it_comes_to_the_deepest_candidate_that_fits(name: str, holes: tuple[int, ...]) -> None:
    """Every amount of room, in every component: all slots or none, and the oracle's length."""
    for count in range(1, 18 if name == "full" else 5 if name == "near" else 3):
        cache = tower(slots=12)
        lose(cache, "state", *holes)
        candidates = restorable(cache, LONG)
        span = room_for(cache, name, count)
        room = count - 1 if name == "state" else count  # one state runs
        fit = {b for b in candidates if not b or lacking(cache, name, b) <= room}
        before = locks(cache)
        with cache.open([*LONG, 999]) as sequence:
            told = sequence.restore()
            assert (told.wanted, told.ready) == (max(candidates), max(fit)), (name, count)
            assert ("did not fit" in told.why) == (max(fit) < max(candidates))
            goes_on(cache, sequence, [*LONG, 999])
        if not told.ready:
            assert {what: locked for what, locked in locks(cache).items() if what in before} == before
        span.free()
        settle(cache)
        assert restored(cache)[1] == max(candidates), "and nothing was lost by trying"


def test_a_restore_that_falls_back_keeps_what_it_had() -> None:
    """The lease covers the device's anchor until the load has won: room is not made of what the sequence reads."""
    cache = tower(tokens=128)
    assert restored(cache, LONG[:24])[1] == 24
    with cache.open([*LONG, 999]) as sequence:
        assert sequence.ready == 24
        spans = [room_for(cache, name, 0) for name in NAMES]
        told = sequence.restore()
        assert (told.wanted, told.ready) == (64, 24)
        for span in spans:
            span.free()
        goes_on(cache, sequence, [*LONG, 999])
    settle(cache)


def test_no_room_is_made_of_what_the_sequence_resumes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the window is sought, and then the copies fail: it resumes where it was, with all that it had there."""

    def broken(*_: Any) -> None:
        raise Broken

    cache = tower(tokens=128)
    assert restored(cache, LONG[:24])[1] == 24
    span = room_for(cache, "near", 0)
    with cache.open([*LONG, 999]) as sequence:
        monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", broken)
        told = sequence.restore()
        monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", whole)
        assert (told.wanted, told.ready) == (64, 24)
        assert unprotected(cache) == []
        goes_on(cache, sequence, [*LONG, 999])
    span.free()
    settle(cache)


def test_room_is_not_made_of_what_the_boundary_needs_and_the_device_has() -> None:
    """Two of three pages of the window are there, and no lease covers them: they are no room for the third."""
    cache = tower()
    assert restored(cache)[1] == 64
    cache.evict({"full": 1000, "state": 1000})
    lane = cache.core.shape.lane("near")
    for node in path_of(cache, LONG):
        if node.end == 56 and node.cells[lane.index] is not None:
            lane.drop_cell(node.cells[lane.index])
    span = room_for(cache, "near", 0)
    assert (lane.in_tree, max(restorable(cache, LONG))) == (2, 64)
    with cache.open([*LONG, 999]) as sequence:
        told = sequence.restore()
        assert (told.wanted, told.ready) == (64, 8)
        goes_on(cache, sequence, [*LONG, 999])
    span.free()
    settle(cache)


def test_sources_and_what_is_there_already_stay_while_room_is_made() -> None:
    """Room on the device is made by demoting what lies there, and room for that below by dropping what is oldest."""
    for tokens in (68, 72, 80, 96):
        cache = tower(tokens=tokens, host=80, slots=16)
        wanted = max(restorable(cache, LONG))
        serve(cache, [7] * 40, restore=False, chunk=8)  # the device is full, and so is the host
        candidates = restorable(cache, LONG)
        assert wanted == 64 == max(candidates)
        told = restored(cache)
        assert told[0] == 64
        assert told[1] in candidates
        assert told[1] == 64 or "did not fit" in told[2]


# ---------------------------------------------------------------- copies that fail


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("holes", [(), (24, 32), (16, 24, 48, 64)], ids=str)
@pytest.mark.parametrize("nth", range(3))
def test_a_copy_that_fails_leaves_the_deepest_that_is_ready(
    nth: int, holes: tuple[int, ...], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of one load are one for each component; whose failed has its source forgotten, and no other."""
    cache = tower()
    lose(cache, "state", *holes)
    told = fail_copy(monkeypatch, nth, half)
    first = max(restorable(cache, LONG))
    with cache.open([*LONG, 999]) as sequence:
        outcome = sequence.restore()
        assert len(told) == 1
        (name,) = told
        assert outcome.wanted == first
        # what the oracle says of what is left, and what has come to the device since
        assert outcome.ready == max(b for b in restorable(cache, LONG) if b < first)
        assert outcome.ready == {"full": 0, "near": outcome.ready, "state": max({8, 56, 40} - {*holes} - {first})}[name]
        goes_on(cache, sequence, [*LONG, 999])
    assert cache.stats().tier.failed == 1  # type: ignore[union-attr]
    settle(cache)
    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", whole)
    ready = max(restorable(cache, LONG))
    assert restored(cache)[1] == ready


def fail_copy(patch: pytest.MonkeyPatch, nth: int, half: bool) -> list[str]:
    """The ``nth`` copy to the device raises, before or half-way; whose it was."""
    seen: list[int] = []
    whose: list[str] = []

    def failing(source: Any, src: Any, target: Any, dst: Any) -> None:
        if source.name.startswith("host"):
            seen.append(1)
            if len(seen) == nth + 1:
                whose.append(target.name)
                if half:
                    whole(source, src[: len(src) // 2], target, dst[: len(src) // 2])
                raise Broken
        whole(source, src, target, dst)

    patch.setattr(prefixloom.tiers.host_copies, "copy_between", failing)
    return whose


def test_if_every_copy_fails_it_ends_with_what_is_ready_and_does_not_try_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = tower()
    assert restored(cache, LONG[:16])[1] == 16

    def broken(*_: Any) -> None:
        raise Broken

    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", broken)
    wanted, ready, why = restored(cache)
    assert (wanted, ready) == (64, 16)
    assert "the copy of 64 tokens failed" in why
    failed = cache.stats().tier.failed  # type: ignore[union-attr]
    assert restored(cache)[:2] == (16, 16), "what cannot be copied is not offered again"
    assert cache.stats().tier.failed == failed  # type: ignore[union-attr]


# ---------------------------------------------------------------- between match and execute


def split_it(cache: Cache) -> None:
    serve(cache, [*LONG[:36], *[500] * 8], restore=False)


def evict_below(cache: Cache) -> None:
    lose(cache, "state", 56, 64)


def evict_all_below(cache: Cache) -> None:
    lose(cache, "full", *range(CHUNK, 65, CHUNK))


def insert_it(cache: Cache) -> None:
    serve(cache, LONG[:28], restore=False)
    serve(cache, [*LONG, *range(200, 220)], restore=False)


def drop_it(cache: Cache) -> None:
    cache.drop_namespace("")


CHANGES = (split_it, evict_below, evict_all_below, insert_it, drop_it)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", [0, 16])
def test_what_changes_between_match_and_restore_is_planned_again(device: int, change: Any) -> None:
    cache = tower(tokens=256, slots=24)
    if device:
        restored(cache, LONG[:device])
    plan = cache.match([*LONG, 999])
    assert (plan.ready, plan.restorable) == (device, 64)
    with cache.open(plan) as sequence:
        change(cache)
        wanted = max(device, *(b for b in restorable(cache, LONG)))
        told = sequence.restore()
        assert told.ready == sequence.ready == wanted
        goes_on(cache, sequence, [*LONG, 999])
    settle(cache)
    nothing_is_covered(cache)
    if change not in (split_it, insert_it):
        assert plan.stale


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_at_random_moments_and_the_oracles_length(seed: int) -> None:
    requests = Requests(("anchor", seed))
    rng = requests.rng
    cache = tiered(
        part("full", Path()), part("near", Window(10)), part("state", Point(), checkpoint_every=8),
        tokens=96, slots=7, host={"full": 150, "near": 60, "state": 8}, write=rng.choice(("through", "back")),
    )  # fmt: skip
    for _ in range(30):
        tokens = requests.next()
        with cache.open(tokens, leave=1) as sequence:
            for _ in range(rng.randrange(3)):
                serve(cache, requests.next(), chunk=8) if rng.random() < 0.5 else cache.evict(rng.randrange(40))
            wanted = max(max(restorable(cache, tokens[:-1])), sequence.ready)
            told = sequence.restore()
            assert told.ready == wanted or ("did not fit" in told.why and told.ready < wanted)
            with cache.step([sequence]) as step:
                step.run_ops()
            assert wrong(cache, sequence, tokens) == []
    settle(cache)


def test_the_anchor_of_a_load_is_one_node_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from inside: every component is asked what it lacks at the same node."""
    asked: list[tuple[str, Node]] = []
    honest = prefixloom.tiers.restore.lacking

    def lacks(host: Any, node: Node, *more: Any) -> Any:
        asked.append((host.name, node))
        return honest(host, node, *more)

    monkeypatch.setattr(prefixloom.tiers.restore, "lacking", lacks)
    cache = tower()
    lose(cache, "state", 48, 56, 64)
    assert restored(cache)[1] == 40
    assert [name for name, _ in asked] == list(NAMES)
    assert {node.end for _, node in asked} == {40}


def test_boundary_is_not_restorable_where_the_host_lacks_pages_inside_of_an_edge() -> None:
    """A sequence gave back what lay between the first pages and its window, so the edge of 48 tokens has a hole."""
    cache = tiered(part("kv", Sinks(PAGE) | Window(8)), tokens=64)
    with cache.open(LONG[:48]) as sequence:
        for end in range(PAGE, 49, PAGE):
            compute(cache, sequence, LONG, end)
            cache.reclaim()
        assert sequence.pages("kv").count(-1) == 9
    cache.evict({"kv": 100})
    assert cache.match(LONG[:48]).restorable == 48
    assert cache.match([*LONG[:24], 99]).restorable == PAGE
