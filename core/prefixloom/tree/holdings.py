"""Holdings: what a running sequence has of one component. Nothing here knows a reach, a pool or a tree.

For a page component, a holding is a table of slots. For a boundary component, it is a running state and further states.
"""

from __future__ import annotations

from array import array

from ..device.pool import ABSENT_BYTES, ID_BYTES, NO_SLOT

TRACKS = 2
"""The most tracked states of a sequence: the deepest may lie past what is named, and so past what can be published."""


# ---------------------------------------------------------------- pages


class PageHolding:
    """A running sequence's pages of one component.

    ``table[p]`` is the slot of page p or *absent*. Pages from ``owned`` on are the sequence's own; those before belong
    to the tree and are read under the sequence's lease. Pages before ``changed`` are as they were when a kernel's table
    was last written.

    Some pages may be given back early. The sequence may still publish or rewind to boundaries from ``floor`` on,
    rounded down to a boundary; what none of these needs may be given back. ``looked``: before so many pages, what no
    later boundary can need was given back already.
    """

    __slots__ = ("changed", "floor", "looked", "owned", "table")

    def __init__(self, data: bytes | array[int], end: int) -> None:
        """Make a holding that reads ``data``, the slots of the pages before ``end``, and owns nothing yet."""
        self.changed = self.floor = 0
        self.table: array[int] = array("i", data)
        self.owned = self.looked = end

    def change(self, page: int) -> None:
        """Mark the kernel's page table stale from ``page`` on."""
        if page < self.changed:
            self.changed = page

    def own_pages(self) -> bytes:
        """Return the slots of the pages that the sequence owns, without *absent* ones."""
        return without_absent(self.table[self.owned :].tobytes())

    def row(self) -> list[int]:
        """Return the slot of each page from 0 on, or *absent*."""
        return self.table.tolist()


def without_absent(data: bytes) -> bytes:
    """Return the page numbers of ``data`` that are present."""
    # The top bit of a page number is clear, so absent ones lie at aligned places only.
    return data.replace(ABSENT_BYTES, b"")


def strip(data: bytes) -> bytes:
    """Return ``data`` without the absent pages in front."""
    if not data.startswith(ABSENT_BYTES):
        return data
    gone = len(data) - len(data.lstrip(b"\xff"))  # it may count up to three bytes of the first present page number
    return data[gone // ID_BYTES * ID_BYTES :]


# ---------------------------------------------------------------- states


class Track:
    """A tracked state: a checkpoint at ``as_of`` that is not published yet, in ``slot``."""

    __slots__ = ("as_of", "slot")

    def __init__(self, as_of: int, slot: int) -> None:
        self.as_of = as_of
        self.slot = slot


class StateHolding:
    """A running state, and the further states of a sequence that tracks checkpoints or rewinds.

    ``slot``        where the running state lies
    ``as_of``       the boundary that its content stands for
    ``ready``       whether its content is valid and may be published: not before the op that fills the slot has run,
                    nor while the layers of open steps write it, nor after a step that failed
    ``tracks``      the tracked states
    ``steps``       ``steps[i]`` is the slot of the state after i + 1 tokens of the last small step
    ``steps_from``  where that step began; -1: there was none
    ``accepted``    the device has put the state after the accepted tokens of that step into ``slot``, and the host does
                    not know yet how many they are
    ``arrived``     the end of data that arrived from elsewhere, which has the state of its end only
    """

    __slots__ = ("accepted", "arrived", "as_of", "ready", "slot", "steps", "steps_from", "tracks")

    def __init__(self, as_of: int) -> None:
        self.slot = NO_SLOT
        self.as_of = as_of
        self.ready = self.accepted = False
        self.arrived = 0
        self.tracks: list[Track] = []
        self.steps: tuple[int, ...] = ()
        self.steps_from = -1

    # ------------------------------------------------------------ the running state
    @property
    def complete(self) -> bool:
        """Whether the running slot holds the state of ``as_of``."""
        return self.ready and not self.accepted and self.slot != NO_SLOT

    def reach(self, upto: int) -> None:
        """Note that the layers bring the running state to ``upto``. After a small step, ``steps`` are valid too."""
        if self.steps:
            before = self.as_of
            known = self.slot != NO_SLOT and self.arrived <= before < upto <= before + len(self.steps)
            self.steps_from = before if known else -1
        self.as_of = upto
        self.ready = True

    def arrive(self, length: int) -> None:
        """Note that data up to ``length`` arrived from elsewhere, with the state of its end only."""
        self.arrived = length

    def lose(self) -> None:
        """Note that no state is valid any more but the tracked ones: layers may have written half a state."""
        self.ready = False
        self.steps_from = -1

    def can_rewind(self, length: int) -> bool:
        """Return whether the running state, or one after a token of the last step, is that at ``length``."""
        return length >= self.as_of or -1 < self.steps_from < length

    def rewind(self, length: int) -> int:
        """Take the state back to ``length``. Return the slot that must be copied into the running one, or NO_SLOT."""
        self.arrived = min(self.arrived, length)
        if self.accepted:  # the device took it back already
            self.accepted = False
            self.as_of = min(length, self.as_of)
        if length >= self.as_of:
            return NO_SLOT
        source = self.steps[length - self.steps_from - 1]
        self.as_of = length
        self.ready = False
        return source

    # ------------------------------------------------------------ checkpoints
    def checkpoint(self, upto: int) -> int:
        """Return the deepest boundary up to ``upto`` that has a complete state; -1 if there is none."""
        best = self.as_of if self.complete and self.as_of <= upto else -1
        for track in self.tracks:
            if best < track.as_of <= upto:
                best = track.as_of
        return best

    def due(self, every: int, start: int, end: int) -> tuple[int, int] | None:
        """Return the checkpoint of a step over [start, end), if any: (boundary, slot with its state after the step)."""
        at = end // every * every
        if at <= start:
            return None
        if at == end:
            return at, self.slot
        single = end - start <= len(self.steps) and start >= self.arrived
        return (at, self.steps[at - start - 1]) if single else None

    def oldest_track(self) -> int:
        """Drop the oldest track if there are as many as may be, and return its slot, or NO_SLOT."""
        return self.tracks.pop(0).slot if len(self.tracks) == TRACKS else NO_SLOT

    def lowest_track(self, floor: int) -> int:
        """Return the lowest boundary of a tracked state, or ``floor`` if that is lower."""
        for track in self.tracks:
            if track.as_of < floor:
                floor = track.as_of
        return floor

    def slots(self) -> list[int]:
        """Return all slots that the sequence owns."""
        running = [] if self.slot == NO_SLOT else [self.slot]
        return [*running, *(track.slot for track in self.tracks), *self.steps]
