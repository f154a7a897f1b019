"""The scheduler: which tokens the next step computes, of whom, and where they go.

It plans from what is known here and never looks at a tensor, so that it can be a step ahead of the device. What a step
computes is reserved in the pools when it is planned. Rules:

- Who decodes goes on first; what is left of the ``chunk`` goes to prefill; whoever waits is admitted by what is free in
  *every* pool. Short of a pool, the running request that ranks last is retracted: what it computed stays cached, and
  it waits for its turn again.
- Prefill stops where a checkpoint is worth having: at the end of a chunk, at the branch that its match told of, at the
  last boundary of its prompt, and where another waiting request parts from it. That one waits for the checkpoint
  instead of computing the same again.
- What a tier below the device has of a request is brought back when it is admitted. Where a store has to be asked, the
  request keeps its turn and others go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from prefixloom import Cache, CapacityError, InputError, encode

from .forward import Row
from .guessing import Guesser
from .handover import Handed
from .model import Span
from .policies import POLICIES, cached
from .requests import RETRIES, Answer, Job, Reason
from .room import Room


@attrs.define
class Counts:
    """What was done so far. ``prefilled``, ``decoded`` and ``drafted`` are tokens that were launched, ``arrived`` those
    that another engine computed, ``restored`` those that a tier below the device brought back; ``waited`` are requests
    that waited for another one's checkpoint."""

    steps: int = 0
    admitted: int = 0
    retracted: int = 0
    waited: int = 0
    prefilled: int = 0
    arrived: int = 0
    restored: int = 0
    decoded: int = 0
    drafted: int = 0
    accepted: int = 0
    failed: int = 0


class Scheduler:
    def __init__(self, cache: Cache, policy: str, chunk: int, running: int, guesser: Guesser | None) -> None:
        if policy not in POLICIES:
            raise InputError(f"a policy is one of {', '.join(POLICIES)}, got {policy!r}")
        self.cache = cache
        self.page, self.lookahead = cache.composition.page, cache.composition.lookahead
        self.chunk = max(chunk // self.page * self.page, self.page)
        self.rows = list(range(running))[::-1]
        """Where the device may keep a newest token: one for each request that runs."""
        self.guesser = guesser
        """None: a draft guesses, on the device."""
        self.order = POLICIES[policy]
        self.by_priority = policy == "priority"
        self.room = Room(cache, self.chunk)
        self.counts = Counts()
        self.jobs: dict[Answer, Job] = {}
        """All that have not ended: waiting or running."""
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        parts = cache.composition.parts
        self.stateful = any(not part.page_tokens for part in parts)
        tracked = all(part.manifest.checkpoint_every for part in parts if not part.page_tokens)
        self.publishes = self.stateful and not tracked  # or else the cache keeps checkpoints of a decode by itself

    def add(self, job: Job) -> None:
        self.jobs[job.answer] = job
        self.waiting.append(job)

    # ------------------------------------------------------------ planning
    def plan(self) -> list[Row]:
        """The next step; empty: nothing can be launched before something comes back."""
        planned: dict[int, Row] = {}
        for job in self.fetching:
            if job.restoring is not None and job.restoring.over:
                self._restored(job)
        for job in self._ranked(self.running):
            if job.sequence is not None and not job.prefilling:
                self._decode(job, planned)
        budget = self.chunk - len(planned)
        for job in self._ranked(self.running):
            if job.sequence is not None and job.prefilling and job.restoring is None and budget > 0:
                budget -= self._prefill(job, budget, planned)
        if budget > 0 and self.waiting and self.rows:
            self._admit(budget, planned)
        return list(planned.values())

    def _ranked(self, jobs: Iterable[Job]) -> list[Job]:
        """Who ranks first is served first, and retracted last."""
        if self.by_priority:
            return sorted(jobs, key=lambda job: (-job.request.priority, job.number))
        return sorted(jobs, key=lambda job: job.number)

    def _decode(self, job: Job, planned: dict[int, Row]) -> None:
        if job.left <= 0 or (job.speculate and job.pending):
            return
        if job.pending and self.publishes and self.lookahead and job.end % self.page == 0:
            return  # the state stands on a boundary, and can be published once the token behind it is known
        known = job.tokens[job.end :]
        most = min(self._guessable(job), job.left - 1) if job.speculate else 0
        if self.guesser is None and job.kept < 0:
            most = 0  # the device's draft has seen nothing of it yet
        guesses = [0] * most if self.guesser is None else self.guesser.guess(job.tokens, most) if most else []
        count = 1 + len(guesses)
        if not self._grow(job, count, planned):
            return
        span = Span(job.end, job.end + count)
        kept = job.kept if self.guesser is None and guesses else -1
        planned[job.number] = Row(
            job, job.sequence, span, known + guesses, job.life, True,
            guesses=guesses, drafted=len(guesses), kept=kept,
        )  # fmt: skip
        job.due += 1
        job.pending += 1
        job.end = span.end

    def _guessable(self, job: Job) -> int:
        """Where the engine itself publishes states of a decode, a step ends on each boundary or before it."""
        most = job.speculate
        if self.publishes:
            most = min(most, (job.end // self.page + 1) * self.page - job.end - 1)
        return most

    def _prefill(self, job: Job, budget: int, planned: dict[int, Row]) -> int:
        """Plan the next chunk of a prompt; its tokens."""
        if job.arrived is not None:
            return self._arrive(job, job.arrived, planned)
        end = self._chunk_end(job, budget, not planned)
        count = end - job.end
        if count <= 0 or not self._grow(job, count, planned):
            return 0
        samples = end == job.total
        span = Span(job.end, end)
        behind = 0 if samples else job.tokens[end]
        known = job.tokens[span.start : end]
        planned[job.number] = Row(job, job.sequence, span, known, job.life, samples, prefill=True, behind=behind)
        job.end = end
        if samples:
            job.due += 1
            job.pending += 1
        return count

    def _arrive(self, job: Job, handed: Handed, planned: dict[int, Row]) -> int:
        """Plan the copy of what another engine has computed; its first token is known already.

        First up to its last boundary, to be published there as that of a prompt computed here is, and then the rest.
        """
        end = handed.boundary if job.end < handed.boundary else handed.border
        count = end - job.end
        if not self._grow(job, count, planned, arriving=True):
            return 0
        samples = end == handed.border
        span = Span(job.end, end)
        planned[job.number] = Row(job, job.sequence, span, [], job.life, samples, prefill=True, arriving=handed)
        job.end = end
        if samples:
            job.due += 1
            job.pending += 1
            job.arrived, job.kept = None, -1
        return count

    def _chunk_end(self, job: Job, budget: int, alone: bool) -> int:
        """On a boundary, but at the end of the prompt; where nothing else is planned, at the next one at least."""
        start, page = job.end, self.page
        end = min(start + budget, job.total)
        if end < job.total:
            end = end // page * page
            if end <= start and alone:
                end = min(start // page * page + page, job.total)
        if self.stateful:
            last = (job.total - 1) // page * page
            if start < last < end:
                end = last
        for cut in job.cuts:
            if start < cut < end:
                end = cut
        return end

    # ------------------------------------------------------------ admission
    def _admit(self, budget: int, planned: dict[int, Row]) -> None:
        """Open who waits, in the policy's order, and plan the first chunk of each, as far as rooms and rows go."""
        for job in self.order(self.waiting, self.cache):
            if budget <= 0 or not self.rows:
                return
            if job.pending or self._waits_for_another(job):
                continue
            if not self._open(job):
                return
            if job.restoring is not None:
                continue
            if self.stateful:
                self._cut_for_others(job)
            taken = self._prefill(job, budget, planned)
            if not taken:
                return
            budget -= taken

    def _cut_for_others(self, job: Job) -> None:
        """Where who waits parts from ``job`` there is to be a state: it can hit there, and not before or after."""
        for other in self.waiting:
            if other is not job and other.request.namespace == job.request.namespace:
                shared = common(job.tokens, other.tokens, len(other.tokens) - 1) // self.page * self.page
                if job.end < shared < job.total:
                    job.cuts.add(shared)

    def _waits_for_another(self, job: Job) -> bool:
        """Whether a running prefill is about to leave a checkpoint that is deeper than what would hit now."""
        deepest, whose = 0, None
        for other in self.running:
            if other.prefilling and other.request.namespace == job.request.namespace:
                shared = common(job.tokens, other.tokens, len(job.tokens) - 1) // self.page * self.page
                ahead = other.end <= shared if self.stateful else other.end < other.total
                if shared > deepest and ahead:
                    deepest, whose = shared, other
        if whose is None or cached(job, self.cache) >= deepest:
            return False
        if deepest < whose.total:
            whose.cuts.add(deepest)
        self.counts.waited += not job.waited
        job.waited = True
        return True

    def _open(self, job: Job) -> bool:
        request = job.request
        try:
            sequence = self.cache.open(
                job.key, namespace=request.namespace, leave=1, label=request.label, priority=request.priority
            )
        except CapacityError:
            return False
        job.end, job.total = sequence.ready, len(job.tokens)
        if self.running and not self._enough(job):
            sequence.abort()
            return False
        job.sequence = sequence
        job.row = self.rows.pop()
        self.waiting.remove(job)
        self.running.append(job)
        self.counts.admitted += 1
        job.restoring = sequence.restore() if job.failures < RETRIES else None  # the last time it is computed
        if job.restoring is None or job.restoring.over:
            self._restored(job)
        return True

    @property
    def fetching(self) -> list[Job]:
        """Those that run, and have to wait for what a store may bring."""
        return [job for job in self.running if job.restoring is not None]

    def _restored(self, job: Job) -> None:
        """It is known where the job goes on from: all that any tier brings of it is there."""
        sequence, handed = job.sequence, job.arrived
        assert sequence is not None
        job.restoring = None
        brought, job.end = sequence.ready - job.end, sequence.ready
        if handed is not None and not handed.have <= sequence.ready < handed.border == job.total:
            job.arrived = None  # what it was to go on from is gone, or was answered since: it is computed here
        job.cuts = {sequence.branch} if sequence.branch else set()
        self.counts.restored += brought
        if not job.admitted:
            job.answer.hit, job.answer.restored = sequence.ready, brought
        job.admitted = True

    def _enough(self, job: Job) -> bool:
        jobs = [*self.running, job]
        if self.room.enough(jobs):
            return True
        self.cache.reclaim()  # what running sequences keep only because there was room
        return self.room.enough(jobs)

    # ------------------------------------------------------------ room
    def _grow(self, job: Job, count: int, planned: dict[int, Row], *, arriving: bool = False) -> bool:
        """Slots for ``count`` more tokens, retracting whoever ranks lower; False: the job itself was retracted."""
        while True:
            assert job.sequence is not None
            try:
                job.sequence.grow(count, arriving=arriving)
                return True
            except CapacityError as error:
                if len(self.running) == 1:  # nobody else is left to make room
                    self.end(job, "error", error)
                    return False
                victim = self._ranked(self.running)[-1]
                dropped = planned.pop(victim.number, None)
                if dropped is not None:
                    self._unplan(dropped)
                self.retract(victim)
                if victim is job:
                    return False

    def _unplan(self, row: Row) -> None:
        job = row.job
        job.end = row.span.start
        job.arrived = row.arriving
        if row.samples:
            job.due -= 1
            job.pending -= 1

    def retract(self, job: Job) -> None:
        """Give back what it holds; what is complete stays cached, and the job waits again."""
        assert job.sequence is not None
        job.sequence.close()
        self.counts.retracted += 1
        self.wait_again(job)

    def wait_again(self, job: Job) -> None:
        """It runs no more, and starts over from what is cached when it is its turn."""
        self._leave(job)
        job.key = encode(job.tokens)
        self.waiting.append(job)

    def restart(self, job: Job) -> None:
        """All that is in flight for it is void: it starts over from what was answered, and from what is cached.

        What another engine handed over may be why, so it is not tried again.
        """
        job.life += 1
        job.pending = 0
        job.due = len(job.answer.tokens)
        job.tokens = [*job.request.tokens, *job.answer.tokens]
        job.arrived = None
        if job.sequence is not None:
            job.sequence.abort()
            self.wait_again(job)

    def end(self, job: Job, reason: Reason, error: BaseException | None = None) -> None:
        """The answer is complete, or never will be. Only what ended well is published."""
        del self.jobs[job.answer]
        job.answer.reason, job.answer.error = reason, error
        job.life += 1
        if job.sequence is None:
            self.waiting.remove(job)
            return
        if reason in ("length", "stop"):
            job.sequence.close()
        else:
            job.sequence.abort()
        self._leave(job)

    def _leave(self, job: Job) -> None:
        """Work in flight may still write its row; whoever gets that next comes after it on the stream."""
        job.sequence = job.restoring = None
        self.running.remove(job)
        self.rows.append(job.row)


def common(a: list[int], b: list[int], most: int) -> int:
    """How many of the first ``most`` tokens agree."""
    low, high = 0, min(most, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
