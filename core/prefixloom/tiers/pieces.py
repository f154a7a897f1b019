"""Pieces: the units that a store keeps, each a page of one component or a state.

This module says under which key a piece lies in a store, which pieces a boundary needs and in which order, and whether
the answer of a store is the piece that was asked for. It keeps spare buffers for their content. It does not know how or
when pieces are read.

The key of a piece is the same in every process. It follows from the identity of its tree page (``keys.pages``) and from
the fingerprint of its component.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from collections.abc import Sequence as Many
from typing import Any

import attrs

from ..contract.identity import Identity
from ..keys.elements import KeyMaker
from ..keys.pages import PageChain
from ..storage import Fingerprint, Key, Miss, Record, Refused, key
from ..tree.lane import Lane, PageLane
from ..tree.radix import Node, path_up, root_of
from .host_lane import HostLane

# ---------------------------------------------------------------- addresses


def fingerprint(lane: Lane, page: int, identity: Identity) -> Fingerprint:
    """Return the fingerprint of what the pool of ``lane`` holds."""
    part, manifest = lane.part, lane.pool.manifest
    return part.fingerprint(manifest, lane.pool.entries, page, identity)


def links_at(chain: PageChain, keys: KeyMaker, node: Node, count: int) -> list[bytes]:
    """Return the identities of the first ``count`` or more pages of a node's edge. The node remembers them."""
    lacking: list[tuple[Any, int]] = []
    link = b""
    for each in path_up(node):
        whole = (each.end - each.start) // chain.page
        known = each.links or []  # type: ignore[attr-defined]
        if each is not node and len(known) >= whole:
            link = known[-1]
            break
        lacking.append((each, count if each is node else whole))
    link = link or chain.root(root_of(node).namespace)
    for each, pages in reversed(lacking):
        known = each.links = each.links or []
        if len(known) < pages:
            known += chain.pages(keys.tokens_in(each.key), known[-1] if known else link, len(known), pages)
        link = known[-1]
    return node.links  # type: ignore[attr-defined, no-any-return]


def piece_key(host: HostLane, fingerprint: Fingerprint, link: bytes, start: int, end: int) -> Key:
    """Return the key of a piece of one component. ``link`` is that of its last tree page."""
    return key(link, host.device.name, start, end, fingerprint)


def spans_of(lane: Lane, boundary: int) -> Sequence[tuple[int, int]]:
    """Return the (start, end) of each piece of one component that ``boundary`` needs; of a state both are equal."""
    if not isinstance(lane, PageLane):
        return [(boundary, boundary)]
    page = lane.page
    return [(at, at + page) for low, high in lane.needs(boundary) for at in range(low, high, page)]


# ---------------------------------------------------------------- spare buffers

MOST = 64 << 20
"""The most bytes of spare buffers that are kept."""


class Spare(bytearray):
    """A buffer of ``Spares``. Its class tells it from memory that belongs to others."""

    __slots__ = ()


class Spares:
    """Buffers between a store and the host's slots, kept by size and used again. Any thread may take and give.

    The system maps and clears new memory page by page, which takes several times as long as filling it.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.kept = 0
        self._lock = threading.Lock()
        self._by_size: dict[int, list[Spare]] = {}

    def take(self, size: int) -> Spare:
        """Return a buffer of ``size`` bytes with undefined content, for the caller alone."""
        with self._lock:
            buffers = self._by_size.get(size)
            if buffers:
                self.kept -= size
                return buffers.pop()
        return Spare(size)

    def give(self, view: Any) -> None:
        """Take back the buffer behind ``view``, which nobody uses any more. A buffer of another kind is ignored."""
        buffer = memoryview(view).obj
        if buffer.__class__ is not Spare:
            return
        size = len(buffer)
        with self._lock:
            if self.kept + size <= self.most:
                self.kept += size
                self._by_size.setdefault(size, []).append(buffer)


# ---------------------------------------------------------------- what is read

READ = 32
"""The number of pieces in one read."""

SLICE = 64 << 20
"""The most bytes that are asked for at a time."""


@attrs.frozen
class Piece:
    """A piece of the component of ``lane``: the tokens [start, end), or the state at ``end`` if both are equal."""

    lane: HostLane
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.lane.pool.slot_bytes


def total(pieces: Many[Piece]) -> int:
    """Return the bytes of all pieces."""
    return sum(piece.size for piece in pieces)


def pages_of(lane: HostLane, low: int, high: int) -> list[tuple[int, int]]:
    """Return the (start, end) of each of the component's pages in the tokens [low, high)."""
    page = lane.part.page_tokens
    return [(at, at + page) for at in range(low, high, page)]


def slices(lanes: Many[HostLane], held: int, boundary: int, page: int) -> list[list[Piece]]:
    """Return the missing pieces for ``boundary``, in slices of ``SLICE`` bytes. The path is held up to ``held``.

    First come the pieces of the path from the top, in whole tree pages. Then come those that belong to the boundary
    alone, in one part of any size: they are of use only if all of them arrive.
    """
    closed = [lane for lane in lanes if lane.closed_upward]
    others = [lane for lane in lanes if not lane.closed_upward]
    parts = [
        [Piece(lane, *span) for lane in closed for span in pages_of(lane, at, at + page)]
        for at in range(held, boundary, page)
    ]
    parts.append([Piece(lane, *span) for lane in others for span in spans_of(lane.device, boundary)])
    found: list[list[Piece]] = []
    room = 0
    for part in filter(None, parts):
        size = total(part)
        if size > room:
            found.append([])
            room = SLICE
        found[-1] += part
        room -= size
    return found


def calls_of(pieces: Many[Piece]) -> list[list[Piece]]:
    """Divide pieces into those of single calls, in the same order."""
    return [list(pieces[first : first + READ]) for first in range(0, len(pieces), READ)]


def said(reason: str, detail: str) -> str:
    """Return the words of a store for why something was not done."""
    return f"{reason}: {detail}".strip(": ")


def checked(piece: Piece, key: Key, answer: object, into: object) -> Record | str:
    """Return a store's answer if it is the piece, else the reason why not. ``into`` is the buffer for its payload."""
    if isinstance(answer, Miss | Refused):
        return said(answer.reason, answer.detail)
    if not isinstance(answer, Record):
        return f"error: {answer!r:.100} is no answer"
    given = (answer.component, answer.start, answer.end, answer.layout, len(answer.payload))
    wanted = (piece.lane.device.name, piece.start, piece.end, "record", piece.size)
    if given != wanted:
        return f"the store gave {given} for {wanted}"
    memory = answer.payload.obj
    if isinstance(memory, Spare) and memory is not into:
        return "the store gave another piece's memory"
    return answer if answer.key == key else "the store gave another prompt's"
