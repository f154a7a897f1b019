"""Leaving: how cells go from a lane, whichever its kind.

A cell that is to go is off the queue first. Then it *leaves*, so that what it kept from going may follow; is *detached*
from its node, which gathers what it had; and what was gathered is given back at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lane import Lane
    from .queues import Queue
    from .tree import Node


class Leaving:
    """The part of a lane that eviction asks."""

    __slots__ = ("evicted", "in_tree", "index", "queue")

    index: int
    queue: Queue
    in_tree: int
    evicted: int
    """Pages (or slots), ever."""

    def pop_victim(self) -> Any:
        """The next cell to go, off the queue but not freed; None if nothing may go."""
        return self.queue.pop()

    def fall(self, nodes: list[Node], lost: Lane) -> None:
        """``lost`` lost its cells at ``nodes``: free ours, but for what is covered or still serves a boundary."""
        gone: list[Any] = []
        try:
            for node in nodes:
                cell = node.cells[self.index]
                if cell is None or cell.next is None:
                    continue
                if not lost.closed_upward and lost.deepest(node, node.end)[1] == node.end:
                    continue
                self.queue.drop(cell)
                self.leave(cell)
                self.detach(cell, node, gone)
        finally:  # a reach that is plain Python may raise
            if gone:
                given = self.give_all(gone)
                self.evicted += given

    def size(self, cell: Any) -> int:
        """Pages (or slots) that freeing ``cell`` gives."""
        return 1

    def hangs_from(self, cell: Any) -> Any:
        """The cell without which ``cell`` is worth nothing; None where there is no such thing."""
        return None

    def leave(self, cell: Any) -> None:
        """``cell``, off the queue, counts as gone: what it kept from going may be the next victim."""

    def come_back(self, cell: Any) -> None:
        """``cell`` does not go after all: undo ``leave``, and it was used just now."""
        self.queue.add(cell)

    def detach(self, cell: Any, node: Node, gone: list[Any]) -> None:
        """Take a cell that has left from its ``node``, what it had to ``gone``.

        The queue is told last: where that is interrupted, the cell has gone nevertheless.
        """
        raise NotImplementedError

    def give_all(self, gone: list[Any]) -> int:
        """Free what ``detach`` gathered, and count the pages."""
        raise NotImplementedError

    def free_left(self, cell: Any) -> int:
        """Free a cell that has left, and count the pages."""
        gone: list[Any] = []
        pages = 0
        try:
            self.detach(cell, cell.node, gone)
        finally:
            if gone:
                pages = self.give_all(gone)
        return pages

    def free_cell(self, cell: Any) -> int:
        """Free a cell that is off the queue, and count the pages."""
        self.leave(cell)
        return self.free_left(cell)

    def evict(self, count: int, freed: list[Node]) -> int:
        """Free at least ``count`` pages if so many may go; the nodes that lost their cell are appended to ``freed``."""
        gone: list[Any] = []
        got = 0
        try:
            while got < count:
                cell = self.pop_victim()
                if cell is None:
                    break
                node = cell.node
                freed.append(node)
                self.leave(cell)
                got += self.size(cell)
                self.detach(cell, node, gone)
        finally:
            if gone:
                self.give_all(gone)
        return got

    def trim(self, count: int, emptied: list[Node]) -> int:
        """Free up to about ``count`` pages that no boundary at a node's end or below it can need.

        Nodes that lose their cell by it are added to ``emptied``.
        """
        return 0

    def loses_first(self, count: int) -> list[Any]:
        """The cells that ``trim`` would cut for so many pages."""
        return []

    def uncovered(self, cell: Any) -> bool:
        """Whether nothing stands in the way of freeing ``cell``."""
        return not cell.locks
