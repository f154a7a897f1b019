"""Worker: runs calls one after another on a thread of its own, and gives up on one that does not come back.

A call that is given up keeps its thread until it returns, if it ever does; what it then says is dropped. The calls
behind it go on with a new thread. Nobody who hands in a call waits, and whoever waits for one waits no longer than its
deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from .clock import Clock

State = Literal["waiting", "running", "done", "failed", "lapsed", "refused", "dropped"]
Settled = Callable[["Ticket", State], None]


class Ticket:
    """A call that was handed in. ``answer`` and ``error`` are there once it is ``over``."""

    __slots__ = ("answer", "began", "deadline", "error", "handed_in", "released", "run", "settled", "state")

    def __init__(
        self, run: Callable[[], Any], deadline: float, now: float, settled: Settled, released: Callable[[], None]
    ) -> None:
        self.run, self.settled, self.released = run, settled, released
        self.deadline, self.handed_in = deadline, now
        self.began: float | None = None
        self.state: State = "waiting"
        self.answer: Any = None
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.state not in ("waiting", "running")

    def left(self, now: float) -> float:
        """Seconds to its deadline, which counts from when it was handed in: waiting is slow, too."""
        return self.deadline - (now - self.handed_in)


class Worker:
    """``most_stuck`` is how many calls may be given up and still be out there; with one more nothing new is taken."""

    def __init__(self, name: str, clock: Clock, most_stuck: int) -> None:
        self.name, self.clock, self.most_stuck = name, clock, most_stuck
        self._condition = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._thread: threading.Thread | None = None
        self._stuck = self._late = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        """Calls that were given up and have not come back."""
        return self._stuck

    @property
    def late(self) -> int:
        """Calls that were given up and came back."""
        return self._late

    def hand_in(
        self, run: Callable[[], Any], deadline: float, settled: Settled, released: Callable[[], None]
    ) -> Ticket:
        """Never waits. ``dropped`` if the worker is closed, ``refused`` if too many calls never came back.

        ``settled`` is told once of the ticket's last state, before the ticket is ``over``; ``released`` is called once
        when the call touches nothing any more, which is later if it was given up, and never if it never comes back.
        """
        self.poll()
        ticket = Ticket(run, deadline, self.clock.now(), settled, released)
        with self._condition:
            taken = not self._closed and self._stuck <= self.most_stuck
            if taken:
                self._queue.append(ticket)
                self._go_on()
        if not taken:
            self._end(ticket, "dropped" if self._closed else "refused")
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Until it is over, which is at its deadline at the latest."""
        while not ticket.over:
            self.poll()
            with self._condition:
                left = ticket.left(self.clock.now())
                if ticket.over:
                    return
                if left > 0:
                    self.clock.wait(self._condition, left)
                else:
                    self._condition.wait(0.001)  # another thread is telling of its end

    def poll(self) -> None:
        """Give up on what is overdue."""
        now = self.clock.now()
        with self._condition:
            lapsed = [ticket for ticket in self._queue if ticket.left(now) <= 0]
            for ticket in lapsed:
                self._queue.remove(ticket)
            running = self._running
            if running is not None and running.left(now) <= 0:
                self._running = self._thread = None
                self._stuck += 1
            else:
                running = None
            self._go_on()
        if running is not None:
            self._end(running, "lapsed", touching=True)
        for ticket in lapsed:
            self._end(ticket, "lapsed")

    def close(self) -> None:
        """Take nothing more, drop what waits and give up what runs: nobody polls what is closed."""
        with self._condition:
            self._closed = True
            dropped = list(self._queue)
            self._queue.clear()
            running, self._running = self._running, None
            if running is not None:
                self._thread = None
                self._stuck += 1
            self._condition.notify_all()
        if running is not None:
            self._end(running, "dropped", touching=True)
        for ticket in dropped:
            self._end(ticket, "dropped")

    def _end(self, ticket: Ticket, state: State, touching: bool = False) -> None:
        ticket.settled(ticket, state)
        if not touching:
            ticket.released()
        with self._condition:
            ticket.state = state
            self._condition.notify_all()

    # ------------------------------------------------------------ the thread

    def _go_on(self) -> None:
        if self._queue and self._thread is None and self._stuck <= self.most_stuck:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads are to be had, or the process ends: what waits will lapse
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
            self._came_back(ticket, answer, error)
            del ticket, answer, error  # what was asked and answered is not to live until more comes

    def _next(self, mine: threading.Thread) -> Ticket | None:
        with self._condition:
            while self._thread is mine and not self._queue and not self._closed:
                self._condition.wait()
            if self._thread is not mine or not self._queue:
                return None
            self._running = ticket = self._queue.popleft()
            ticket.state, ticket.began = "running", self.clock.now()
            return ticket

    def _came_back(self, ticket: Ticket, answer: Any, error: BaseException | None) -> None:
        with self._condition:
            in_time = self._running is ticket
            if in_time:
                self._running = None
            else:
                self._stuck -= 1
                self._late += 1
                self._go_on()
        if in_time:
            ticket.answer, ticket.error = answer, error
            self._end(ticket, "done" if error is None else "failed")
        else:
            ticket.released()
