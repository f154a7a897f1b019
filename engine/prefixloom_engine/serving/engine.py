"""The engine: requests in, tokens out.

One thread drives the engine, and with it the cache. ``step`` plans the next forward pass, launches it, and reads the
results of an earlier one. With ``overlap`` that is the pass before, so that the device never waits for planning;
without, it is the pass just launched. The answers are the same.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from prefixloom import (
    BrokenError,
    Cache,
    Figure,
    Identity,
    InputError,
    PrefixloomError,
    ProtocolError,
    Sequence,
    Tokens,
    encode,
)

from ..contract.handover import Handover
from ..contract.model import Identified, Media, Model, Multimodal
from ..contract.observer import Observer, PrefillChunk, StepFacts
from ..contract.requests import POSITIONS, Answer, Request, shown
from ..forward.jobs import Job, LogitsError, PlannedRow
from ..forward.stream import ForwardStream, LaunchedStep
from .driving import AnswerStream, OpenStreams, generate
from .guessing import CheckedGuesser, Guesser, PromptLookup
from .interrupts import defer_interrupts
from .observers import Observers, observers_of
from .scheduler import RETRIES, Counts, Scheduler

log = logging.getLogger("prefixloom.engine")
STORE_POLL_SECONDS = 0.001
"""How long ``step`` waits before it polls a store, where there is nothing else to do."""


class Engine:
    """Serves a model through a composed cache. As a context manager, it aborts at its end what still runs.

    ``chunk``        how many tokens one step computes, decoding and prefill together
    ``max_running``  how many requests run at once
    ``policy``       which waiting request is admitted first: "fcfs", "lpm" (longest cached prefix), "dfs-weight"
                     (requests that share a prefix together), "priority"
    ``overlap``      plan a step while the one before runs
    ``speculate``    how many tokens are guessed ahead for requests that do not say; the cache must be composed with at
                     least as much ``max_rewind``
    ``clock``        seconds, by which the ``ttl`` of requests is counted
    ``shares``       by tenant, its part of what runs, where others want it too; who is not there has 1
    ``observers``    told what the engine does while it works: see ``Observer``
    ``guesser``      what makes the guesses (default: the model's draft, if it has one, else ``PromptLookup``)
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        chunk: int = 512,
        max_running: int = 16,
        policy: str = "fcfs",
        overlap: bool = True,
        speculate: int = 0,
        guesser: Guesser | None = None,
        clock: Callable[[], float] = time.monotonic,
        shares: Mapping[str, float] = {},
        observers: Iterable[Observer] = (),
    ) -> None:
        if not isinstance(cache, Cache) or not callable(getattr(model, "bind", None)):
            raise InputError(
                f"an engine takes a model (prefixloom_engine.Model) and its cache, got {model!r}, {cache!r}"
            )
        for name, value in (("chunk", chunk), ("max_running", max_running)):
            if value.__class__ is not int or value < 1:
                raise InputError(f"{name} is a whole number from 1 up, got {value!r}")
        self.model, self.cache = model, cache
        self.overlap = overlap
        self._speculate = self._guess_depth(speculate, "the engine")
        runner = model.bind(cache)
        if guesser is None and getattr(runner, "drafter", None) is None:
            guesser = PromptLookup()
        checked = None if guesser is None else CheckedGuesser(guesser, model.vocabulary)
        self._scheduler = Scheduler(cache, policy, chunk, max_running, checked, clock, shares)
        self._forward = ForwardStream(runner, cache, max_running, overlap)
        self._in_flight: deque[LaunchedStep] = deque()
        self._streams = OpenStreams()
        self._identified = model if isinstance(model, Identified) else None
        self._identity: Identity | None = None
        self._encoded: tuple[tuple[int, ...], Tokens] = (), encode(())
        """The last prompt that was checked. The choices of a request have the same one."""
        self._jobs_added = 0
        self._clock = clock
        self._expires = False
        """Whether a request ever had a ``ttl``."""
        self._closed = False
        self.forward_seconds = 0.0
        self._observers = self._scheduler.observers = observers_of(observers)
        if self._observers is not None:
            self._observers.attached(cache)

    # ------------------------------------------------------------ requests
    def add(self, request: Request, handed: Handover | None = None, *, answer: Answer | None = None) -> Answer:
        """Queue a request. Refuse at once tokens that the model does not know, and what the pools can never hold.

        ``handed``: what another engine computed of the prompt. If that does not fit any more when the request is
        admitted, this engine computes the prompt itself. ``answer``: an empty one that the client has already.
        """
        speculate = self.check(request)
        media = self._media(request)
        stops = self.model.stops if request.stops is None else request.stops
        self._identify()
        answer = Answer(request) if answer is None else answer
        key, namespace = self._encoded[1], self.namespace(request.namespace)
        job = Job(answer, self._jobs_added, list(request.tokens), key, namespace, stops, speculate, media)
        job.handover = handed
        self._jobs_added += 1
        self._expires |= request.ttl is not None
        try:
            with defer_interrupts():
                self._scheduler.add(job)
        except KeyboardInterrupt:  # the caller never gets the answer, and so could not abort it
            self.abort(answer)
            raise
        return answer

    @property
    def identity(self) -> Identity | None:
        """The identity of the model as it is; None if the model does not say it."""
        self._identify()
        return self._identity

    def namespace(self, name: str) -> str:
        """Return the namespace ``name`` of the model's identity, in which the cache keeps what its requests compute."""
        return name if self._identity is None else self._identity.namespace(name)

    def _identify(self) -> None:
        """See under which identity the model computes now. What runs under another one ends."""
        if self._identified is None:
            return
        identity = self._identified.identity
        self.cache.identity = identity
        before, self._identity = self._identity, identity
        if before is None or before == identity:
            return
        error = ProtocolError("the model's weights or adapters have changed while this request ran: ask again")
        for job in list(self._scheduler.jobs.values()):
            if not job.admitted and job.sequence is None:
                job.namespace = self.namespace(job.request.namespace)
                job.handover = None  # another engine computed it under the identity before
                continue
            self._scheduler.end(job, "error", error)
            if self._in_flight:  # what is published with a step may have been computed after the change
                self.cache.drop_namespace(before.namespace(job.request.namespace))

    def check(self, request: Request) -> int:
        """Refuse a request that can never be answered; otherwise return how many tokens to guess ahead for it."""
        if self._closed:
            raise ProtocolError("this engine is closed")
        name = request.label or "a request"
        most = self.model.vocabulary
        if request.tokens is not self._encoded[0]:
            wrong = next((t for t in request.tokens if t.__class__ is not int or not 0 <= t < most), None)
            if wrong is not None:
                raise InputError(
                    f"{name} has the token {shown(wrong)}: the model's are whole numbers from 0 to {most - 1}"
                )
            self._encoded = request.tokens, encode(request.tokens)
        beyond = [stop for stop in request.stops or () if stop >= most]
        if beyond:
            raise InputError(f"{name} has the stop {min(beyond)}: the model's tokens are from 0 to {most - 1}")
        length = len(request.tokens) + request.max_tokens - 1
        self._scheduler.budget.check(length, name)
        self._forward.check(length, name)
        return self._speculate if request.speculate is None else self._guess_depth(request.speculate, name)

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its answer may come to: what the pools hold, and the model's positions."""
        return bisect.bisect_left(range(1, POSITIONS), True, key=lambda length: not self._serves(length))

    def _serves(self, length: int) -> bool:
        try:
            self._scheduler.budget.check(length, "")
            self._forward.check(length, "")
        except InputError:
            return False
        return True

    def extra_keys(self, tokens: list[int], inputs: Mapping[str, Any]) -> list[tuple[int, int, str]]:
        """Return the extra keys of a prompt that carries ``inputs``, such as images: spans (start, end, key)."""
        media = self._media(Request(tokens, 1, inputs=inputs))
        return [] if media is None else list(media.extra)

    def _media(self, request: Request) -> Media | None:
        """Return the media that a request's prompt carries beside its tokens."""
        if not request.inputs:
            return None
        name = request.label or "a request"
        if not isinstance(self.model, Multimodal):
            raise InputError(f"{name} carries {', '.join(request.inputs)}, and this model takes tokens only")
        media = self.model.media(request.tokens, request.inputs)
        longest = max((end - start for start, end in media.whole), default=0)
        if longest > self._scheduler.chunk:
            raise InputError(
                f"{name} has an image of {longest} tokens, which one step has to compute, and a step of this engine "
                f"computes {self._scheduler.chunk}: make the engine with chunk={longest} or more"
            )
        return media

    def _guess_depth(self, tokens: int, name: str) -> int:
        if tokens.__class__ is not int or tokens < 0:
            raise InputError(f"{name} would guess {tokens!r} tokens ahead: it is a whole number from 0 up")
        if tokens > self.cache.composition.max_rewind:
            raise InputError(
                f"{name} would guess {tokens} tokens ahead, and the cache takes at most "
                f"{self.cache.composition.max_rewind} back: compose it with max_rewind={tokens}"
            )
        return tokens

    def abort(self, answer: Answer) -> None:
        """End a request at any time. ``answer.tokens`` keeps what it has so far; nothing more of it is published."""
        with defer_interrupts():
            self._abort(answer)

    def _abort(self, answer: Answer) -> None:
        job = self._scheduler.jobs.get(answer)
        if job is not None:
            self._scheduler.end(job, "aborted")

    def finish(self, answer: Answer) -> None:
        """End a request at any time as if it had met a stop: what is computed of it stays cached."""
        with defer_interrupts():
            job = self._scheduler.jobs.get(answer)
            if job is not None:
                self._scheduler.end(job, "stop")

    # ------------------------------------------------------------ steps
    def step(self) -> bool:
        """Plan and launch one step, and read the results of an earlier one. False: there was nothing to do.

        Ctrl-C is held back until the end of the step. A second Ctrl-C, or any other exception, interrupts the step;
        then every job starts over from what is cached.
        """
        with defer_interrupts(), self._restart_all_on_error():
            planned = 0.0 if self._observers is None else time.perf_counter()
            self._restart_failed(None)  # the program may have polled or flushed the cache since the last step
            self._end_unusable()
            for answer in self._streams.dropped():
                self._abort(answer)
            if self._identified is not None and self._identified.changed():
                self._identify()
            if self._expires:
                self.cache.expire(self._clock())
            rows = self._scheduler.plan()
            if rows:
                self._launch(rows, planned)
            elif not self._in_flight:
                worked = self._idle()
                if self._observers is not None:
                    self._observers.stepped()
                return worked
            while self._in_flight and (len(self._in_flight) > self.overlap or not rows or self._in_flight[-1].error):
                self._collect(self._in_flight.popleft())  # nothing can be planned behind a step that failed
            if self._observers is not None:
                self._observers.stepped()
        return True

    @contextmanager
    def _restart_all_on_error(self) -> Iterator[None]:
        """Restart every job if the block raises, because everything in flight is void then."""
        try:
            yield
        except BaseException:
            for job in list(self._scheduler.jobs.values()):
                self._scheduler.restart(job)
            raise

    def _launch(self, rows: list[PlannedRow], planned: float) -> None:
        launched = self._forward.launch(rows, timed=self._observers is not None)
        self._in_flight.append(launched)
        counts = self._scheduler.counts
        counts.steps += 1
        for row in rows:
            if row.prefill:
                counts.prefilled += row.span.count if row.incoming is None else 0
                counts.arrived += row.span.count if row.incoming is not None else 0
                if launched.error is None:  # published with the step, so that jobs waiting for it are admitted next
                    row.sequence.publish()
            else:
                counts.decoded += 1
                counts.drafted += row.guess_count
                row.job.answer.drafted += row.guess_count
        if self._observers is not None:
            launched.facts = facts_of(rows, counts.steps, planned)
            self._observers.launched(launched.facts)

    def _idle(self) -> bool:
        """Wait for a store, or end the first waiting job. Nothing is in flight, and nothing can be launched.

        A store may still bring something. If it cannot, the first waiting job can never be admitted.
        """
        if self._scheduler.fetching:
            time.sleep(STORE_POLL_SECONDS)
            self.cache.poll()
            self._restart_failed(None)
            return True
        for job in self._scheduler.waiting[:1]:
            name = job.request.label or "a request"
            message = f"{name} cannot be admitted: something other than this engine holds the pools"
            self._scheduler.end(job, "error", PrefixloomError(f"{message}. {self.cache.stats()}"))
        return bool(self._scheduler.waiting)

    def _collect(self, launched: LaunchedStep) -> None:
        """Wait for a step, and continue its jobs with what it sampled. Only rows whose inputs were all valid count."""
        if launched.facts is None or self._observers is None:
            launched.wait()
        else:
            launched.facts.waited = time.perf_counter()
            launched.wait()
            self._tell_over(launched, self._observers)
        self.cache.poll()
        self.forward_seconds += launched.seconds
        self._restart_failed(launched)
        for row in launched.rows if launched.error is None else ():
            job = row.job
            if row.attempt == job.attempt and row.error is None:
                if row.span.end >= job.apart_until:
                    job.apart_until = 0
                if row.samples:
                    job.unread_passes -= 1
                    if row.prefill and self._observers is not None:
                        self._observers.first_token(job.number)
                    self._take_tokens(row, job)
        self._end_unusable(launched)

    def _tell_over(self, launched: LaunchedStep, observers: Observers) -> None:
        facts = launched.facts
        assert facts is not None
        facts.begun, facts.ended = launched.times()
        facts.read, facts.error = time.perf_counter(), launched.error
        observers.over(facts)

    def _take_tokens(self, row: PlannedRow, job: Job) -> None:
        """Take the tokens of a row: rewind after wrong guesses, append the others, and end a complete answer."""
        fresh = self._verified_tokens(row)
        request, answer = job.request, job.answer
        answer.handed = row.outgoing
        running = row.sequence.open and job.sequence is row.sequence
        if row.guess_count and running:
            wrong = row.guess_count + 1 - len(fresh)
            row.sequence.rewind(wrong)
            job.launched -= wrong
        job.answer_launched += len(fresh) - 1
        job.guesses_kept = len(fresh) - 1 if row.incoming is None else -1
        job.failures = 0
        for at, token in enumerate(fresh):
            answer.tokens.append(token)
            answer.logprobs += row.logprobs[at : at + 1]
            answer.alternatives += row.alternatives[at : at + 1]
            job.tokens.append(token)
            if token in job.stops or len(answer.tokens) == request.max_tokens:
                break
        if running:
            row.sequence.append(job.tokens[row.sequence.named :])
        if answer.tokens[-1] in job.stops:
            self._scheduler.end(job, "stop")
        elif len(answer.tokens) == request.max_tokens:
            self._scheduler.end(job, "length")
        elif running and self._scheduler.publishes_while_decoding:
            self._publish_on_boundary(row.sequence)

    def _publish_on_boundary(self, sequence: Sequence) -> None:
        """Publish a decode where its running state stands on a boundary and all tokens before it are known."""
        if sequence.published < sequence.committed == sequence.publishable:
            sequence.publish()

    def _verified_tokens(self, row: PlannedRow) -> list[int]:
        """Return the guesses that were right, and the token that the model sampled after them."""
        right = 0
        while right < row.guess_count and row.sampled[right] == row.guesses[right]:
            right += 1
        self._scheduler.counts.accepted += right
        row.job.answer.accepted += right
        return row.sampled[: right + 1]

    def _restart_failed(self, launched: LaunchedStep | None) -> None:
        """Restart jobs that lost what they computed; end a job that failed too often.

        A job is lost if its step failed, if it had read what a failed step or copy was to write, or if a flush took all
        that it held. The cache may report a failure of a later step before that step is collected here.
        """
        lost = {
            job.number: (job, job.sequence.failed)
            for job in self._scheduler.running
            if job.sequence and not job.sequence.open
        }
        if launched is not None and launched.error is not None:
            log.warning("a forward pass of %d requests failed: %r", len(launched.rows), launched.error)
        steps = [*self._in_flight] if launched is None else [launched, *self._in_flight]
        in_failed: dict[int, tuple[LaunchedStep, PlannedRow]] = {}
        for step in steps:
            error = step.error if step is launched else None  # of the others, what the cache has seen counts
            for row in step.rows:  # a job may have been retracted since, so ``running`` does not name them all
                failed, number = error or row.sequence.failed, row.job.number
                if failed is not None and row.attempt == row.job.attempt:
                    lost.setdefault(number, (row.job, failed))
                    if failed is step.error:
                        in_failed.setdefault(number, (step, row))
        unusable = {row.job.number for step in steps for row in step.rows if self._is_unusable(step, row)}
        for number, (job, failed) in lost.items():
            if number in unusable:
                continue  # ``_end_unusable`` ends it, after the tokens before that were taken
            if failed is not None:
                self._scheduler.counts.failed += 1
                if number in in_failed:
                    step, row = in_failed[number]
                    job.failures += len(step.rows) == 1
                    job.apart_until = max(job.apart_until, row.span.end)
                elif not isinstance(failed, LogitsError) and all(failed is not step.error for step in steps):
                    job.failures += 1  # a copy that it read failed; otherwise it has read what another one published
                if job.failures > RETRIES:
                    self._scheduler.end(job, "error", failed)
            self._scheduler.restart(job)  # it changes nothing of a job that has ended

    def _end_unusable(self, launched: LaunchedStep | None = None) -> None:
        """End the jobs whose logits were not finite. The model would return the same again, so they are not retried."""
        for step in [*self._in_flight] if launched is None else [launched, *self._in_flight]:
            for row in step.rows:
                if self._is_unusable(step, row):
                    log.warning("%s", row.error)
                    self._scheduler.counts.failed += 1
                    self._scheduler.end(row.job, "error", row.error)

    def _is_unusable(self, step: LaunchedStep, row: PlannedRow) -> bool:
        """Return whether this row of a step that is over, and nothing else, ends its job.

        If something that the row had read failed before, the row's logits say nothing.
        """
        if step.error is not None or row.error is None or row.attempt != row.job.attempt:
            return False
        return row.sequence.failed is None or row.sequence.failed is row.error

    # ------------------------------------------------------------ whole answers
    def generate(self, prompts: Iterable[Request | Iterable[int]], max_tokens: int = 32) -> list[Answer]:
        """Answer all prompts and return the answers in their order; a prompt is a ``Request`` or a list of tokens.

        If one prompt is refused, none is begun. An exception or an interrupt aborts what this call has begun.
        """
        return generate(self, prompts, max_tokens)

    def stream(self, prompt: Request | Iterable[int], max_tokens: int = 32) -> AnswerStream:
        """Return the tokens of one answer as they come, while other requests run.

        Closing the iterator aborts it. So does dropping the iterator, at the engine's next step.
        """
        request = prompt if isinstance(prompt, Request) else Request(prompt, max_tokens)
        return self._streams.begin(self, request)

    @property
    def counts(self) -> Counts:
        return self._scheduler.counts

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    @property
    def tokens_ahead(self) -> int:
        """How many tokens of prompts are still to be computed, those included that may yet hit."""
        waiting = sum(len(job.tokens) for job in self._scheduler.waiting)
        return waiting + sum(max(0, job.prefill_end - job.launched) for job in self._scheduler.running)

    @property
    def peers(self) -> Mapping[str, str]:
        """By name, the processes that compute for this one: there are none."""
        return {}

    def figures(self) -> list[Figure]:
        """Return the figures of the cache, and of tenants if requests name theirs, for a dashboard."""
        return [
            *self.cache.figures(),
            *self._scheduler.tenants.figures(self._scheduler.running, self._scheduler.waiting),
        ]

    def retire(self) -> None:
        """Take nothing new from other processes: an engine alone has nothing of them."""

    def account(self) -> None:
        """Count from now on in the cache's history why the tokens of each request miss (``Cache.account``)."""
        self._scheduler.accounts = True
        self.cache.history()

    def drain(self) -> None:
        """Read the results of everything that was launched, without launching more."""
        with defer_interrupts(), self._restart_all_on_error():
            while self._in_flight:
                self._collect(self._in_flight.popleft())

    def close(self) -> None:
        """Abort what still runs, wait for what is in flight, and end the worker. A second call does nothing."""
        if self._closed:
            return
        with defer_interrupts():
            for answer in list(self._scheduler.jobs):
                self._abort(answer)
            self._forward.close()
            self._closed = True
            if self._observers is not None:
                for launched in self._in_flight:
                    self._tell_over(launched, self._observers)
            self._in_flight.clear()
            self._streams.clear()
            with suppress(BrokenError):  # what is over is nobody's then, and the caller has the error of what broke it
                self.cache.poll()
            if self._observers is not None:
                self._observers.stepped()
                self._observers.closed()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def facts_of(rows: Iterable[PlannedRow], number: int, planned: float) -> StepFacts:
    """Return the facts for observers of a step that was just launched."""
    chunks, decoded, drafted = [], 0, 0
    for row in rows:
        if row.prefill:
            span = row.span
            chunks.append(PrefillChunk(row.job.number, span.start, span.end, row.samples, row.incoming is not None))
        else:
            decoded += 1
            drafted += row.guess_count
    return StepFacts(number, tuple(chunks), decoded, drafted, planned, time.perf_counter())
