"""The scheduler: decides which tokens of which jobs the next step computes, and reserves the slots for them.

It plans from what the planning thread knows and never reads a tensor, so it can plan one step ahead of the device. A
planned step's slots are reserved in the pools when it is planned. The rules:

- Jobs that decode come first. What is left of the ``chunk`` goes to prefill, and then to waiting jobs, which are
  admitted as far as *every* pool has pages. A step in which nobody decodes delays nobody's next token, so it takes
  further prompts, of up to ``BURST`` chunks, if it can compute all that is left of them. If a pool runs short, the
  running job that ranks last is retracted: what it computed stays cached, and it waits for its next turn.
- Of several tenants the one that runs least comes first, and that was served least (``tenants``). If it lacks a row or
  pages that another one has beyond its share, a job of that one is retracted. Ranks and the policy's order hold among
  the jobs of one tenant.
- A prefill step ends where a state is worth keeping (``Sequence.next_stop``), and where a waiting job's prompt diverges
  from this one.
- A job waits while a running one computes a prefix that both have, instead of computing the same tokens again.
- A job whose step failed is computed alone, one such job per step, until it has passed the place where it failed. So
  only the job whose own step fails is held to be the cause.
- What a tier below the device has is brought back when a job is admitted. If a store has to be asked, the job keeps its
  place, and others run meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

import attrs

from prefixloom import Cache, CapacityError, InputError, PluginError, Sequence, encode

from ..contract.handover import Handover
from ..contract.model import Span
from ..contract.requests import Answer, Reason, Request
from ..forward.jobs import Job, PlannedRow
from .admission import POLICIES, PageBudget, cached_tokens
from .guessing import Guesser
from .observers import Observers
from .tenants import Tenants, of_one, of_tokens

log = logging.getLogger("prefixloom.engine")
BURST = 8
"""How many chunks of whole prompts a step computes in which nobody decodes."""
RETRIES = 2
"""How many times in a row a job starts over because a step that computed it alone, or a copy that it read, failed. The
last time it restores nothing from below the device."""


@attrs.define
class Counts:
    """What an engine has done so far.

    ``steps``                           launched steps
    ``admitted``, ``retracted``         admissions and retractions; a retracted request is admitted again
    ``waited``                          requests that waited for a prefix that another one was computing
    ``prefilled``, ``decoded``          tokens launched in prefill, and rows launched in decoding
    ``arrived``                         tokens of prompts that another engine had computed
    ``restored``                        tokens that a tier below the device brought back
    ``drafted``, ``accepted``           tokens guessed ahead, and how many of these guesses were right
    ``failed``                          how often a request had to start over because a step or a copy failed
    """

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
    """Owns the jobs of one engine.

    ``jobs``      by answer: all jobs that have not ended; each is in ``waiting`` or in ``running``
    ``guesser``   None where a draft model guesses on the device
    """

    def __init__(
        self, cache: Cache, policy: str, chunk: int, max_running: int, guesser: Guesser | None,
        clock: Callable[[], float], shares: Mapping[str, float],
    ) -> None:  # fmt: skip
        if policy not in POLICIES:
            raise InputError(f"a policy is one of {', '.join(POLICIES)}, got {policy!r}")
        self.cache, self.clock = cache, clock
        self.page, self.lookahead = cache.composition.page, cache.composition.lookahead
        self.chunk = max(chunk // self.page * self.page, self.page)
        self.free_rows = list(range(max_running))[::-1]
        """Device rows that no running job has."""
        self.guesser = guesser
        self.order = POLICIES[policy]
        self.by_priority = policy == "priority"
        self.budget = PageBudget(cache, self.chunk)
        self.tenants = Tenants(shares, cache, self.budget)
        self.counts = Counts()
        self.accounts = False
        """Whether the cache is told to account for the hit of each request."""
        self.observers: Observers | None = None
        self.jobs: dict[Answer, Job] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        parts = cache.composition.parts
        self.stateful = any(not part.page_tokens for part in parts)
        tracked = all(part.manifest.checkpoint_every for part in parts if not part.page_tokens)
        self.publishes_while_decoding = self.stateful and not tracked
        """Whether the engine publishes the states of a decode. Otherwise there are none, or the cache keeps them."""

    def add(self, job: Job) -> None:
        self.tenants.came(job, self.jobs.values(), self.clock())
        self.jobs[job.answer] = job
        self.waiting.append(job)
        if self.observers is not None:
            self.observers.queued(job.number, job.answer)

    # ------------------------------------------------------------ planning
    def plan(self) -> list[PlannedRow]:
        """Plan the next step. Return no rows if nothing can be launched before a result is read."""
        planned: dict[int, PlannedRow] = {}
        for job in self.fetching:
            if job.restoring is not None and job.restoring.over:
                self._finish_restore(job)
        self._plan_apart(planned)
        if not planned:
            self._plan_together(planned)
        return list(planned.values())

    def _plan_together(self, planned: dict[int, PlannedRow]) -> None:
        together = [job for job in self._ranked(self.running) if not job.apart_until]
        for job in together:
            if job.sequence is not None and not job.prefilling:
                self._plan_decode(job, planned)
        budget = self.chunk - len(planned)
        served, filling = self.tenants.by_served, {job.request.tenant for job in together if job.prefilling}
        if filling:  # who was served less than all of these comes before them
            least = min(map(served, filling))
            budget = self._admit([job for job in self.waiting if served(job.request.tenant) < least], budget, planned)
        for job in self.tenants.turns(together, served):
            if job.sequence is not None and job.prefilling and job.restoring is None:
                budget -= self._plan_prefill(job, budget, planned)
        if not any(job.apart_until for job in self.waiting):  # those are admitted first
            self._admit(self.waiting, budget, planned)

    def _plan_apart(self, planned: dict[int, PlannedRow]) -> None:
        """Plan a step of one job alone, if there is one that must be computed alone and waits for no result."""
        alone = self._ranked(job for job in self.running if job.apart_until)
        for job in self.tenants.turns(alone, self.tenants.by_served):
            if job.sequence is None or job.restoring is not None or job.launched >= job.apart_until:
                continue
            if job.prefilling:
                self._plan_prefill(job, self.chunk, planned)
            else:
                self._plan_decode(job, planned)
            if planned:
                return
        self._admit([job for job in self.waiting if job.apart_until], self.chunk, planned)

    def _ranked(self, jobs: Iterable[Job]) -> list[Job]:
        """Sort running jobs by rank. Of one tenant's, the first is served first, and the last is retracted first."""
        if self.by_priority:
            return sorted(jobs, key=lambda job: (-job.request.priority, job.number))
        return sorted(jobs, key=lambda job: job.number)

    def _plan_decode(self, job: Job, planned: dict[int, PlannedRow]) -> None:
        if job.answer_left <= 0 or (job.speculate and job.unread_passes):
            return
        if job.unread_passes and self.publishes_while_decoding and self.lookahead and job.launched % self.page == 0:
            return  # the running state stands on a boundary: it is published once the token after it is known
        known = job.tokens[job.launched :]
        most = min(self._most_guesses(job), job.answer_left - 1) if job.speculate else 0
        if self.guesser is None and job.guesses_kept < 0:
            most = 0  # the draft model has not seen this job yet
        guesses = [0] * most if self.guesser is None else self._guesses(self.guesser, job, most) if most else []
        count = 1 + len(guesses)
        if not self._grow(job, count, planned):
            return
        assert job.sequence is not None
        span = Span(job.launched, job.launched + count, job.media)
        kept = job.guesses_kept if self.guesser is None and guesses else -1
        planned[job.number] = PlannedRow(
            job, job.sequence, span, known + guesses, job.attempt, True,
            guesses=guesses, guess_count=len(guesses), guesses_kept=kept,
        )  # fmt: skip
        job.answer_launched += 1
        job.unread_passes += 1
        job.launched = span.end
        self.tenants.served[job.request.tenant] += count

    def _guesses(self, guesser: Guesser, job: Job, most: int) -> list[int]:
        try:
            return guesser.guess(job.tokens, most)
        except PluginError as error:  # guesses only save time: the job goes on without
            log.warning("%s has no more guesses: %s", job.request.label or "a request", error)
            job.speculate = 0
            return []

    def _most_guesses(self, job: Job) -> int:
        """Return how many tokens to guess: a step must end at each boundary if decode states are published."""
        most = job.speculate
        if self.publishes_while_decoding:
            most = min(most, (job.launched // self.page + 1) * self.page - job.launched - 1)
        return most

    def _plan_prefill(self, job: Job, budget: int, planned: dict[int, PlannedRow]) -> int:
        """Plan the next chunk of a prompt; return the number of its tokens."""
        if job.handover is not None:
            return self._plan_handover_copy(job, job.handover, planned)
        allowed = self._allowed(job.prefill_end - job.launched, budget, planned)
        if not allowed:
            return 0
        end = self._chunk_end(job, allowed, not planned)
        count = end - job.launched
        if count <= 0 or not self._grow(job, count, planned):
            return 0
        assert job.sequence is not None
        samples = end == job.prefill_end
        span = Span(job.launched, end, job.media)
        next_token = 0 if samples else job.tokens[end]
        known = job.tokens[span.start : end]
        planned[job.number] = PlannedRow(
            job, job.sequence, span, known, job.attempt, samples, prefill=True, next_token=next_token
        )
        job.launched = end
        self.tenants.served[job.request.tenant] += count
        if samples:
            job.answer_launched += 1
            job.unread_passes += 1
        return count

    def _plan_handover_copy(self, job: Job, handover: Handover, planned: dict[int, PlannedRow]) -> int:
        """Plan the copy of what another engine has computed; return the number of its tokens.

        The copy takes two steps: to the boundary, where the job publishes as after a prefill here, and then to the end.
        """
        end = handover.boundary if job.launched < handover.boundary else handover.end
        count = end - job.launched
        if not self._grow(job, count, planned, arriving=True):
            return 0
        assert job.sequence is not None
        samples = end == handover.end
        span = Span(job.launched, end)
        planned[job.number] = PlannedRow(
            job, job.sequence, span, [], job.attempt, samples, prefill=True, incoming=handover
        )
        job.launched = end
        if samples:
            job.answer_launched += 1
            job.unread_passes += 1
            job.handover, job.guesses_kept = None, -1
        return count

    def _allowed(self, left: int, budget: int, planned: dict[int, PlannedRow]) -> int:
        """Return how many of a prompt's last ``left`` tokens a step may take that has ``budget`` of its chunk left."""
        most = min(self.chunk, budget + (BURST - 1) * self.chunk)
        if budget < left <= most and all(row.prefill for row in planned.values()):
            return left
        return max(budget, 0)

    def _chunk_end(self, job: Job, budget: int, alone: bool) -> int:
        """Return where the next chunk ends: at the end of the prompt or on a boundary. Its start: not in this step.

        ``alone``: nothing else is planned, so the chunk reaches at least the next boundary.
        """
        assert job.sequence is not None
        start = job.launched
        to_boundary = self.page - start % self.page
        end = job.sequence.next_stop(max(budget, to_boundary) if alone else budget, stops=job.prefill_stops)
        if end < job.prefill_end and end - start < to_boundary:
            return start
        return end if job.media is None else job.media.pass_end(start, end)

    # ------------------------------------------------------------ admission
    def _admit(self, jobs: list[Job], budget: int, planned: dict[int, PlannedRow]) -> int:
        """Admit waiting jobs in the policy's order and plan the first chunk of each, as far as pools and rows allow.

        Return what is left of ``budget``.
        """
        tenants, refused = self.tenants, set()
        if not jobs or (not self.free_rows and len({job.request.tenant for job in (*jobs, *self.running)}) == 1):
            return budget
        for job in tenants.turns(self.order(jobs, self.cache), tenants.by_running(self.running)):
            if planned and job.apart_until:
                return budget
            if job.unread_passes or self._awaits_prefix(job, planned):
                continue
            if budget <= 0 and not self._allowed(len(job.tokens) - cached_tokens(job, self.cache), budget, planned):
                return budget
            if job.request.tenant in refused or not tenants.leaves_others_theirs(job, self.running, self.clock()):
                refused.add(job.request.tenant)
                continue
            if not self.free_rows and not self._give_way(job, planned, of_one):
                return budget
            while not self._open(job):
                if not self._give_way(job, planned, of_tokens):
                    return budget
            if job.restoring is not None:
                continue
            if self.stateful:
                self._stop_where_waiting_diverge(job)
            taken = self._plan_prefill(job, budget, planned)
            if not taken:
                return budget
            budget -= taken
        return budget

    def _stop_where_waiting_diverge(self, job: Job) -> None:
        """End a prefill step where a waiting prompt diverges from ``job``: with a state there, that one can hit."""
        for other in self.waiting:
            if other is not job and other.namespace == job.namespace:
                shared = shared_tokens(job, other, len(other.tokens) - 1) // self.page * self.page
                if job.launched < shared < job.prefill_end:
                    job.prefill_stops.add(shared)

    def _awaits_prefix(self, job: Job, planned: dict[int, PlannedRow]) -> bool:
        """Return whether a running prefill is about to publish a longer prefix than ``job`` would hit now.

        What this step computes is published when it is launched, so the next step can admit ``job``.
        """
        deepest, whose = 0, None
        ending = {number for number, row in planned.items() if row.prefill}
        for other in self.running:
            if (other.prefilling or other.number in ending) and other.namespace == job.namespace:
                shared = shared_tokens(job, other, len(job.tokens) - 1) // self.page * self.page
                if shared > deepest and self._will_publish(other, shared):
                    deepest, whose = shared, other
        if whose is None or cached_tokens(job, self.cache) >= deepest:
            return False
        if deepest < whose.prefill_end:
            whose.prefill_stops.add(deepest)
        self.counts.waited += not job.awaited_prefix
        job.awaited_prefix = True
        return True

    def _will_publish(self, job: Job, boundary: int) -> bool:
        """Return whether a running prefill will publish ``boundary``, with a state there if the model has states."""
        assert job.sequence is not None
        if job.sequence.published >= boundary:
            return False
        return not self.stateful or job.launched <= boundary

    def _open(self, job: Job) -> bool:
        """Open the sequence of a waiting job and begin its restore. False: a pool is too short."""
        request = job.request
        if job.key.count < len(job.tokens):  # a token was in flight when it was retracted
            job.key = encode(job.tokens)
        try:
            sequence = self.cache.open(
                job.key, namespace=job.namespace, leave=1, extra=job.extra, label=request.label,
                priority=request.priority, until=self._until(request),
            )  # fmt: skip
        except CapacityError:
            return False
        job.launched, job.prefill_end = sequence.ready, len(job.tokens)
        if self.running and not self._pools_suffice(job):
            sequence.abort()
            return False
        job.sequence = sequence
        job.device_row = self.free_rows.pop()
        self.waiting.remove(job)
        self.running.append(job)
        self.counts.admitted += 1
        if self.observers is not None:
            self.observers.admitted(job.number, sequence.ready)
        if not job.answer.admitted_at:
            job.answer.admitted_at = time.monotonic()
            if self.accounts:
                self._account(sequence)
        job.restoring = sequence.restore() if job.failures < RETRIES else None
        if job.restoring is None or job.restoring.over:
            self._finish_restore(job)
        return True

    def _until(self, request: Request) -> float:
        """Return the time from which nobody needs what a request uses now."""
        return math.inf if request.ttl is None else self.clock() + request.ttl

    def _account(self, sequence: Sequence) -> None:
        """Count why the tokens of an admitted request miss. An error in it ends the counting, and no request."""
        try:
            self.cache.account(sequence)
        except Exception:
            log.exception("why prompts miss is counted no more")
            self.accounts = False

    @property
    def fetching(self) -> list[Job]:
        """The running jobs that wait for what a store may bring."""
        return [job for job in self.running if job.restoring is not None]

    def _finish_restore(self, job: Job) -> None:
        """Continue a job with what every tier has restored."""
        sequence, handover = job.sequence, job.handover
        assert sequence is not None
        job.restoring = None
        if job.apart_until:
            job.apart_until = max(job.apart_until, sequence.ready + 1)  # others may have computed beyond it
        brought, job.launched = sequence.ready - job.launched, sequence.ready
        if handover is not None and not handover.have <= sequence.ready < handover.end == job.prefill_end:
            job.handover = (
                None  # its beginning was evicted here, or tokens were answered since: the job is computed here
            )
        job.prefill_stops = set()
        self.counts.restored += brought
        if job.handover is not None:
            job.answer.prefill_hit = job.handover.hit
        if not job.admitted:
            job.answer.hit, job.answer.restored = sequence.ready, brought
        job.admitted = True
        if self.observers is not None:
            self.observers.restored(job.number, sequence.ready, brought)

    def _pools_suffice(self, job: Job) -> bool:
        jobs = [*self.running, job]
        if self.budget.suffices(jobs):
            return True
        self.cache.reclaim()  # running sequences give back what they keep without needing it
        return self.budget.suffices(jobs)

    # ------------------------------------------------------------ slots
    def _grow(self, job: Job, count: int, planned: dict[int, PlannedRow], *, arriving: bool = False) -> bool:
        """Reserve slots for ``count`` more tokens, and retract jobs that rank lower until they fit.

        False: the job itself was retracted or ended.
        """
        while True:
            assert job.sequence is not None
            try:
                job.sequence.grow(count, arriving=arriving)
                return True
            except CapacityError as error:
                if len(self.running) == 1:  # there is no other job to retract
                    self.end(job, "error", error)
                    return False
                most = self.tenants.most(self.running, of_tokens)
                victim = [each for each in self._ranked(self.running) if each.request.tenant == most][-1]
                self._set_back(victim, planned)
                if victim is job:
                    return False

    def _give_way(self, job: Job, planned: dict[int, PlannedRow], measure: Callable[[Job], int]) -> bool:
        """Retract a job of a tenant that runs more than the one of ``job``, which waits. False: there is none."""
        victim = self.tenants.gives_way(job, self._ranked(self.running), measure)
        if victim is not None:
            self._set_back(victim, planned)
        return victim is not None

    def _set_back(self, job: Job, planned: dict[int, PlannedRow]) -> None:
        dropped = planned.pop(job.number, None)
        if dropped is not None:
            self._unplan(dropped)
        self.retract(job)

    def _unplan(self, row: PlannedRow) -> None:
        """Undo what planning this row has changed in its job."""
        job = row.job
        job.launched = row.span.start
        job.handover = row.incoming
        if row.samples:
            job.answer_launched -= 1
            job.unread_passes -= 1

    # ------------------------------------------------------------ how a job stops running
    def retract(self, job: Job) -> None:
        """Give back the pages of a running job. What it computed stays cached, and it waits for its next turn."""
        assert job.sequence is not None
        job.sequence.close()
        self.counts.retracted += 1
        self._requeue(job, retracted=True)

    def _requeue(self, job: Job, *, retracted: bool) -> None:
        """Make a running job wait. Then it starts over from what is cached."""
        self._stop_running(job)
        job.key = encode(job.tokens)
        self.waiting.append(job)
        if self.observers is not None:
            self.observers.requeued(job.number, retracted)

    def restart(self, job: Job) -> None:
        """Void everything in flight for a job: it starts over from its answer so far and from what is cached.

        The failure may be due to what another engine handed over, so that is not used again.
        """
        job.attempt += 1
        job.unread_passes = 0
        job.answer_launched = len(job.answer.tokens)
        job.tokens = [*job.request.tokens, *job.answer.tokens]
        job.handover = None
        if job.sequence is not None:
            job.sequence.abort()
            self._requeue(job, retracted=False)

    def end(self, job: Job, reason: Reason, error: BaseException | None = None) -> None:
        """End the answer. Only a job that ended with "length" or "stop" is published."""
        del self.jobs[job.answer]
        job.answer.reason, job.answer.error = reason, error
        job.attempt += 1
        if self.observers is not None:
            self.observers.ended(job.number, job.answer)
        if job.sequence is None:
            self.waiting.remove(job)
            return
        if job.request.ttl is not None and job.sequence.open:
            job.sequence.until = self._until(job.request)
        if reason in ("length", "stop"):
            job.sequence.close()
        else:
            job.sequence.abort()
        self._stop_running(job)

    def _stop_running(self, job: Job) -> None:
        """Free the job's device row. Work in flight may still write the row, and its next owner comes later on the
        stream."""
        job.sequence = job.restoring = None
        self.running.remove(job)
        self.free_rows.append(job.device_row)


def shared_tokens(job: Job, other: Job, most: int) -> int:
    """Return how many of the first ``most`` tokens of two jobs agree, with what their prompts carry there."""
    for one, two in itertools.zip_longest(job.extra, other.extra):
        if one != two:
            most = min(most, *(span[0] for span in (one, two) if span is not None))
            break
    return common_prefix(job.tokens, other.tokens, most)


def common_prefix(a: list[int], b: list[int], most: int) -> int:
    """Return how many of the first ``most`` tokens of ``a`` and ``b`` agree."""
    low, high = 0, min(most, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
