"""All that can be told of a cache and of what was made of it, to be compared with another's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from prefixloom.contract.queues import ListQueue


def path(node: Any) -> tuple[Any, ...]:
    return node.start, node.end, node.key[:64]


def covered(record: Any) -> Any:
    """What a lease's record of one component says."""
    if record is None:
        return None
    if isinstance(record, tuple):
        return path(record[0]), record[1]
    if isinstance(record, list):
        return [(path(cell.node), start) for cell, start in record]
    return path(record.node)


def orders(queue: Any, told: Callable[[Any], Any]) -> Any:
    """Who goes when, whatever kind of queue it is."""
    if isinstance(queue, ListQueue):
        return [told(cell) for cell in queue]
    parts = [getattr(queue, name) for kind in type(queue).__mro__ for name in getattr(kind, "__slots__", ())]
    lists = [orders(part, told) for part in parts if isinstance(part, ListQueue)]
    ranked = [
        (key, orders(bucket, told))
        for part in parts
        if isinstance(part, dict)
        for key, bucket in part.items()
        if key.__class__ is int and isinstance(bucket, ListQueue)
    ]
    return lists, sorted(ranked)


def tree(cache: Any, exact: bool) -> list[Any]:
    found = []
    stack: list[tuple[str, Any]] = [
        *sorted(cache.core.index.tree.roots.items()),
        *(("grave", root) for root in cache.core.index.dropped_roots),
    ]
    while stack:
        space, node = stack.pop()
        cells = []
        for lane in cache.core.shape.all_lanes:
            cell = node.cells[lane.index]
            if cell is not None:
                slots = lane.slots_of(cell) if node.parent is not None else []
                linked = cell.next is not None
                cells.append(
                    (lane.index, cell.locks, linked, getattr(cell, "below", 0), slots if exact else len(slots))
                )
        found.append((space, *path(node), node.leases, node.priority, cells))
        kids = sorted(node.children, key=lambda kid: kid.key, reverse=True)
        stack += [(f"{space}/{node.end}", kid) for kid in kids]
    return found


def holding_of(lane: Any, holding: Any, exact: bool) -> Any:
    if lane.unit == "boundary":
        tracks = [(track.as_of, track.before, track.complete, track.slot if exact else 0) for track in holding.tracks]
        slots = holding.slots()
        ready = holding.ready, holding.accepted, holding.as_of, holding.steps_from
        return (*ready, getattr(holding, "arrived", 0), tracks, slots if exact else len(slots))
    table = holding.table.tolist()
    shape = table if exact else [slot >= 0 for slot in table]
    return holding.base, holding.owned, getattr(holding, "floor", 0), getattr(holding, "low", 0), shape


def look(cache: Any, sequences: Iterable[Any], leases: Iterable[Any], exact: bool = True) -> dict[str, Any]:
    """All that can be told of ``cache``. ``exact``: slots by number."""
    out: dict[str, Any] = {
        "stats": attrs.asdict(cache.stats()),
        "epoch": cache.core.index.epoch,
        "tree": tree(cache, exact),
    }
    for lane in cache.core.shape.all_lanes:
        mine = out[lane.name if lane in cache.core.shape.lanes else f"host {lane.name}"] = {}
        mine["order"] = orders(lane.queue, lambda cell: path(cell.node))
        if hasattr(lane, "slack"):
            mine["slack"] = orders(lane.slack, lambda slack: path(slack.cell.node))
        mine["counts"] = lane.in_tree, lane.leased, len(lane.surplus)
        for pool in lane.pools:
            mine[f"free {pool.name}"] = pool._free[: pool.at_hand].tolist() if exact else pool.at_hand
    for number, sequence in enumerate(sequences):
        lease = sequence.running
        told: dict[str, Any] = {
            name: getattr(sequence, name)
            for name in (
                "reserved",
                "committed",
                "published",
                "named",
                "ready",
                "branch",
                "open",
            )
        }
        told["steps"] = lease.high, lease.lost, lease.open_steps, lease.planned
        told["repr"] = repr(sequence)
        if sequence.open:
            told["key"] = bytes(
                sequence.running.names.key_between(0, max(0, sequence.named - cache.core.shape.lookahead))
            )
            told["publishable"] = sequence.publishable
            told["reached"] = None if sequence.running.reached is None else path(sequence.running.reached)
            told["at"] = path(lease.node), lease.fence, lease.row
            told["records"] = [covered(record) for record in lease.covers]
            told["held"] = [holding_of(lane, holding, exact) for lane, holding in sequence.running.pairs]
            told["fills"] = [(fill[0].name, fill[2], fill[3] if exact else 0) for fill in sequence.running.fills]
            told["pages"] = [len(sequence.pages(lane.name)) for lane in cache.core.shape.lanes]
        out[f"sequence {number}"] = told
    for number, lease in enumerate(leases):
        records = [covered(record) for record in lease.covers] if lease.active else None
        out[f"lease {number}"] = lease.active, lease.boundary, records
    return out
