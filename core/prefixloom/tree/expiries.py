"""Expiries: until when somebody wants what hangs at each node, and what becomes of it then.

Times are numbers that an engine gives, of a clock that it reads itself: nothing here does. A node is wanted until the
latest time that was given by a sequence which used it, so at least as long as whatever hangs below it. What nobody
wants any more is not freed. It is the next to go, until it is used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ..errors import InputError
from .cells import Cells
from .radix import FOREVER, NEVER, Node, Tree


def is_time(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and given > NEVER


def check_until(given: object) -> None:
    if not is_time(given):
        raise InputError(f"until is a number on the engine's clock, or infinity, got {given!r}")


class Expiries:
    """The nodes that are not wanted for ever, in the order of their times.

    There is none while no sequence gave a time: then all nodes are wanted for ever, and nothing is noted.
    """

    __slots__ = ("_heap", "_now", "_number", "_tree")

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        tree.until = NEVER
        self._heap: list[tuple[float, int, Node]] = []
        self._number = 0
        self._now = NEVER

    def __len__(self) -> int:
        return len(self._heap)

    def want(self, node: Node, until: float) -> None:
        """Note that ``node`` and all nodes above it are wanted until ``until``. A root is wanted for ever.

        The same time is noted again, because leases may have covered the cells at ``node`` when it came before.
        """
        if node.until > until:
            return
        above = node
        while above.until < until:
            above.until = until
            above = above.parent
        if until < FOREVER:
            self._note(until, node)

    def is_over(self, node: Node) -> bool:
        """Return whether the time has passed until which ``node`` was wanted."""
        return node.until <= self._now

    def _note(self, until: float, node: Node) -> None:
        self._number += 1
        heapq.heappush(self._heap, (until, self._number, node))
        if len(self._heap) > 2 * self._tree.nodes + 64:
            self._forget_old()

    def _forget_old(self) -> None:
        """Keep one entry for each node at most: a later one replaces it, and what was unlinked stands for what is
        left above it.
        """
        newest: dict[Node, tuple[float, int, Node]] = {}
        for until, number, node in self._heap:
            while node.first is None and node.parent is not None:
                node = node.parent
            if node.until == until:
                newest[node] = (until, number, node)
        self._heap = sorted(newest.values())

    def expire(self, lanes: Iterable[Cells], now: float) -> None:
        """Make the cells that nobody wants at ``now`` the next of their queues to be evicted, the deepest first."""
        self._now = max(self._now, now)
        heap = self._heap
        unwanted: set[Node] = set()
        while heap and heap[0][0] <= now:
            node = heapq.heappop(heap)[2]
            while node.until <= now and node not in unwanted:
                unwanted.add(node)
                node = node.parent
        for node in sorted(unwanted, key=lambda node: node.end):
            for lane in lanes:
                cell = node.cells[lane.index]
                if cell is not None and cell.next is not None:
                    lane.goes_next(cell)
