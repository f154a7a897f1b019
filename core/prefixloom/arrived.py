"""What a store brought becomes the tree's: nodes for its tokens, slots of the host, and the bytes in them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from functools import partial
from typing import TYPE_CHECKING, Any

from .insert import spell
from .lane_host import Moves
from .lease import inert
from .pool import ABSENT

if TYPE_CHECKING:
    from .fetching import Fetch
    from .lane_host import HostLane
    from .pieces import Piece
    from .spares import Spares
    from .tier import Job
    from .tree import Node

Brought = Many[tuple["Piece", Any]]


def place(fetch: Fetch, brought: Brought, whole: bool) -> None:
    """As deep as all components that need everything above have arrived; what has no room below is left out.

    ``whole``: nothing of what was asked for is lacking.
    """
    cache = fetch.shelf.cache
    upto = fetch.boundary if whole else _path_end(fetch, brought)
    if upto <= 0:
        return
    width = cache._tree.element_bytes
    root = cache._root(fetch.plan.namespace)
    root.leases += 1
    run: list[Node] = []
    spell(cache, root, fetch.key[: upto * width], upto, run)
    for node in run:
        node.leases += 1  # it may hold nothing yet, or lose what it holds to make room
    pinned: list[tuple[HostLane, Any]] = []
    try:
        for lane in fetch.shelf.tier.lanes:  # what leads there is not to go for the sake of what is there
            for node in run:
                cell = node.cells[lane.index]
                if cell is not None and lane.closed_upward:
                    lane.pin(cell)
                    pinned.append((lane, cell))
        _fill(fetch, run, [(piece, answer) for piece, answer in brought if piece.end <= upto], pinned)
    finally:
        for lane, cell in pinned:
            lane.unpin(cell)
        for node in (*reversed(run), root):
            node.leases -= 1
            cache._tree.prune(node)


def _path_end(fetch: Fetch, brought: Brought) -> int:
    """The boundary up to which all of the path came."""
    ends = [
        max((piece.end for piece, _ in brought if piece.lane is lane), default=fetch.held)
        for lane in fetch.shelf.tier.lanes
        if lane.closed_upward
    ]
    return min(ends, default=0) // fetch.shelf.cache._page * fetch.shelf.cache._page


def _fill(fetch: Fetch, run: list[Node], brought: Brought, pinned: list[tuple[HostLane, Any]]) -> None:
    tier = fetch.shelf.tier
    hold = inert(fetch.shelf.cache)
    jobs: list[Job] = []
    taken: list[Moves] = []
    try:
        for lane in tier.lanes:
            mine = {piece.start: answer.payload for piece, answer in brought if piece.lane is lane}
            for node in run:
                places, payloads = _lacking(lane, node, mine)
                if not places:
                    continue
                cell = node.cells[lane.index]
                if cell is not None:  # it is not to go for the sake of what is to be added to it
                    lane.pin(cell)
                    pinned.append((lane, cell))
                slots = tier.take(lane, len(places))
                if slots is None:
                    tier.dropped += 1
                    continue
                taken.append(Moves(lane))
                taken[-1].dst = slots.tolist()
                lane.add(node, places, slots)
                if cell is None:
                    cell = node.cells[lane.index]
                    lane.pin(cell)
                    pinned.append((lane, cell))
                    if fetch.store is fetch.shelf.store:
                        cell.store, cell.stored = fetch.shelf.attached, cell.places
                write = partial(_write, fetch.shelf.spares, lane.pool, taken[-1].dst, payloads)
                jobs.append((lane, taken[-1].dst, write))
        hold.claim(fetch.shelf.cache._flight)
        if jobs:
            tier.bring(jobs, run, hold)
    except BaseException:
        for each in taken:
            each.take_back(run)
        raise
    tier.fetched += sum(len(filled) for _, filled, _ in jobs)


def _lacking(lane: HostLane, node: Node, mine: dict[int, Any]) -> tuple[list[int], list[Any]]:
    """The places of ``node``'s edge that were brought and that the host has not, with what is to be there."""
    cell = node.cells[lane.index]
    if lane.unit == "boundary":
        return ([0], [mine[node.end]]) if cell is None and node.end in mine else ([], [])
    page, start = lane.part.page_tokens, node.parent.end
    ours = None if cell is None else array("i", cell.data)
    places = [
        place
        for place in range((node.end - start) // page)
        if start + place * page in mine and (ours is None or ours[place] == ABSENT)
    ]
    return places, [mine[start + place * page] for place in places]


def _write(spares: Spares, pool: Any, slots: Many[int], payloads: Many[Any]) -> None:
    for slot, payload in zip(slots, payloads, strict=True):
        pool.write_from(slot, payload)
        spares.give(payload)
