"""Fleet simulation: R replicas in one virtual time, a router before them, and what goes wrong.

What happens next is the earliest of: an event of a replica, a replica that dies or joins, and the next request of the
trace. At equal times they come in this order. So equal inputs give equal outcomes, whatever the policy.

A replica's cache is composed when the first request is sent there.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from prefixloom import Cache, InputError, PageChain, ProtocolError, SequenceNeeds
from prefixloom.lab import LabRequest, SeenPrefixes, Setup
from prefixloom.lab.replay import Active
from prefixloom.lab.setup import outcomes_of

from ..routing import RoutingPolicy, RoutingRequest, find_policy
from .fleet_outcome import FleetOutcome, ReplicaFigures, rounded_wait
from .member import Depths, Member
from .outages import Outage, check_outages
from .prefix_index import PrefixIndex
from .repeated import RepeatedTrace
from .replica import SimulatedReplica
from .shared_store import BytesOfBoundaries, SharedStore, StoreSpeed


@attrs.frozen
class FleetSetup:
    """A fleet, as plain data, so that another process can make the same.

    ``setup``     of each replica
    ``replicas``  how many there are, and ``routing`` the policy of the router
    ``late``      seconds until the router hears what a replica has cached; None: it never does
    ``lies``      replicas, counted from 0, that say they have every prompt
    ``outages``   replicas that die
    ``store``     a store behind all replicas; None: there is none
    """

    setup: Setup
    replicas: int
    routing: str
    late: float | None = 0.0
    lies: tuple[int, ...] = ()
    outages: tuple[Outage, ...] = ()
    store: StoreSpeed | None = None

    def __attrs_post_init__(self) -> None:
        if self.replicas.__class__ is not int or self.replicas < 1:
            raise InputError(f"replicas are a whole number from 1 up, got {self.replicas!r}")
        if self.setup.service is None:
            raise InputError("replicas serve requests that overlap in time: a fleet needs a service")
        if self.late is not None and not 0 <= self.late < math.inf:
            raise InputError(f"a router hears of caches after 0 seconds or more, or never; got {self.late!r}")
        for each in self.lies:
            if not 0 <= each < self.replicas:
                raise InputError(f"replica {each} cannot lie: there are {self.replicas}, counted from 0")
        check_outages(self.outages, self.replicas)
        find_policy(self.routing)


class Fleet:
    """One simulation while it goes on. ``policy``: instead of the one that the setup names."""

    def __init__(
        self, setup: FleetSetup, trace: str, policy: RoutingPolicy | None = None,
        told: Callable[[int, float], None] | None = None,
    ) -> None:  # fmt: skip
        assert setup.setup.service is not None
        self._setup, self._service, self._trace, self._told = setup, setup.setup.service, trace, told
        self._spare: Cache | None = setup.setup.compose()
        """A composed cache for the first replica. What all have in common is read of it."""
        self._composition = self._spare.composition
        self._page = self._composition.page
        self._chain = PageChain(self._page, self._composition.lookahead)
        self._policy = policy or find_policy(setup.routing, follows=setup.late is not None)
        self._index: PrefixIndex | None = None
        """Made when a policy first asks, since following all caches takes as long as the rest."""
        sizes = BytesOfBoundaries(self._spare)
        self.needs = SequenceNeeds.of(self._composition, setup.setup.chunk)
        self._bytes = sum(each.capacity * each.page_bytes for each in self._spare.stats().components.values())
        self._store = None if setup.store is None else SharedStore(setup.store, sizes, self._page)
        self._seen = SeenPrefixes(self._page)
        self.now = 0.0
        self._first: float | None = None
        self._members: dict[int, Member] = {}
        """By place, the replicas that are there."""
        self._all: list[Member] = []
        self._of: dict[int, Member] = {}
        """By number of a request that is not answered, the replica that it was sent to."""
        self._links: dict[int, Sequence[int]] = {}
        self._held: deque[tuple[LabRequest, int, int | None]] = deque()
        """Requests that no replica is there for, with their numbers and ideals."""
        self._events: list[tuple[float, int, Member]] = []
        self._changes: list[tuple[float, int, int]] = []
        """Of the fleet: (when, a number that orders those of one time, place). It dies at even numbers, and joins."""
        self._asked: tuple[RoutingRequest | None, Depths] = (None, ({}, {}))
        self._waits: Counter[int] = Counter()
        self._resent = self._done = 0
        for number, each in enumerate(check_outages(setup.outages, setup.replicas)):
            self._changes.append((each.at, 2 * number, each.replica))
            if each.until < math.inf:
                self._changes.append((each.until, 2 * number + 1, each.replica))
        heapq.heapify(self._changes)
        for place in range(setup.replicas):
            self._join(place)

    # ------------------------------------------------------------ running
    def run(self, requests: Iterable[LabRequest]) -> FleetOutcome:
        """Serve a trace. An interrupt leaves what was measured; nothing stays open."""
        begun, complete = time.process_time(), False
        try:
            for number, request in enumerate(requests):
                if self._first is None:
                    self._first = request.at
                self._advance_to(request.at)
                self.now = max(self.now, request.at)
                self._route(request, number, None)
            self._advance_to(math.inf)
            complete = True
        except KeyboardInterrupt:
            pass
        finally:
            for member in self._members.values():
                if member.replica is not None:
                    member.replica.abandon()
        return self._outcome(time.process_time() - begun, complete)

    def _advance_to(self, until: float) -> None:
        """Let everything happen up to a time, in its order."""
        events, changes = self._events, self._changes
        while True:
            while events and events[0][2].due != events[0][0]:
                heapq.heappop(events)  # it happens at another time by now
            next_event = events[0][0] if events else math.inf
            next_change = changes[0][0] if changes else math.inf
            if not events and not self._held and until == math.inf:
                return  # who dies or joins now changes nothing
            if min(next_event, next_change) > until or min(next_event, next_change) == math.inf:
                return
            if next_event <= next_change:
                at, _, member = heapq.heappop(events)
                self.now = max(self.now, at)
                member.due = math.inf
                assert member.replica is not None
                member.replica.advance()
                self._reschedule(member)
            else:
                at, change, place = heapq.heappop(changes)
                self.now = max(self.now, at)
                self._join(place) if change % 2 else self._die(place)

    def _reschedule(self, member: Member) -> None:
        """Plan anew a replica's next event after something happened at the replica."""
        assert member.replica is not None
        if self._index is not None:
            self._index.poll(member.number, self.now)
        due = member.replica.due()
        if due != member.due:
            member.due = due
            if due < math.inf:
                heapq.heappush(self._events, (due, member.number, member))

    # ------------------------------------------------------------ the router
    def _route(self, request: LabRequest, number: int, ideal: int | None) -> None:
        """Send a request to the best replica. ``ideal``: it was sent before, and that is its ideal."""
        if not self._members:
            self._held.append((request, number, ideal))
            return
        asked = self._described(request)
        ordered = self._policy.order(asked, list(self._members.values()))
        if not ordered:
            raise ProtocolError(f"the routing policy {self._policy!r} names no replica")
        member = next(each for each in self._members.values() if each is ordered[0])
        replica = self._made(member)
        if ideal is None:
            active = replica.arrive(request, number, self._seen)
            if active is None:
                self._count_one()
                return
        else:
            active = Active(request, number, ideal)
        promised = 0 if self._index is None else member.resumable(asked)
        member.sent(active.number, request.prompt.count, promised)
        self._of[active.number] = member
        self._links[active.number] = asked.links
        replica.submit(active, self.now)
        self._reschedule(member)

    def _described(self, request: LabRequest) -> RoutingRequest:
        prompt = request.prompt
        links = self._chain.numbers(prompt.tokens(), request.namespace)
        return RoutingRequest(
            prompt, prompt.count, request.output, request.namespace, request.session, links, self._page
        )

    def depths(self, request: RoutingRequest) -> Depths:
        """Return the known prefixes of a request, in tokens by replica."""
        if self._setup.late is None:
            return {}, {}
        if self._index is None:
            self._index = PrefixIndex(self._setup.late)
            for each in self._members.values():
                if each.cache is not None:
                    self._index.follow(each.number, each.cache)
                    self._index.poll(each.number, self.now)
        if self._asked[0] is not request:
            has, resumes = self._index.depths(request.links, self.now)
            page = self._page
            self._asked = (
                request,
                ({n: at * page for n, at in has.items()}, {n: at * page for n, at in resumes.items()}),
            )
        return self._asked[1]

    # ------------------------------------------------------------ what replicas tell
    def computed(self, active: Active) -> None:
        self._of[active.number].left(active.number, max(0, active.request.prompt.count - active.launched))

    def over(self, active: Active, answered: bool) -> None:
        self._of.pop(active.number).over(active.number, active.hit if answered else None)
        del self._links[active.number]
        if answered:
            self._waits[rounded_wait(active.first - active.request.at)] += 1
        self._count_one()

    def links(self, active: Active) -> Sequence[int]:
        return self._links[active.number]

    def _count_one(self) -> None:
        self._done += 1
        if self._told is not None:
            self._told(self._done, self.now)

    # ------------------------------------------------------------ joining and dying
    def _join(self, place: int) -> None:
        number = len(self._all)
        again = sum(each.place == place for each in self._all)
        name = f"replica {place}" + (f", joined again ({again})" if again else "")
        begun = self.now - (self._first or 0.0)
        member = Member(name, number, place, begun, place in self._setup.lies, self)
        self._members[place] = member
        self._all.append(member)
        held, self._held = self._held, deque()
        for each in held:
            self._route(*each)

    def _made(self, member: Member) -> SimulatedReplica:
        if member.replica is None:
            cache, self._spare = self._spare or self._setup.setup.compose(), None
            member.cache = cache
            member.replica = SimulatedReplica(self._setup.setup, cache, self._service, self, self._store, self._trace)
            if self._index is not None:
                self._index.follow(member.number, cache)
        return member.replica

    def _die(self, place: int) -> None:
        """Drop a replica with its whole cache, and send again the requests that it had not answered."""
        member = self._members.pop(place)
        member.died, member.due = self.now - (self._first or 0.0), math.inf
        if self._index is not None:
            self._index.drop(member.number)
        if member.replica is None:
            return
        for active in member.replica.abandon():
            member.lost += active.computed
            del self._of[active.number], self._links[active.number]
            self._resent += 1
            self._route(active.request, active.number, active.ideal)

    # ------------------------------------------------------------ telling
    def _outcome(self, cpu: float, complete: bool) -> FleetOutcome:
        outcomes = [None if each.replica is None else each.replica.outcome() for each in self._all]
        return FleetOutcome(
            trace=self._trace,
            model=self._composition.name,
            routing=self._setup.routing,
            places=self._setup.replicas,
            bytes=self._bytes,
            replicas=tuple(
                ReplicaFigures(
                    each.name, each.place, each.begun, each.died, each.lost,
                    None if outcome is None else attrs.evolve(outcome, memory=(), cpu=0.0),
                )
                for each, outcome in zip(self._all, outcomes, strict=True)
            ),
            unanswered=len(self._held),
            resent=self._resent,
            waits=dict(self._waits),
            read=0 if self._store is None else self._store.read,
            written=0 if self._store is None else self._store.written,
            prefill=self._service.prefill,
            span=self.now - (self._first or 0.0),
            cpu=cpu,
            complete=complete,
        )  # fmt: skip


def simulate(
    setup: FleetSetup,
    trace: RepeatedTrace,
    *,
    policy: RoutingPolicy | None = None,
    told: Callable[[int, float], None] | None = None,
) -> FleetOutcome:
    """Serve a trace with a fleet.

    ``policy``  a policy of one's own, instead of the one that the setup names
    ``told``    is called after each request that is done, with their number and the virtual time
    """
    return Fleet(setup, trace.name, policy, told).run(trace)


def simulate_all(
    setups: Sequence[tuple[FleetSetup, RepeatedTrace]],
    *,
    jobs: int = 1,
    told: Callable[[int, FleetOutcome], None] | None = None,
) -> list[FleetOutcome]:
    """Return the outcomes of all fleets, each on its trace, in their order, in ``jobs`` processes.

    ``told`` is called with the number of each fleet and its outcome when it is done. An interrupt ends all.
    """

    def done(number: int, outcome: FleetOutcome) -> None:
        if told is not None:
            told(number, outcome)
        if not outcome.complete:
            raise KeyboardInterrupt

    return outcomes_of(simulate, setups, jobs=jobs, told=done)
