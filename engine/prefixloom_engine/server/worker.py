"""The worker: one thread drives the engine, and coroutines of one event loop ask it.

The engine and its cache belong to the worker's thread. A coroutine adds a request with ``add`` and awaits its tokens
from the ``PendingAnswer``. Anything else that it wants of the engine or of the cache it asks with ``call``. Both are
done between two steps of the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

import attrs

from prefixloom import BrokenError, InputError, PrefixloomError

from ..contract.requests import Answer, Request
from ..serving.driving import DrivenEngine

log = logging.getLogger("prefixloom.server")
T = TypeVar("T")
MOST_FAILURES = 3
"""After so many steps in a row that raised, the engine is given up."""
POLL_SECONDS = 0.05
"""How often the cache is polled while there is nothing to compute: copies and writes below the device go on."""
SILENT_SECONDS = 60.0
"""After so long in one step, an engine is told not to answer."""


class EngineDown(PrefixloomError):
    """The engine cannot answer any more."""


class QueueFull(PrefixloomError):
    """Too many requests wait already. ``seconds``: when to ask again."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests wait already: ask again in {seconds} seconds")
        self.seconds = seconds


@attrs.frozen
class News:
    """What is new of an answer: its next tokens and, once it is over, why it ended.

    ``hit``     how many tokens of the prompt were cached here, and ``cached`` also elsewhere
    """

    tokens: list[int]
    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]
    reason: str
    error: BaseException | None
    hit: int
    admitted_at: float = 0.0
    cached: int = 0


class PendingAnswer:
    """One request of a client: its answer as it comes. It belongs to the event loop.

    ``begun``, ``admitted_at``, ``first_at``, ``last_at``  when it was asked, was admitted, and had its first and its
    last tokens, on the clock ``time.monotonic``; 0: not yet. ``count`` are its tokens so far. ``ended`` is called once.
    """

    def __init__(self, request: Request, ended: Callable[[PendingAnswer], None] = lambda _: None) -> None:
        self.request = request
        self.begun = time.monotonic()
        self.context = copy_context()
        """Of the task that asks: what a request came with is there."""
        self.admitted_at = self.first_at = self.last_at = 0.0
        self.count = self.hit = self.cached = 0
        self.reason = ""
        self.over = False
        self._ended = ended
        self._news: deque[News] = deque()
        self._come = asyncio.Event()

    def put(self, news: News) -> None:
        """Tell what is new. After the end nothing is: the engine may answer on for a step after an abort."""
        if self.over:
            return
        self._news.append(news)
        self.hit, self.cached = news.hit, max(news.cached, self.cached)
        self.admitted_at = news.admitted_at or self.admitted_at
        if news.tokens:
            self.last_at = time.monotonic()
            self.first_at = self.first_at or self.last_at
            self.count += len(news.tokens)
        self.over = bool(news.reason)
        self._come.set()
        if self.over:
            self.reason = news.reason
            self._ended(self)

    async def next(self) -> News:
        """Wait for what is new. What came meanwhile comes at once."""
        await self._come.wait()
        self._come.clear()
        news = self._news.popleft()
        while self._news:
            more = self._news.popleft()
            news = attrs.evolve(
                more,
                tokens=news.tokens + more.tokens,
                logprobs=news.logprobs + more.logprobs,
                alternatives=news.alternatives + more.alternatives,
            )
        return news


@attrs.define(eq=False)
class DrivenAnswer:
    """A ticket with its answer, in the worker's thread. ``told``: how many of its tokens the event loop knows."""

    ticket: PendingAnswer
    answer: Answer
    told: int = 0


class EngineWorker:
    """Drives an engine in a thread of its own, which also makes it, from ``start`` to ``stop``.

    ``make``   makes the engine with its cache
    ``most``   how many requests may run or wait at once; more are refused with ``QueueFull``
    ``shares`` by tenant, its part of those that may wait. ``running`` may run at once, of one tenant if no other asks
    ``failed`` is called in the event loop with the error if the engine is given up
    ``ended``  is called in the thread when the engine is closed
    """

    def __init__(
        self,
        make: Callable[[], DrivenEngine],
        most: int,
        failed: Callable[[BaseException], None],
        ended: Callable[[], None] = lambda: None,
        *,
        running: int = 0,
        shares: Mapping[str, float] = {},
    ) -> None:
        waiting, whole = most - running, sum(shares.values())
        self._most = {tenant: running + max(1, int(waiting * share / whole)) for tenant, share in shares.items()}
        self.most = most
        self.error: BaseException | None = None
        self.seconds_per_answer = 1.0
        """A running mean of how long requests take from the first step to the end."""
        self._failed, self._ended = failed, ended
        self._tickets: set[PendingAnswer] = set()
        self._observers: list[Callable[[PendingAnswer], None]] = []
        self._running: dict[PendingAnswer, DrivenAnswer] = {}
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._asking = threading.Lock()
        """Held where a call is added, and where the last ones are taken, so that none is left without an answer."""
        self._over = False
        """Whether the engine is driven no more."""
        self._wake = threading.Event()
        self._stopping = False
        self._patience = self._ends_at = self._stepped_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        made: Future[DrivenEngine] = Future()
        self._thread = threading.Thread(target=self._live, args=(make, made), name="prefixloom engine", daemon=True)
        self._thread.start()
        self.engine = made.result()

    # ------------------------------------------------------------ for coroutines
    def start(self) -> None:
        """Begin to drive the engine, for the coroutines of the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._started.set()

    @property
    def trouble(self) -> str:
        """What keeps the engine from answering, in words; "": nothing."""
        silent = time.monotonic() - self._stepped_at if self._stepped_at else 0.0
        return f"a step has run for {silent:.0f} seconds" if silent > SILENT_SECONDS else ""

    @property
    def load(self) -> int:
        """How many requests run or wait."""
        return len(self._tickets)

    def check_room(self, count: int, tenant: str = "") -> None:
        """Refuse so many requests, if they never fit at once (``InputError``) or do not fit now (``QueueFull``).

        Each tenant has room of its own, so that none takes that of others.
        """
        most = self._most.get(tenant, self.most)
        load = sum(ticket.request.tenant == tenant for ticket in self._tickets)
        if count > most:
            raise InputError(f"{count} answers are asked for at once, and this server takes {most} at most")
        if load + count > most:
            ahead = max(load - most // 2, 1)
            raise QueueFull(load, max(1, min(60, round(self.seconds_per_answer * ahead / most))))

    async def add(self, *requests: Request) -> list[PendingAnswer]:
        """Add requests, all or none. ``QueueFull``: there are too many already. ``InputError``: one is refused."""
        self.check_room(len(requests), requests[0].tenant)
        tickets = [PendingAnswer(request, self._tell_end) for request in requests]
        self._tickets.update(tickets)
        try:
            await self.call(lambda: self._add(tickets))
        except BaseException:
            for ticket in tickets:
                self.abort(ticket)
            raise
        return tickets

    def observe(self, ended: Callable[[PendingAnswer], None], *, account: bool = True) -> None:
        """Call ``ended`` with each request that has ended, in the loop. ``account``: the engine accounts for hits."""
        self._observers.append(ended)
        if account:
            self._ask(self.engine.account)  # in the worker's thread

    def _tell_end(self, ticket: PendingAnswer) -> None:
        for observer in self._observers:
            observer(ticket)

    def abort(self, ticket: PendingAnswer) -> None:
        """End a request whose client has gone. Whoever still waits for its answer is told."""
        self._end(ticket, self.engine.abort)
        ticket.put(News([], [], [], "aborted", None, ticket.hit))

    def abort_all(self, error: BaseException) -> None:
        """End every request. Whoever waits for its answer gets the error."""
        for ticket in list(self._tickets):
            ticket.put(News([], [], [], "error", error, ticket.hit))
            self.abort(ticket)

    def finish(self, ticket: PendingAnswer) -> None:
        """End a request that has answered enough; what is computed stays cached."""
        self._end(ticket, self.engine.finish)
        ticket.put(News([], [], [], "stop", None, ticket.hit))

    def _end(self, ticket: PendingAnswer, how: Callable[[Answer], None]) -> None:
        self._tickets.discard(ticket)

        def end() -> None:
            running = self._running.pop(ticket, None)
            if running is not None:
                how(running.answer)

        self._ask(end)

    async def call(self, what: Callable[[], T]) -> T:
        """Run ``what`` in the worker's thread, between two steps, and return what it returns."""
        return await asyncio.wrap_future(self._ask(what))

    def _ask(self, what: Callable[[], T]) -> Future[T]:
        asked: Future[T] = Future()
        with self._asking:
            if not self._over:
                self._calls.append((asked, what))
                self._wake.set()
                return asked
        asked.set_exception(self.error or EngineDown("the engine is not running"))
        return asked

    async def stop(self, seconds: float) -> None:
        """Wait for what runs, write to the store what waits for it, for at most so many seconds, and end the thread."""
        self._patience = seconds
        self._stopping = True
        self._wake.set()
        self._started.set()
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------ in the worker's thread
    def _live(self, make: Callable[[], DrivenEngine], made: Future[DrivenEngine]) -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
            return
        self._started.wait()
        try:
            self._drive()
        except BaseException as error:
            log.exception("the engine is given up")
            self._give_up(error)
        self._take_no_more()
        try:
            self.engine.close()
            if self.error is None:
                self._write_out()
        except Exception:
            log.exception("the engine could not be closed")
        self._ended()

    def _drive(self) -> None:
        """Step until the worker is stopped and nothing runs. An error means that the engine has to be given up."""
        failures = 0
        while not (self._stopping and self._is_over()):
            self._wake.clear()
            self._stepped_at = time.monotonic()
            self._do_calls()
            try:
                worked = self.engine.step()
                failures = 0
            except BrokenError:  # what its cache has cannot be trusted, nor what the step was amid
                raise
            except Exception:
                failures += 1
                log.exception("a step of the engine raised (%d of %d)", failures, MOST_FAILURES)
                if failures == MOST_FAILURES:
                    raise
                continue
            self._tell()
            if not worked and not self._calls:
                self.engine.cache.poll()
                self._wake.wait(POLL_SECONDS)

    def _is_over(self) -> bool:
        """Return whether the worker, which is to stop, has nothing left to do for clients or for other processes."""
        if not self._ends_at:
            self._ends_at = time.monotonic() + self._patience
            self.engine.retire()
        busy = any(self.engine.load) and time.monotonic() < self._ends_at
        return not (self._running or self._calls or busy)

    def _write_out(self) -> None:
        """Poll until the store has all that was to be written."""
        cache, until = self.engine.cache, time.monotonic() + self._patience
        while (tier := cache.stats().tier) is not None and tier.to_store:
            if time.monotonic() > until:
                log.warning("the store did not take in time %d pieces that were to be written", tier.to_store)
                return
            time.sleep(0.005)
            cache.poll()

    def _do_calls(self) -> None:
        while self._calls:
            asked, what = self._calls.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(what())
            except BaseException as error:
                asked.set_exception(error)

    def _add(self, tickets: list[PendingAnswer]) -> None:
        """Add all, or none if one is refused."""
        added = []
        try:
            for ticket in tickets:
                added.append(DrivenAnswer(ticket, self.engine.add(ticket.request)))
        except BaseException:
            for each in added:
                self.engine.abort(each.answer)
            raise
        self._running.update((each.ticket, each) for each in added)

    def _tell(self) -> None:
        """Tell the event loop, in one call, the news of every answer."""
        found: list[tuple[PendingAnswer, News]] = []
        for running in list(self._running.values()):
            answer, told = running.answer, running.told
            if len(answer.tokens) == told and not answer.done:
                continue
            news = News(
                answer.tokens[told:], answer.logprobs[told:], answer.alternatives[told:],
                answer.reason, answer.error, answer.hit, answer.admitted_at, answer.cached,
            )  # fmt: skip
            running.told = len(answer.tokens)
            found.append((running.ticket, news))
            if answer.done:
                del self._running[running.ticket]
        if found:
            self._send(found)

    def _send(self, found: list[tuple[PendingAnswer, News]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._receive, found)
        except RuntimeError:  # the loop is closed: nobody listens any more
            log.warning("%d answers have nobody to go to", len(found))

    def _receive(self, found: list[tuple[PendingAnswer, News]]) -> None:
        """Tell each ticket its news. In the event loop."""
        for ticket, news in found:
            if news.reason and ticket in self._tickets:
                self._tickets.discard(ticket)
                self.seconds_per_answer += 0.1 * (time.monotonic() - ticket.begun - self.seconds_per_answer)
            ticket.put(news)

    def _give_up(self, error: BaseException) -> None:
        """Tell everybody that the engine has failed."""
        self.error = EngineDown(f"the engine has failed: {error!r}")
        self.error.__cause__ = error
        self._send([(each.ticket, News([], [], [], "error", self.error, 0)) for each in self._running.values()])
        self._running.clear()
        self._take_no_more()
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._failed, self.error)

    def _take_no_more(self) -> None:
        """Refuse all who ask something of the engine from now on, or have asked and wait: the engine is down."""
        with self._asking:
            self._over = True
        while self._calls:
            asked, _ = self._calls.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_exception(self.error or EngineDown("the engine is not running"))
