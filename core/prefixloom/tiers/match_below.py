"""Matching below the device: the boundaries at which a component could resume after a load from the host.

A lane answers this for the device alone; here a position that a boundary needs must be present on the device or on the
host. Nothing here changes any state.
"""

from __future__ import annotations

from array import array

from ..device.pool import ABSENT, ABSENT_BYTES
from ..tree.lane import Lane, PageLane
from ..tree.radix import Node, climb
from .host_lane import HostLane


def usable(lane: Lane, host: HostLane | None, node: Node, boundary: int, page: int) -> tuple[Node, int]:
    """The deepest boundary up to ``boundary``, which lies in ``node``, that one component has on the two tiers."""
    if host is None:
        return lane.deepest(node, boundary) if boundary else (node, boundary)
    if not isinstance(lane, PageLane):
        if boundary != node.end:
            node = node.parent
        i, k = lane.index, host.index
        while node.end and node.cells[i] is None and node.cells[k] is None:
            node = node.parent
        return node, node.end
    while boundary:
        hole = hole_of(lane, host, node, boundary)
        if hole < 0:
            break
        boundary = hole // page * page
        node = climb(node, boundary)
    return node, boundary


def hole_of(lane: PageLane, host: HostLane, node: Node, boundary: int) -> int:
    """A position that ``boundary`` needs and that neither tier has; -1 if there is none.

    If the reach is convex, no boundary between that position and ``boundary`` can be resumed at either.
    """
    for low, high in reversed(lane.needs(boundary)):
        hole = lowest_hole(lane, host, node, low, high)
        if hole >= 0:
            return hole if lane.part.reach.convex else boundary - 1
    return -1


def lowest_hole(lane: PageLane, host: HostLane, node: Node, low: int, high: int) -> int:
    """The lowest page in positions [low, high) that neither tier has; -1 if there is none."""
    lowest = -1
    page = lane.page
    closed = lane.part.reach.closed_upward
    while high > low:
        start = node.parent.end
        if start < high:
            cells = node.cells
            ours, theirs = cells[host.index], cells[lane.index]
            if closed and theirs is not None:
                break  # the device has everything above it, too
            count = (node.end - start) // page
            if ours is None or ours.pages < count:
                device = lane.edge(node)
                if ABSENT_BYTES in device:
                    data = ABSENT_BYTES * count if ours is None else ours.data
                    first, last = max(0, low - start) // page, -(-(min(high, node.end) - start) // page)
                    for place, (one, other) in enumerate(zip(array("i", device), array("i", data), strict=True)):
                        if one == other == ABSENT and first <= place < last:
                            lowest = start + place * page
                            break
            high = start
        node = node.parent
    return lowest
