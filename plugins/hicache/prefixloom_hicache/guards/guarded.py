"""Guarded: a store behind a deadline, a breaker, a write rate and a backlog, so that no store can delay its caller.

Every method returns a ``StoreCall`` at once; the answers come later. They are what the store answered. What was not
asked, or not answered in time, is a miss or a refusal with its reason. A guard works around any store and knows none.
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

from .clock import Clock, SystemClock
from .limits import Backlog, Breaker, BreakerLimits, BreakerState, Rate
from .worker import Ticket, TicketState, Worker

T = TypeVar("T")
REASON_OF: Mapping[TicketState, Reason] = {
    "lapsed": "deadline",
    "failed": "error",
    "refused": "backlog",
    "dropped": "closed",
}
"""The reason in the answers of a call that the store did not answer, by how the call ended."""


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

    ``calls``    calls by method
    ``ended``    calls by how they ended
    ``refused``  keys and records that were never given to the store, by reason
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


class StoreCall(Generic[T]):
    """One call to a guarded store. ``answers`` is None until the call is ``over``.

    The answers are the store's, or they say why the store gave none.
    """

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
        detail = f"{type(ticket.error).__name__}: {ticket.error}" if ticket.error else ""
        return self._instead(REASON_OF[ticket.state], detail)

    def wait(self) -> T:
        """Wait for the answers, until the deadline at the latest. A scheduler's thread must not call this."""
        if self._ticket is not None and self._worker is not None:
            self._worker.wait(self._ticket)
        answers = self.answers
        assert answers is not None
        return answers


class Guarded:
    """A store that cannot delay its caller. Its methods return at once, and raise nothing that the store raises.

    A ``Guarded`` that is garbage-collected ends its threads as soon as no call runs. It does not close the store, which
    may have another user; ``close`` does.
    """

    def __init__(self, backend: Backend, limits: GuardLimits = GuardLimits(), clock: Clock | None = None) -> None:
        self.backend, self.limits = backend, limits
        self.clock = SystemClock() if clock is None else clock
        self.breaker = Breaker(limits.breaker, self.clock)
        rate = limits.write_rate
        self._rate = None if rate is None else Rate(rate, limits.write_burst, self.clock)
        self._workers = {side: Worker(f"prefixloom-{side}", self.clock, limits.stuck) for side in ("reads", "writes")}
        self._backlogs = {side: Backlog(limits.backlog_calls, limits.backlog_bytes) for side in ("reads", "writes")}
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._closed = False
        weakref.finalize(self, _close_all, tuple(self._workers.values())).atexit = False

    # ------------------------------------------------------------ calls to the store

    def get(
        self, keys: Sequence[Key], into: Sequence[Any] | None = None, released: Callable[[], None] | None = None
    ) -> StoreCall[tuple[Record | Miss, ...]]:
        """Read records. The buffers ``into`` belong to the store until ``released`` is called.

        ``released`` is called once, from any thread. After the deadline this may be much later, or never. Until then
        the buffers must not be used for anything else.
        """
        keys = tuple(keys)
        size = sum(len(memoryview(buffer).cast("B")) for buffer in into or ())
        misses = lambda reason, detail: tuple(Miss(key, reason, detail) for key in keys)  # noqa: E731
        return self._submit("get", "reads", lambda: self.backend.get(keys, into), keys, size, misses, released)

    def put(
        self, records: Sequence[Record], released: Callable[[], None] | None = None
    ) -> StoreCall[tuple[Stored | Refused, ...]]:
        """Write records. The store may read their payloads until ``released`` is called, as with ``get``."""
        records = tuple(records)
        keys = tuple(record.key for record in records)
        size = sum(len(record.payload) for record in records)
        refusals = lambda reason, detail: tuple(Refused(key, reason, detail) for key in keys)  # noqa: E731
        return self._submit("put", "writes", lambda: self.backend.put(records), keys, size, refusals, released)

    def ask(
        self,
        run: Callable[[Backend], tuple[Any, ...]],
        instead: Callable[[Reason, str], tuple[Any, ...]],
        *,
        writes: bool = False,
        size: int = 0,
        released: Callable[[], None] | None = None,
    ) -> StoreCall[tuple[Any, ...]]:
        """Run ``run`` with the store as one call. If the store is not called, or fails, the answer is ``instead``."""
        side = "writes" if writes else "reads"
        method = "put" if writes else "get"
        return self._submit(method, side, lambda: run(self.backend), None, size, instead, released)

    def exists(self, keys: Sequence[Key]) -> StoreCall[tuple[bool, ...]]:
        keys = tuple(keys)
        return self._submit("exists", "reads", lambda: self.backend.exists(keys), keys, 0, _all_false(keys))

    def delete(self, keys: Sequence[Key]) -> StoreCall[tuple[bool, ...]]:
        keys = tuple(keys)
        return self._submit("delete", "writes", lambda: self.backend.delete(keys), keys, 0, _all_false(keys))

    def flush(self) -> StoreCall[tuple[bool, ...]]:
        return self._submit("flush", "writes", lambda: (self.backend.flush(),), (None,), 0, _all_false((None,)))

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

    # ------------------------------------------------------------ submission and end of a call

    def _submit(
        self,
        method: str,
        side: str,
        run: Callable[[], Any],
        keys: Sequence[Key | None] | None,
        size: int,
        instead: Callable[[Any, str], Any],
        released: Callable[[], None] | None = None,
    ) -> StoreCall[Any]:
        self._count(self._calls, method)
        count = 1 if keys is None else len(keys)
        token, reason = self._admit(side, size if method == "put" else 0, size)
        if token is None:
            self._count(self._refused, reason, count)
            if released is not None:
                released()
            return StoreCall(None, None, lambda _, detail: instead(reason, detail))

        def checked() -> Any:
            answers = run()
            valid = isinstance(answers, tuple)
            if keys is not None:
                valid = valid and len(answers) == len(keys) and all(map(_is_answer_for, answers, keys))
            if not valid:
                raise TypeError(f"{type(self.backend).__name__}.{method} answered {answers!r:.200} for {count} keys")
            return answers

        def on_end(ticket: Ticket, state: TicketState) -> None:
            self._record_end(ticket, state, token, side, size, count)

        worker = self._workers[side]
        ticket = worker.submit(checked, self.limits.deadline, on_end, released or (lambda: None))
        return StoreCall(worker, ticket, instead)

    def _admit(self, side: str, cost: int, size: int) -> tuple[object | None, Reason]:
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
        if cost and self._rate is not None and not self._rate.take(cost):
            self.breaker.withdrawn(token)
            self._backlogs[side].leave(size)
            return None, "rate"
        return token, "absent"

    def _record_end(self, ticket: Ticket, state: TicketState, token: object, side: str, size: int, keys: int) -> None:
        """Count how a call ended, and tell the backlog and the breaker."""
        self._backlogs[side].leave(size)
        self._count(self._ended, state)
        if state in ("refused", "dropped") or (state == "lapsed" and ticket.started_at is None):
            self.breaker.withdrawn(token)
            self._count(self._refused, REASON_OF[state], keys)
        elif state == "done" and not any(getattr(answer, "reason", "") in FAULTS for answer in ticket.answer):
            self.breaker.succeeded(token)
        else:
            self.breaker.failed(token)

    def _count(self, counter: Counter[str], name: str, by: int = 1) -> None:
        with self._lock:
            counter[name] += by


def _close_all(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.close()


def _all_false(keys: Sequence[object]) -> Callable[[Any, str], tuple[bool, ...]]:
    return lambda reason, detail: (False,) * len(keys)


def _is_answer_for(answer: object, key: Key | None) -> bool:
    """Whether ``answer`` can be an answer for ``key``."""
    if isinstance(answer, bool):
        return True
    return isinstance(answer, Record | Miss | Stored | Refused) and key is not None and answer.key == key
