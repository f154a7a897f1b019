"""Making room: which cells go, all or nothing.

The amounts are known before anything is touched: a shortage that eviction cannot cover is refused with nothing lost. A
component evicts only its own cells. What thereby becomes useless for others is not freed with it, but is the next of its
own component to go: it may still be evidence (data deeper than the last state asks for a checkpoint there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import CapacityError, Shortage
from .values import NodeView

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane
    from .tree import Node


def make_room(cache: Cache, wanted: list[tuple[Lane, int]], what: str) -> None:
    """Evict until each lane has its number of free pages; CapacityError, with nothing evicted, if one cannot."""
    short = [(lane, count) for lane, count in wanted if count > lane.pool.free + lane.evictable]
    if short:
        raise CapacityError(tuple(shortage(cache, lane, count) for lane, count in short), what)
    for lane, count in wanted:
        missing = count - lane.pool.free
        if missing > 0:
            evict(cache, lane, missing)
    short = [(lane, count) for lane, count in wanted if count > lane.pool.free]
    if short:  # an inner page stays evictable in the books while a hook or a deeper lease holds what hangs below it
        raise CapacityError(tuple(shortage(cache, lane, count) for lane, count in short), what)


def shortage(cache: Cache, lane: Lane, count: int) -> Shortage:
    """What is lacking and who holds it: the running sequences that own most."""
    holders = sorted(
        ((sequence.label, owned) for sequence in cache.sequences() if (owned := sequence.owned(lane.name))),
        key=lambda held: -held[1],
    )
    return Shortage(
        lane.name, count, lane.pool.free, lane.evictable, lane.leased, lane.running, lane.pool.capacity, tuple(holders[:3])
    )


def evict(cache: Cache, lane: Lane, count: int) -> int:
    """Free at least ``count`` pages of one component, if so much may go; the number that was freed."""
    got = lane.trim(count)
    freed: list[Node] = []
    if lane.hooks.evict_component is not None:
        got += _evict_asking(cache, lane, count - got, freed)
    else:
        while got < count:
            cell = lane.pop_victim()
            if cell is None:
                break
            freed.append(cell.node)
            got += lane.free_cell(cell)
    cache._epoch += 1
    cache._evicted[lane.index] += got
    others = [other for other in cache._lanes if other is not lane]
    prune = cache._tree.prune
    for node in freed:
        for other in others:
            _useless(node, lane, other)
        if not node.kids:
            prune(node)
    return got


def _useless(node: Node, lane: Lane, other: Lane) -> None:
    """``lane`` lost its cell at ``node``: where the node's own boundary needed it, the others' cells go first."""
    cell = node.cells[other.index]
    if cell is None or cell.next is None:
        return
    if lane.part.reach.closed_upward or other.unit == "boundary":
        other.queue.remove(cell)
        other.queue.add_first(cell)


def _evict_asking(cache: Cache, lane: Lane, count: int, freed: list[Node]) -> int:
    """Eviction with ``evict_component``: victims are shown in batches, and one that is held back is asked once."""
    got = 0
    held: list[Any] = []
    while got < count:
        victims: list[Any] = []
        pages = 0
        while got + pages < count:
            cell = lane.pop_victim()
            if cell is None:
                break
            victims.append(cell)
            pages += _pages(lane, cell)
        if not victims:
            break
        views = tuple(
            NodeView(cell.node.start, cell.node.end, _pages(lane, cell), cell.locks) for cell in victims
        )
        claim = cache._ask_softly(lane, "evict_component", lane.hooks.evict_component, views, "device")
        keep = set(claim.keep) if claim is not None and claim.keep else set()
        for index, cell in enumerate(victims):
            if index in keep:
                held.append(cell)
            else:
                freed.append(cell.node)
                got += lane.free_cell(cell)
    for cell in held:
        if got < count:
            freed.append(cell.node)
            got += lane.free_cell(cell)
        else:
            lane.queue.add(cell)
    return got


def _pages(lane: Lane, cell: Any) -> int:
    return 1 if lane.unit == "boundary" else len(cell.data) // 4


def clear_subtree(cache: Cache, root: Node) -> int:
    """Free all below ``root`` that nothing covers, deepest first, without recursion; how many cells stayed."""
    order: list[Node] = []
    stack = [root]
    while stack:
        node = stack.pop()
        order.append(node)
        if node.kids:
            stack.extend(node.kids.values())
    kept = 0
    for node in reversed(order):
        if node is root:
            continue
        for lane in cache._lanes:
            cell = node.cells[lane.index]
            if cell is None:
                continue
            if lane.uncovered(cell):
                if cell.next is not None:
                    lane.queue.remove(cell)
                lane.free_cell(cell)
            else:
                kept += 1
        cache._tree.prune(node)
    cache._epoch += 1
    return kept
