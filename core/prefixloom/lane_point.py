"""The lane of boundary components: one slot of state at a node's end, attached by copy.

A running sequence writes its state in place, so it never reads the tree's slot: a match copies it into a slot of the
sequence's own (a deferred op, the source covered until it has run), and a publication *donates* the sequence's slot to
the tree and goes on with a fresh one.
"""

from __future__ import annotations

from array import array
from typing import Any

from .lane import Cell, Lane
from .tree import Node

NO_SLOT = -1


class StateHolding:
    """``slot`` is the running state's, ``as_of`` the boundary that its content stands for.

    ``ready`` is False until the op that fills the slot has run: until then the content is not the sequence's.
    """

    __slots__ = ("as_of", "ready", "slot")

    def __init__(self, slot: int, as_of: int) -> None:
        self.slot = slot
        self.as_of = as_of
        self.ready = False


class PointLane(Lane):
    __slots__ = ()
    unit = "boundary"

    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        i = self.index
        if boundary == node.end and (node.cells[i] is not None or not boundary):
            return node, boundary
        node = node.parent
        while node.cells[i] is None and node.end:
            node = node.parent
        return node, node.end

    def row(self, node: Node, boundary: int) -> bytes:
        return array("i", [node.cells[self.index].data] if boundary else []).tobytes()

    def acquire(self, node: Node) -> Cell | None:
        cell: Cell | None = node.cells[self.index]
        if cell is None:
            return None
        if not cell.locks:
            self.leased += 1
            if cell.next is not None:
                self.queue.remove(cell)
        cell.locks += 1
        return cell

    def release(self, record: Cell, recent: bool = True) -> None:
        record.locks -= 1
        if record.locks:
            return
        self.leased -= 1
        if recent:
            self.queue.add(record)
        else:
            self.queue.add_first(record)

    def advance(self, record: Cell | None, node: Node) -> None:
        """A state is covered until it has been copied, not while the sequence runs on."""
        if record is not None:
            self.release(record)

    def divide(self, upper: Node, lower: Node) -> None:
        """The state stays at the end, which is the lower half's."""

    def open(self, node: Node) -> StateHolding:
        return StateHolding(self.pool.take(1)[0], node.end)

    def adopt(self, node: Node, holding: StateHolding) -> None:
        if holding.as_of != node.end or not holding.ready or node.cells[self.index] is not None:
            return
        cell = Cell(node, holding.slot)
        node.cells[self.index] = cell
        holding.slot = NO_SLOT
        holding.ready = False
        self.in_tree += 1
        self.queue.add(cell)

    def renew(self, holding: StateHolding) -> None:
        holding.slot = self.pool.take(1)[0]

    def retain(self, holding: StateHolding, floor: int) -> None:
        pass

    def owned(self, holding: StateHolding) -> int:
        return int(holding.slot != NO_SLOT)

    def close(self, holding: StateHolding) -> None:
        if holding.slot != NO_SLOT:
            self.pool.give_one(holding.slot)
            holding.slot = NO_SLOT
        holding.ready = False

    def rewind(self, holding: StateHolding, length: int) -> None:
        pass

    def free_cell(self, cell: Any) -> int:
        cell.node.cells[self.index] = None
        self.queue.forget(cell)
        self.pool.give_one(cell.data)
        self.in_tree -= 1
        return 1
