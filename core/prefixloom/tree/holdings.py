"""Holdings of page components: what a running sequence has of one, as a table of slots that begins where its data does.

Nothing here knows a reach, a pool or a tree.

What a running sequence has of a boundary component: its state, and states beside it. Nothing here knows a tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, NO_SLOT


class Holding:
    """A running sequence's pages of one component.

    ``table`` begins at page ``base``; nothing before that is present. ``table[p - base]`` is the slot of page p or
    *absent*. Pages from ``owned`` on, which is never below ``base``, are the sequence's own; those before belong to the
    tree and are read under the sequence's lease. Pages before ``changed`` are as they were when a kernel's table was
    last written.
    """

    __slots__ = ("base", "changed", "owned", "table")

    def __init__(self, data: bytes, base: int, end: int) -> None:
        """It reads ``data``, the slots of the pages [``base``, ``end``), and owns nothing yet."""
        self.changed = 0
        self.base = base
        self.table: array[int] = array("i", data)
        self.owned = end

    def change(self, page: int) -> None:
        """What is told of pages from ``page`` on changes."""
        if page < self.changed:
            self.changed = page

    def own_pages(self) -> bytes:
        """The pages that the sequence owns, *absent* left out."""
        data = self.table[self.owned - self.base :].tobytes()
        return data if ABSENT_BYTES not in data else without_absent(data)

    def row(self) -> list[int]:
        """The slot of each page from 0 on, or *absent*."""
        return [ABSENT] * self.base + self.table.tolist()


class RetainedHolding(Holding):
    """Of which a part may be given back early: the sequence may still publish or rewind to boundaries from ``floor``
    on, rounded down to one, and what none of them needs may go. ``whole``: none of its own pages is *absent*. (To look
    through a thousand of them takes two microseconds.)
    """

    __slots__ = ("floor", "whole")

    def __init__(self, data: bytes, base: int, end: int) -> None:
        super().__init__(data, base, end)
        self.floor = 0
        self.whole = True


def without_absent(data: bytes) -> bytes:
    return array("i", [slot for slot in array("i", data) if slot != ABSENT]).tobytes()


def strip(data: bytes) -> bytes:
    """``data`` without the absent pages in front."""
    if not data.startswith(ABSENT_BYTES):
        return data
    gone = len(data) - len(data.lstrip(b"\xff"))  # it may take up to three bytes of the first page number too many
    return data[gone // ID_BYTES * ID_BYTES :]


class Track:
    """A state kept at ``as_of``, not yet published; ``complete`` once the copy that makes it has been enqueued.

    Until then the slot still has the state of ``before``, if it was kept for that (-1: it was not).
    """

    __slots__ = ("as_of", "before", "complete", "slot")

    def __init__(self, slot: int, as_of: int, before: int) -> None:
        self.slot = slot
        self.as_of = as_of
        self.before = before
        self.complete = False


class StateHolding:
    """``slot`` is the running state's, ``as_of`` the boundary that its content stands for.

    ``ready`` says whether it does, to who publishes: until the op that fills the slot has run, the content is not the
    sequence's, and while steps are open, their layers write it. It is False for good after a step that failed, whose
    layers may have written half a state.
    What a sequence has besides where it tracks or rewinds is said below; elsewhere there is nothing of that.
    """

    __slots__ = ("as_of", "ready", "slot")
    accepted: bool = False
    tracks: Any = ()
    steps: tuple[int, ...] = ()
    steps_from: int = -1

    def __init__(self, as_of: int) -> None:
        self.slot = NO_SLOT
        self.as_of = as_of
        self.ready = False

    def slots(self) -> list[int]:
        """All slots that the sequence owns."""
        running = [] if self.slot == NO_SLOT else [self.slot]
        return [*running, *(track.slot for track in self.tracks), *self.steps]


class SteppedHolding(StateHolding):
    """With states beside the running one: ``tracks``, and ``steps``.

    ``steps[i]`` is the state after i + 1 tokens of the last small step, which began at ``steps_from`` (-1: none).
    ``accepted``: the device has put the state after the kept tokens of that step into ``slot``, and how many these are
    is not known here yet. Of what arrived, which ends at ``arrived``, there is no state but that of its end.
    """

    __slots__ = ("accepted", "arrived", "steps", "steps_from", "tracks")

    def __init__(self, as_of: int) -> None:
        super().__init__(as_of)
        self.accepted = False
        self.arrived = 0
        self.tracks: list[Track] = []
        self.steps = ()
        self.steps_from = -1


def go_on(states: Iterable[tuple[Any, StateHolding]]) -> None:
    """More was computed of a sequence: what a device chose in an earlier step of it is past."""
    for _, holding in states:
        if isinstance(holding, SteppedHolding):
            holding.accepted = False
