"""Graves: what is left of dropped namespaces, until the leases that still cover it end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tree import unlink

if TYPE_CHECKING:
    from .cache import Cache
    from .tree import Node


def bury(cache: Cache, namespace: str) -> int:
    """Nothing is found of a namespace any more, nor of what a store still brings; the cells that are still covered."""
    if cache._tier is not None and cache._tier.shelf is not None:
        cache._tier.shelf.forget(namespace)
    root = cache._tree.roots.pop(namespace, None)
    if root is None:
        return 0
    cache._graves.append(root)
    return sweep(cache)


def sweep(cache: Cache) -> int:
    """Free what leases no longer cover of dropped namespaces; the number of cells that are still covered."""
    kept = 0
    for root in list(cache._graves):
        kept += _clear(cache, root)
        if root.kids is None and not root.leases:
            cache._graves.remove(root)
            unlink(root)
    cache._epoch += 1
    return kept


def _clear(cache: Cache, root: Node) -> int:
    """Free all below ``root`` that nothing covers, deepest first, without recursion; how many cells stayed."""
    order: list[Node] = []
    stack = root.children
    while stack:
        node = stack.pop()
        order.append(node)
        stack += node.children
    kept = 0
    for node in reversed(order):
        for lane in cache._all_lanes:
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
