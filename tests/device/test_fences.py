"""The fences of several pools of one flight: retired slots are held against a list of who may still touch them."""

from __future__ import annotations

import random
from array import array

import pytest

from prefixloom import Buffer, Manifest, Path, TierManifest
from prefixloom.device.flight import Flight
from prefixloom.device.pool import Pool
from prefixloom.device.streams import InlineStream
from prefixloom.operations.lease import swap
from prefixloom.testing.inside.backdoor import tier, tier_lane
from prefixloom.testing.schedules.simulated import Simulation
from prefixloom_hicache import HostTier
from tests.support.helpers import cache_of, part, serve

KV = Manifest([Buffer("kv", (1,), "int8")])


class Owner:
    """Who follows a step."""

    label = "owner"
    fence = 0
    work = None


@pytest.mark.parametrize("seed", range(40))
def test_slots_are_taken_behind_the_newest_step_that_may_touch_them(seed: int) -> None:
    """Steps end in any order. What is given back meanwhile waits, and who takes it early learns for which step."""
    rng = random.Random(seed)
    pools = [Pool(name, KV, "page", 6, 1, "meta", allocate=False) for name in "abc"]
    flight: Flight[Owner] = Flight(pools)
    simulation = Simulation("x", "y")
    owned: list[tuple[Pool, int]] = []
    touched: dict[tuple[str, int], int] = {}
    owner = Owner()
    for _ in range(60):
        what = rng.randrange(6)
        if what == 5:  # work that is over at once; what it gave back while it was open waited for it alone
            work = flight.begin()
            if owned and rng.random() < 0.5:
                pool, slot = owned.pop()
                touched[pool.name, slot] = work.number
                pool.give(array("i", [slot]).tobytes())
            flight.end(work, InlineStream("calling"), [], "work of the calling thread")
        elif what == 0:
            work, stream = flight.begin(), simulation[rng.choice("xy")]
            work.since = stream.tick
            stream.run(lambda: None)
            flight.end(work, stream, [owner], "a step")
            assert owner.fence == flight.launched
        elif what == 1 and owned:
            pool, slot = owned.pop(rng.randrange(len(owned)))
            touched[pool.name, slot] = flight.launched if flight.works else 0
            pool.give(array("i", [slot]).tobytes())
        elif what == 2:
            for stream in rng.sample([simulation["x"], simulation["y"]], 1):
                if stream.ready:
                    stream.advance()
            flight.poll()
        else:  # one operation takes of several pools
            flight.taken_early = 0
            newest = 0
            for pool in rng.sample(pools, rng.randrange(1, 4)):
                count = rng.randrange(3)
                if count <= pool.free:
                    taken = pool.take(count).tolist() if count else []
                    owned += [(pool, slot) for slot in taken]
                    newest = max([newest, *(touched.get((pool.name, slot), 0) for slot in taken)])
            running = newest if newest > flight.over else 0
            assert flight.taken_early == running, "the new owner comes after all of them"
        for pool in pools:
            assert pool.free + sum(other is pool for other, _ in owned) == pool.capacity
            assert flight.works or not pool.retiring, "nothing runs, and slots wait"
    simulation.drain()
    flight.poll()
    assert [pool.retiring for pool in pools] == [0, 0, 0]


def test_an_owner_that_waits_for_a_later_step_goes_on_waiting() -> None:
    flight: Flight[Owner] = Flight([Pool("a", KV, "page", 2, 1, "meta", allocate=False)])
    simulation = Simulation("x")
    owner = Owner()
    first, second = flight.begin(), flight.begin()
    for work in (second, first):
        work.since = simulation["x"].tick
        flight.end(work, simulation["x"], [owner], "a step")
        assert owner.fence == second.number
    simulation.drain()


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_slots_below_leave_the_fence_of_slots_that_were_taken_before(before: int, count: int) -> None:
    """One operation takes slots of the device, and then of the host for what has to go: it comes after both."""
    host = HostTier(TierManifest(capacity={"path": 8}))
    cache = cache_of(part("path", Path()), host)
    lane, flight, simulation = tier_lane(cache, "path"), cache.core.flight, Simulation("x")
    slots = lane.pool.take(2)
    for slot in slots:
        work = flight.begin()
        work.since = simulation["x"].tick
        simulation["x"].run(lambda: None)
        flight.end(work, simulation["x"], [], "a step")
        lane.pool.give(array("i", [slot]).tobytes())
    flight.taken_early = before
    taken = tier(cache).copies.take(lane, count)
    assert flight.taken_early == max(before, count)
    lane.pool.give(taken.tobytes())
    simulation.drain()
    cache.poll()


@pytest.mark.parametrize("fences", [(0, 0), (5, 3), (3, 5)])
def test_who_takes_over_a_lease_waits_for_both(fences: tuple[int, int]) -> None:
    cache = cache_of(part("path", Path()))
    serve(cache, range(16))
    mine, other = cache.lease(cache.match(range(16))), cache.lease(cache.match(range(8)))
    mine.fence, other.fence = fences
    swap(cache.core, mine, other)
    assert (mine.fence, mine.node.end) == (max(fences), 8)
    mine.release()
