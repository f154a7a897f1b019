"""Store: the store behind the host tier of one cache, as its reads and its writes see it.

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
from .pieces import Spares, fingerprint, said

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
        """Return the seconds that a fetch of so many pages may take, if ``fetch`` is "timeout"."""

    def now(self) -> float: ...


class StoreBehind:
    """The store of one cache, or the place for one. ``attached`` is its number, in the order of their coming.

    If the component of the tier cannot have a store, there is never one.
    """

    def __init__(self, core: Core, copies: HostCopies, component: TierWithStore) -> None:
        self.core = core
        self.copies = copies
        self.component = component
        self.store: GuardedStore | None = None
        self.attached = 0
        self.fingerprints: dict[int, Fingerprint] = {}
        self.consensus: Consensus = getattr(component, "consensus", None) or LocalConsensus()
        self.completions = Completions(self.consensus)
        self.follows: dict[int, Callable[[int], None]] = {}
        """What to do with the amount of each open ticket, after all ranks have agreed on it."""
        self.spares = Spares()
        self.chain = PageChain(core.shape.page, core.shape.lookahead)
        self._agreed: dict[int, int] = {}

    def find(self) -> bool:
        """Attach or detach a store if the tier has another one than at the last call. Return whether there is one."""
        store = getattr(self.component, "store", None)
        if store is not self.store:
            self.store = store
            self.attached += 1
            self.find_fingerprints()
        return store is not None

    def poll(self) -> None:
        if self.find():
            assert self.store is not None
            self.store.poll()

    def find_fingerprints(self) -> None:
        """Compute the components' fingerprints from the tier's present identity."""
        if self.store is not None:
            page, identity = self.core.shape.page, self.component.identity
            self.fingerprints = {lane.index: fingerprint(lane.device, page, identity) for lane in self.copies.lanes}

    def open(self, follow: Callable[[int], None]) -> int:
        """Return a new ticket. ``follow`` is called at a poll, with the amount on which all ranks have agreed."""
        ticket = self.completions.open()
        self.follows[ticket] = follow
        return ticket

    def apply(self) -> None:
        """Apply what is done on all ranks."""
        self._agreed.update(self.completions.poll())
        while self._agreed:  # if one raises, the others wait for the next poll
            ticket = next(iter(self._agreed))
            self.follows.pop(ticket)(self._agreed.pop(ticket))

    def ask(
        self,
        store: GuardedStore,
        kind: Kind,
        work: Callable[[Backend], Answers],
        instead: Callable[[str], Answers],
        lanes: Iterable[HostLane] = (),
        released: Callable[[], None] | None = None,
    ) -> PendingCall:
        """Call a store, timed if a timeline follows. ``lanes`` has the host lane of each piece.

        ``instead`` makes the answers from the reason for which the store fails.
        """
        pages, size = amounts((lane, (0,)) for lane in lanes)
        times = self.core.flight.times
        return store.ask(
            work if times is None else times.call(kind, work, pages, size),
            lambda reason, detail: instead(said(reason, detail)),
            writes=kind == "write", size=size, released=released,
        )  # fmt: skip

    def copies_to(self, lane: HostLane, node: Node) -> list[Work[Hold]]:
        """Return the copies in flight, oldest first, that still have to write data of the host at ``node``."""
        unwritten, flight = self.core.unwritten, self.core.flight
        writing = {each.work for each in unwritten.nodes.get(node, ()) for other, _ in each.slots if other is lane}
        return [work for work in flight.works if work in writing and work.event is not None]
