"""Host tier: the tier of one cache in the host's memory, as the core sees it.

Each component that shares data has a host lane beside its own (``host_lane``), with a pool of the same slots. The
tier's manifest says when data is copied to the host: on publication, after some hits, or before the device evicts it.
``host_copies`` makes the copies, ``restore`` brings data back to the device, and ``store`` handles a store behind the
host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

from ..contract.composition import TierPart
from ..contract.tier_answers import Restored, TierStats
from ..operations.state import Core, Match, Running
from ..tree.lane import Lane
from ..tree.radix import Node, path_up
from ..tree.residency import Residency
from .host_copies import HostCopies
from .host_lane import HostLane
from .restore import restorable_at, restore
from .store import StoreBehind
from .store_reads import StoreReads
from .store_writes import StoreWrites


class LowerTier:
    """The tier below the device of one cache."""

    def __init__(self, core: Core, part: TierPart, lanes: tuple[HostLane, ...]) -> None:
        self.core = core
        self.copies = HostCopies(core, part, lanes)
        self.store = StoreBehind(core, self.copies, part.component)
        self.writes = StoreWrites(self.store)
        self.reads = StoreReads(self.store)
        self.copies.on_copied = self.writes.copied
        self._write = part.manifest.write
        self._counting = "selective" in (part.manifest.write, getattr(part.component, "keep", ""))

    # ------------------------------------------------------------ events
    def published(self, run: Many[Node]) -> None:
        if self._write == "through":
            self.copies.backup(run)

    def used(self, node: Node) -> None:
        if not self._counting:
            return
        due: list[Node] = []
        enough = self.copies.manifest.hits
        for each in path_up(node):
            hits = each.hits = each.hits + 1  # type: ignore[attr-defined]
            if hits >= enough:
                due.append(each)
        if due:
            if self._write == "selective":
                self.copies.backup(due[::-1])
            self.writes.used(due)

    def _taking(self, lane: Lane) -> HostLane | None:
        """Return the host lane that takes what the device frees of ``lane``, or None."""
        return None if self._write == "selective" else self.copies.by_component[lane.index]

    def demotes(self, lane: Lane) -> bool:
        return self._taking(lane) is not None

    def losing(self, lane: Lane, cells: Iterable[Any]) -> None:
        """Copy cells to the host, as far as it has room, before the device evicts them."""
        host = self._taking(lane)
        if host is not None:
            self.copies.backup([cell.node for cell in cells], (host,), defer=False)

    def gone(self, lane: Lane, nodes: list[Node]) -> list[Node]:
        host = self.copies.by_component[lane.index]
        if host is not None:
            nodes = [node for node in nodes if host.cell(node) is None]
        if lane.closed_upward or not lane.feeds:
            return nodes
        return [node for node in nodes if self.residency(lane).deepest(node, node.end)[1] < node.end]

    def divided(self, upper: Node, lower: Node) -> None:
        self.copies.divided(upper, lower)
        self.writes.divided(upper)

    def namespace_dropped(self, namespace: str) -> None:
        self.reads.forget(namespace)

    def flushed(self) -> None:
        self.copies.flushed()
        self.store.find_fingerprints()  # the tier's identity may be another one now: of new weights, say
        self.writes.flushed()
        self.reads.forget()

    def poll(self) -> None:
        self.copies.poll()
        self.store.poll()
        self.reads.poll()
        self.store.apply()
        self.writes.poll()
        self.copies.make_pending()

    # ------------------------------------------------------------ questions
    def restorable(self, match: Match, node: Node, boundary: int) -> None:
        match.below, match.restorable = restorable_at(self.copies, match, node, boundary)

    def residency(self, lane: Lane) -> Residency:
        return self.copies.residencies[lane.index]

    def restore(self, running: Running) -> Restored:
        """Restore what the host has, and start a fetch of what only a store may have."""
        restored = restore(self.copies, running)
        self.reads.begin(running, restored)
        return restored

    def stats(self) -> TierStats:
        copies = self.copies
        by_name = {lane.device.name: lane for lane in copies.lanes}
        return TierStats(
            copies.part.name,
            {name: lane.pool.capacity for name, lane in by_name.items()},
            {name: lane.in_tree for name, lane in by_name.items()},
            copies.backed_up, copies.dropped, copies.evicted,
            copies.restores, copies.restored_tokens, copies.fallbacks, copies.failed,
            self.writes.stored, self.writes.refused, copies.fetched, self.writes.outstanding,
        )  # fmt: skip
