"""Lesson 5 where the tier records and copies: what the tree holds is the same before, while and after it is copied.

A cell's numbers are bytes of its own, on the CPU; what a copy wants elsewhere is made of a copy of them when it runs.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from typing import Any

import pytest

import prefixloom.tiers.host_copies
import prefixloom.tiers.restore
from prefixloom.cache.cache import Cache
from prefixloom.contract.manifest import LAYOUTS
from prefixloom.device.host_pool import HostPool
from prefixloom.tiers.host_copies import HostCopies
from prefixloom.tiers.host_lane import HostCell, HostLane
from tests.support.helpers import every_reach, nodes, part, settle
from tests.support.tiers import restorable, serve, simulated, tiered, wrong

KINDS = ("path", "window", "point")
TOKENS = list(range(1, 41))
Mutant = Callable[[pytest.MonkeyPatch], None]


def cache_with(layout: str, write: str, *, tokens: int = 64, host: int = 640) -> Cache:
    """The host has ten times the slots, and hands out those that the device does not have: a mix-up is seen."""
    parts = [part(name, every_reach()[name]) for name in KINDS]
    cache = tiered(*parts, tokens=tokens, slots=6, write=write, host=dict.fromkeys(KINDS, host), layout=layout)
    for lane in cache.core.below.copies.lanes:  # type: ignore[union-attr]
        assert min(lane.pool._free[: lane.pool.at_hand][-20:]) >= lane.device.pool.capacity
    return cache


def held(cache: Cache) -> dict[tuple[str, int], Any]:
    """What every cell of every tier says of its slots, as it is."""
    return {
        (lane.pool.name, node.end): cell.data
        for lane in cache.core.shape.all_lanes
        for node in nodes(cache)
        if (cell := node.cells[lane.index]) is not None and node.parent is not None
    }


def all_on_the_cpu(cache: Cache) -> None:
    """Cells have plain numbers of slots that their own pool has."""
    for lane in cache.core.shape.all_lanes:
        for node in nodes(cache):
            cell = node.cells[lane.index]
            if cell is None or node.parent is None:
                continue
            assert cell.data.__class__ is bytes
            assert all(slot.__class__ is int and 0 <= slot < lane.pool.capacity for slot in lane.slots_of(cell))
            if isinstance(lane.pool, HostPool):
                assert min(lane.slots_of(cell), default=99) >= cache.core.shape.lanes[0].pool.capacity


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", ["through", "back"])
def test_write_evict_below_free_and_load_leave_every_record_as_it_was(layout: str, write: str) -> None:
    cache = cache_with(layout, write)
    simulation = simulated(cache)
    serve(cache, TOKENS, restore=False, chunk=8)
    if write == "back":
        cache.evict(dict.fromkeys(KINDS, 1000))
    before = held(cache)
    assert any(name.startswith("host") for name, _ in before)
    all_on_the_cpu(cache)
    simulation.drain()
    cache.poll()
    assert held(cache) == before, "the copies down changed what they were told"
    cache.evict(dict.fromkeys(KINDS, 1000))
    simulation.drain()
    with cache.open([*TOKENS, 99]) as sequence:
        assert sequence.restore().ready == 40
        before = held(cache)
        all_on_the_cpu(cache)
        simulation.drain()
        cache.poll()
        assert held(cache) == before, "the copies up did"
    simulation.drain()
    cache.poll()
    for lane in cache.core.below.copies.lanes:  # type: ignore[union-attr]
        freed: list[Any] = []
        count, free = lane.in_tree, lane.pool.free
        assert lane.evict(1000, freed) == count
        assert lane.pool.free == free + count
        cache.core.index.tree.prune_all(freed)
    assert serve(cache, [*TOKENS, 98]) == 40
    simulation.drain()
    cache.poll()
    settle(cache)


@pytest.mark.parametrize("way", ["down", "up"])
def test_what_a_caller_changes_after_a_copy_was_recorded_changes_nothing(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = HostCopies.run

    def careless(self: HostCopies, moves: Any, given: Any, hold: Any, to: str) -> Any:
        mine = [copy.copy(each) for each in moves]
        for each in mine:
            each.src, each.dst = list(each.src), list(each.dst)
        work = honest(self, mine, given, hold, to)
        if to == way:
            for each in mine:
                each.src.reverse()
                each.src.append(0)
                each.dst[:] = [0] * len(each.dst)
        return work

    cache = cache_with("page_first", "back")
    simulation = simulated(cache)
    serve(cache, TOKENS, restore=False)
    monkeypatch.setattr(HostCopies, "run", careless)
    cache.evict(dict.fromkeys(KINDS, 1000))
    simulation.drain()
    cache.poll()
    tokens = [*TOKENS, 99]
    with cache.open(tokens) as sequence:
        assert sequence.restore().ready == 40
        simulation.drain()
        cache.poll()
        with cache.step([sequence]) as step:
            step.run_ops()
        assert wrong(cache, sequence, tokens) == []
    simulation.drain()
    cache.poll()
    settle(cache)


@pytest.mark.parametrize("write", ["through", "back", "selective"])
def test_only_the_pool_that_handed_a_slot_out_takes_it_back(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over long traffic every number that comes back to a pool is one that it gave: by side, it could be no other's."""
    cache = cache_with("layer_first", write)
    out: dict[str, set[int]] = {lane.pool.name: set() for lane in cache.core.shape.all_lanes}
    for lane in cache.core.below.copies.lanes:  # type: ignore[union-attr]
        watch(lane.pool, out[lane.pool.name], monkeypatch)
    for turn in range(10):
        serve(cache, [turn % 3, *TOKENS[: 12 + 3 * turn]], chunk=8)
        cache.evict(dict.fromkeys(KINDS, 6))
    assert sum(len(slots) for slots in out.values()) or write == "selective"
    for lane in cache.core.below.copies.lanes:  # type: ignore[union-attr]
        assert len(out[lane.pool.name]) == lane.in_tree
    cache.drop_namespace("")
    assert not any(out.values())
    assert restorable(cache, TOKENS) == {0}


def watch(pool: Any, out: set[int], patch: pytest.MonkeyPatch) -> None:
    kind = type(pool)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def take(self, count: int) -> Any:
            ids = super().take(count)
            assert not out & set(ids)
            out.update(ids)
            return ids

        def give(self, data: bytes) -> None:
            assert data.__class__ is bytes
            assert set(array("i", data)) <= out
            out.difference_update(array("i", data))
            super().give(data)

    pool.__class__ = Watched


# ---------------------------------------------------------------- the mistakes, put back


def copies_are_told_in_the_callers_lists(patch: pytest.MonkeyPatch) -> None:
    """The numbers of a copy that waits are whatever its maker's lists say when it runs."""

    def as_given(numbers: Any) -> Any:
        return numbers if isinstance(numbers, list) else tuple(numbers)

    patch.setattr(prefixloom.tiers.host_copies, "tuple", as_given, raising=False)


def the_host_records_the_devices_numbers(patch: pytest.MonkeyPatch) -> None:
    def add(self: HostLane, node: Any, places: Any, slots: Any) -> None:
        theirs = self.device.edge(node)
        honest(self, node, places, array("i", [theirs[place] for place in places]))

    honest = HostLane.add
    patch.setattr(HostLane, "add", add)


def a_state_is_freed_by_the_devices_number(patch: pytest.MonkeyPatch) -> None:
    def slots_of(self: HostLane, cell: HostCell | None) -> list[int]:
        theirs = None if cell is None else cell.node.cells[self.device.index]
        return honest(self, cell) if theirs is None or self.unit == "page" else [theirs.slot]

    honest = HostLane.slots_of
    patch.setattr(HostLane, "slots_of", slots_of)


def a_copy_writes_the_numbers_that_it_wants_into_the_record(patch: pytest.MonkeyPatch) -> None:
    """As it was in the field: the record has the numbers of where the data is wanted next."""
    honest = prefixloom.tiers.restore._copy_up

    def copy_up(filling: Any, running: Any) -> Any:
        for made in filling.moving:
            for node, _ in made.at:
                cell = node.cells[made.lane.index]
                if made.lane.unit == "page":
                    cell.data = array("i", [slot % 16 for slot in array("i", cell.data)]).tobytes()
        return honest(filling, running)

    patch.setattr(prefixloom.tiers.restore, "_copy_up", copy_up)


CALLER = test_what_a_caller_changes_after_a_copy_was_recorded_changes_nothing


def record_test(layout: str, write: str, patch: pytest.MonkeyPatch) -> None:
    test_write_evict_below_free_and_load_leave_every_record_as_it_was(layout, write)


BACK = test_only_the_pool_that_handed_a_slot_out_takes_it_back
KILLED: list[tuple[Mutant, Any, tuple[Any, ...]]] = [
    (copies_are_told_in_the_callers_lists, CALLER, ("down",)),
    (copies_are_told_in_the_callers_lists, CALLER, ("up",)),
    (the_host_records_the_devices_numbers, record_test, ("page_first", "through")),
    (the_host_records_the_devices_numbers, BACK, ("back",)),
    (a_state_is_freed_by_the_devices_number, BACK, ("through",)),
    (a_copy_writes_the_numbers_that_it_wants_into_the_record, record_test, ("layer_first", "back")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), KILLED, ids=[f"{mutant.__name__}-{k}" for k, (mutant, *_) in enumerate(KILLED)]
)
def test_the_mistakes_of_lesson_5_in_a_tier_are_seen(
    mutant: Mutant, test: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.MonkeyPatch.context() as inner, pytest.raises(Exception) as failure:
        test(*arguments, inner)
    assert not isinstance(failure.value, TypeError), failure.value
