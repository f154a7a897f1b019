"""A queue that remembers cells is told when they have gone."""

from __future__ import annotations

from typing import Any

from prefixloom import Path, Window
from prefixloom.contract.policy import EvictionPolicy
from prefixloom.contract.queues import ListQueue
from tests.support.helpers import cache_of, nodes, part, run, serve, serve_tightly, settle


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
