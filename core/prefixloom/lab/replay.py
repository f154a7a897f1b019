"""Replay: drives a composed cache with the requests of a trace, as an engine would.

For each request the driver does what the reference engine does: it matches, opens, restores from below, and computes
the prompt in chunks that end where a state is useful, each published when it is launched; then it decodes and closes.
No layer runs, and on the device "meta" no pool has bytes. The time is virtual: that of the ``Service``, or of the
arrivals where requests run one after the other.

The driver knows the public verbs of a cache and nothing behind them.
"""

from __future__ import annotations

import heapq
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import attrs

from ..cache.cache import Cache
from ..cache.match_plan import MatchPlan
from ..cache.sequence import Sequence
from ..errors import CapacityError, InputError
from ..insight.explanation import Explanation
from ..keys.tokens import Tokens, encode
from .outcome import COUNTED, GONE, NEW, ROUNDED, PoolUse, ReplayOutcome, Tally
from .seen import SeenPrefixes
from .service import Service
from .traces.requests import BASE, LabRequest

Outputs = Literal["running", "published"]
STRIDE = 128
"""So many tokens are decoded between two looks at a request whose answer is not published."""
CHUNK = 2048
"""The tokens of a step where requests run one after the other, unless something else is said."""
CLOSELY = 64
"""One of so many requests is looked at closely: how deep each component alone could have resumed."""


@attrs.define(eq=False)
class Active:
    """A request that was taken from the trace and is not done.

    ``named``    the tokens it is opened with: the prompt, and what it has decoded if answers are published
    ``launched`` tokens whose slots are reserved, and that count as computed
    ``end``      where its prompt ends, with what it had decoded when it was retracted
    ``first``    when the first token of its answer came; -1: not yet
    """

    request: LabRequest
    number: int
    ideal: int
    sequence: Any = None
    tokens: Tokens = attrs.field(factory=Tokens)
    named: Tokens = attrs.field(factory=Tokens)
    launched: int = 0
    end: int = 0
    decoded: int = 0
    computed: int = 0
    event: int = 0
    hit: int = -1
    restored: int = -1
    walked: int = -1
    first: float = -1.0
    limited_by: str | None = None
    alone: Mapping[str, int] | None = None


@attrs.frozen
class PoolFigures:
    """A pool of a side, in pages: what it has cached, what running requests hold, and what it has ever evicted.

    ``page_tokens`` is 0 where a page has no fixed number of tokens: a state, or a shared block. ``rest_bytes`` are the
    bytes of a page that is cached, where they differ.
    """

    capacity: int
    page_tokens: int
    page_bytes: int
    cached: int = 0
    running: int = 0
    evicted: int = 0
    rest_bytes: int = 0


class Serving(ABC):
    """Serves the requests of a trace in virtual time, and sums up: what every side of a comparison has in common.

    ``run`` serves a trace. Whoever drives several of them in one time, submits requests and advances each one event by
    event instead.

    A subclass says how its cache opens, computes and decodes a request, and when a prompt has room. What a request
    holds of the cache is its ``sequence``, which can be closed or aborted.

    ``page``     what the ideal is rounded to, in tokens
    ``grain``    what a hit of this cache is a multiple of
    ``chunk``    the most tokens of a prompt that one step computes
    ``stride``   tokens that are decoded between two looks at a request
    ``leave``    so many tokens of a prompt are computed at least: an engine needs the last one's logits
    ``names``    of the trace, the model and the policy, as the outcome has them
    """

    def __init__(
        self, *, page: int, grain: int, chunk: int, stride: int, service: Service | None,
        told: Callable[[int, float], None] | None, names: tuple[str, str, str], leave: int = 1,
    ) -> None:  # fmt: skip
        self._service, self._told, self._names, self._leave = service, told, names, leave
        self._page, self._grain, self._chunk, self._stride = page, grain, chunk, stride
        self._stateful = self._expires = False
        self._before: Mapping[str, PoolFigures] = {}
        """The pools before the first request, which a subclass notes."""
        self._publishes = False  # answers
        self._seen = SeenPrefixes(page)
        self._tally = Tally()
        self._first: float | None = None
        self._now = 0.0
        self._cpu = 0.0
        self._events = 0
        self._complete = True
        self._waiting: deque[Active] = deque()
        self._alive: dict[int, Active] = {}
        """Requests that run, by their numbers."""
        self._retracted: list[tuple[int, Active]] = []
        self._decoding: list[tuple[float, int, Active]] = []
        self._prefilling: Active | None = None
        self._free_at = 0.0
        """When the next chunk can begin."""
        self._blocked = False
        """There was no room: nothing is admitted before a request ends."""

    @abstractmethod
    def _pools(self) -> Mapping[str, PoolFigures]:
        """Return the figures of each pool at this moment."""

    @abstractmethod
    def _holds(self, length: int) -> bool:
        """Return whether a request that comes to ``length`` tokens can run at all."""

    @abstractmethod
    def _open(self, active: Active) -> bool:
        """Open a request: what it hits is protected. False: there is no room for it now."""

    @abstractmethod
    def _admit(self, active: Active, alone: bool) -> bool:
        """Open a request if the pools have room for its prompt beside those that run."""

    @abstractmethod
    def _compute(self, active: Active) -> None:
        """Compute the next chunk of a prompt, and publish it. CapacityError: nothing changed."""

    @abstractmethod
    def _decode(self, active: Active, count: int) -> None:
        """Decode ``count`` tokens. CapacityError: nothing changed."""

    def _states_made(self, components: Mapping[str, PoolUse]) -> int:
        """Return how many states the cache has taken."""
        return sum(each.made for each in components.values() if not each.page_tokens)

    def _at(self, now: float) -> None:
        """Set the virtual time."""
        self._now = now

    # ------------------------------------------------------------ running
    def run(self, requests: Iterable[LabRequest]) -> ReplayOutcome:
        """Serve requests in their order. An interrupt leaves what was measured; nothing stays open."""
        begun, self._complete = time.process_time(), False
        serve = self._one_by_one if self._service is None else self._overlapping
        try:
            for number, request in enumerate(requests):
                if (active := self.arrive(request, number, self._seen)) is not None:
                    serve(active)
            while self.due() < math.inf:
                self.advance()
            self._complete = True
        finally:
            self.abandon()
            self._cpu += time.process_time() - begun
        return self.outcome()

    def arrive(self, request: LabRequest, number: int, seen: SeenPrefixes) -> Active | None:
        """Return a request as it is served here, with its ideal.

        None: it is too long for the pools, and counts as refused.
        """
        if self._first is None:
            self._first = request.at
        if not self._holds(request.prompt.count + max(0, request.output - 1)):
            self._tally.refused += 1
            self._tally.requests += 1
            return None
        return Active(request, number % BASE, seen.take(request, self._leave, self._publishes))

    def _one_by_one(self, active: Active) -> None:
        self._at(max(self._now, active.request.at))
        self._accept(active)
        self._alive[active.number] = active
        try:
            done = self._open(active)
            while done and active.launched < active.end:
                self._compute(active)
            left = active.request.output - 1
            while done and left > 0:
                count = min(left, self._chunk)
                self._decode(active, count)
                left -= count
        except CapacityError:
            done = False
        if done:
            self._end(active)
        else:
            self._refuse(active)
        del self._alive[active.number]

    def _overlapping(self, active: Active) -> None:
        """Go on until a request is admitted or refused. The next one is taken from the trace only then."""
        self.submit(active)
        while self._waiting:
            self.advance()

    def _accept(self, active: Active) -> None:
        if self._first is None:
            self._first = active.request.at
        if active.request.ttl is not None:
            self._expires = True

    # ------------------------------------------------------------ step by step, in the time of a service
    def submit(self, active: Active, now: float = 0.0) -> None:
        """Let a request wait until it can be admitted, from ``now`` on or from when it arrives.

        Those that were submitted before it come first.
        """
        self._accept(active)
        if now > self._now:
            self._at(now)
        self._waiting.append(active)

    def due(self) -> float:
        """Return when the next event is: the next tokens of an answer, or the next chunk of a prompt.

        Infinite: there is none. It does not change until ``advance`` or ``submit`` is called.
        """
        return min(self._prompt_due(), self._decode_due())

    def advance(self) -> None:
        """Let the next event happen. There must be one."""
        if self._decode_due() <= self._prompt_due():
            self._decode_next()
        else:
            self._compute_next(self._prompt_due())

    def abandon(self) -> list[Active]:
        """Drop all requests that wait or run, with what they hold, and return them in their order. None is counted."""
        retracted = (active for _, active in self._retracted)
        dropped = sorted((*self._alive.values(), *self._waiting, *retracted), key=lambda active: active.number)
        for active in dropped:
            if active.sequence is not None:
                active.sequence.abort()
                active.sequence = None
        self._alive, self._retracted, self._decoding, self._prefilling = {}, [], [], None
        self._waiting.clear()
        self._blocked = False
        return dropped

    def _prompt_due(self) -> float:
        """Return when the next chunk of a prompt begins, or the next request can be admitted."""
        if self._prefilling is not None:
            return self._free_at
        if self._blocked and not self._alive:
            self._blocked = False  # nothing runs that could end
        candidate = self._candidate()
        if candidate is None or self._blocked or self._service is None:
            return math.inf
        if len(self._alive) >= self._service.max_running:
            return math.inf
        return max(self._free_at, candidate.request.at, self._now)

    def _decode_due(self) -> float:
        decoding = self._decoding
        while decoding and decoding[0][2].event != decoding[0][1]:
            heapq.heappop(decoding)  # of a request that was retracted meanwhile
        return decoding[0][0] if decoding else math.inf

    def _candidate(self) -> Active | None:
        """Return the request that is admitted next: one that was retracted comes before those that wait."""
        if self._retracted:
            return self._retracted[0][1]
        return self._waiting[0] if self._waiting else None

    def _take_candidate(self) -> None:
        """Take the candidate out of those that wait."""
        if self._retracted:
            heapq.heappop(self._retracted)
        else:
            self._waiting.popleft()

    def _decode_next(self) -> None:
        assert self._service is not None
        at, _, active = heapq.heappop(self._decoding)
        self._at(at)
        count = min(self._stride - active.launched % self._stride, self._left(active))
        if not count:
            del self._alive[active.number]
            self._end(active)
            self._blocked = False
            return
        before = len(self._retracted)
        if self._try(active, count, decode=True):
            self._schedule(active, at + count / self._service.decode)
        if len(self._retracted) > before:
            self._blocked = True  # or they would take back the room that they gave
        if self._prefilling is not None and self._prefilling.sequence is None:
            self._prefilling = None

    def _compute_next(self, at: float) -> None:
        self._at(at)
        if self._prefilling is None and not self._admit_next():
            return
        active = self._prefilling
        assert active is not None
        start, before = active.launched, len(self._retracted)
        done = self._try(active, 0, decode=False)
        if len(self._retracted) > before:
            self._blocked = True
        if not done:
            self._prefilling = None
            return
        self._free_at = at + self._seconds(active, start)
        if active.launched >= active.end:
            if active.first < 0:
                active.first = self._free_at
            self._schedule(active, self._free_at)
            self._prefilling = None

    def _admit_next(self) -> bool:
        candidate = self._candidate()
        assert candidate is not None
        self._alive[candidate.number] = candidate
        if self._admit(candidate, alone=len(self._alive) == 1):
            self._take_candidate()
            self._prefilling = candidate
            return True
        del self._alive[candidate.number]
        self._blocked = True
        if not self._alive:  # nobody else holds anything
            self._refuse(candidate)
            self._blocked = False
            self._take_candidate()
        return False

    def _seconds(self, active: Active, start: int) -> float:
        """Return how long the chunk took that a prompt was computed by, from ``start`` on."""
        assert self._service is not None
        return (active.launched - start) / self._service.prefill

    def _try(self, active: Active, count: int, *, decode: bool) -> bool:
        """Compute a chunk, or decode ``count`` tokens. Where pools are short, the youngest give up their room.

        False: the request itself did, or it is refused since nobody else runs.
        """
        while True:
            try:
                self._decode(active, count) if decode else self._compute(active)
                return True
            except CapacityError:
                victim = self._alive[max(self._alive)]
                del self._alive[victim.number]
                if not self._alive and victim is active:
                    self._refuse(victim)
                    return False
                self._retract(victim)
                heapq.heappush(self._retracted, (victim.number, victim))
                if victim is active:
                    return False

    def _schedule(self, active: Active, at: float) -> None:
        self._events += 1
        active.event = self._events
        heapq.heappush(self._decoding, (at, active.event, active))

    def _left(self, active: Active) -> int:
        """Return tokens that a request still decodes. The last one of an answer is never computed."""
        return max(0, active.request.output - 1 - active.decoded)

    def _retract(self, active: Active) -> None:
        """Give the room of a running request to others. What it computed stays cached; it begins again later."""
        assert active.sequence is not None
        active.sequence.close()
        active.sequence, active.event = None, -1
        self._tally.retracted += 1

    def _refuse(self, active: Active) -> None:
        """Refuse a request for which the pools are too small even if nothing else runs."""
        if active.sequence is not None:
            active.sequence.abort()
            active.sequence = None
        self._tally.refused += 1
        self._tally.requests += 1

    def _end(self, active: Active) -> None:
        sequence, request, tally = active.sequence, active.request, self._tally
        assert sequence is not None
        sequence.close()
        active.sequence = None
        count, hit = request.prompt.count, active.hit + active.restored
        tally.requests += 1
        tally.prompt += count
        tally.output += request.output
        tally.hit += active.hit
        tally.restored += active.restored
        tally.computed += active.computed
        tally.ideal += count - active.ideal
        tally.left[count - hit] += 1
        tally.states_used += self._stateful and hit > 0
        could = max(active.ideal, hit)
        there = min(max(active.walked, hit), could)
        whole = could // self._grain * self._grain  # no hit of this cache ends behind it
        gone, stopped = max(0, whole - there), max(0, min(there, whole) // self._grain * self._grain - hit)
        tally.missed[NEW] += count - could
        if gone:
            tally.missed[GONE] += gone
        if stopped:
            name = active.limited_by or GONE
            tally.missed[name] += stopped
            tally.stops[name] += 1
        if rounded := could - hit - gone - stopped:
            tally.missed[ROUNDED] += rounded
        if active.alone is not None:
            tally.looked_at += count
            tally.alone.update(active.alone)
        if tally.sample_due():
            pools = self._pools()
            tally.sampled(
                self._now - (self._first or 0.0),
                {name: each.cached * (each.rest_bytes or each.page_bytes) for name, each in pools.items()},
                {name: each.running * each.page_bytes for name, each in pools.items()},
            )
        if self._told is not None:
            self._told(tally.requests, self._now)

    def outcome(self) -> ReplayOutcome:
        """Return what was measured so far."""
        tally, components = self._tally, {}
        for name, now in self._pools().items():
            before = self._before[name]
            evicted = now.evicted - before.evicted
            components[name] = PoolUse(
                capacity=now.capacity, page_tokens=now.page_tokens, page_bytes=now.page_bytes, evicted=evicted,
                made=now.cached - before.cached + evicted, stopped=tally.missed[name], stops=tally.stops[name],
                alone=tally.alone[name] / tally.looked_at if tally.looked_at else None, peak=tally.peaks.get(name, 0),
            )  # fmt: skip
        trace, model, policy = self._names
        return ReplayOutcome(
            trace=trace,
            model=model,
            policy=policy,
            page=self._grain,
            components=components,
            requests=tally.requests - tally.refused,
            **{name: getattr(tally, name) for name in COUNTED},
            missed=dict(tally.missed),
            states_made=self._states_made(components),
            skipped=0,
            left=dict(tally.left),
            memory=tuple(tally.memory),
            span=self._now - (self._first or 0.0),
            cpu=self._cpu,
            complete=self._complete,
        )


class Replay(Serving):
    """One replay over one cache. ``run`` takes requests; ``outcome`` tells what was measured so far, at any time.

    ``service``   how requests overlap in time; None: one after the other
    ``chunk``     the most tokens of a step, if there is no service
    ``outputs``   what becomes of answers. "running": they take memory while a request runs, and are not published,
                  since a trace of blocks does not tell their text; "published": they are cached as an engine does it
    ``closely``   one of so many requests is looked at closely; 0: none
    ``leave``     so many tokens of a prompt are computed at least: an engine needs the last one's logits
    ``explain``   the numbers of requests, from 1 on, of which ``explained`` says why they hit what they hit
    ``told``      called after each request that is done, with their number and the virtual time
    """

    def __init__(
        self,
        cache: Cache,
        *,
        service: Service | None = None,
        chunk: int = CHUNK,
        outputs: Outputs = "running",
        closely: int = CLOSELY,
        leave: int = 1,
        explain: Collection[int] = (),
        told: Callable[[int, float], None] | None = None,
        trace: str = "trace",
    ) -> None:
        if outputs not in ("running", "published"):
            raise InputError(f"outputs are 'running' or 'published', got {outputs!r}")
        if chunk.__class__ is not int or chunk < 1:
            raise InputError(f"chunk is a whole number from 1 up, got {chunk!r}")
        composition, page = cache.composition, cache.composition.page
        most = chunk if service is None else service.chunk
        self._cache = cache
        publishes = outputs == "published"
        self._closely = closely
        states = [part for part in composition.parts if not part.page_tokens]
        tracked = all(part.manifest.checkpoint_every for part in states)
        self._publishes_states = publishes and bool(states) and not tracked
        super().__init__(
            page=page, grain=page, chunk=max(most // page * page, page),
            stride=page if self._publishes_states else max(STRIDE // page, 1) * page,
            service=service, told=told, names=(trace, composition.name, composition.policy.name), leave=leave,
        )  # fmt: skip
        self._stateful, self._publishes = bool(states), publishes
        self._tier = composition.tier is not None
        self._room = PoolRoom(cache, self._chunk)
        self._before, self._skipped = self._pools(), cache.stats().skipped_checkpoints
        self._explain = explain
        self._history = cache.history(clock=lambda: self._now) if explain else None
        self.explained: dict[int, Explanation] = {}

    def _holds(self, length: int) -> bool:
        return self._room.holds(length)

    def _end(self, active: Active) -> None:
        if active.request.ttl is not None:
            assert active.sequence is not None
            active.sequence.until = self._now + active.request.ttl
        super()._end(active)

    def _at(self, now: float) -> None:
        if self._history is not None:
            self._history.poll()  # what has changed did so until now
        super()._at(now)
        if self._expires:
            self._cache.expire(now)
        if self._tier:
            self._cache.poll()

    # ------------------------------------------------------------ one request
    def _admit(self, active: Active, alone: bool) -> bool:
        if not self._open(active):
            return False
        if alone or self._room.suffices(active.launched, active.end):
            return True
        self._cache.reclaim()
        if self._room.suffices(active.launched, active.end):
            return True
        assert active.sequence is not None
        active.sequence.abort()
        active.sequence = None
        if not active.computed:
            active.hit = -1  # it is looked at again when it can run
        return False

    def _open(self, active: Active) -> bool:
        request, cache = active.request, self._cache
        if not active.tokens:
            active.tokens = (request.whole or request.prompt).tokens()
        count = request.prompt.count
        if self._publishes and active.decoded:
            active.named = active.tokens.part(0, count).extended(self._answer(active, 0, active.decoded))
        else:
            active.named = active.tokens if request.whole is None else active.tokens.part(0, count)
        until = math.inf if request.ttl is None else self._now + request.ttl
        plan = cache.match(active.named, namespace=request.namespace, leave=self._leave)
        number = active.number + 1
        if number in self._explain and number not in self.explained:
            self.explained[number] = cache.explain(plan)
        label = f"request {number}" if self._history is not None else ""
        try:
            sequence = cache.open(plan, label=label, priority=request.priority, until=until)
        except CapacityError:
            return False
        active.sequence = sequence
        if self._tier:
            loading = sequence.restore()
            while not loading.over:
                cache.poll()
        if active.hit < 0:
            self._look(active, plan, sequence.ready - plan.ready)
        active.launched = sequence.ready
        active.end = count + active.decoded
        return True

    def _look(self, active: Active, plan: MatchPlan, restored: int) -> None:
        """Note what a request hits when it is first admitted."""
        active.hit, active.restored = plan.ready, restored
        active.walked, active.limited_by = plan.walked, plan.limited_by
        if self._closely and active.number % self._closely == self._closely // 2:  # the first one never hits
            active.alone = self._cache.explain(plan, closely=False).alone

    def _compute(self, active: Active) -> None:
        sequence, start = active.sequence, active.launched
        assert sequence is not None
        end = min(sequence.next_stop(self._chunk), active.end)
        sequence.grow(end - start)
        self._step(sequence)
        active.launched = end
        active.computed += end - start
        sequence.publish()

    def _decode(self, active: Active, count: int) -> None:
        sequence = active.sequence
        assert sequence is not None
        sequence.grow(count)
        self._step(sequence)
        active.launched += count
        active.decoded += count
        if self._publishes:
            sequence.append(self._answer(active, active.decoded - count, active.decoded))
            if self._publishes_states and sequence.published < sequence.committed == sequence.publishable:
                sequence.publish()

    def _step(self, sequence: Sequence) -> None:
        with self._cache.step((sequence,)) as step:
            step.run_ops()

    def _answer(self, active: Active, start: int, end: int) -> Tokens:
        """Return tokens of an answer: those that the trace knows, or such as no other request has."""
        count = active.request.prompt.count
        if active.request.whole is not None:
            known = active.tokens.part(count + start, count + end)
            if known.count == end - start:
                return known
        return encode([active.number] * (end - start))

    # ------------------------------------------------------------ telling
    def _pools(self) -> Mapping[str, PoolFigures]:
        names = [field.name for field in attrs.fields(PoolFigures)]
        return {
            component: PoolFigures(*(getattr(figures, name) for name in names))
            for component, figures in self._cache.stats().components.items()
        }

    def outcome(self) -> ReplayOutcome:
        return attrs.evolve(super().outcome(), skipped=self._cache.stats().skipped_checkpoints - self._skipped)


class PoolRoom:
    """Whether pools have the pages that requests need, from the reaches of the components and the statistics.

    A path needs a page for every token. A window needs what its reach covers at the end, and what one step adds.
    """

    def __init__(self, cache: Cache, chunk: int) -> None:
        composition = cache.composition
        self._cache = cache
        self._parts = [part for part in composition.parts if part.page_tokens]
        self._most = max(chunk, 1 + composition.max_rewind) + composition.max_rewind
        self._held: dict[int, dict[str, int]] = {}

    def held(self, length: int) -> dict[str, int]:
        """Return by component how many pages a sequence of ``length`` tokens holds at most while it runs."""
        found = {}
        for part in self._parts:
            size = part.page_tokens
            kept = sum(-(-end // size) - start // size for start, end in part.reach.needs(length))
            found[part.name] = min(-(-length // size), kept + -(-self._most // size) + 1)
        return found

    def holds(self, length: int) -> bool:
        """Return whether a request that comes to ``length`` tokens can run at all."""
        held = self.held(length)
        return all(held[part.name] <= part.capacity for part in self._parts)

    def suffices(self, launched: int, end: int) -> bool:
        """Return whether a prompt that is computed up to ``launched`` can be computed up to ``end`` now."""
        figures, held = self._cache.stats().components, self.held(end + 1)
        for part in self._parts:
            pages = -(-(end + 1) // part.page_tokens) - -(-launched // part.page_tokens)
            each = figures[part.name]
            if min(pages, held[part.name]) > each.free + each.cached - each.leased:
                return False
        return True
