"""Passing: the order of eviction among cells of a reach that is the end of a prefix, such as a state's or a window's.

A long prompt leaves such cells at each boundary where a step of it ended, and whoever goes on needs the last of them
alone. A cell is *passed* if resuming where its path ends needs nothing of it, nor resuming where prompts part between
the two. Passed cells are evicted before all others, whatever the policy says (# 0111). The rule follows from the
reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import TypeVar

from ..contract.composition import Part
from ..contract.queues import Queue
from ..device.pool import ID_BYTES, Pool
from .cells import Cell
from .lane import C, H, Lane
from .radix import Node


class PassingCell(Cell):
    """A cell that is evicted before all others while it is ``passed``, or while it is ``unwanted``, which it is if
    nobody wants it any more. A use of the cell takes both back. ``spares``: the end of the prompt whose answer ends
    here; what that needs was not passed yet.
    """

    __slots__ = ("passed", "spares", "unwanted")

    def __init__(self, node: Node, data: bytes, pages: int) -> None:
        super().__init__(node, data, pages)
        self.passed = self.unwanted = False
        self.spares = 0

    def take_back(self) -> None:
        """Keep the cell as others are kept, because it was used."""
        self.passed = self.unwanted = False


Resumes = Callable[[Node, int], int]
"""Returns the deepest boundary of all components up to one, which lies in the edge of a node."""
P = TypeVar("P", bound=PassingCell, default=Any)
"""The cells."""


class PassingLane(Lane[P, C, H]):
    """A lane that evicts what later boundaries of its path have passed before anything else."""

    __slots__ = ("_early",)

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self._early = queue.before()
        """The cells that are evicted before all in ``queue``: first what nobody wants, then what is passed, in the
        order in which it was."""

    def reset(self) -> None:
        super().reset()
        self._early = self.queue.before()

    # ------------------------------------------------------------ the order of eviction
    def queue_of(self, cell: P) -> Queue:
        return self._early if cell.passed or cell.unwanted else self.queue

    def enter(self, cell: P, recent: bool = True) -> None:
        if recent:
            (self._early if cell.passed or cell.unwanted else self.queue).add(cell)
        else:
            cell.unwanted = True
            self._early.add_first(cell)

    def put_back(self, cell: P) -> None:
        cell.take_back()
        super().put_back(cell)

    def _pop_victim(self) -> P | None:
        return self._early.pop() or super()._pop_victim()

    def strays(self) -> list[Any]:
        early = [cell for cell in self._early if not self.has(cell) or self.queue_of(cell) is not self._early]
        return [*super().strays(), *early, *(cell for cell in self.queue if self.queue_of(cell) is not self.queue)]

    def _inherit(self, upper: P, lower: P, linked: bool) -> None:
        upper.passed, upper.unwanted = lower.passed, lower.unwanted
        early = linked and self.queue_of(lower) is self._early
        super()._inherit(upper, lower, linked and not early)
        if early:
            self._early.inherit(upper, lower, True)

    def _use(self, cell: P) -> None:
        """Count ``cell``, which was computed again, as used just now."""
        stood_in = self.queue_of(cell)
        cell.take_back()
        if cell.next is None:
            return
        if stood_in is self.queue:
            stood_in.touch(cell)
        else:
            stood_in.remove(cell)
            self.queue.add(cell)

    # ------------------------------------------------------------ what is passed
    def pass_above(self, run: list[Node], boundary: int, resumes: Resumes) -> None:
        """Mark which cells of a path are passed when ``run``, its end, is published.

        ``boundary``: where ``run`` ends, or the end of its prompt, if that can be resumed at. Then the answer behind
        the prompt counts as passed: whoever misses what the answer's end needs computes an answer again, and a next
        turn that leaves the answer out would compute everything.
        """
        raise NotImplementedError

    def _judge(self, node: Node, boundary: int, low: int, resumes: Resumes) -> None:
        """Mark which cells at and above ``node`` are passed by ``boundary``, its end or that of the prompt.

        What lies above ``low`` was judged before. Of states the next one above alone was not.
        """
        i, page, unneeded = self.index, self.page, self.paged.unneeded
        above = node.parent
        if boundary < node.end:
            above = node
            if (own := node.cells[i]) is not None:
                own.spares = boundary
        first, last = unneeded(boundary)
        parting: Node | None = None
        while above.end > low:
            if above.forks:
                parting = above
            cell: P | None = above.cells[i]
            if cell is not None:
                end = above.end // page
                start = end - len(cell.data) // ID_BYTES
                passed = answer = start * page >= boundary
                if not answer:
                    passed = start >= first and end <= last
                    if passed and parting is not None:
                        resumed = resumes(parting, parting.end)  # where prompts resume that part there
                        if end * page <= resumed:
                            last = min(last, unneeded(resumed)[1])
                            parting, passed = None, end <= last
                if passed is not cell.passed:
                    self._set_passed(cell, passed)
                elif answer and above is not node:
                    return  # the publication of what is above has judged the rest
                if passed and not answer and cell.spares:  # now what that end spared is passed as well
                    low = min(low, unneeded(cell.spares)[1] * page)
                elif self.unit == "boundary" and not answer:
                    return
            above = above.parent

    def _set_passed(self, cell: P, passed: bool) -> None:
        before = self.queue_of(cell)
        cell.passed = passed
        after = self.queue_of(cell)
        if cell.next is not None and after is not before:
            before.remove(cell)
            after.add(cell)

    def _unhang(self, cell: P) -> None:
        super()._unhang(cell)
        if not cell.passed:
            i, above = self.index, cell.node.parent
            while above.parent is not None and above.cells[i] is None:
                above = above.parent
            found: P | None = above.cells[i]
            if found is not None and found.passed:
                end, paged = cell.node.end, self.paged
                if not paged.closed_form or paged.unneeded(end)[1] * self.page < end:
                    self._set_passed(found, False)  # it serves again what the one that is lost served
