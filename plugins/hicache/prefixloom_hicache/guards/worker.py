"""Worker: runs calls one after another on a thread of its own, and gives up a call that does not return in time.

A call that was given up keeps its thread until it returns, if it ever does. Its answer is dropped. The calls behind it
go on with a new thread. ``submit`` never waits.

A worker knows no store: a call is any function.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from .limits import Now

TicketState = Literal["waiting", "running", "done", "failed", "lapsed", "refused", "dropped"]
"""How far a call is, and how it ended:

``done``     it returned
``failed``   it raised
``lapsed``   its deadline passed
``refused``  the worker did not take it, because too many calls are stuck
``dropped``  the worker was closed
"""
OnEnd = Callable[["Ticket", TicketState], None]


class Ticket:
    """One submitted call. ``answer`` or ``error`` is set once the call is ``over``."""

    __slots__ = ("answer", "deadline", "error", "on_end", "released", "run", "started_at", "state", "submitted_at")

    def __init__(
        self, run: Callable[[], Any], deadline: float, now: float, on_end: OnEnd, released: Callable[[], None]
    ) -> None:
        self.run, self.on_end, self.released = run, on_end, released
        self.deadline, self.submitted_at = deadline, now
        self.started_at: float | None = None
        self.state: TicketState = "waiting"
        self.answer: Any = None
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.state not in ("waiting", "running")

    def left(self, now: float) -> float:
        """Return the seconds to the deadline. It counts from the submission, so waiting counts too."""
        return self.deadline - (now - self.submitted_at)


class Worker:
    """One queue of calls and the thread that runs them.

    ``max_stuck``  the number of given-up calls that may still be running. With one more, the worker takes no call
    ``stuck``      the number of calls that were given up and have not returned
    ``late``       the number of calls that were given up and returned later
    """

    def __init__(self, name: str, now: Now, max_stuck: int) -> None:
        self.name, self.now, self.max_stuck = name, now, max_stuck
        self._condition = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._thread: threading.Thread | None = None
        self.stuck = self.late = 0
        self._closed = False

    def submit(self, run: Callable[[], Any], deadline: float, on_end: OnEnd, released: Callable[[], None]) -> Ticket:
        """Queue a call. It never waits.

        The ticket is ``dropped`` at once if the worker is closed, and ``refused`` if too many calls are stuck.
        ``on_end`` is called once with the ticket's last state, before the ticket is ``over``. ``released`` is called
        once when the call touches nothing any more: for a call that was given up this is later, and never if the call
        never returns.
        """
        self.poll()
        ticket = Ticket(run, deadline, self.now(), on_end, released)
        with self._condition:
            taken = not self._closed and self.stuck <= self.max_stuck
            if taken:
                self._queue.append(ticket)
                self._ensure_thread()
        if not taken:
            self._end(ticket, "dropped" if self._closed else "refused")
        return ticket

    def poll(self) -> None:
        """Give up every call whose deadline has passed."""
        now = self.now()
        with self._condition:
            lapsed = [ticket for ticket in self._queue if ticket.left(now) <= 0]
            for ticket in lapsed:
                self._queue.remove(ticket)
            running = self._running
            if running is not None and running.left(now) <= 0:
                self._running = self._thread = None
                self.stuck += 1
            else:
                running = None
            self._ensure_thread()
        if running is not None:
            self._end(running, "lapsed", still_running=True)
        for ticket in lapsed:
            self._end(ticket, "lapsed")

    def close(self) -> None:
        """Take no more calls, drop those that wait, and give up the one that runs: after this, nobody polls."""
        with self._condition:
            self._closed = True
            dropped = list(self._queue)
            self._queue.clear()
            running, self._running = self._running, None
            if running is not None:
                self._thread = None
                self.stuck += 1
            self._condition.notify_all()
        if running is not None:
            self._end(running, "dropped", still_running=True)
        for ticket in dropped:
            self._end(ticket, "dropped")

    def _end(self, ticket: Ticket, state: TicketState, still_running: bool = False) -> None:
        ticket.on_end(ticket, state)
        if not still_running:
            ticket.released()
        ticket.state = state

    # ------------------------------------------------------------ the thread

    def _ensure_thread(self) -> None:
        """Start a thread if calls wait and none runs them. The condition is held."""
        if self._queue and self._thread is None and self.stuck <= self.max_stuck:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the system gives no more threads, or the process ends: what waits will lapse
                self._thread = None
        self._condition.notify_all()

    def _work(self) -> None:
        mine = threading.current_thread()
        while (ticket := self._next(mine)) is not None:
            answer = error = None
            try:
                answer = ticket.run()
            except BaseException as raised:
                error = raised
            self._finish(ticket, answer, error)
            del ticket, answer, error  # keep no request and no answer alive while waiting for the next call

    def _next(self, mine: threading.Thread) -> Ticket | None:
        """Wait for the next call. Return None if this thread is to end."""
        with self._condition:
            while self._thread is mine and not self._queue and not self._closed:
                self._condition.wait()
            if self._thread is not mine or not self._queue:
                return None
            self._running = ticket = self._queue.popleft()
            ticket.state, ticket.started_at = "running", self.now()
            return ticket

    def _finish(self, ticket: Ticket, answer: Any, error: BaseException | None) -> None:
        """Hand over what a call came to, or only its release if the call was given up meanwhile."""
        with self._condition:
            in_time = self._running is ticket
            if in_time:
                self._running = None
            else:
                self.stuck -= 1
                self.late += 1
                self._ensure_thread()
        if in_time:
            ticket.answer, ticket.error = answer, error
            self._end(ticket, "done" if error is None else "failed")
        else:
            ticket.released()
