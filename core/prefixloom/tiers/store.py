"""Shelf: the store behind the host tier of one cache. It may come and go while the cache runs.

Everything that a store does is a ticket, and what follows from it happens at a poll, once all ranks know that it is
done (``consensus``). Tickets are numbered as they are asked for, so the same one is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..storage import Backend, Fingerprint, Reason
from .consensus import Completions, Consensus, LocalConsensus
from .pieces import Spares, fingerprint
from .store_reads import Fetch
from .store_writes import PER_POLL, Storing

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence as Running
    from ..device.flight import Work
    from ..tree.radix import Node
    from .host_lane import HostLane
    from .host_tier import LowerTier
    from .restore import Restored

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
    keep: Literal["through", "selective", "back"]
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
        self.completions = Completions(self.consensus)
        self.spares = Spares()
        self.storing = Storing(self)
        self.fetches: dict[int, Fetch] = {}
        self.reading: list[Fetch] = []
        self.attached = 0  # the number of the store, counted as they come
        self.unseen: list[tuple[Node, bool]] = []  # what was there before it came; and whether all below it was, too
        self.agreed: dict[int, int] = {}

    # ------------------------------------------------------------ coming and going
    def poll(self) -> None:
        """Apply what is done on all ranks, and go on."""
        self._notice()
        if self.store is not None:
            self.store.poll()
        for fetch in list(self.fetches.values()):
            fetch.poll()
        self.agreed.update(self.completions.poll())
        while self.agreed:  # what raises leaves the others for the next poll
            ticket = next(iter(self.agreed))
            amount = self.agreed.pop(ticket)
            if not self.storing.advance(ticket):
                self.fetches.pop(ticket).advance(amount)
        self._backfill()
        self.storing.poll()

    def _notice(self) -> None:
        """A store may have come or gone since somebody looked."""
        store = self.component.store
        if store is self.store:
            return
        self.store = store
        self.attached += 1
        self.unseen = []
        if store is not None:
            self._tell_apart()
            if self.component.keep == "through":
                roots = self.cache._tree.roots.values()
                self.unseen = [(node, True) for root in roots for node in root.children]
        for lane in self.tier.lanes:
            lane.going = self.storing.rescue if store is not None and self.component.keep == "back" else None

    def _tell_apart(self) -> None:
        self.fingerprints = {
            lane.index: fingerprint(lane.device, self.cache._page, self.component.identity) for lane in self.tier.lanes
        }

    def _backfill(self) -> None:
        """This store has nothing of what came to the host while it was not there: offer that, some nodes at a poll."""
        for _ in range(min(PER_POLL, len(self.unseen))):
            node, deep = self.unseen.pop()
            if deep:
                self.unseen.extend((kid, True) for kid in node.children)
            for lane in self.tier.lanes:
                if node.cells[lane.index] is not None:
                    self.storing.offer(lane, node)

    def divided(self, upper: Node) -> None:
        """A node was split. The lower half is the one that is known, if it was seen by then."""
        if self.unseen:
            self.unseen.append((upper, False))

    def flushed(self) -> None:
        """From now on what is stored and fetched is of ``identity`` as it is by now: of new weights, say."""
        if self.store is not None:
            self._tell_apart()
        self.storing.flushed()
        self.unseen = []
        self.forget()

    def forget(self, namespace: str | None = None) -> None:
        """What is being fetched, of one namespace or of all, is nobody's."""
        for fetch in self.fetches.values():
            if namespace is None or fetch.plan.namespace == namespace:
                fetch.forget()

    # ------------------------------------------------------------ what it is asked
    def copied(self, lane: HostLane, node: Node) -> None:
        """The host has, or is about to have, something at ``node`` that it had not."""
        if self.store is not None and self.component.keep == "through":
            self.storing.offer(lane, node)

    def used(self, nodes: Sequence[Node]) -> None:
        """These were hit often enough to be copied down."""
        if self.store is not None and self.component.keep == "selective":
            for node in nodes:
                for lane in self.tier.lanes:
                    if node.cells[lane.index] is not None:
                        self.storing.offer(lane, node)

    def copies_to(self, lane: HostLane, node: Node) -> list[Work]:
        """The copies in flight, oldest first, that have yet to write some of what the host has at ``node``."""
        flight = self.cache._flight
        numbers = {each.number for each in flight.nodes.get(node, ()) for other, _ in each.slots if other is lane}
        return [work for work in flight.works if work.number in numbers and work.event is not None]

    def fetch(self, sequence: Running, told: Restored) -> None:
        """Look for more of a sequence's prompt than the cache has; ``told`` hears of it."""
        self._notice()
        if self.store is not None:
            Fetch.begin(self, sequence, told)
