"""Calls: the reads or the writes of a guarded store, one after another on a thread, each with a deadline.

A call that was given up keeps its thread until it returns, if it ever does. Its answer is dropped. The calls behind it
go on with a new thread. ``submit`` never waits.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import attrs

from prefixloom import CompositionError
from prefixloom.storage import FAULTS, Backend, Reason

from .breaker import Breaker, BreakerLimits, Now, at_least

Answers = tuple[Any, ...]
Instead = Callable[[Reason, str], Answers]
"""Returns the answers of a call that the store did not answer, from (reason, detail)."""


@attrs.frozen
class GuardLimits:
    """The limits of one guarded store. Reads and writes have a thread and a backlog each.

    ``deadline``    seconds for a call, from its submission
    ``stuck``       the number of calls that may never return, and hold a thread each; with one more, the store is not
                    called until one of them returns
    ``breaker``     when to stop calling a store that fails
    ``backlog_calls``, ``backlog_bytes``  how much may wait or run at one time; a call that is alone may be larger
    """

    deadline: float = attrs.field(default=2.0, validator=at_least(0))
    stuck: int = attrs.field(default=2, validator=at_least(0))
    breaker: BreakerLimits = attrs.field(factory=BreakerLimits)
    backlog_calls: int = attrs.field(default=256, validator=at_least(0))
    backlog_bytes: int = attrs.field(default=256 << 20, validator=at_least(0))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.breaker, BreakerLimits):
            raise CompositionError(f"breaker must be BreakerLimits, got {self.breaker!r}")


class StoreCall:
    """One call to a guarded store. ``answers`` is None until the call is ``over``.

    The answers are the store's. If it gave none, ``instead`` makes them from the reason.
    """

    __slots__ = ("_found", "_instead", "_why", "asked_at", "began", "over", "released", "run", "size", "token")

    def __init__(
        self, run: Callable[[Backend], Answers], instead: Instead, size: int, released: Callable[[], None], now: float
    ) -> None:
        self.run, self.released, self.size, self.asked_at = run, released, size, now
        self._instead = instead
        self._found: Answers | None = None
        self._why: tuple[Reason, str] | None = None
        self.token = -1
        """The breaker's, if it gave one."""
        self.began = self.over = False

    @property
    def answers(self) -> Answers | None:
        return self._instead(*self._why) if self._why is not None else self._found

    def end(self, found: Answers | None, why: tuple[Reason, str] | None) -> None:
        self._found, self._why, self.over = found, why, True


class CallQueue:
    """One queue of calls and the thread that runs them.

    ``waiting``  the calls and the bytes that wait or run
    ``stuck``    the number of calls that were given up and have not returned
    ``late``     the number of calls that were given up and returned later
    ``ended``    calls by how they ended: "done", or the reason for ``instead``

    It has no reference to the ``Guarded`` that it belongs to, which may be garbage-collected while its thread waits.
    """

    def __init__(self, name: str, backend: Backend, limits: GuardLimits, breaker: Breaker, now: Now) -> None:
        self._name, self._backend, self._limits, self._breaker, self._now = name, backend, limits, breaker, now
        self._condition = threading.Condition()
        self._queue: deque[StoreCall] = deque()
        self._running: StoreCall | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.waiting = (0, 0)
        self.stuck = self.late = 0
        self.ended: Counter[str] = Counter()

    def submit(self, call: StoreCall) -> None:
        """Queue a call, or end it at once. ``released`` is called once when the call touches nothing any more.

        For a call that was given up this is later, and never if the call never returns.
        """
        self.poll()
        token = self._breaker.allow()
        why: Reason | None = "breaker" if token is None else None
        with self._condition:
            (calls, size), limits = self.waiting, self._limits
            is_full = calls >= limits.backlog_calls or (calls and size + call.size > limits.backlog_bytes)
            if self._closed:
                why = "closed"
            elif token is not None:
                call.token = token
                why = "backlog" if is_full or self.stuck > limits.stuck else None
            self.waiting = calls + 1, size + call.size
            if why is None:
                self._queue.append(call)
                self._ensure_thread()
        if why is not None:
            self._end(call, why)

    def poll(self) -> None:
        """Give up every call whose deadline has passed."""
        self._give_up("deadline", self._now() - self._limits.deadline)

    def close(self) -> None:
        """Take no more calls, drop those that wait, and give up the one that runs: after this, nobody polls."""
        self._closed = True
        self._give_up("closed", float("inf"))

    def _give_up(self, why: Reason, upto: float) -> None:
        """Give up the calls that were submitted by then."""
        with self._condition:
            lapsed = [call for call in self._queue if call.asked_at <= upto]
            for call in lapsed:
                self._queue.remove(call)
            if self._running is not None and self._running.asked_at <= upto:
                lapsed.insert(0, self._running)
                self._running = self._thread = None
                self.stuck += 1
            self._ensure_thread()
        for call in lapsed:
            self._end(call, why)

    def _end(
        self,
        call: StoreCall,
        why: Reason | None,
        detail: str = "",
        found: Answers | None = None,
        faulty: bool = False,
    ) -> None:
        """End a call. If it was given up and still runs, it is released when it returns.

        ``faulty``: an answer says that the store failed
        """
        given_up = call.began and why in ("deadline", "closed")
        well = None
        if call.began and why != "closed":
            well = why is None and not faulty
        with self._condition:
            calls, size = self.waiting
            self.waiting = calls - 1, size - call.size
            self.ended[why or "done"] += 1
        self._breaker.ended(call.token, well)
        if not given_up:
            call.released()
        call.end(found, None if why is None else (why, detail))

    # ------------------------------------------------------------ the thread

    def _ensure_thread(self) -> None:
        """Start a thread if calls wait and none runs them. The condition is held."""
        if self._queue and self._thread is None and self.stuck <= self._limits.stuck:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the system gives no more threads, or the process ends: what waits will lapse
                self._thread = None
        self._condition.notify_all()

    def _work(self) -> None:
        mine = threading.current_thread()
        while (call := self._next(mine)) is not None:
            found: Any = None
            why: Reason | None = None
            detail, faulty = "", False
            try:  # all that asks an object of the store stands here: the thread must outlive what such an object raises
                found = call.run(self._backend)
                if not isinstance(found, tuple):
                    raise TypeError(f"{type(self._backend).__name__} answered {found!r:.200}")
                faulty = any(getattr(answer, "reason", "") in FAULTS for answer in found)
            except BaseException as error:
                why, detail = "error", _words(error)
            self._finish(call, why, detail, found, faulty)
            del call, found  # keep no request and no answer alive while waiting for the next call

    def _next(self, mine: threading.Thread) -> StoreCall | None:
        """Wait for the next call. Return None if this thread is to end."""
        with self._condition:
            while self._thread is mine and not self._queue and not self._closed:
                self._condition.wait()
            if self._thread is not mine or not self._queue:
                return None
            self._running = call = self._queue.popleft()
            call.began = True
            return call

    def _finish(self, call: StoreCall, why: Reason | None, detail: str, found: Answers | None, faulty: bool) -> None:
        """End a call that has returned, or only release it if it was given up meanwhile."""
        with self._condition:
            in_time = self._running is call
            if in_time:
                self._running = None
            else:
                self.stuck -= 1
                self.late += 1
                self._ensure_thread()
        if in_time:
            self._end(call, why, detail, found, faulty)
        else:
            call.released()


def _words(error: BaseException) -> str:
    """Return an error's type and text, or its type alone if it cannot be put into words."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__
