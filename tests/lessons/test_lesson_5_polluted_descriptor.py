"""Lesson 5, polluted_descriptor: moving indices for a copy changed the tree's own record.

A transfer's descriptor was shared by a node and an IO queue, and its indices were moved to the GPU in place. A later
eviction freed host slots with indices of the GPU. The invariant: a copy does not change what the tree holds. A cell's
numbers are bytes of its own, on the CPU. What a copy wants elsewhere is made of a copy of them when it runs.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from prefixloom.cache.cache import Cache
from prefixloom.contract.manifest import LAYOUTS
from prefixloom.contract.values import Transfer, TransferPlan
from prefixloom.device.host_pool import HostPool
from prefixloom.tiers.host_copies import HostCopies
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


def test_plan_of_a_transfer_cannot_be_changed() -> None:
    transfer = Transfer("kv", 0, 8, "device", "host")
    plan = TransferPlan("backup", "", 8, (transfer,))
    for thing, name in ((plan, "transfers"), (plan, "boundary"), (transfer, "start"), (transfer, "end")):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(thing, name, ())
    assert copy.deepcopy(plan) == plan and hash(plan) == hash(copy.deepcopy(plan))
