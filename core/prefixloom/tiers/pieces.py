"""Addresses: under which keys the pieces of a cache lie in a store, the same in every process.

A piece is a page of one component, or a state. Its key follows from all that the tree's key says up to the end of its
page of the tree (a chain of links, one per page) and from the fingerprint of its component. What hangs on an extra key
that has no lasting name has no address, and nor has what lies below it.

Spares: the memory between a store and the host's slots, used again and again.

New memory is mapped and cleared by the system page by page, which takes several times as long as filling it. A buffer
that nobody needs any more is kept instead, up to so many bytes in all. It must not know records, stores or slots.

Pieces: what a store keeps one by one, a page of a component or a state; which of them a boundary needs, in which
order, and whether what a store answers is the piece that it was asked for. It must not know how or when they are read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import attrs

from ..storage import Fingerprint, Key, Miss, Record, Refused, key, next_link
from ..storage.keys import root_link
from ..tree.keys import KeyMaker
from ..tree.lane import PageLane
from ..tree.radix import Root

if TYPE_CHECKING:
    from ..tree.lane import Lane
    from ..tree.radix import Node
    from .host_lane import HostLane

Links = list[bytes]


def fingerprint(lane: Lane, page: int, identity: Mapping[str, Any]) -> Fingerprint:
    """Everything beside the tokens that decides what a record of this component means.

    ``identity`` is the caller's: ``model``, and where they apply ``weights`` and ``shards``, by axis.
    """
    part, manifest = lane.part, lane.pool.manifest
    component = type(part.component)
    shards = identity.get("shards", {}) if part.manifest.placement == "sharded" else {}
    return Fingerprint(
        model=str(identity["model"]),
        weights=str(identity.get("weights", "")),
        dtype=",".join(buffer.dtype for buffer in manifest.buffers),
        page_size=part.page_tokens or page,
        plugin=f"{component.__module__}.{component.__qualname__}",
        plugin_version=str(part.manifest.version),
        layout="record",
        shapes=[
            (f"{buffer.name} of layers {','.join(map(str, buffer.layers))}", (*buffer.shape, lane.pool.entries))
            for buffer in manifest.buffers
        ],
        layers=sorted({layer for buffer in manifest.buffers for layer in buffer.layers}),
        shards=shards,
    )


def chain(keys: KeyMaker, link: bytes | None, key_bytes: bytes, page_bytes: int) -> list[bytes | None]:
    """The links of the pages of ``key_bytes``, which follow after ``link``; None from where there is none."""
    found: list[bytes | None] = []
    for at in range(0, len(key_bytes), page_bytes):
        meaning = keys.meaning(key_bytes[at : at + page_bytes]) if link is not None else None
        link = None if meaning is None or link is None else next_link(link, *meaning)
        found.append(link)
    return found


def links_at(keys: KeyMaker, node: Node, page_bytes: int, count: int) -> list[bytes | None]:
    """The links of ``count`` or more pages of a node's edge, from its first, remembered there."""
    lacking: list[tuple[Any, int]] = [(node, count)]
    above: Any = node.parent
    while above.parent is not None and len(above.links or ()) * page_bytes < len(above.first) + len(above.rest):
        lacking.append((above, (len(above.first) + len(above.rest)) // page_bytes))
        above = above.parent
    if above.parent is None:
        assert isinstance(above, Root)
        link: bytes | None = root_link(above.namespace)
    else:
        link = above.links[-1]
    for each, pages in reversed(lacking):
        known = each.links = each.links or []
        key = each.key[len(known) * page_bytes : pages * page_bytes]
        known += chain(keys, known[-1] if known else link, key, page_bytes)
        link = known[-1]
    return node.links  # type: ignore[attr-defined, no-any-return]


def piece_key(host: HostLane, told: Fingerprint, link: bytes, start: int, end: int) -> Key:
    return key(link, host.device.name, start, end, told)


def spans_of(lane: Lane, boundary: int) -> Sequence[tuple[int, int]]:
    """The pieces that a resume at ``boundary`` needs of one component: (start, end), for its state both the same."""
    if not isinstance(lane, PageLane):
        return [(boundary, boundary)]
    page = lane.page
    return [(at, at + page) for low, high in lane.needs(boundary) for at in range(low, high, page)]


MOST = 64 << 20


class Spare(bytearray):
    """A buffer of ours: whatever else a view may be of belongs to somebody."""

    __slots__ = ()


class Spares:
    """Buffers that may be had again, by size. Any thread takes and gives."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.kept = 0
        self._lock = threading.Lock()
        self._by_size: dict[int, list[Spare]] = {}

    def take(self, size: int) -> Spare:
        """``size`` bytes of any content, the caller's alone."""
        with self._lock:
            buffers = self._by_size.get(size)
            if buffers:
                self.kept -= size
                return buffers.pop()
        return Spare(size)

    def give(self, view: Any) -> None:
        """Nobody looks at the buffer behind ``view`` any more. If it is none of ours, nothing is done."""
        buffer = memoryview(view).obj
        if buffer.__class__ is not Spare:
            return
        size = len(buffer)
        with self._lock:
            if self.kept + size <= self.most:
                self.kept += size
                self._by_size.setdefault(size, []).append(buffer)


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
