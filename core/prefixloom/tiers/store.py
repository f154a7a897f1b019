"""Store: when the host tier of one cache offers data to a store, and when it looks for a prompt there.

A store may be attached and detached while the cache runs. ``store_writes`` makes the writes, ``store_reads`` the reads.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from ..contract.tier_answers import Restored
from ..operations.state import Core, Running
from ..tree.radix import Node
from .host_copies import HostCopies
from .host_lane import HostLane
from .store_link import StoreLink, TierWithStore
from .store_reads import StoreReads
from .store_writes import PER_POLL, StoreWrites


class StoreBehind:
    """The store behind the host tier of one cache, or the place for one."""

    def __init__(self, core: Core, copies: HostCopies, component: TierWithStore) -> None:
        self.link = StoreLink(core, copies, component)
        self.writes = StoreWrites(self.link)
        self.reads = StoreReads(self.link)
        self._component = component
        self._lanes = copies.lanes
        self.unseen: list[tuple[Node, bool]] = []
        """The nodes from before the store was attached; and whether all nodes below are from before, too."""
        self._agreed: dict[int, int] = {}

    # ------------------------------------------------------------ coming and going
    def poll(self) -> None:
        """Apply what is done on all ranks, and go on with reads and writes."""
        self._attach_new()
        if self.link.store is not None:
            self.link.store.poll()
        self.reads.poll()
        self._agreed.update(self.link.completions.poll())
        while self._agreed:  # if one raises, the others wait for the next poll
            ticket = next(iter(self._agreed))
            amount = self._agreed.pop(ticket)
            if not self.writes.advance(ticket):
                self.reads.advance(ticket, amount)
        self._offer_unseen()
        self.writes.poll()

    def _attach_new(self) -> None:
        """Attach or detach a store if the tier has another one than at the last call."""
        store = self._component.store
        if store is self.link.store:
            return
        self.link.attach(store)
        self.unseen = []
        if store is not None and self._component.keep == "through":
            roots = self.link.core.index.tree.roots.values()
            self.unseen = [(node, True) for root in roots for node in root.children]
        for lane in self._lanes:
            lane.going = self.writes.rescue if self._component.keep == "back" else None

    @property
    def outstanding(self) -> int:
        """How much of what is to be written was not answered for by the store: nodes, and pieces of calls."""
        if self.link.store is None:
            return 0
        return len(self.unseen) + len(self.link.copies.pending) + self.writes.outstanding

    def _offer_unseen(self) -> None:
        """Offer a few of the nodes from before the store was attached."""
        for _ in range(min(PER_POLL, len(self.unseen))):
            node, deep = self.unseen.pop()
            if deep:
                self.unseen.extend((kid, True) for kid in node.children)
            self._offer(node)

    def _offer(self, node: Node) -> None:
        for lane in self._lanes:
            if lane.cell(node) is not None:
                self.writes.offer(lane, node)

    def divided(self, upper: Node) -> None:
        """Note that a node was split. Its upper half is a new node; the lower half is the one that is known."""
        if self.unseen:
            self.unseen.append((upper, False))

    def flushed(self) -> None:
        """Start anew after a flush, with the tier's present identity (of new weights, say)."""
        self.link.find_fingerprints()
        self.writes.flushed()
        self.unseen = []
        self.forget()

    def forget(self, namespace: str | None = None) -> None:
        """Give up the fetches of one namespace or of all."""
        self.reads.forget(namespace)

    # ------------------------------------------------------------ offers and fetches
    def copied(self, lane: HostLane, node: Node) -> None:
        """Offer data that the host has, or is about to have, at ``node``."""
        if self.link.store is not None and self._component.keep == "through":
            self.writes.offer(lane, node)

    def used(self, nodes: Many[Node]) -> None:
        """Offer nodes that were hit often enough."""
        if self.link.store is not None and self._component.keep == "selective":
            for node in nodes:
                self._offer(node)

    def fetch(self, running: Running, restored: Restored) -> None:
        """Look in the store for more of a sequence's prompt than the cache has; the result goes to ``restored``."""
        self._attach_new()
        if self.link.store is not None:
            self.reads.begin(running, restored)
