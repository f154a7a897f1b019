"""Lanes: one component's way through the core, derived from its manifest and reach alone.

A lane has the component's cells on the device (``cells``), and answers for it the questions of a request's way: what a
lease covers, what a sequence hands to the tree, what it gives back early, what may be evicted with what.
There is a lane for each kind of reach (a path, positions near an end, a boundary), and none for any component.

Words: a *cell* is what one component keeps at one node. A *holding* is what a running sequence has of one component.
A *cover* is what one lease protects of one component.
"""

from __future__ import annotations

from array import array
from typing import Any, Generic

from typing_extensions import TypeVar

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.reach import Interval
from ..contract.values import Receipt
from ..device.pool import ABSENT, ID_BYTES, Pool
from .cells import Cells, K
from .holdings import PageHolding, without_absent
from .radix import Node
from .residency import Residency

C = TypeVar("C", default=Any)
"""What one lease covers of one component."""
H = TypeVar("H", default=Any)
"""What a running sequence has of one component."""


class Lane(Cells[K], Generic[K, C, H]):
    """What every lane of the device has."""

    __slots__ = ("feeds", "live", "paged", "residency", "surplus")

    retains = False
    """Whether a running sequence may give something back early."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        self.residency = Residency.of(part, (self,), tree_page)
        """What this lane alone has along a path."""
        self.paged = self.residency.paged
        super().__init__(index, part, pool, queue, self.paged.page)
        self.live = pool
        """The pool of running sequences: another one only where the tree keeps things in another form."""
        self.feeds: tuple[Lane, ...] = ()
        """Lanes whose cell at a node may serve nothing any more once this lane has lost its own."""
        self.surplus: dict[Any, H] = {}
        """What running sequences hold that may be more than they need, since there was room."""

    def reset(self) -> None:
        super().reset()
        self.surplus = {}

    # ------------------------------------------------------------ counting
    @property
    def room(self) -> Any:
        """Whom a new sequence's slots are asked of."""
        return self

    @property
    def running(self) -> int:
        """Pages owned by sequences (and by whoever minted a span)."""
        return self.pool.capacity - self.pool.outside - self.pool.free - self.in_tree

    @property
    def evictable(self) -> int:
        """Pages that may go, those of covered cells included that no boundary there needs."""
        return self.in_tree - self.leased

    # ------------------------------------------------------------ covering
    def row(self, node: Node, boundary: int) -> bytes:
        """Return the page numbers that resuming at ``boundary``, which lies in ``node``, needs; *absent* for other
        pages.

        A boundary component's row is its slot.
        """
        raise NotImplementedError

    def acquire(self, node: Node, receipt: Receipt | None = None) -> C | None:
        """Cover what resuming at the end of ``node`` needs; ``release`` undoes exactly this.

        If a plugin gave a ``receipt``, cover its positions too, as far as the cover can be wider and they hold data.
        """
        raise NotImplementedError

    def release(self, cover: C, recent: bool = True) -> None:
        """Uncover what ``cover`` covers; what nobody covers any more may be evicted, the recent last."""
        raise NotImplementedError

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node, cover: C | None) -> H:
        """Return a holding that reads of ``cover``, which a lease at ``node`` has, what resuming there needs."""
        raise NotImplementedError

    def adopt(self, run: list[Node], holding: H) -> None:
        """Move the pages that ``holding`` owns of the positions of ``run`` into cells, and free duplicates.

        ``run``: nodes one below the other, from where the holding begins to own. Call ``follow``, ``finish`` or
        ``line_up`` next: the end of a path, and states, stand in no queue yet.
        """
        raise NotImplementedError

    def follow(self, run: list[Node], holding: H, cover: C | None, receipt: Receipt | None = None) -> C | None:
        """Cover what resuming at the end of ``run`` needs, where the sequence runs on, and release ``cover``."""
        new = self.acquire(run[-1], receipt)
        if cover is not None:
            self.release(cover)
        return new

    def finish(self, run: list[Node], cover: C | None) -> None:
        """Release ``cover``: the sequence ends at the end of ``run``, which counts as used just now."""
        if cover is not None:
            self.release(cover)

    def line_up(self, run: list[Node]) -> None:
        """Enter the cells of ``run`` that may be evicted and are in no queue."""
        for node in run:
            cell = node.cells[self.index]
            if cell is not None and cell.next is None and self.uncovered(cell):
                self.enter(cell)

    def close(self, holding: H) -> None:
        """Give back all that the sequence owns."""
        raise NotImplementedError

    # ------------------------------------------------------------ who owns what
    def owned(self, holding: H) -> int:
        """Return the number of pages (or slots) that the sequence owns."""
        raise NotImplementedError

    def own_slots(self, holding: H) -> list[int]:
        """Return the slots of ``pool`` that a running sequence owns."""
        raise NotImplementedError

    def live_slots(self, holding: H) -> list[int]:
        """Return the slots of ``live`` that a running sequence owns, if ``live`` is not ``pool``."""
        return []

    def slot_at(self, holding: H, place: int, own: bool) -> int:
        """Return the slot that an op names as ``place``, or *absent*. ``own``: only if the sequence owns the slot."""
        raise NotImplementedError

    def touches(self, holding: H, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        """Add the slots that the layers of a step over positions [start, end) read, and those that they write."""
        raise NotImplementedError

    # ------------------------------------------------------------ eviction
    def hangs_from(self, cell: K) -> K | None:
        """Return the cell without which ``cell`` is worth nothing, or None if there is no such cell."""
        return self.cell_above(cell.node) if self.closed_upward else None

    def fall(self, nodes: list[Node], lost: Lane) -> None:
        """Free the cells at ``nodes``, the deepest first, where ``lost`` lost its own. Keep a cell that is covered, and
        one whose boundary ``lost`` can still resume at.
        """
        going: list[K] = []
        for node in nodes:  # asked first: a reach that is plain Python may raise
            cell = self.cell(node)
            if cell is None or cell.locks:
                continue
            if not lost.closed_upward and lost.residency.deepest(node, node.end)[1] == node.end:
                continue
            going.append(cell)
        gone: list[bytes] = []
        for cell in going:
            if not cell.below:
                self.queue_of(cell).remove(cell)
                self._leave(cell)
                self._detach(cell, gone)
        if gone:
            self.evicted += self._give_all(gone)


class PageLane(Lane[K, C, PageHolding]):
    """What the lanes of page cells share: tables, growth, closing."""

    __slots__ = ()

    # ------------------------------------------------------------ what is needed
    def needs(self, boundary: int) -> tuple[Interval, ...]:
        """Return ascending intervals of positions, in whole pages, that resuming at ``boundary`` needs."""
        return self.residency.positions(self.paged.needs[boundary])

    def needed_pages(self, first: int, length: int) -> list[bool]:
        """Return by page, from ``first`` on, whether resuming at ``length`` needs the page or goes on writing it."""
        return [True] * (-(-length // self.page) - first)

    # ------------------------------------------------------------ a sequence's way
    def close(self, holding: PageHolding) -> None:
        end = len(holding.table)
        if end > holding.owned:
            self.pool.give(holding.own_pages())
            holding.owned = end

    def rewind(self, holding: PageHolding, length: int) -> None:
        """Give back what lies past ``length`` tokens."""
        keep = max(-(-length // self.page), holding.owned)
        dropped = holding.table[keep:].tobytes()
        if dropped:
            self.pool.give(without_absent(dropped))
            del holding.table[keep:]
            holding.change(keep)

    # ------------------------------------------------------------ who owns what
    def owned(self, holding: PageHolding) -> int:
        return len(holding.own_pages()) // ID_BYTES

    def own_slots(self, holding: PageHolding) -> list[int]:
        return array("i", holding.own_pages()).tolist()

    def slot_at(self, holding: PageHolding, place: int, own: bool) -> int:
        at, first = place // self.page, holding.owned if own else 0
        return holding.table[at] if first <= at < len(holding.table) else ABSENT

    def touches(self, holding: PageHolding, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        table = holding.table
        last = -(-end // self.page)
        first = max(holding.owned, start // self.page) if end > start else last
        reads.extend(slot for slot in table[:first] if slot != ABSENT)
        writes.extend(slot for slot in table[first:last] if slot != ABSENT)
