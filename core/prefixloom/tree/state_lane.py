"""The lane of boundary components: one slot of state at a node's end, attached by copy.

A running sequence writes its state in place, so it never reads the tree's slot: a match copies it into a slot of the
sequence's own (a deferred op, the source covered until it has run), and a publication *donates* the sequence's slot to
the tree and goes on with a fresh one. While it runs, a sequence may *track*: copy its state at a boundary into a slot
beside, so that its end can publish the deepest checkpoint that its key names, even if it ran on past it. With a rewind
depth k it has k + 1 further slots, into which each step of at most so many tokens writes the state after every token.

The lane of states that rest in another form (``stored_as``): running ones and cached ones have a pool each.

A running sequence writes its state as the kernels want it; what the tree keeps is coded, and so is what is tracked. So
nothing is donated: a publication *encodes* the running state into a slot of the tree's pool, and a match *decodes*.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contract.queues import ListQueue, Queue
from ..device.pool import NO_SLOT, Pool
from .holdings import StateHolding, SteppedHolding, Track
from .lane import Cell, Lane
from .radix import Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..contract.composition import Part
    from ..device.codecs import Coder

TRACKS = 2
"""Tracked states of a sequence: one that is complete, and one that may be in the making."""


class PointLane(Lane):
    __slots__ = ("admit", "holds", "per_path", "per_sequence", "policy", "track_every", "worth")
    unit = "boundary"
    taken = "copy"
    """The kind of op that gives a sequence a state of the tree."""
    kept = "track"
    """The kind of op that keeps a state beside for the tree."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        manifest = part.manifest
        self.per_path = manifest.states_per_path
        self.track_every = -(-manifest.checkpoint_every // tree_page) * tree_page
        self.per_sequence = 1
        self.holds = SteppedHolding if self.track_every else StateHolding
        self.policy = "" if part.admission is None else part.admission.name
        self.admit = None if part.admission is None else part.admission.admit
        self.worth = None if part.admission is None else part.admission.worth

    def allow_rewind(self, depth: int) -> None:
        """Sequences may take ``depth`` tokens back: each gets ``depth + 1`` slots for the states of single steps."""
        self.per_sequence = depth + 2 if depth else 1
        if depth:
            self.holds = SteppedHolding

    # ------------------------------------------------------------ match
    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        i = self.index
        if boundary == node.end and (node.cells[i] is not None or not boundary):
            return node, boundary
        node = node.parent
        while node.cells[i] is None and node.end:
            node = node.parent
        return node, node.end

    def row(self, node: Node, boundary: int) -> bytes:
        return array("i", [node.cells[self.index].data] if boundary else []).tobytes()

    # ------------------------------------------------------------ leases
    def acquire(self, node: Node) -> Cell | None:
        cell: Cell | None = node.cells[self.index]
        if cell is None:
            return None
        if not cell.locks:
            if cell.next is not None:
                self.queue.remove(cell)
            self.leased += 1
        cell.locks += 1
        return cell

    def release(self, record: Cell, recent: bool = True) -> None:
        record.locks -= 1
        if record.locks:
            return
        self.leased -= 1
        if recent:
            self.queue.add(record)
        else:
            self.queue.add_first(record)

    def pin(self, cell: Cell) -> None:
        self.acquire(cell.node)

    def unpin(self, cell: Cell) -> None:
        self.release(cell)

    def advance(self, record: Cell | None, node: Node) -> None:
        """A state is covered until it has been copied, not while the sequence runs on."""
        if record is not None:
            self.release(record)

    def divide(self, upper: Node, lower: Node) -> None:
        """The state stays at the end, which is the lower half's."""

    # ------------------------------------------------------------ sequences
    def open(self, node: Node) -> StateHolding:
        holding: StateHolding = self.holds(node.end)
        return holding

    def begin(self, node: Node) -> tuple[Cell | None, StateHolding]:
        """In one move, with the slots if they are at hand: else somebody has to make room first."""
        cell: Cell | None = node.cells[self.index]
        if cell is not None:
            if not cell.locks:
                self.leased += 1
                if cell.next is not None:
                    self.queue.remove(cell)
            cell.locks += 1
        holding = self.holds(node.end)
        if self.per_sequence <= self.live.at_hand:
            self.start(holding)
        return cell, holding

    def start(self, holding: StateHolding) -> None:
        """Its slots; the caller has made sure that they are free."""
        if self.per_sequence == 1:
            holding.slot = self.live.take_one()
        else:
            slots = self.live.take(self.per_sequence)
            holding.slot = slots[0]
            holding.steps = tuple(slots[1:])  # type: ignore[misc]

    def stepped(self, holding: SteppedHolding, upto: int) -> None:
        """A step brings the running state from where it stands to ``upto``: which states of single tokens there are."""
        before = holding.as_of
        known = holding.slot != NO_SLOT and holding.arrived <= before < upto <= before + len(holding.steps)
        holding.steps_from = before if known else -1

    def due(self, holding: StateHolding, start: int, end: int) -> tuple[int, int] | None:
        """The checkpoint to be kept of a step over [start, end): (boundary, slot that has its state then)."""
        every = self.track_every
        at = end // every * every
        if at <= start:
            return None
        if at == end:
            return at, holding.slot
        assert isinstance(holding, SteppedHolding)
        single = end - start <= len(holding.steps) and start >= holding.arrived
        return (at, holding.steps[at - start - 1]) if single else None

    def complete(self, holding: StateHolding) -> bool:
        """Whether there is a running slot that holds the state of ``as_of``, and no device chooses it."""
        return holding.ready and not holding.accepted and holding.slot != NO_SLOT

    def replaceable(self, holding: StateHolding) -> Track | None:
        """The oldest of enough tracks, whose slot a new one may have; None if a new slot is needed."""
        if len(holding.tracks) < TRACKS:
            return None
        return next((track for track in holding.tracks if track.complete), None)

    def plan_track(self, holding: StateHolding, at: int, old: Track | None) -> Track:
        """A track of boundary ``at``, in the slot of ``old`` or in one that the caller has made sure is free."""
        if old is None:
            track = Track(self.pool.take(1)[0], at, -1)
        else:
            holding.tracks.remove(old)
            track = Track(old.slot, at, old.as_of)
        holding.tracks.append(track)
        return track

    def drop_track(self, holding: StateHolding, track: Track) -> None:
        """It is not wanted any more; or it did not come to be, and its slot has what it had before."""
        holding.tracks.remove(track)
        if track.complete or track.before < 0:
            self.pool.give_slots([track.slot])
        else:
            track.as_of, track.complete = track.before, True
            holding.tracks.insert(0, track)

    def checkpoint(self, holding: StateHolding, upto: int) -> int:
        """The deepest boundary up to ``upto`` that a complete state stands for; -1 if there is none."""
        best = holding.as_of if self.complete(holding) and holding.as_of <= upto else -1
        for track in holding.tracks:
            if track.complete and best < track.as_of <= upto:
                best = track.as_of
        return best

    def adopt(self, run: list[Node], holding: StateHolding) -> None:
        """A publication ends where the running state stands; what was tracked may lie before."""
        if holding.tracks:
            for node in run:
                self.adopt_track(node, holding)
        node = run[-1]
        i = self.index
        if node.cells[i] is None and holding.as_of == node.end and self.complete(holding):
            cell = Cell(node, holding.slot)
            node.cells[i] = cell
            self.in_tree += 1
            holding.slot = NO_SLOT
            holding.ready = False
            self.queue.add(cell)

    def carry(self, run: list[Node], holding: StateHolding, record: Cell | None) -> Cell | None:
        """Mostly the running state is all that it has; the lease covers it until it has been copied."""
        node = run[-1]
        i = self.index
        if (
            holding.tracks
            or node.cells[i] is not None
            or holding.as_of != node.end
            or not self.complete(holding)
            or self.queue.__class__ is not ListQueue  # one that may count uses
        ):
            moved: Cell | None = super().carry(run, holding, record)
            return moved
        if record is not None:
            self.release(record)
        cell = Cell(node, holding.slot, 1)
        node.cells[i] = cell
        self.in_tree += 1
        self.leased += 1
        holding.slot = NO_SLOT
        holding.ready = False
        return cell

    def adopt_track(self, node: Node, holding: StateHolding) -> None:
        if node.cells[self.index] is None:
            for track in holding.tracks:
                if track.complete and track.as_of == node.end:
                    holding.tracks.remove(track)
                    self.keep(node, track.slot)
                    return

    def keep(self, node: Node, slot: int) -> None:
        """The tree takes over a state that stands beside a running one."""
        cell = node.cells[self.index] = Cell(node, slot)
        self.in_tree += 1
        self.queue.add(cell)

    def conclude(self, run: list[Node], holding: StateHolding, record: Cell | None) -> None:
        node = run[-1]
        i = self.index
        if (
            holding.tracks
            or holding.steps
            or record is not None
            or node.cells[i] is not None
            or holding.as_of != node.end
            or not self.complete(holding)
        ):
            super().conclude(run, holding, record)
            return
        cell = Cell(node, holding.slot)  # the running state is all that it has
        node.cells[i] = cell
        self.in_tree += 1
        self.queue.add(cell)
        holding.slot = NO_SLOT

    def donates(self, holding: StateHolding, boundary: int) -> bool:
        """Whether publishing ``boundary`` takes the running state, so that the sequence needs a fresh slot."""
        return (
            self.complete(holding)
            and holding.as_of == boundary
            and not (holding.tracks and any(track.complete and track.as_of == boundary for track in holding.tracks))
        )

    def renew(self, holding: StateHolding) -> None:
        holding.slot = self.live.take_one()

    def above(self, node: Node | None) -> list[Cell]:
        """The states on the path from ``node`` upward, the nearest first."""
        found: list[Cell] = []
        while node is not None and node.parent is not None:
            cell = node.cells[self.index]
            if cell is not None:
                found.append(cell)
            node = node.parent
        return found

    def floor(self, holding: StateHolding, floor: int) -> int:
        """The lowest boundary that a tracked state may still be published at, or ``floor``."""
        for track in holding.tracks:
            if track.as_of < floor:
                floor = track.as_of
        return floor

    def forget_tracks(self, holding: StateHolding, low: int, high: int) -> None:
        """Give back tracked states outside of (``low``, ``high``]."""
        for track in [track for track in holding.tracks if track.complete and not low < track.as_of <= high]:
            self.drop_track(holding, track)

    def retain(self, holding: StateHolding, floor: int) -> None:
        pass

    def owned(self, holding: StateHolding) -> int:
        return len(holding.slots())

    def close(self, holding: StateHolding) -> None:
        if holding.slot != NO_SLOT:
            self.live.give_slots([holding.slot])
        holding.slot = NO_SLOT
        holding.ready = False
        if isinstance(holding, SteppedHolding):
            self.live.give_slots(list(holding.steps))
            self.pool.give_slots([track.slot for track in holding.tracks])
            holding.tracks = []
            holding.steps = ()

    def can_rewind(self, holding: StateHolding, length: int) -> bool:
        """Whether the state at ``length`` is at hand: the running one, or that of a single token of the last step."""
        return length >= holding.as_of or -1 < holding.steps_from < length

    def rewind_state(self, holding: StateHolding, length: int) -> int:
        """Take the state back to ``length``; the slot that must be copied into the running one, or NO_SLOT."""
        self.forget_tracks(holding, -1, length)
        if isinstance(holding, SteppedHolding):
            holding.arrived = min(holding.arrived, length)
            if holding.accepted:  # the device took it back already
                holding.accepted = False
                holding.as_of = min(length, holding.as_of)
                return NO_SLOT
        if length >= holding.as_of:
            return NO_SLOT
        source = holding.steps[length - holding.steps_from - 1]
        holding.as_of = length
        holding.ready = False
        return source

    # ------------------------------------------------------------ ops
    def work(self, kind: str, src: list[int], dst: list[int]) -> Callable[[], object]:
        """What an op of this kind does with content."""
        if kind == "clear":
            return partial(self.live.clear, dst)
        return partial(self.live.copy, src, dst)

    def ends(self, kind: str) -> tuple[Pool, Pool]:
        """The pools that an op of this kind reads from and writes into."""
        return self.pool, self.pool

    # ------------------------------------------------------------ eviction
    def slots_of(self, cell: Cell | None) -> list[int]:
        return [] if cell is None else [cell.data]

    def touches(self, holding: StateHolding, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        if end > start:
            writes.append(holding.slot)
            if end - start <= len(holding.steps):
                writes.extend(holding.steps)

    def own_slots(self, holding: StateHolding) -> list[int]:
        return holding.slots()

    def detach(self, cell: Cell, node: Node, gone: list[int]) -> None:
        node.cells[self.index] = None
        gone.append(cell.data)
        self.queue.forget(cell)

    def give_all(self, gone: list[int]) -> int:
        pages = len(gone)
        self.pool.give_slots(gone)
        self.in_tree -= pages
        return pages


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
