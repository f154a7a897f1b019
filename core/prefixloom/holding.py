"""Holdings of page components: what a running sequence has of one, as a table of slots that begins where its data does.

Nothing here knows a reach, a pool or a tree.
"""

from __future__ import annotations

from array import array

from .pool import ABSENT, ABSENT_BYTES, ID_BYTES


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
