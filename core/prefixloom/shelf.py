"""Shelf: the store behind the host tier of one cache. It may come and go while the cache runs.

Everything that a store does is a ticket, and what follows from it happens at a poll, once all ranks know that it is
done (``consensus``). Tickets are numbered as they are asked for, so the same one is the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .addresses import fingerprint
from .consensus import Consensus, LocalConsensus
from .fetching import Fetch
from .storage import Backend, Fingerprint, Reason
from .storing import Storing

if TYPE_CHECKING:
    from .cache import Cache
    from .lane_host import HostLane
    from .restore import Restored
    from .sequence import Sequence
    from .tier import LowerTier
    from .tree import Node

Answers = tuple[Any, ...]


class Call(Protocol):
    """Something that was asked of a store. ``answers`` is None until it is ``over``."""

    @property
    def over(self) -> bool: ...

    @property
    def answers(self) -> Answers | None: ...


class Store(Protocol):
    """A backend behind guards: whatever is asked comes back at once, and nobody waits for it or dies of it."""

    def ask(
        self,
        run: Callable[[Backend], Answers],
        instead: Callable[[Reason, str], Answers],
        *,
        writes: bool = False,
        size: int = 0,
        released: Callable[[], None] | None = None,
    ) -> Call:
        """Have ``run`` talk to the backend on a thread of the store's; ``instead`` answers where it cannot, or raises.

        ``released`` is called once when ``run`` touches nothing any more, from any thread.
        """

    def poll(self) -> None: ...


class Shelved(Protocol):
    """What a tier with a store says: ``store`` is None while there is none. ``identity`` is the caller's part of the
    fingerprint: the model, and where they apply its weights and the ranks' shards.
    """

    store: Store | None
    identity: Mapping[str, Any]
    consensus: Consensus
    fetch: Literal["best_effort", "wait", "timeout"]
    fetch_at_least: int

    def patience(self, pages: int) -> float:
        """Seconds that a fetch of so many pages may take where ``fetch`` is "timeout"."""

    def now(self) -> float: ...


class Shelf:
    """One per cache whose tier can have a store."""

    def __init__(self, cache: Cache, tier: LowerTier, component: Shelved) -> None:
        self.cache = cache
        self.tier = tier
        self.component = component
        self.fingerprints: dict[int, Fingerprint] = {}
        self.consensus = getattr(component, "consensus", None) or LocalConsensus()
        self.store: Store | None = None
        self.done: deque[tuple[int, int]] = deque()  # said by the store's threads, too
        self._told: dict[int, int] = {}
        self._tickets = 0
        self.storing = Storing(self)
        self.fetches: dict[int, Fetch] = {}

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    # ------------------------------------------------------------ coming and going
    def poll(self) -> None:
        """Apply what is done on all ranks, and go on."""
        store = self.component.store
        if store is not self.store:
            self.store = store
            if store is not None:
                self.fingerprints = {
                    lane.index: fingerprint(lane.device, self.cache._page, self.component.identity)
                    for lane in self.tier.lanes
                }
                self._backfill()
        if store is not None:
            store.poll()
        for fetch in list(self.fetches.values()):
            fetch.poll()
        while self.done:
            ticket, amount = self.done.popleft()
            self._told[ticket] = amount
        if self._told or self._tickets:
            for ticket, amount in self.consensus.agree(self._told).items():
                del self._told[ticket]
                if not self.storing.advance(ticket, amount):
                    fetch = self.fetches.pop(ticket)
                    fetch.advance(amount)
        self.storing.poll()

    def _backfill(self) -> None:
        """What came to the host while no store was there."""
        for root in self.cache._tree.roots.values():
            stack: list[Node] = list((root.kids or {}).values())
            while stack:
                node = stack.pop()
                stack.extend((node.kids or {}).values())
                for lane in self.tier.lanes:
                    if node.cells[lane.index] is not None:
                        node.cells[lane.index].stored = False
                        self.storing.offer(lane, node)

    def flushed(self) -> None:
        self.storing.flushed()
        for fetch in self.fetches.values():
            fetch.forget()

    # ------------------------------------------------------------ what it is asked
    def copied(self, lane: HostLane, node: Node) -> None:
        """The host has, or is about to have, something at ``node`` that it had not."""
        if self.store is not None:
            self.storing.offer(lane, node)

    def arriving(self, lane: HostLane, node: Node) -> bool:
        """Whether a copy that is not over has yet to write some of it."""
        return any(lane is other for each in self.cache._flight.nodes.get(node, ()) for other, _ in each.slots)

    def fetch(self, sequence: Sequence, told: Restored) -> None:
        """Look for more of a sequence's prompt than the cache has; ``told`` hears of it."""
        if self.store is not None:
            Fetch.begin(self, sequence, told)
