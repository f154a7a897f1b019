"""Cells: what a queue knows of a cell, and prints of paths.

A queue sees cells of the tree's edges. They have any length, are split, and on a path only the last one stands in the
queue.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Protocol

import attrs

from prefixloom import ListQueue

from .ages import Visit


class PathNode(Protocol):
    """The part of a node of the tree that a queue reads: the bytes of its edge, and where the edge ends."""

    key: bytes
    parent: PathNode
    end: int
    children: Iterable[PathNode]


class EvictableCell(Protocol):
    """What stands in a queue, at a node."""

    node: PathNode


@attrs.define(slots=True, eq=False)
class CellRecord:
    """What a queue knows of a cell.

    ``node``     the node that the cell is at
    ``depth``    tokens from the root to its end
    ``away``     whether a lease covers it
    ``useless``  whether it goes next since others lost what it needs, or nobody wants it
    ``chosen``   whether it went because the queue chose it
    ``line``     the list it stands in; None: in none
    ``visit``    the last use of the path that ends here
    """

    node: PathNode
    depth: int
    away: bool = False
    useless: bool = False
    chosen: bool = False
    line: ListQueue | None = None
    visit: Visit | None = None


class Prints:
    """Prints of paths, by which a path is known again after it was evicted, however its edges were divided.

    A print is a checksum of one element of 64. What was computed is kept for the last paths that were asked for.
    """

    stride = 64
    kept = 1024

    def __init__(self) -> None:
        self._ends: dict[PathNode, int] = {}

    def marks(self, node: PathNode, mask: int) -> list[tuple[int, int]]:
        """Return the marks of the edge of ``node``: its printed positions whose print has no bit of ``mask``.

        Each is the depth up to which it represents the edge, and the print of the path up to it, deepest first.
        """
        key = getattr(node, "key", None)
        if not key:
            return []
        start, stride = node.parent.end, self.stride
        width = len(key) // (node.end - start)
        found = self._to_end(node.parent, width)
        some = self._some(node, width)
        depth = start + -start % stride + stride
        marks = []
        for at in range(0, len(some), width):
            found = zlib.crc32(some[at : at + width], found)
            if not found & mask:
                marks.append((min(depth, node.end), found))
            depth += stride
        self._ends[node] = found
        marks.reverse()
        return marks

    def _some(self, node: PathNode, width: int) -> bytes:
        """Return the elements of an edge that are printed, ``width`` bytes each."""
        key = node.key
        first = -node.parent.end % self.stride * width
        return b"".join([key[at : at + width] for at in range(first, len(key), self.stride * width)])

    def _to_end(self, node: PathNode, width: int) -> int:
        ends = self._ends
        edges = []
        while node.parent is not None and node not in ends:
            edges.append(node)
            node = node.parent
        found = ends.get(node, 0)
        if len(ends) > self.kept:
            ends.clear()
        for below in reversed(edges):
            found = zlib.crc32(self._some(below, width), found)
            ends[below] = found
        return found
