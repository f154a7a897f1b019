"""Guarded: a store behind a deadline, a breaker, a write rate and a backlog, so that no store can delay its caller.

``ask`` returns a ``StoreCall`` at once; the answers come later. They are what the store answered. If it was not
called, or did not answer in time, the caller's ``instead`` makes them from the reason. A guard works around any store
and knows none.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from prefixloom.storage import FAULTS, Backend, Reason

from .limits import Backlog, Breaker, BreakerLimits, BreakerState, Now, Rate
from .worker import Ticket, TicketState, Worker

Instead = Callable[[Reason, str], tuple[Any, ...]]
"""(reason, detail) -> the answers of a call that the store did not answer."""
REASON_OF: Mapping[TicketState, Reason] = {
    "lapsed": "deadline",
    "failed": "error",
    "refused": "backlog",
    "dropped": "closed",
}
"""The reason for ``instead``, by how a call ended."""


@attrs.frozen
class GuardLimits:
    """The limits of one guarded store. Reads and writes have a thread and a backlog each.

    ``deadline``    seconds for a call, from its submission
    ``stuck``       the number of calls that may never return, and hold a thread each; with one more, the store is not
                    called until one of them returns
    ``breaker``     when to stop calling a store that fails
    ``write_rate``  bytes per second; None: unlimited. ``write_burst`` bytes may be written at once
    ``backlog_calls``, ``backlog_bytes``  how much may wait or run at one time
    """

    deadline: float = 2.0
    stuck: int = 2
    breaker: BreakerLimits = attrs.field(factory=BreakerLimits)
    write_rate: float | None = None
    write_burst: float = 256 << 20
    backlog_calls: int = 256
    backlog_bytes: int = 256 << 20


@attrs.frozen
class GuardStatus:
    """What a guard counted since it was made, and its state now.

    ``calls``    "reads" and "writes"
    ``ended``    calls by how they ended
    ``refused``  calls that were never made, by reason
    ``late``     calls that returned after their deadline; ``stuck``: those that have not returned
    ``breaker``  the breaker's state; ``trips``: how often it opened
    ``reads_waiting``, ``writes_waiting``  calls and bytes that wait or run
    """

    calls: Mapping[str, int]
    ended: Mapping[str, int]
    refused: Mapping[str, int]
    late: int
    stuck: int
    breaker: BreakerState
    trips: int
    reads_waiting: tuple[int, int]
    writes_waiting: tuple[int, int]


class StoreCall:
    """One call to a guarded store. ``answers`` is None until the call is ``over``.

    The answers are the store's, or they say why the store gave none.
    """

    __slots__ = ("_instead", "_ticket")

    def __init__(self, ticket: Ticket | None, instead: Instead) -> None:
        self._ticket, self._instead = ticket, instead

    @property
    def over(self) -> bool:
        return self._ticket is None or self._ticket.over

    @property
    def answers(self) -> tuple[Any, ...] | None:
        ticket = self._ticket
        if ticket is None:
            return self._instead("closed", "")  # it was not submitted, and ``instead`` has its reason already
        if not ticket.over:
            return None
        if ticket.state == "done":
            return ticket.answer  # type: ignore[no-any-return]
        detail = f"{type(ticket.error).__name__}: {ticket.error}" if ticket.error else ""
        return self._instead(REASON_OF[ticket.state], detail)


class Guarded:
    """A store that cannot delay its caller. Its methods return at once, and raise nothing that the store raises.

    ``now`` returns the seconds since a fixed moment.

    A ``Guarded`` that is garbage-collected ends its threads as soon as no call runs. It does not close the store, which
    may have another user; ``close`` does.
    """

    def __init__(self, backend: Backend, limits: GuardLimits = GuardLimits(), now: Now = time.monotonic) -> None:
        self.backend, self.limits, self.now = backend, limits, now
        self.breaker = Breaker(limits.breaker, now)
        rate = limits.write_rate
        self._rate = None if rate is None else Rate(rate, limits.write_burst, now)
        self._workers = {side: Worker(f"prefixloom-{side}", now, limits.stuck) for side in ("reads", "writes")}
        self._backlogs = {side: Backlog(limits.backlog_calls, limits.backlog_bytes) for side in ("reads", "writes")}
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._closed = False
        weakref.finalize(self, _close_all, tuple(self._workers.values())).atexit = False

    # ------------------------------------------------------------ calls to the store

    def ask(
        self,
        run: Callable[[Backend], tuple[Any, ...]],
        instead: Instead,
        *,
        writes: bool = False,
        size: int = 0,
        released: Callable[[], None] | None = None,
    ) -> StoreCall:
        """Run ``run`` with the store as one call. If the store is not called, or fails, the answer is ``instead``.

        ``run`` may use ``size`` bytes of the caller's until ``released`` is called: once, from any thread. After the
        deadline this may be much later, or never. Until then the bytes must not be used for anything else.
        """
        side = "writes" if writes else "reads"
        self._count(self._calls, side)
        token, reason = self._admit(side, size)
        if token is None:
            self._count(self._refused, reason)
            if released is not None:
                released()
            return StoreCall(None, lambda _, detail: instead(reason, detail))

        def checked() -> tuple[Any, ...]:
            answers = run(self.backend)
            if not isinstance(answers, tuple):
                raise TypeError(f"{type(self.backend).__name__} answered {answers!r:.200}")
            return answers

        def on_end(ticket: Ticket, state: TicketState) -> None:
            self._record_end(ticket, state, token, side, size)

        ticket = self._workers[side].submit(checked, self.limits.deadline, on_end, released or (lambda: None))
        return StoreCall(ticket, instead)

    def poll(self) -> None:
        """Give up every call whose deadline has passed. It is cheap: call it before looking at ``StoreCall.over``."""
        for worker in self._workers.values():
            worker.poll()

    def status(self) -> GuardStatus:
        """Return the counts. The store is not called."""
        with self._lock:
            counts = dict(self._calls), dict(self._ended), dict(self._refused)
        late, stuck = (sum(getattr(w, name) for w in self._workers.values()) for name in ("late", "stuck"))
        waiting = self._backlogs["reads"].waiting, self._backlogs["writes"].waiting
        return GuardStatus(*counts, late, stuck, self.breaker.state, self.breaker.trips, *waiting)

    def close(self) -> None:
        """Drop every call, and close the store on a thread of its own, because closing may hang too."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _close_all(self._workers.values())
        with contextlib.suppress(RuntimeError):  # the process ends, and no thread can be started
            threading.Thread(target=self.backend.close, name="prefixloom-close", daemon=True).start()

    def _admit(self, side: str, size: int) -> tuple[object | None, Reason]:
        """Return the breaker's token, or None and the reason. After a None, nothing stays taken from any limit."""
        if self._closed:
            return None, "closed"
        token = self.breaker.allow()
        if token is None:
            self._workers[side].poll()
            return None, "breaker"
        if not self._backlogs[side].enter(size):
            self.breaker.withdrawn(token)
            self._workers[side].poll()
            return None, "backlog"
        if side == "writes" and self._rate is not None and not self._rate.take(size):
            self.breaker.withdrawn(token)
            self._backlogs[side].leave(size)
            return None, "rate"
        return token, "absent"

    def _record_end(self, ticket: Ticket, state: TicketState, token: object, side: str, size: int) -> None:
        """Count how a call ended, and tell the backlog and the breaker."""
        self._backlogs[side].leave(size)
        self._count(self._ended, state)
        if state in ("refused", "dropped") or (state == "lapsed" and ticket.started_at is None):
            self.breaker.withdrawn(token)
            self._count(self._refused, REASON_OF[state])
        elif state == "done" and not any(getattr(answer, "reason", "") in FAULTS for answer in ticket.answer):
            self.breaker.succeeded(token)
        else:
            self.breaker.failed(token)

    def _count(self, counter: Counter[str], name: str) -> None:
        with self._lock:
            counter[name] += 1


def _close_all(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.close()
