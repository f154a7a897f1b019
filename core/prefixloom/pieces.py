"""Pieces: what a store keeps one by one, a page of a component or a state; which of them a boundary needs, in which
order, and whether what a store answers is the piece that it was asked for. It must not know how or when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import attrs

from .addresses import spans_of
from .spares import Spare
from .storage import Key, Miss, Record, Refused

if TYPE_CHECKING:
    from .lane_host import HostLane

READ = 32
"""Pieces of one read."""
SLICE = 64 << 20
"""Bytes that are asked for at a time."""


@attrs.frozen
class Piece:
    """``start`` and ``end`` in tokens; of a state both are its boundary."""

    lane: HostLane
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.lane.pool.record_bytes  # type: ignore[attr-defined, no-any-return]


def total(pieces: Many[Piece]) -> int:
    """Their bytes."""
    return sum(piece.size for piece in pieces)


def pages_of(lane: HostLane, low: int, high: int) -> list[tuple[int, int]]:
    page = lane.part.page_tokens
    return [(at, at + page) for at in range(low, high, page)]


def slices(lanes: Many[HostLane], held: int, boundary: int, page: int) -> list[list[Piece]]:
    """What is lacking for ``boundary`` where the path is held up to ``held``, in parts of at most ``SLICE`` bytes.

    The path from the top, in whole pages of the tree. Then, however large, what belongs to the boundary alone: it is
    of no use but whole.
    """
    closed = [lane for lane in lanes if lane.closed_upward]
    found: list[list[Piece]] = []
    room = 0
    for at in range(held, boundary if closed else held, page):
        pieces = [Piece(lane, *span) for lane in closed for span in pages_of(lane, at, at + page)]
        size = total(pieces)
        if size > room:
            found.append([])
            room = SLICE
        found[-1] += pieces
        room -= size
    last = [Piece(lane, *span) for lane in lanes if not lane.closed_upward for span in spans_of(lane.device, boundary)]
    if last and found and total(last) <= room:
        found[-1] += last
    elif last:
        found.append(last)
    return found


def calls_of(pieces: Many[Piece]) -> list[list[Piece]]:
    """In this order, for one call each."""
    return [list(pieces[first : first + READ]) for first in range(0, len(pieces), READ)]


def judged(piece: Piece, key: Key, answer: Any, into: Any) -> Record | str:
    """The piece, or why an answer is not that. ``into`` is the memory that the store was given for it."""
    if isinstance(answer, Miss | Refused):
        return f"{answer.reason} {answer.detail}".strip()
    if not isinstance(answer, Record):
        return f"error {answer!r:.100} is no answer"
    told = (answer.component, answer.start, answer.end, answer.layout, len(answer.payload))
    wanted = (piece.lane.device.name, piece.start, piece.end, "record", piece.size)
    if told != wanted:
        return f"the store gave {told} for {wanted}"
    memory = answer.payload.obj
    if isinstance(memory, Spare) and memory is not into:
        return "the store gave another piece's memory"
    return answer if answer.key == key else "the store gave another prompt's"
