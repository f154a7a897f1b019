"""Store link: the connection of a host tier to a store, shared by reads and writes.

A store may be attached and detached while the cache runs. Every call to it has a ticket, and its result takes effect at
a poll, once all ranks know that the call is done (``consensus``). Tickets are numbered in the order of the calls, so a
ticket has the same number on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from ..contract.identity import Identity
from ..device.flight import Work
from ..device.timeline import Kind
from ..keys.pages import PageChain
from ..operations.state import Core, Hold
from ..storage import Backend, Fingerprint, Reason
from ..tree.radix import Node
from .consensus import Completions, Consensus, LocalConsensus
from .host_copies import HostCopies, amounts
from .host_lane import HostLane
from .pieces import Spares, fingerprint

Answers = tuple[Any, ...]


class PendingCall(Protocol):
    """A call to a store. ``answers`` is None until it is ``over``."""

    @property
    def over(self) -> bool: ...

    @property
    def answers(self) -> Answers | None: ...


class GuardedStore(Protocol):
    """A backend behind guards: a call returns at once, never waits for the backend, and never raises its errors."""

    def ask(
        self,
        run: Callable[[Backend], Answers],
        instead: Callable[[Reason, str], Answers],
        *,
        writes: bool = False,
        size: int = 0,
        released: Callable[[], None] | None = None,
    ) -> PendingCall:
        """Run ``run`` with the backend on a thread of the store. ``instead`` gives the answers if that fails.

        ``released`` is called once, from any thread, when ``run`` uses nothing of the caller any more.
        """

    def poll(self) -> None: ...


class TierWithStore(Protocol):
    """A tier component that can have a store. ``store`` is None while there is none.

    ``identity`` is what its records belong to.
    """

    store: GuardedStore | None
    identity: Identity
    consensus: Consensus
    keep: Literal["through", "selective", "back"]
    fetch: Literal["best_effort", "wait", "timeout"]
    fetch_at_least: int

    def patience(self, pages: int) -> float:
        """The seconds that a fetch of so many pages may take, if ``fetch`` is "timeout"."""

    def now(self) -> float: ...


class StoreLink:
    """The link of one cache to its store. ``attached`` is the number of the store, in the order of their coming."""

    def __init__(self, core: Core, copies: HostCopies, component: TierWithStore) -> None:
        self.core = core
        self.copies = copies
        self.component = component
        self.consensus: Consensus = getattr(component, "consensus", None) or LocalConsensus()
        self.store: GuardedStore | None = None
        self.attached = 0
        self.fingerprints: dict[int, Fingerprint] = {}
        self.completions = Completions(self.consensus)
        self.spares = Spares()
        self.chain = PageChain(core.shape.page, core.shape.lookahead)

    def attach(self, store: GuardedStore | None) -> None:
        """Replace the store by ``store``; None: there is none any more."""
        self.store = store
        self.attached += 1
        self.find_fingerprints()

    def find_fingerprints(self) -> None:
        """Compute the components' fingerprints from the tier's present identity."""
        if self.store is not None:
            page, identity = self.core.shape.page, self.component.identity
            self.fingerprints = {lane.index: fingerprint(lane.device, page, identity) for lane in self.copies.lanes}

    def timed(
        self, kind: Kind, work: Callable[[Backend], Answers], lanes: Iterable[HostLane] = ()
    ) -> Callable[[Backend], Answers]:
        """``work`` for a thread of the store, timed if a timeline follows. ``lanes``: the host lane of each piece."""
        times = self.core.flight.times
        return work if times is None else times.call(kind, work, *amounts((lane, (0,)) for lane in lanes))

    def copies_to(self, lane: HostLane, node: Node) -> list[Work[Hold]]:
        """The copies in flight, oldest first, that still have to write data of the host at ``node``."""
        unwritten, flight = self.core.unwritten, self.core.flight
        writing = {each.work for each in unwritten.nodes.get(node, ()) for other, _ in each.slots if other is lane}
        return [work for work in flight.works if work in writing and work.event is not None]
