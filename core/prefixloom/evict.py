"""Making room: which cells go, all or nothing.

The amounts are known before anything is touched: a shortage that eviction cannot cover is refused with nothing lost. A
component evicts only its own cells. What thereby becomes useless for others is not freed with it, but is the next of
its own component to go: it may still be evidence (data deeper than the last state asks for a checkpoint there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import CapacityError, Shortage
from .values import NodeView

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane
    from .tree import Node

    Wanted = Sequence[tuple[Lane, int, Any]]


def make_room(cache: Cache, wanted: Wanted, verb: str, count: int = 0, who: object = None) -> None:
    """Evict until each (lane, pages, holding) has its free pages; CapacityError, nothing evicted, if one cannot."""
    for lane, pages, _ in wanted:
        if pages > len(lane.pool._free) + lane.in_tree - lane.leased:
            raise _refusal(cache, wanted, verb, count, who)
    for lane, pages, _ in wanted:
        missing = pages - len(lane.pool._free)
        if missing > 0 and evict(cache, lane, missing) < missing:  # the books were wrong, or a hook raised half-way
            raise _refusal(cache, wanted, verb, count, who)


def _refusal(cache: Cache, wanted: Wanted, verb: str, count: int, who: object) -> CapacityError:
    short = [(lane, pages) for lane, pages, _ in wanted if pages > lane.pool.free + lane.evictable]
    short = short or [(lane, pages) for lane, pages, _ in wanted if pages > lane.pool.free]
    what = verb + (f" {count} tokens" if count else "") + (f" for {who!r}" if who else "")
    return CapacityError(tuple(shortage(cache, lane, pages) for lane, pages in short), what)


def shortage(cache: Cache, lane: Lane, count: int) -> Shortage:
    """What is lacking and who holds it: the running sequences that own most."""
    held: list[tuple[str, int]] = []
    for hold in cache._live:
        for other, holding in hold.pairs:
            if other is lane:
                held.append((hold.label or "an unlabelled sequence", lane.owned(holding)))
    holders = sorted(((name, pages) for name, pages in held if pages), key=lambda held: -held[1])
    return Shortage(
        lane.name,
        count,
        lane.pool.free,
        lane.evictable,
        lane.leased,
        lane.running,
        lane.pool.capacity,
        tuple(holders[:3]),
    )


def evict(cache: Cache, lane: Lane, count: int) -> int:
    """Free at least ``count`` pages of one component, if so much may go; the number that was freed."""
    freed: list[Node] = []
    emptied: list[Node] = []
    got = lane.trim(count, emptied) if lane.retains else 0
    if got < count:
        if lane.hooks.evict_component is None:
            got += lane.evict(count - got, freed)
        else:
            got += _evict_asking(cache, lane, count - got, freed)
    cache._epoch += 1
    cache._evicted[lane.index] += got
    if len(cache._lanes) > 1:
        for node in freed:
            for other in cache._lanes:
                if other is not lane:
                    _useless(node, lane, other)
    cache._tree.prune_all(freed + emptied)
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
        views = tuple(NodeView(cell.node.start, cell.node.end, _pages(lane, cell), cell.locks) for cell in victims)
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


def sweep(cache: Cache) -> int:
    """Free what leases no longer cover of dropped namespaces; the number of cells that are still covered."""
    kept = 0
    for root in list(cache._graves):
        kept += _clear(cache, root)
        if not root.kids and not root.leases:
            cache._graves.remove(root)
    cache._epoch += 1
    return kept


def _clear(cache: Cache, root: Node) -> int:
    """Free all below ``root`` that nothing covers, deepest first, without recursion; how many cells stayed."""
    order: list[Node] = []
    stack = list((root.kids or {}).values())
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend((node.kids or {}).values())
    kept = 0
    for node in reversed(order):
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
    return kept
