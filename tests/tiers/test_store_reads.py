"""How a prompt is read from a store: in slices that fit what may wait, and once for all who want it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from prefixloom import Path, PluginError, Point, Window
from prefixloom.cache.cache import Cache
from prefixloom.storage import Miss, Record
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom.tiers import store_reads
from prefixloom.tiers.consensus import LocalConsensus
from prefixloom.tiers.store_reads import Fetch
from prefixloom_hicache import GuardLimits, MemoryBackend
from tests.support.helpers import part, settle
from tests.support.setups import MRU
from tests.support.stores import Gated, behind, composed, idle, read_back, restored, serve, stocked, until
from tests.support.tiers import path_of

TOKENS = list(range(160))
SETS = {"F": ("path",), "FS": ("path", "window"), "FSM": ("path", "window", "point"), "M": ("point",)}


def parts(names: tuple[str, ...]) -> list[Any]:
    made = {"path": Path(), "window": Window(10), "point": Point()}
    return [part(name, made[name]) for name in names]


class Counting(Gated):
    """Counts how often each record is read."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.read: Counter[bytes] = Counter()

    def get(self, *given: Any) -> Any:
        found = super().get(*given)
        self.read.update(each.key.address for each in found if isinstance(each, Record))
        return found


@pytest.fixture
def slices_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No more than so many bytes are asked for at a time."""

    def told(size: int) -> None:
        for module in ("pieces", "store_reads"):
            monkeypatch.setattr(f"prefixloom.tiers.{module}.SLICE", size)

    return told


def record_bytes(cache: Cache) -> int:
    return max(lane.pool.slot_bytes for lane in tier_lanes(cache))  # type: ignore[attr-defined]


# ---------------------------------------------------------------- slices


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_prompt_larger_than_the_backlog_comes_in_one_request(names: tuple[str, ...], slices_of: Any) -> None:
    store = stocked(*parts(names), tokens=TOKENS)
    cache, _ = composed(*parts(names))
    size = 8 * record_bytes(cache)
    slices_of(size)
    limits = GuardLimits(deadline=5.0, backlog_bytes=size, backlog_calls=4)
    cache, _ = composed(*parts(names), store=store, limits=limits)
    assert read_back(cache, [*TOKENS, 1]) == 160
    settle(cache)


def test_what_belongs_to_one_boundary_is_asked_for_as_it_comes(slices_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 36 pages, and no more than two of them at a time."""
    near = part("near", Window(144))
    store = stocked(near, tokens=TOKENS)
    monkeypatch.setattr("prefixloom.tiers.pieces.READ", 1)
    cache, _ = composed(near)
    size = 2 * record_bytes(cache)
    slices_of(size)
    cache, _ = composed(near, store=store, limits=GuardLimits(deadline=5.0, backlog_bytes=size))
    assert read_back(cache, [*TOKENS, 1]) == 160


def test_of_a_prompt_in_slices_what_came_before_a_fault_counts(slices_of: Any) -> None:
    class Failing(MemoryBackend):
        bad: bytes = b""

        def get(self, keys: Any, into: Any = None) -> Any:
            found = super().get(keys, into)
            return tuple(
                Miss(key, "io") if key.address == self.bad else each for key, each in zip(keys, found, strict=True)
            )

    store = stocked(part("path", Path()), tokens=TOKENS, kind=Failing)
    cache, _ = composed(part("path", Path()), store=store)
    slices_of(4 * record_bytes(cache))
    store.bad = list(store._frames)[21]  # its first slices are good: five times four pages
    with cache.open([*TOKENS, 1]) as sequence:
        told = restored(cache, sequence)
        assert (told.ready, "io" in told.why) == (80, True)
    assert not behind(cache).reads.fetches
    settle(cache)


# ---------------------------------------------------------------- once for all


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_who_wants_what_is_being_read_does_not_read_it_again(names: tuple[str, ...]) -> None:
    store = stocked(*parts(names), tokens=TOKENS, kind=Counting)
    cache, _ = composed(*parts(names), store=store)
    store.gate.clear()
    sequences = [cache.open([*TOKENS, last]) for last in range(3)]
    told = [sequence.restore() for sequence in sequences]
    store.gate.set()
    until(cache, lambda: all(each.over for each in told))
    assert [sequence.ready for sequence in sequences] == [160] * 3
    assert store.read and max(store.read.values()) == 1
    for sequence in sequences:
        sequence.close()
    settle(cache)


def test_of_a_longer_prompt_only_the_rest_is_read() -> None:
    store = stocked(part("path", Path()), tokens=TOKENS, kind=Counting)
    cache, _ = composed(part("path", Path()), store=store)
    store.gate.clear()
    short, long = cache.open([*TOKENS[:100], 99999]), cache.open([*TOKENS, 99999])
    told = [each.restore() for each in (short, long)]
    store.gate.set()
    until(cache, lambda: all(each.over for each in told))
    assert (short.ready, long.ready) == (100, 160)
    assert len(store.read) == 40 and max(store.read.values()) == 1
    for sequence in (short, long):
        sequence.close()
    settle(cache)


def test_who_shares_little_does_not_wait() -> None:
    waited: list[Fetch] = []

    def are_over() -> bool:
        waited.extend(fetch for fetch in behind(cache).reads.fetches if fetch.ahead is not None)
        return all(each.over for each in told)

    store = stocked(part("path", Path()), tokens=TOKENS, kind=Counting)
    other = [*TOKENS[:16], *range(500, 580)]
    cache, _ = composed(part("path", Path()), store=store)
    with cache.open(other) as sequence:  # the store comes to have it as well
        sequence.grow(96)
        with cache.step([sequence]) as step:
            step.run_ops()
    until(cache, lambda: store.status().records == 60)
    cache, _ = composed(part("path", Path()), store=store)
    sequences = [cache.open([*tokens, 99999]) for tokens in (TOKENS, other)]
    told = [sequence.restore() for sequence in sequences]
    until(cache, are_over)
    assert [sequence.ready for sequence in sequences] == [160, 96] and not waited
    for sequence in sequences:
        sequence.close()


@pytest.mark.parametrize("names", [("path",), ("path", "point")])
def test_if_the_first_is_refused_the_next_one_asks_itself(names: tuple[str, ...]) -> None:
    class Once(Counting):
        refusals = 0

        def get(self, *given: Any) -> Any:
            found = super().get(*given)
            if self.refusals:
                self.refusals -= 1
                return tuple(Miss(key, "io") for key in given[0])
            return found

    store = stocked(*parts(names), tokens=TOKENS, kind=Once)
    cache, _ = composed(*parts(names), store=store)
    store.refusals = 1 + len(names)
    store.gate.clear()
    sequences = [cache.open([*TOKENS, last]) for last in range(4)]
    told = [sequence.restore() for sequence in sequences]
    store.gate.set()
    until(cache, lambda: all(each.over for each in told))
    assert sequences[0].ready < 160 and sequences[-1].ready == 160
    for sequence in sequences:
        sequence.close()
    settle(cache)


def two_behind_one() -> tuple[Counting, Any, Any, list[Any], list[Any]]:
    """Three sequences that want the same from a store, which holds back its answer to the first."""
    store = stocked(part("path", Path()), tokens=TOKENS, kind=Counting)
    cache, tier = composed(part("path", Path()), store=store)
    store.holds = ("get",)
    store.gate.clear()
    sequences = [cache.open([*TOKENS, last]) for last in range(3)]
    told = [sequence.restore() for sequence in sequences]
    until(cache, lambda: sum(fetch.ahead is not None for fetch in behind(cache).reads.fetches) == 2)
    return store, cache, tier, sequences, told


@pytest.mark.parametrize("how", ["flush", "drop", "close", "detach"])
def test_who_waits_behind_another_is_let_go_with_it(how: str) -> None:
    store, cache, tier, sequences, told = two_behind_one()
    if how == "flush":
        cache.flush()
    elif how == "drop":
        cache.drop_namespace("")
    elif how == "close":
        for sequence in sequences:
            sequence.close()
    else:
        tier.detach()
    store.gate.set()
    until(cache, lambda: all(each.over for each in told) and not behind(cache).reads.fetches)
    for sequence in sequences:
        sequence.close()
    settle(cache)


def test_who_waits_behind_a_fetch_that_fails_reads_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache, _, sequences, told = two_behind_one()
    honest, failed = store_reads.place, []

    def once(*args: Any) -> None:
        if failed:
            return honest(*args)
        failed.append(True)
        raise PluginError("what arrived cannot be entered")

    monkeypatch.setattr(store_reads, "place", once)
    store.gate.set()
    until(cache, lambda: all(each.over for each in told))
    assert failed and [each.ready for each in told] == [0, 160, 160]
    assert "cannot be entered" in told[0].why
    for sequence in sequences:
        sequence.close()
    settle(cache)


def test_what_is_fetched_for_a_namespace_that_is_dropped_does_not_bring_it_back() -> None:
    store = Counting(1 << 24)
    for tenant in ("gone", "stays"):
        cache, _ = composed(part("path", Path()), store=store)
        serve(cache, TOKENS, namespace=tenant)
        idle(cache)
    cache, _ = composed(part("path", Path()), store=store)
    store.holds = ("get",)
    store.gate.clear()
    gone, stays = (cache.open([*TOKENS, 1], namespace=tenant) for tenant in ("gone", "stays"))
    dropped, other = gone.restore(), stays.restore()
    until(cache, lambda: sum(fetch.reading for fetch in behind(cache).reads.fetches) == 2)
    cache.drop_namespace("gone")
    assert (dropped.over, dropped.ready, other.over) == (True, 0, False)
    store.gate.set()
    until(cache, lambda: other.over and not behind(cache).reads.fetches)
    assert other.ready == 160 and "gone" not in cache.core.index.tree.roots
    gone.close()
    stays.close()
    with cache.open([*TOKENS, 1], namespace="gone") as later:  # the store was not emptied
        told = later.restore()
        until(cache, lambda: told.over)
        assert told.ready == 160
    settle(cache)


def test_who_waits_for_the_beginning_of_a_long_prompt_does_not_wait_for_its_end(slices_of: Any) -> None:
    class Slow(MemoryBackend):
        delay = 0.0

        def get(self, keys: Any, into: Any = None) -> Any:
            time.sleep(self.delay)
            return super().get(keys, into)

    store = stocked(part("path", Path()), tokens=TOKENS, kind=Slow)
    cache, _ = composed(part("path", Path()), store=store)
    slices_of(4 * record_bytes(cache))
    store.delay = 0.02
    with cache.open([*TOKENS, 1]) as long, cache.open([*TOKENS[:16], 7]) as short:
        whole, part_of_it = long.restore(), short.restore()
        until(cache, lambda: part_of_it.over)
        assert (part_of_it.ready, whole.over) == (16, False)
        until(cache, lambda: whole.over)
        assert whole.ready == 160
    settle(cache)


def test_what_several_nodes_lack_comes_in_one_fetch() -> None:
    """The path is there, in three nodes, and the window's last pages have gone from two of them, on both tiers."""
    store = stocked(*parts(("path", "window")), tokens=TOKENS[:24])
    cache, _ = composed(*parts(("path", "window")), store=store)
    for end in (8, 16, 24):
        serve(cache, TOKENS[:end], restore=False)
    window = cache.core.shape.lane("window")
    for node in path_of(cache, TOKENS[:24])[1:]:
        for lane in (window, *(each for each in tier_lanes(cache) if each.device is window)):  # type: ignore[attr-defined]
            if node.cells[lane.index] is not None:
                lane.drop_cell(node.cells[lane.index])
    cache.core.index.lose()
    assert cache.match(TOKENS[:25]).restorable == 8
    assert read_back(cache, TOKENS[:25]) == 24
    settle(cache)


def test_what_comes_does_not_drive_out_the_path_that_it_hangs_from() -> None:
    """The host is full, and what was used last goes first: that is the path itself."""
    paths = part("path", Path()), part("more", Path())
    store = stocked(*paths, tokens=TOKENS[:24])
    cache, _ = composed(*paths, store=store, host={"path": 24, "more": 24}, policy=MRU)
    for tokens in (TOKENS[:8], TOKENS[:16], [9] * 8):
        serve(cache, tokens)
        cache.evict(1000)
        idle(cache)
    assert cache.match(TOKENS[:25]).restorable == 16
    assert read_back(cache, TOKENS[:25]) == 24
    assert cache.match([9] * 9).restorable == 0, "the other prompt made room"
    cache.evict(1000)
    assert cache.match(TOKENS[:25]).restorable == 24
    settle(cache)


def test_what_finds_no_room_leaves_in_place_what_came_with_it() -> None:
    store = stocked(*parts(("path", "window")), tokens=TOKENS[:24])
    cache, _ = composed(*parts(("path", "window")), store=store, host={"path": 4096, "window": 4})
    with cache.open(TOKENS[:25]) as sequence:
        told = restored(cache, sequence)
        assert told.ready == 0 and "found no room in the tier" in told.why
    figures = cache.stats().tier
    assert figures is not None and (figures.cached, figures.dropped) == ({"path": 6, "window": 0}, 1)
    settle(cache)


class Late(LocalConsensus):
    """The other ranks are done some polls later."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        self.asked.update(done)
        return super().agree({ticket: amount for ticket, amount in done.items() if self.asked[ticket] > 3})


def test_what_has_arrived_waits_until_the_other_ranks_have_it() -> None:
    store = stocked(*parts(("path", "window")), tokens=TOKENS)
    late = Late()
    cache, _ = composed(*parts(("path", "window")), store=store, consensus=late)
    assert read_back(cache, [*TOKENS, 1]) == 160
    assert late.asked and min(late.asked.values()) == 4
    settle(cache)


def test_what_lies_behind_a_piece_that_is_missing_is_not_asked_for(slices_of: Any, monkeypatch: Any) -> None:
    class Lacking(Counting):
        lacking: bytes = b""

        def get(self, keys: Any, *more: Any) -> Any:
            found = super().get(keys, *more)
            return tuple(
                Miss(key, "absent") if key.address == self.lacking else each
                for key, each in zip(keys, found, strict=True)
            )

    near = part("near", Window(144))
    store = stocked(near, tokens=TOKENS, kind=Lacking)
    cache, _ = composed(near, store=store)
    monkeypatch.setattr("prefixloom.tiers.pieces.READ", 1)
    slices_of(2 * record_bytes(cache))
    store.lacking = list(store._frames)[10]
    with cache.open([*TOKENS, 1]) as sequence:
        assert restored(cache, sequence).ready == 0
    assert 7 <= sum(store.read.values()) <= 9, "of 36 pages, those up to the seventh and what was asked for beside it"
    settle(cache)


def test_of_a_path_no_more_is_looked_for_than_the_store_has_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reads, "LOOK", 3)
    store = stocked(*parts(("path", "window")), tokens=TOKENS[:80])
    other, tier = composed(*parts(("window",)), store=store)
    tier.fetch_at_least = 1 << 30
    serve(other, TOKENS)
    idle(other)
    cache, _ = composed(*parts(("path", "window")), store=store)
    with cache.open([*TOKENS, 1]) as sequence:
        told = restored(cache, sequence)
        assert (told.ready, told.wanted, told.why) == (80, 80, "")
    settle(cache)
