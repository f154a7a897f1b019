"""The lane of states that rest in another form (``stored_as``): running ones and cached ones have a pool each.

A running sequence writes its state as the kernels want it; what the tree keeps is coded, and so is what is tracked. So
nothing is donated: a publication *encodes* the running state into a slot of the tree's pool, and a match *decodes*.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .errors import CapacityError
from .evict import make_room
from .lane_point import PointLane
from .ops import run_apart
from .pool import NO_SLOT, Pool
from .queues import Queue
from .stages import Stage
from .states import StateHolding
from .tree import Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cache import Cache
    from .codecs import Coder
    from .compose import Part
    from .sequence import Sequence


class Room:
    """The slots of running states as ``make_room`` asks for them: none of them can be evicted."""

    __slots__ = ("name", "pool")

    in_tree = leased = evictable = 0
    sparing = False

    def __init__(self, pool: Pool) -> None:
        self.name = pool.name
        self.pool = pool

    @property
    def running(self) -> int:
        return self.pool.capacity - self.pool.free


class CodedLane(PointLane):
    """What is encoded is not adopted: ``encode_states`` sees to it once the publication's lease has moved."""

    __slots__ = ("_room", "coder")
    taken = "decode"
    kept = "encode"

    def __init__(
        self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int, live: Pool, coder: Coder
    ) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.live = live
        self.coder = coder
        self._room = Room(live)

    @property
    def room(self) -> Room:  # type: ignore[override]
        return self._room

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (self.pool, self.live)

    @property
    def running(self) -> int:
        return super().running + self._room.running

    def adopt(self, run: list[Node], holding: StateHolding) -> None:
        for node in run:
            self.adopt_track(node, holding)

    def carry(self, run: list[Node], holding: StateHolding, record: Any) -> None:
        self.adopt(run, holding)
        self.advance(record, run[-1])

    def to_encode(self, node: Node, holding: StateHolding) -> bool:
        """Whether the running state stands for the end of ``node``, and that has none."""
        return node.cells[self.index] is None and holding.as_of == node.end and self.complete(holding)

    def donates(self, holding: StateHolding, boundary: int) -> bool:
        return False

    def own_slots(self, holding: StateHolding) -> list[int]:
        return [track.slot for track in holding.tracks]

    def live_slots(self, holding: StateHolding) -> list[int]:
        return [slot for slot in (holding.slot, *holding.steps) if slot != NO_SLOT]

    def work(self, kind: str, src: list[int], dst: list[int]) -> Callable[[], object]:
        live, rest, coder = self.live, self.pool, self.coder
        if live.device == "meta":
            return lambda: None
        if kind == "encode":
            return lambda: coder.encode(live.buffers, src, rest.buffers, dst)
        if kind == "decode":
            return lambda: coder.decode(rest.buffers, src, live.buffers, dst)
        return super().work(kind, src, dst)

    def ends(self, kind: str) -> tuple[Pool, Pool]:
        if kind == "encode":
            return self.live, self.pool
        return (self.pool, self.live) if kind == "decode" else (self.live, self.live)


def encode_states(
    cache: Cache, sequence: Sequence, node: Node, pairs: Iterable[tuple[Any, Any]]
) -> list[tuple[CodedLane, set[int]]]:
    """Encode the running states that a publication down to ``node`` hands over, behind the sequence's last step.

    The slots that the tree took, where the stream has yet to write them. A checkpoint without room is left out, and so
    is one in a slot that a step may still write that is open: nothing can come after that yet.
    """
    lease, flight = sequence._lease, cache._flight
    flying = []
    for lane, holding in pairs:
        if not isinstance(lane, CodedLane) or not lane.to_encode(node, holding):
            continue
        try:
            make_room(cache, [(lane, 1, None)], "checkpoint")
        except CapacityError:
            cache._skipped_checkpoints += 1
            continue
        slot = lane.pool.take_one()
        lease.claim(flight)
        if any(work.event is None for work in flight.unfinished(lease.fence)):
            lane.pool.give_slots([slot])
            cache._skipped_checkpoints += 1
            continue
        try:
            over = run_apart(cache, sequence, lane, "encode", [holding.slot], [slot])
        except BaseException:
            lane.pool.give_slots([slot])
            raise
        lane.pool.enter((slot,), Stage.SEALED)
        lane.keep(node, slot)
        if not over:
            flying.append((lane, {slot}))
    return flying
