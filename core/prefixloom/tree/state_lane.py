"""The lane of boundary components: one slot of state at a node's end, attached by copy.

A running sequence writes its state in place, so it never reads the tree's slot: a match copies it into a slot of the
sequence's own (a deferred op, the source covered until it has run), and a publication *donates* the sequence's slot to
the tree and goes on with a fresh one. While it runs, a sequence may *track*: copy its state at a boundary into a slot
beside, so that its end can publish the deepest checkpoint that its key names, even if it ran on past it. With a rewind
depth k it has k + 1 further slots, into which each step of at most so many tokens writes the state after every token.

States that rest in another form (``stored_as``) have a pool apart: a running sequence writes its state as the kernels
want it; what the tree keeps is coded, and so is what is tracked. So nothing is donated there: a publication *encodes*
the running state into a slot of the tree's pool, and a match *decodes*.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.values import Receipt
from ..device.codecs import Coder
from ..device.pool import NO_SLOT, Pool
from .holdings import StateHolding
from .passing import PassingCell, PassingLane, Resumes
from .radix import Node, path_up


class StateCell(PassingCell):
    """A state at the end of a node."""

    __slots__ = ()

    @property
    def slot(self) -> int:
        return array("i", self.data)[0]


class StateLane(PassingLane[StateCell, StateCell, StateHolding]):
    """A cover is the cell of the state that is still to be copied."""

    __slots__ = ("admit", "per_sequence", "policy", "track_every")
    kind = StateCell
    unit = "boundary"
    taken = "copy"
    """The kind of op that gives a sequence a state of the tree."""
    kept = "track"
    """The kind of op that keeps a state beside for the tree."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int, max_rewind: int) -> None:
        """Give each sequence ``max_rewind + 1`` more slots, for states of single tokens, if it may rewind."""
        super().__init__(index, part, pool, queue, tree_page)
        manifest = part.manifest
        self.track_every = -(-manifest.checkpoint_every // tree_page) * tree_page
        self.per_sequence = max_rewind + 2 if max_rewind else 1
        self.policy = "" if part.admission is None else part.admission.name
        self.admit = None if part.admission is None else part.admission.admit

    # ------------------------------------------------------------ covering
    def row(self, node: Node, boundary: int) -> bytes:
        cell: StateCell = node.cells[self.index]
        return cell.data if boundary else b""

    def above(self, node: Node) -> list[StateCell]:
        """Return the states on the path from ``node`` upward, the nearest first."""
        return [cell for each in path_up(node) if (cell := each.cells[self.index]) is not None]

    def acquire(self, node: Node, receipt: Receipt | None = None) -> StateCell | None:
        cell: StateCell | None = node.cells[self.index]
        if cell is not None:
            self.pin(cell)
            cell.take_back()
        return cell

    def release(self, cover: StateCell, recent: bool = True) -> None:
        self.unpin(cover, recent)

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node, cover: StateCell | None) -> StateHolding:
        return StateHolding(node.end)

    def start(self, holding: StateHolding) -> None:
        """Give a new sequence its slots; the caller has made sure that they are free."""
        if self.per_sequence == 1:
            holding.slot = self.live.take_one()
        else:
            holding.slot, *steps = self.live.take(self.per_sequence)
            holding.steps = tuple(steps)

    def donates(self, holding: StateHolding, node: Node) -> bool:
        """Return whether a publication takes the running state at the end of ``node``: then a fresh slot is needed."""
        return (
            holding.complete
            and holding.as_of == node.end
            and node.cells[self.index] is None
            and not any(track.as_of == node.end for track in holding.tracks)
        )

    def adopt(self, run: list[Node], holding: StateHolding) -> None:
        """Hand over the running state at the end of ``run``, or count the tree's as used; and tracks at any node."""
        if holding.tracks:
            self._adopt_tracks(run, holding)
        node = run[-1]
        if holding.as_of != node.end or not holding.complete:
            return
        cell = node.cells[self.index]
        if cell is None:
            slot = holding.slot
            holding.slot = NO_SLOT
            holding.ready = False
            self.keep(node, slot)
        else:
            self._use(cell)

    def _adopt_tracks(self, run: list[Node], holding: StateHolding) -> None:
        asks = self.admit is not None or self.hooks.commit_insert is not None
        for node in run[-1:] if asks else run:  # whether the tree takes a state was asked of the last alone
            if node.cells[self.index] is None:
                track = next((track for track in holding.tracks if track.as_of == node.end), None)
                if track is not None:
                    holding.tracks.remove(track)
                    self.keep(node, track.slot)

    def keep(self, node: Node, slot: int) -> None:
        """Make a cell of a state. It is in no queue yet: call ``follow``, ``finish`` or ``line_up`` next."""
        self.place(node, array("i", [slot]).tobytes(), 1)

    def resumable(self, node: Node, boundary: int) -> int:
        """Return the deepest boundary up to ``boundary``, which lies in the edge of ``node``, that has a state."""
        return self.residency.deepest(node, boundary)[1]

    def pass_above(self, run: list[Node], boundary: int, resumes: Resumes) -> None:
        for node in run:
            if node.cells[self.index] is not None:
                self._judge(node, boundary if node is run[-1] else node.end, 0, resumes)

    def follow(
        self, run: list[Node], holding: StateHolding, cover: StateCell | None, receipt: Receipt | None = None
    ) -> StateCell | None:
        """Cover a state that was donated until it has been copied: the sequence goes on with the copy.

        If nothing was donated, keep ``cover``, whose state has yet to be copied.
        """
        new = self.acquire(run[-1]) if holding.slot == NO_SLOT else cover
        self.line_up(run)
        return new

    def finish(self, run: list[Node], cover: StateCell | None) -> None:
        super().finish(run, cover)
        self.line_up(run)

    def rewind_state(self, holding: StateHolding, length: int) -> int:
        """Take the state back to ``length``. Return the slot that must be copied into the running one, or NO_SLOT."""
        self.forget_tracks(holding, -1, length)
        return holding.rewind(length)

    def close(self, holding: StateHolding) -> None:
        if holding.slot != NO_SLOT:
            self.live.give_slots([holding.slot, *holding.steps])
        elif holding.steps:
            self.live.give_slots([*holding.steps])
        if holding.tracks:
            self.pool.give_slots([track.slot for track in holding.tracks])
            holding.tracks = []
        holding.slot = NO_SLOT
        holding.steps = ()
        holding.ready = False

    def forget_tracks(self, holding: StateHolding, low: int, high: int) -> None:
        """Give back tracked states outside of (``low``, ``high``]."""
        for track in [track for track in holding.tracks if not low < track.as_of <= high]:
            holding.tracks.remove(track)
            self.pool.give_slots([track.slot])

    # ------------------------------------------------------------ ops
    def work(self, kind: str, src: list[int], dst: list[int]) -> Callable[[], object]:
        """Return the call that changes content as an op of this kind does."""
        if kind == "clear":
            return partial(self.live.clear, dst)
        return partial(self.live.copy, src, dst)

    def ends(self, kind: str) -> tuple[Pool, Pool]:
        """Return the pool that an op of this kind reads from, and the pool that it writes into."""
        return self.pool, self.pool

    # ------------------------------------------------------------ who owns what
    def owned(self, holding: StateHolding) -> int:
        return len(holding.slots())

    def own_slots(self, holding: StateHolding) -> list[int]:
        return holding.slots()

    def slot_at(self, holding: StateHolding, place: int, own: bool) -> int:
        slots = (holding.slot, *holding.steps)
        return slots[place] if place < len(slots) else NO_SLOT

    def touches(self, holding: StateHolding, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        if end > start and holding.slot != NO_SLOT:
            writes.append(holding.slot)
            if end - start <= len(holding.steps):
                writes.extend(holding.steps)


class RunningSlots:
    """The slots of running states as ``make_room`` asks for them: none of them can be evicted."""

    __slots__ = ("name", "pool")

    in_tree = leased = evictable = 0
    surplus = False

    def __init__(self, pool: Pool) -> None:
        self.name = pool.name
        self.pool = pool

    @property
    def running(self) -> int:
        return self.pool.capacity - self.pool.free


class CodedLane(StateLane):
    """A running state is not handed over: the publication encodes it into a track before, which is."""

    __slots__ = ("_room", "coder")
    taken = "decode"
    kept = "encode"

    def __init__(
        self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int, max_rewind: int, live: Pool,
        coder: Coder,
    ) -> None:  # fmt: skip
        super().__init__(index, part, pool, queue, tree_page, max_rewind)
        self.live = live
        self.coder = coder
        self._room = RunningSlots(live)

    @property
    def room(self) -> RunningSlots:
        return self._room

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (self.pool, self.live)

    @property
    def running(self) -> int:
        return super().running + self._room.running

    def adopt(self, run: list[Node], holding: StateHolding) -> None:
        self._adopt_tracks(run, holding)

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
