"""Addresses: under which keys the pieces of a cache lie in a store, the same in every process.

A piece is a page of one component, or a state. Its key follows from all that the tree's key says up to the end of its
page of the tree (a chain of links, one per page) and from the fingerprint of its component. What hangs on an extra key
that has no lasting name has no address, and nor has what lies below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .keys import KeyMaker
from .lane import PageLane
from .storage import Fingerprint, Key, key, next_link
from .storage.keys import root_link
from .tree import Root

if TYPE_CHECKING:
    from .lane import Lane
    from .lane_host import HostLane
    from .tree import Node

Links = list[bytes]


def fingerprint(lane: Lane, page: int, identity: Mapping[str, Any]) -> Fingerprint:
    """Everything beside the tokens that decides what a record of this component means.

    ``identity`` is the caller's: ``model``, and where they apply ``weights`` and ``shards``, by axis.
    """
    part, manifest = lane.part, lane.pool.manifest
    component = type(part.component)
    shards = identity.get("shards", {}) if part.manifest.placement == "sharded" else {}
    return Fingerprint(
        model=str(identity["model"]),
        weights=str(identity.get("weights", "")),
        dtype=",".join(buffer.dtype for buffer in manifest.buffers),
        page_size=part.page_tokens or page,
        plugin=f"{component.__module__}.{component.__qualname__}",
        plugin_version=str(part.manifest.version),
        layout="record",
        shapes=[
            (f"{buffer.name} of layers {','.join(map(str, buffer.layers))}", (*buffer.shape, lane.pool.entries))
            for buffer in manifest.buffers
        ],
        layers=sorted({layer for buffer in manifest.buffers for layer in buffer.layers}),
        shards=shards,
    )


def chain(keys: KeyMaker, link: bytes | None, key_bytes: bytes, page_bytes: int) -> list[bytes | None]:
    """The links of the pages of ``key_bytes``, which follow after ``link``; None from where there is none."""
    found: list[bytes | None] = []
    for at in range(0, len(key_bytes), page_bytes):
        meaning = keys.meaning(key_bytes[at : at + page_bytes]) if link is not None else None
        link = None if meaning is None or link is None else next_link(link, *meaning)
        found.append(link)
    return found


def links_at(keys: KeyMaker, node: Node, page_bytes: int, count: int) -> list[bytes | None]:
    """The links of ``count`` or more pages of a node's edge, from its first, remembered there."""
    lacking: list[tuple[Any, int]] = [(node, count)]
    above: Any = node.parent
    while above.parent is not None and len(above.links or ()) * page_bytes < len(above.first) + len(above.rest):
        lacking.append((above, (len(above.first) + len(above.rest)) // page_bytes))
        above = above.parent
    if above.parent is None:
        assert isinstance(above, Root)
        link: bytes | None = root_link(above.namespace)
    else:
        link = above.links[-1]
    for each, pages in reversed(lacking):
        known = each.links = each.links or []
        key = each.key[len(known) * page_bytes : pages * page_bytes]
        known += chain(keys, known[-1] if known else link, key, page_bytes)
        link = known[-1]
    return node.links  # type: ignore[attr-defined, no-any-return]


def piece_key(host: HostLane, told: Fingerprint, link: bytes, start: int, end: int) -> Key:
    return key(link, host.device.name, start, end, told)


def spans_of(lane: Lane, boundary: int) -> Sequence[tuple[int, int]]:
    """The pieces that a resume at ``boundary`` needs of one component: (start, end), for its state both the same."""
    if not isinstance(lane, PageLane):
        return [(boundary, boundary)]
    page = lane.page
    return [(at, at + page) for low, high in lane.needs(boundary) for at in range(low, high, page)]
