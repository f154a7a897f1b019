"""Guarded: any store behind a deadline, a breaker, a rate and a backlog, and nobody waits for it or dies of it.

A call is handed in and comes back at once; its answer is there later, and is what a store answers: what was not asked,
or not answered in time, is a miss or a refusal with its reason. It belongs to no backend and knows none.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from prefixloom.storage import FAULTS, Backend, Key, Miss, Reason, Record, Refused, Stored

from .breaker import Breaker, BreakerLimits
from .breaker import State as BreakerState
from .clock import Clock, SystemClock
from .limits import Backlog, Rate
from .worker import State, Ticket, Worker

T = TypeVar("T")
REASON_OF: Mapping[State, Reason] = {
    "lapsed": "deadline",
    "failed": "error",
    "refused": "backlog",
    "dropped": "closed",
}
"""What a call that the store did not answer is told."""


@attrs.frozen
class GuardLimits:
    """``deadline`` in seconds from the handing in; ``write_rate`` in bytes per second, None: unlimited.

    Reads and writes have a thread and a backlog each. ``stuck``: so many calls that never came back may each hold a
    thread; with one more, nothing is asked until one returns.
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
    """Counts since the beginning, by what was asked and how it ended; and how things are now.

    ``refused`` counts keys and records that were never given to the store, by reason; ``late`` calls that came back
    after their deadline, ``stuck`` those that have not.
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


class Call(Generic[T]):
    """A call that was handed in. ``answers`` is None until it is ``over``; it is the store's, or says why not."""

    __slots__ = ("_instead", "_ticket", "_worker")

    def __init__(self, worker: Worker | None, ticket: Ticket | None, instead: Callable[[str, str], T]) -> None:
        self._worker, self._ticket, self._instead = worker, ticket, instead

    @property
    def over(self) -> bool:
        return self._ticket is None or self._ticket.over

    @property
    def answers(self) -> T | None:
        ticket = self._ticket
        if ticket is None:
            return self._instead("", "")
        if not ticket.over:
            return None
        if ticket.state == "done":
            return ticket.answer  # type: ignore[no-any-return]
        told = f"{type(ticket.error).__name__}: {ticket.error}" if ticket.error else ""
        return self._instead(REASON_OF[ticket.state], told)

    def wait(self) -> T:
        """The answers, at the deadline at the latest. Not for a thread that schedules."""
        if self._ticket is not None and self._worker is not None:
            self._worker.wait(self._ticket)
        answers = self.answers
        assert answers is not None
        return answers


class Guarded:
    """A store that cannot hold anybody up. Its methods return at once, and never raise for what a store does.

    One that is dropped ends its threads, once no call is out there. It does not close the store: somebody may have it.
    """

    def __init__(self, backend: Backend, limits: GuardLimits = GuardLimits(), clock: Clock | None = None) -> None:
        self.backend, self.limits = backend, limits
        self.clock = SystemClock() if clock is None else clock
        self.breaker = Breaker(limits.breaker, self.clock)
        rate = limits.write_rate
        self._rate = None if rate is None else Rate(rate, limits.write_burst, self.clock)
        self._workers = {lane: Worker(f"prefixloom-{lane}", self.clock, limits.stuck) for lane in ("reads", "writes")}
        self._backlogs = {lane: Backlog(limits.backlog_calls, limits.backlog_bytes) for lane in ("reads", "writes")}
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._closed = False
        weakref.finalize(self, end_all, tuple(self._workers.values())).atexit = False

    # ------------------------------------------------------------ what may be asked

    def get(
        self, keys: Sequence[Key], into: Sequence[Any] | None = None, released: Callable[[], None] | None = None
    ) -> Call[tuple[Record | Miss, ...]]:
        """``into`` belongs to the store until ``released`` is called: once, from any thread, and after a lapse perhaps
        much later or never. Until then it must not be given to anybody else."""
        keys = tuple(keys)
        size = sum(len(memoryview(buffer).cast("B")) for buffer in into or ())
        misses = lambda reason, told: tuple(Miss(key, reason, told) for key in keys)  # noqa: E731
        return self._hand_in("get", "reads", lambda: self.backend.get(keys, into), keys, size, misses, released)

    def put(
        self, records: Sequence[Record], released: Callable[[], None] | None = None
    ) -> Call[tuple[Stored | Refused, ...]]:
        """Payloads are read until ``released`` is called, as with ``get``."""
        records = tuple(records)
        keys = tuple(record.key for record in records)
        size = sum(len(record.payload) for record in records)
        refusals = lambda reason, told: tuple(Refused(key, reason, told) for key in keys)  # noqa: E731
        return self._hand_in("put", "writes", lambda: self.backend.put(records), keys, size, refusals, released)

    def ask(
        self,
        run: Callable[[Backend], tuple[Any, ...]],
        instead: Callable[[Reason, str], tuple[Any, ...]],
        *,
        writes: bool = False,
        size: int = 0,
        released: Callable[[], None] | None = None,
    ) -> Call[tuple[Any, ...]]:
        """Whatever ``run`` does with the store, as one call; ``instead``: what is answered if it is not, or in vain."""
        lane = "writes" if writes else "reads"
        what = "put" if writes else "get"
        return self._hand_in(what, lane, lambda: run(self.backend), None, size, instead, released)

    def exists(self, keys: Sequence[Key]) -> Call[tuple[bool, ...]]:
        keys = tuple(keys)
        return self._hand_in("exists", "reads", lambda: self.backend.exists(keys), keys, 0, _nowhere(keys))

    def delete(self, keys: Sequence[Key]) -> Call[tuple[bool, ...]]:
        keys = tuple(keys)
        return self._hand_in("delete", "writes", lambda: self.backend.delete(keys), keys, 0, _nowhere(keys))

    def flush(self) -> Call[tuple[bool, ...]]:
        return self._hand_in("flush", "writes", lambda: (self.backend.flush(),), (None,), 0, _nowhere((None,)))

    def poll(self) -> None:
        """Give up on what is overdue. Cheap: call it wherever finished calls are looked for."""
        for worker in self._workers.values():
            worker.poll()

    def status(self) -> GuardStatus:
        """Asks the store nothing."""
        with self._lock:
            counts = dict(self._calls), dict(self._ended), dict(self._refused)
        late, stuck = (sum(getattr(w, name) for w in self._workers.values()) for name in ("late", "stuck"))
        waiting = self._backlogs["reads"].waiting, self._backlogs["writes"].waiting
        return GuardStatus(*counts, late, stuck, self.breaker.state, self.breaker.trips, *waiting)

    def close(self) -> None:
        """Drop what waits or runs, and close the store on a thread of its own: it may hang, too."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        end_all(self._workers.values())
        with contextlib.suppress(RuntimeError):  # the process ends, and starts no more threads
            threading.Thread(target=self.backend.close, name="prefixloom-close", daemon=True).start()

    # ------------------------------------------------------------ asking

    def _hand_in(
        self,
        what: str,
        lane: str,
        run: Callable[[], Any],
        keys: Sequence[Key | None] | None,
        size: int,
        instead: Callable[[Any, str], Any],
        released: Callable[[], None] | None = None,
    ) -> Call[Any]:
        self._count(self._calls, what)
        count = 1 if keys is None else len(keys)
        token, reason = self._admit(lane, size if what == "put" else 0, size)
        if token is None:
            self._count(self._refused, reason, count)
            if released is not None:
                released()
            return Call(None, None, lambda _, told: instead(reason, told))

        def checked() -> Any:
            answers = run()
            fits = isinstance(answers, tuple)
            if keys is not None:
                fits = fits and len(answers) == len(keys) and all(map(_fits, answers, keys))
            if not fits:
                raise TypeError(f"{type(self.backend).__name__}.{what} answered {answers!r:.200} for {count} keys")
            return answers

        def settled(ticket: Ticket, state: State) -> None:
            self._settle(ticket, state, token, lane, size, count)

        worker = self._workers[lane]
        ticket = worker.hand_in(checked, self.limits.deadline, settled, released or (lambda: None))
        return Call(worker, ticket, instead)

    def _admit(self, lane: str, cost: int, size: int) -> tuple[object | None, Reason]:
        """The breaker's token, or why not. Whatever was taken on the way to a no is given back."""
        if self._closed:
            return None, "closed"
        token = self.breaker.allow()
        if token is None:
            self._workers[lane].poll()
            return None, "breaker"
        if not self._backlogs[lane].enter(size):
            self.breaker.withdrawn(token)
            self._workers[lane].poll()
            return None, "backlog"
        if cost and self._rate is not None and not self._rate.take(cost):
            self.breaker.withdrawn(token)
            self._backlogs[lane].leave(size)
            return None, "rate"
        return token, "absent"

    def _settle(self, ticket: Ticket, state: State, token: object, lane: str, size: int, keys: int) -> None:
        self._backlogs[lane].leave(size)
        self._count(self._ended, state)
        if state in ("refused", "dropped") or (state == "lapsed" and ticket.began is None):
            self.breaker.withdrawn(token)
            self._count(self._refused, REASON_OF[state], keys)
        elif state == "done" and not any(getattr(answer, "reason", "") in FAULTS for answer in ticket.answer):
            self.breaker.succeeded(token)
        else:
            self.breaker.failed(token)

    def _count(self, counter: Counter[str], name: str, by: int = 1) -> None:
        with self._lock:
            counter[name] += by


def end_all(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.close()


def _nowhere(keys: Sequence[object]) -> Callable[[Any, str], tuple[bool, ...]]:
    return lambda reason, told: (False,) * len(keys)


def _fits(answer: object, key: Key | None) -> bool:
    """Whether it could be the answer to what was asked."""
    if isinstance(answer, bool):
        return True
    return isinstance(answer, Record | Miss | Stored | Refused) and key is not None and answer.key == key
