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
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from ..cache.cache import Cache
from ..cache.explanation import Explanation
from ..cache.match_plan import MatchPlan
from ..cache.sequence import Sequence
from ..cache.stats import CacheStats
from ..errors import CapacityError, InputError
from ..tree.keys import TOKEN_LIMIT, Tokens
from .outcome import GONE, NEW, ROUNDED, PoolUse, ReplayOutcome, Tally
from .seen import SeenPrefixes
from .service import Service
from .traces.requests import LabRequest

Outputs = Literal["running", "published"]
STRIDE = 128
"""So many tokens are decoded between two looks at a request whose answer is not published."""
CHUNK = 2048
"""The tokens of a step where requests run one after the other, unless something else is said."""
CLOSELY = 64
"""One of so many requests is looked at closely: how deep each component alone could have resumed."""


class Active:
    """A request that was taken from the trace and is not done.

    ``named``    the tokens it is opened with: the prompt, and what it has decoded if answers are published
    ``launched`` tokens whose slots are reserved, and that count as computed
    ``end``      where its prompt ends, with what it had decoded when it was retracted
    """

    __slots__ = (
        "alone",
        "computed",
        "decoded",
        "end",
        "event",
        "hit",
        "ideal",
        "launched",
        "limited_by",
        "named",
        "number",
        "request",
        "restored",
        "sequence",
        "stops",
        "tokens",
        "walked",
    )  # fmt: skip

    def __init__(self, request: LabRequest, number: int, ideal: int) -> None:
        self.request, self.number, self.ideal = request, number, ideal
        self.sequence: Any = None
        self.tokens = self.named = Tokens()
        self.launched = self.end = self.decoded = self.computed = self.event = 0
        self.hit = self.restored = self.walked = -1
        self.limited_by: str | None = None
        self.stops: tuple[int, ...] = ()
        self.alone: Mapping[str, int] | None = None


class Serving(ABC):
    """Serves the requests of a trace in virtual time, and sums up: what every side of a comparison has in common.

    A subclass says how its cache opens, computes and decodes a request, and when a prompt has room. What a request
    holds of the cache is its ``sequence``, which can be closed or aborted.

    ``page``     what the ideal is rounded to, in tokens
    ``grain``    what a hit of this cache is a multiple of
    ``chunk``    the most tokens of a prompt that one step computes
    ``stride``   tokens that are decoded between two looks at a request
    ``leave``    so many tokens of a prompt are computed at least: an engine needs the last one's logits
    """

    def __init__(
        self, *, page: int, grain: int, chunk: int, stride: int, service: Service | None,
        told: Callable[[int, float], None] | None, trace: str, leave: int = 1,
    ) -> None:  # fmt: skip
        self._service, self._told, self._trace, self._leave = service, told, trace, leave
        self._page, self._grain, self._chunk, self._stride = page, grain, chunk, stride
        self._stateful = self._expires = False
        self._publishes = False  # answers
        self._seen = SeenPrefixes(page)
        self._tally = Tally()
        self._first: float | None = None
        self._now = 0.0
        self._cpu = 0.0
        self._events = 0
        self._complete = True

    @abstractmethod
    def outcome(self) -> ReplayOutcome:
        """What was measured so far."""

    @abstractmethod
    def _holds(self, length: int) -> bool:
        """Whether a request that comes to ``length`` tokens can run at all."""

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

    @abstractmethod
    def _sample(self) -> None:
        """Note the use of memory at this moment."""

    def _at(self, now: float) -> None:
        """The virtual time is ``now``."""
        self._now = now

    # ------------------------------------------------------------ running
    def run(self, requests: Iterable[LabRequest]) -> ReplayOutcome:
        """Serve requests in their order. An interrupt leaves what was measured; nothing stays open."""
        begun, self._complete = time.process_time(), False
        alive: dict[int, Active] = {}
        try:
            if self._service is None:
                self._one_by_one(requests, alive)
            else:
                self._overlapping(requests, self._service, alive)
            self._complete = True
        finally:
            for active in alive.values():
                if active.sequence is not None:
                    active.sequence.abort()
            self._cpu += time.process_time() - begun
        return self.outcome()

    def _arrivals(self, requests: Iterable[LabRequest]) -> Iterator[Active]:
        """The requests that the pools can hold, each with its ideal."""
        seen = self._seen
        for number, request in enumerate(requests):
            if self._first is None:
                self._first = request.at
            if not self._holds(request.prompt.count + max(0, request.output - 1)):
                self._tally.refused += 1
                self._tally.requests += 1
                continue
            if request.ttl is not None:
                self._expires = True
            yield Active(request, number % TOKEN_LIMIT, seen.take(request, self._leave, self._publishes))

    def _one_by_one(self, requests: Iterable[LabRequest], alive: dict[int, Active]) -> None:
        for active in self._arrivals(requests):
            self._at(max(self._now, active.request.at))
            alive[active.number] = active
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
            del alive[active.number]

    def _overlapping(self, requests: Iterable[LabRequest], service: Service, alive: dict[int, Active]) -> None:
        """Take, again and again, what comes first: a decoding request's next tokens, or the next chunk of a prompt."""
        arrivals = self._arrivals(requests)
        retracted: list[tuple[int, Active]] = []
        decoding: list[tuple[float, int, Active]] = []
        coming, prefilling = next(arrivals, None), None
        free_at = 0.0  # when the next chunk can begin
        blocked = False  # no room: nothing is admitted before a request ends
        while True:
            candidate = retracted[0][1] if retracted else coming
            if prefilling is not None:
                due = free_at
            elif candidate is not None and not blocked and len(alive) < service.max_running:
                due = max(free_at, candidate.request.at, self._now)
            else:
                due = math.inf
            while decoding and decoding[0][2].event != decoding[0][1]:
                heapq.heappop(decoding)  # of a request that was retracted meanwhile
            if decoding and decoding[0][0] <= due:
                at, _, active = heapq.heappop(decoding)
                self._at(at)
                count = min(self._stride - active.launched % self._stride, self._left(active))
                if count:
                    before = len(retracted)
                    if self._try(active, count, alive, retracted, decode=True):
                        self._schedule(decoding, active, at + count / service.decode)
                    blocked = blocked or len(retracted) > before  # or they would take back the room that they gave
                    if prefilling is not None and prefilling.sequence is None:
                        prefilling = None
                    continue
                del alive[active.number]
                self._end(active)
                blocked = False
            elif due < math.inf:
                self._at(due)
                if prefilling is None:
                    assert candidate is not None
                    alive[candidate.number] = candidate
                    if not self._admit(candidate, alone=len(alive) == 1):
                        del alive[candidate.number]
                        blocked = True
                        if not alive:  # nobody else holds anything
                            self._refuse(candidate)
                            blocked = False
                            if retracted:
                                heapq.heappop(retracted)
                            else:
                                coming = next(arrivals, None)
                        continue
                    if retracted:
                        heapq.heappop(retracted)
                    else:
                        coming = next(arrivals, None)
                    prefilling = candidate
                start, before = prefilling.launched, len(retracted)
                done = self._try(prefilling, 0, alive, retracted, decode=False)
                blocked = blocked or len(retracted) > before
                if not done:
                    prefilling = None
                    continue
                free_at = due + (prefilling.launched - start) / service.prefill
                if prefilling.launched >= prefilling.end:
                    self._schedule(decoding, prefilling, free_at)
                    prefilling = None
            elif candidate is None and not alive:
                return
            else:
                blocked = False  # nothing runs that could end

    def _try(
        self, active: Active, count: int, alive: dict[int, Active], retracted: list[tuple[int, Active]], decode: bool
    ) -> bool:
        """Compute a chunk, or decode ``count`` tokens. Where pools are short, the youngest give up their room.

        False: the request itself did, or it is refused since nobody else runs.
        """
        while True:
            try:
                self._decode(active, count) if decode else self._compute(active)
                return True
            except CapacityError:
                victim = alive[max(alive)]
                del alive[victim.number]
                if not alive and victim is active:
                    self._refuse(victim)
                    return False
                self._retract(victim)
                heapq.heappush(retracted, (victim.number, victim))
                if victim is active:
                    return False

    def _schedule(self, decoding: list[tuple[float, int, Active]], active: Active, at: float) -> None:
        self._events += 1
        active.event = self._events
        heapq.heappush(decoding, (at, active.event, active))

    def _left(self, active: Active) -> int:
        """Tokens that a request still decodes. The last one of an answer is never computed."""
        return max(0, active.request.output - 1 - active.decoded)

    def _retract(self, active: Active) -> None:
        """A running request gives its room to others. What it computed stays cached; it begins again later."""
        assert active.sequence is not None
        active.sequence.close()
        active.sequence, active.event = None, -1
        self._tally.retracted += 1

    def _refuse(self, active: Active) -> None:
        """The pools are too small for a request, even alone."""
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
            self._sample()
        if self._told is not None:
            self._told(tally.requests, self._now)


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
            service=service, told=told, trace=trace, leave=leave,
        )  # fmt: skip
        self._stateful, self._publishes = bool(states), publishes
        self._tier = composition.tier is not None
        self._room = PoolRoom(cache, self._chunk)
        self._before = cache.stats()
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
            active.named = Tokens(active.tokens[: 4 * count] + self._answer(active, 0, active.decoded))
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
        active.stops = () if sequence.branch is None else (sequence.branch,)
        return True

    def _look(self, active: Active, plan: MatchPlan, restored: int) -> None:
        """Note what a request hits when it is first admitted."""
        active.hit, active.restored = plan.ready, restored
        active.walked, active.limited_by = plan.walked, plan.limited_by
        if self._closely and active.number % self._closely == self._closely // 2:  # the first one never hits
            active.alone = self._cache.explain(plan, closely=False).alone

    def _compute(self, active: Active) -> None:
        start, page, named = active.launched, self._page, active.named.count
        end = min(start + self._chunk, active.end)
        if end < active.end:
            end = end // page * page
        if self._stateful:
            last = (named - 1) // page * page
            if start < last < end:
                end = last
        for stop in active.stops:
            if start < stop < end:
                end = stop
        sequence = active.sequence
        assert sequence is not None
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
        """Tokens of an answer: those that the trace knows, or such as no other request has."""
        count = active.request.prompt.count
        if active.request.whole is not None:
            known = active.tokens.part(count + start, count + end)
            if known.count == end - start:
                return known
        return Tokens((array("i", [active.number]) * (end - start)).tobytes())

    # ------------------------------------------------------------ telling
    def _sample(self) -> None:
        figures = self._cache.stats().components
        self._tally.sampled(
            self._now - (self._first or 0.0),
            {name: each.cached * (each.rest_bytes or each.page_bytes) for name, each in figures.items()},
            {name: each.running * each.page_bytes for name, each in figures.items()},
        )

    def outcome(self) -> ReplayOutcome:
        tally, stats, composition = self._tally, self._cache.stats(), self._cache.composition
        components = {name: self._use(name, stats, tally) for name in stats.components}
        states = [name for name, each in components.items() if not each.page_tokens]
        return ReplayOutcome(
            trace=self._trace,
            model=composition.name,
            policy=composition.policy.name,
            page=self._page,
            components=components,
            requests=tally.requests - tally.refused,
            refused=tally.refused,
            retracted=tally.retracted,
            prompt=tally.prompt,
            output=tally.output,
            hit=tally.hit,
            restored=tally.restored,
            computed=tally.computed,
            ideal=tally.ideal,
            missed=dict(tally.missed),
            states_made=sum(components[name].made for name in states),
            states_used=tally.states_used,
            skipped=stats.skipped_checkpoints - self._before.skipped_checkpoints,
            left=dict(tally.left),
            memory=tuple(tally.memory),
            span=self._now - (self._first or 0.0),
            cpu=self._cpu,
            complete=self._complete,
        )

    def _use(self, name: str, stats: CacheStats, tally: Tally) -> PoolUse:
        now, before = stats.components[name], self._before.components[name]
        evicted = now.evicted - before.evicted
        return PoolUse(
            capacity=now.capacity,
            page_tokens=now.page_tokens,
            page_bytes=now.page_bytes,
            evicted=evicted,
            made=now.cached - before.cached + evicted,
            stopped=tally.missed[name],
            stops=tally.stops[name],
            alone=tally.alone[name] / tally.looked_at if tally.looked_at else None,
            peak=tally.peaks.get(name, 0),
        )


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
        """By component: how many pages a sequence of ``length`` tokens holds at most while it runs."""
        found = {}
        for part in self._parts:
            size = part.page_tokens
            kept = sum(-(-end // size) - start // size for start, end in part.reach.needs(length))
            found[part.name] = min(-(-length // size), kept + -(-self._most // size) + 1)
        return found

    def holds(self, length: int) -> bool:
        """Whether a request that comes to ``length`` tokens can run at all."""
        held = self.held(length)
        return all(held[part.name] <= part.capacity for part in self._parts)

    def suffices(self, launched: int, end: int) -> bool:
        """Whether a prompt that is computed up to ``launched`` can be computed up to ``end`` now."""
        figures, held = self._cache.stats().components, self.held(end + 1)
        for part in self._parts:
            pages = -(-(end + 1) // part.page_tokens) - -(-launched // part.page_tokens)
            each = figures[part.name]
            if min(pages, held[part.name]) > each.free + each.cached - each.leased:
                return False
        return True
