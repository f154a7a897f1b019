"""The engine: requests in, tokens out.

One thread drives it, and with it the cache: ``step`` plans the next forward pass, launches it, and handles what an
earlier one brought. With overlap that is the one before, so that the device never waits for the planning; without, the
one just launched. What comes out is the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from prefixloom import Cache, InputError, PrefixloomError, ProtocolError, Sequence, encode

from .forward import Flight, Forward, Row
from .guessing import Guesser, PromptLookup
from .handover import Handed
from .interrupts import held
from .model import Model
from .requests import RETRIES, Answer, Job, Request
from .scheduler import Counts, Scheduler

log = logging.getLogger("prefixloom.engine")
PAUSE = 0.001
"""Seconds between two looks at a store, where there is nothing else to do."""


class Engine:
    """Serves a model through a composed cache. A context manager: its end aborts what still runs.

    ``chunk``        tokens of one step, decoding and prefill together
    ``max_running``  requests that run at once
    ``policy``       who is admitted first: "fcfs", "lpm" (longest cached prefix), "dfs-weight" (those who share a
                     prefix together), "priority"
    ``overlap``      plan a step while the one before runs
    ``speculate``    tokens guessed ahead for requests that do not say; the cache must be composed with at least as
                     much ``max_rewind``
    ``guesser``      where guesses come from (default: the model's draft, if it has one, else ``PromptLookup``)
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
    ) -> None:
        if not isinstance(cache, Cache) or not callable(getattr(model, "bind", None)):
            raise InputError(
                f"an engine takes a model (prefixloom_engine.model) and its cache, got {model!r}, {cache!r}"
            )
        for name, value in (("chunk", chunk), ("max_running", max_running)):
            if value.__class__ is not int or value < 1:
                raise InputError(f"{name} is a whole number from 1 up, got {value!r}")
        self.model, self.cache = model, cache
        self.overlap = overlap
        self._speculate = self._depth(speculate, "the engine")
        runner = model.bind(cache)
        if guesser is None and getattr(runner, "drafter", None) is None:
            guesser = PromptLookup()
        self._scheduler = Scheduler(cache, policy, chunk, max_running, guesser)
        self._forward = Forward(runner, cache, max_running, overlap)
        self._flying: deque[Flight] = deque()
        self._numbers = 0
        self._closed = False
        self.forward_seconds = 0.0

    # ------------------------------------------------------------ asking
    def add(self, request: Request, handed: Handed | None = None) -> Answer:
        """Queue a request. Refused at once: tokens that the model does not know, and what the pools can never hold.

        ``handed``: what another engine computed of its prompt. Where that does not fit any more, it is computed here.
        """
        asked = self.check(request)
        stops = self.model.stops if request.stops is None else request.stops
        answer = Answer(request)
        job = Job(answer, self._numbers, list(request.tokens), encode(request.tokens), stops, asked)
        job.arrived = handed
        self._numbers += 1
        try:
            with held():
                self._scheduler.add(job)
        except KeyboardInterrupt:  # nobody is given the answer
            self.abort(answer)
            raise
        return answer

    def check(self, request: Request) -> int:
        """Refuse what can never be answered; else the number of tokens to guess ahead."""
        if self._closed:
            raise ProtocolError("this engine is closed")
        name = request.label or "a request"
        most = self.model.vocabulary
        wrong = next((t for t in request.tokens if t.__class__ is not int or not 0 <= t < most), None)
        if wrong is not None:
            raise InputError(f"{name} has the token {wrong!r}: the model's are whole numbers from 0 to {most - 1}")
        self._scheduler.room.check(len(request.tokens) + request.max_tokens - 1, name)
        return self._speculate if request.speculate is None else self._depth(request.speculate, name)

    def _depth(self, tokens: int, name: str) -> int:
        if tokens.__class__ is not int or tokens < 0:
            raise InputError(f"{name} would guess {tokens!r} tokens ahead: it is a whole number from 0 up")
        if tokens > self.cache.composition.max_rewind:
            raise InputError(
                f"{name} would guess {tokens} tokens ahead, and the cache takes at most "
                f"{self.cache.composition.max_rewind} back: compose it with max_rewind={tokens}"
            )
        return tokens

    def abort(self, answer: Answer) -> None:
        """At any time. What it has so far stays in ``answer.tokens``; nothing of it is published any more."""
        with held():
            self._abort(answer)

    def _abort(self, answer: Answer) -> None:
        job = self._scheduler.jobs.get(answer)
        if job is not None:
            self._scheduler.end(job, "aborted")

    # ------------------------------------------------------------ running
    def step(self) -> bool:
        """Plan and launch one step, and handle what came back. False: there was nothing to do.

        Ctrl-C is held back until its end. A second one, or whatever else interrupts it, makes everything that runs
        start over from what is cached.
        """
        with held(), self._begun_anew():
            self._start_over(None)  # others may have polled since, or flushed
            rows = self._scheduler.plan()
            if rows:
                self._launch(rows)
            elif not self._flying:
                return self._idle()
            if self._flying and (len(self._flying) > self.overlap or not rows):
                self._collect(self._flying.popleft())
        return True

    @contextmanager
    def _begun_anew(self) -> Iterator[None]:
        """What raises in this block voids all that is in flight."""
        try:
            yield
        except BaseException:
            for job in list(self._scheduler.jobs.values()):
                self._scheduler.restart(job)
            raise

    def _launch(self, rows: list[Row]) -> None:
        flight = self._forward.launch(rows)
        self._flying.append(flight)
        counts = self._scheduler.counts
        counts.steps += 1
        for row in rows:
            if row.prefill:
                counts.prefilled += row.span.count if row.arriving is None else 0
                counts.arrived += row.span.count if row.arriving is not None else 0
                if flight.error is None:  # with the step: who waits for what it computes is admitted next
                    row.sequence.publish()
            else:
                counts.decoded += 1
                counts.drafted += row.drafted
                row.job.answer.drafted += row.drafted

    def _idle(self) -> bool:
        """Nothing runs and nothing can be launched: a store may bring something, or else whoever still waits can never
        be admitted."""
        if self._scheduler.fetching:
            time.sleep(PAUSE)
            self.cache.poll()
            self._start_over(None)
            return True
        for job in self._scheduler.waiting[:1]:
            told = f"{job.request.label or 'a request'} cannot be admitted: others than this engine hold the pools"
            self._scheduler.end(job, "error", PrefixloomError(f"{told}. {self.cache.stats()}"))
        return bool(self._scheduler.waiting)

    def _collect(self, flight: Flight) -> None:
        """Wait for a step, and go on from what it sampled: for whom all went well that it read."""
        flight.wait()
        self.cache.poll()
        self.forward_seconds += flight.seconds
        self._start_over(flight)
        for row in flight.rows if flight.error is None else ():
            job = row.job
            if row.samples and row.life == job.life:
                job.pending -= 1
                self._sampled(row, job)

    def _sampled(self, row: Row, job: Job) -> None:
        """The tokens of a row are known: name them, take back what was guessed wrong, and see whether it ends."""
        fresh = self._accepted(row)
        request, answer = job.request, job.answer
        answer.handed = row.handed
        here = row.sequence.open and job.sequence is row.sequence
        if row.drafted and here:
            wrong = row.drafted + 1 - len(fresh)
            row.sequence.rewind(wrong)
            job.end -= wrong
        job.due += len(fresh) - 1
        job.kept = len(fresh) - 1 if row.arriving is None else -1
        job.failures = 0
        for at, token in enumerate(fresh):
            answer.tokens.append(token)
            answer.logprobs += row.logprobs[at : at + 1]
            job.tokens.append(token)
            if token in job.stops or len(answer.tokens) == request.max_tokens:
                break
        if here:
            row.sequence.append(job.tokens[row.sequence.named :])
        if answer.tokens[-1] in job.stops:
            self._scheduler.end(job, "stop")
        elif len(answer.tokens) == request.max_tokens:
            self._scheduler.end(job, "length")
        elif here and self._scheduler.publishes:
            self._checkpoint(row.sequence)

    def _checkpoint(self, sequence: Sequence) -> None:
        """Of a decode: where the running state stands on a boundary, and its tokens are known by now."""
        if sequence.published < sequence.committed == sequence.publishable:
            sequence.publish()

    def _accepted(self, row: Row) -> list[int]:
        """The guesses that were right, and the token behind them."""
        kept = 0
        while kept < row.drafted and row.chosen[kept] == row.guesses[kept]:
            kept += 1
        self._scheduler.counts.accepted += kept
        row.job.answer.accepted += kept
        return row.chosen[: kept + 1]

    def _start_over(self, flight: Flight | None) -> None:
        """Whoever was in a step that failed, or had read what that or a copy was to bring, starts over; a few times.

        So does who lost all that it held to a flush. The cache may know of a later step that failed before its turn
        comes here.
        """
        lost = {
            job.number: (job, job.sequence.failed)
            for job in self._scheduler.running
            if job.sequence and not job.sequence.open
        }
        if flight is not None:
            if flight.error is not None:
                log.warning("a forward pass of %d requests failed: %r", len(flight.rows), flight.error)
            for row in flight.rows:  # those that were retracted since, too
                failed = flight.error or row.sequence.failed
                if failed is not None and row.life == row.job.life:
                    lost[row.job.number] = row.job, failed
        for job, failed in lost.values():
            if failed is not None:
                self._scheduler.counts.failed += 1
                job.failures += 1
                if job.failures > RETRIES:
                    self._scheduler.end(job, "error", failed)
                    continue
            self._scheduler.restart(job)

    # ------------------------------------------------------------ the surface
    def generate(self, prompts: Iterable[Request | Iterable[int]], max_tokens: int = 32) -> list[Answer]:
        """Answer all of these, in their order; a prompt may be a ``Request`` or just its tokens.

        If one is refused, none is begun. Whatever interrupts it aborts what it began.
        """
        if isinstance(prompts, (str, bytes, Request)) or not isinstance(prompts, Iterable):
            raise InputError(f"generate takes a list of prompts, each a Request or a list of tokens, got {prompts!r}")
        asked = [p if isinstance(p, Request) else Request(p, max_tokens) for p in prompts]
        answers: list[Answer] = []
        try:
            with held():
                for request in asked:
                    answers.append(self.add(request))
            while not all(answer.done for answer in answers):
                self.step()
        finally:
            with held():
                for answer in answers:
                    self._abort(answer)
        return answers

    def stream(self, prompt: Request | Iterable[int], max_tokens: int = 32) -> AnswerStream:
        """The tokens of one answer as they come, while others run on. Closing the iterator aborts it."""
        request = prompt if isinstance(prompt, Request) else Request(prompt, max_tokens)
        with held():  # where it is interrupted, the stream is dropped and aborts
            return AnswerStream(self, self.add(request))

    @property
    def counts(self) -> Counts:
        return self._scheduler.counts

    def drain(self) -> None:
        """Handle all that was launched, without launching more."""
        with held(), self._begun_anew():
            while self._flying:
                self._collect(self._flying.popleft())

    def close(self) -> None:
        """Abort what still runs, wait for what is in flight, end the worker. A second close does nothing."""
        if self._closed:
            return
        with held():
            for answer in list(self._scheduler.jobs):
                self._abort(answer)
            self._forward.close()
            self._closed = True
            self._flying.clear()
            self.cache.poll()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AnswerStream:
    """An answer, token by token. Whoever leaves early closes it, or drops it, and the request is aborted."""

    def __init__(self, engine: Engine, answer: Answer) -> None:
        self.engine, self.answer = engine, answer
        self._told = 0

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> int:
        answer = self.answer
        while self._told == len(answer.tokens):
            if answer.error is not None:
                raise answer.error
            if answer.done:
                raise StopIteration
            self.engine.step()
        self._told += 1
        return answer.tokens[self._told - 1]

    def close(self) -> None:
        self.engine.abort(self.answer)

    __del__ = close
