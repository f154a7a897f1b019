"""A queue of somebody else's that raises while cells leave or come: nothing is lost, and what went is counted."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Claim, Component, Path, Point, Reach, Window, hookimpl
from prefixloom.contract.policy import EvictionPolicy
from prefixloom.contract.queues import ListQueue
from tests.support.helpers import cache_of, finish, nodes, owners, part, run, serve, serve_tightly, settle

COMPOSITIONS: dict[str, dict[str, Reach]] = {
    "path": {"path": Path()},
    "paths": {"path": Path(), "other": Path(), "state": Point()},
    "window": {"window": Window(10), "state": Point()},
    "hybrid": {"path": Path(), "window": Window(10), "state": Point()},
}


class Told(BaseException):
    """An interrupt: anything else that a queue raises is not passed on (``test_watched_queues``)."""


def raising(what: str, calls: int) -> tuple[EvictionPolicy, dict[str, int]]:
    """A policy whose queues raise at the call of that number of ``what``, once it is armed."""
    left = {"calls": 0, "raise": calls}

    class Raising(ListQueue):
        def asked(self, name: str) -> None:
            if left["calls"] and name == what:
                left["calls"] -= 1
                if not left["calls"]:
                    raise Told

        def pop(self) -> Any:
            self.asked("pop")
            return super().pop()

        def forget(self, cell: Any) -> None:
            self.asked("forget")
            super().forget(cell)

        def add(self, cell: Any) -> None:
            self.asked("add")
            super().add(cell)

        def remove(self, cell: Any) -> None:
            self.asked("remove")
            super().remove(cell)

        def touch(self, cell: Any) -> None:
            self.asked("touch")
            super().touch(cell)

    return EvictionPolicy("raising", make=Raising), left


class Asked(Component):
    """All victims are seen before any of them goes."""

    @hookimpl
    def evict_component(self, node: Any, tier: Any) -> Claim:
        return Claim(keep=())


CASES = [(kinds, lane) for kinds, reaches in COMPOSITIONS.items() for lane in reaches if lane != "other"]


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
@pytest.mark.parametrize("what", ["pop", "forget"])
@pytest.mark.parametrize("kind", [Component, Asked])
@pytest.mark.parametrize(("kinds", "lane"), CASES)
def test_a_queue_that_raises_while_cells_leave_loses_nothing(
    kinds: str, lane: str, kind: type[Component], what: str, calls: int
) -> None:
    reaches = COMPOSITIONS[kinds]
    policy, left = raising(what, calls)
    parts = [part(name, reach, kind=kind) for name, reach in reaches.items()]
    cache = cache_of(*parts, policy=policy, slots=16, debug=False)
    for number in range(4):
        with cache.open([1, 2, 3, 4] + [number] * 20) as sequence:
            for end in (8, 16, 24):
                run(sequence, end - sequence.reserved)
                sequence.publish()
    free = {name: cache.pool(name).free for name in reaches}
    left["calls"] = left["raise"]
    with pytest.raises(Told):
        cache.evict({lane: 256})
    left["calls"] = 0
    owners(cache, [])
    for name, figures in cache.stats().components.items():
        assert figures.running == 0, f"{name}: in the books and not in the tree"
        assert figures.evicted == figures.free - free[name], f"{name}: what went by then has gone"
    cache.evict(dict.fromkeys(reaches, 256))
    assert [figures.cached for figures in cache.stats().components.values()] == [0] * len(reaches), "all may still go"


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("what", ["add", "remove", "touch"])
@pytest.mark.parametrize("other", [Path(), Point()], ids=str)
def test_a_queue_that_raises_while_cells_come_loses_nothing(other: Reach, what: str, calls: int) -> None:
    """A window that the tree has lost above one that it has, and a new one below."""
    policy, left = raising(what, calls)
    parts = part("window", Window(5)), part("other", other)
    cache = cache_of(*parts, policy=policy, slots=16, debug=False)
    sequence = cache.open(range(24))
    run(sequence, 24)
    for length in (8, 16, 17):
        with cache.open(range(length)) as short:
            finish(short)
    cache.evict({"window": 3})
    left["calls"] = left["raise"]
    try:
        sequence.publish()
    except Told:
        assert not sequence.open
    left["calls"] = 0
    sequence.close()
    owners(cache, [])
    settle(cache)
    cache.evict({"window": 256, "other": 256})
    assert not any(figures.cached for figures in cache.stats().components.values()), "all may still go"


class Remembering(ListQueue):
    """One that keeps something of every cell that it has been told of, until it is told that the cell is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[Any] = set()

    def add(self, cell: Any) -> None:
        self.known.add(cell)
        super().add(cell)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        self.known.add(upper)
        super().inherit(upper, lower, linked)

    def forget(self, cell: Any) -> None:
        self.known.discard(cell)
        super().forget(cell)


def test_a_queue_is_told_of_what_goes_because_its_last_lease_does() -> None:
    """The upper half of a split, of which no page is left, stays for as long as the lease covers it."""
    policy = EvictionPolicy("remembering", make=Remembering)
    cache = cache_of(part("path", Path()), part("window", Window(5)), policy=policy)
    lane: Any = cache.core.shape.lane("window")
    serve(cache, range(24))
    lease = cache.lease(cache.match([*range(24), 99]))
    cache.evict({"window": 4})  # what is older than the window
    serve_tightly(cache, [*range(8), *range(50, 70)])
    upper = lease.node.parent
    assert upper.end == 8 and upper.cells[lane.index].locks and not upper.cells[lane.index].pages
    lease.release()
    assert upper.cells[lane.index] is None
    there = {node.cells[lane.index] for node in nodes(cache)} - {None}
    assert {guest.cell for guest in lane.queue._queue.known} == there, "and of nothing else it keeps anything"
    settle(cache)


def test_a_queue_that_keeps_a_history_is_told_of_what_a_running_sequence_publishes() -> None:
    """It counts as used there, although the sequence's lease covers it at once."""
    policy = EvictionPolicy("remembering", make=Remembering)
    cache = cache_of(part("path", Path()), part("window", Window(5)), policy=policy, debug=False)
    lane: Any = cache.core.shape.lane("window")
    with cache.open(range(33)) as sequence:
        for end in (8, 16, 24):
            run(sequence, end - sequence.reserved)
            sequence.publish()
            assert sequence.running.node.cells[lane.index] in lane.queue._guests
    settle(cache)
