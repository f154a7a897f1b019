"""Guarded: a store behind a deadline, a breaker and a backlog, so that no store can delay its caller.

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
from collections.abc import Callable, Mapping

import attrs

from prefixloom.storage import Backend

from .breaker import Breaker, BreakerState, Now
from .calls import Answers, CallQueue, GuardLimits, Instead, StoreCall


@attrs.frozen
class GuardStatus:
    """What a guard counted since it was made, and its state now.

    ``ended``    calls by how they ended: "done", or the reason for which the store did not answer
    ``late``     calls that returned after they were given up; ``stuck``: those that have not returned
    ``breaker``  the breaker's state; ``trips``: how often it opened
    ``reads_waiting``, ``writes_waiting``  calls and bytes that wait or run
    """

    ended: Mapping[str, int]
    late: int
    stuck: int
    breaker: BreakerState
    trips: int
    reads_waiting: tuple[int, int]
    writes_waiting: tuple[int, int]


class Guarded:
    """A store that cannot delay its caller. Its methods return at once, and raise nothing that the store raises.

    ``now`` returns the seconds since a fixed moment.

    A ``Guarded`` that is garbage-collected ends its threads as soon as no call runs. It does not close the store, which
    may have another user; ``close`` does.
    """

    def __init__(self, backend: Backend, limits: GuardLimits | None = None, now: Now = time.monotonic) -> None:
        self.backend, self.limits, self.now = backend, limits or GuardLimits(), now
        self.breaker = Breaker(self.limits.breaker, now)
        self._reads, self._writes = self._sides = tuple(
            CallQueue(f"prefixloom-{side}", backend, self.limits, self.breaker, now) for side in ("reads", "writes")
        )
        self._closed = False
        weakref.finalize(self, _close_all, self._sides).atexit = False

    def ask(
        self,
        run: Callable[[Backend], Answers],
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
        call = StoreCall(run, instead, size, released or _nothing, self.now())
        (self._writes if writes else self._reads).submit(call)
        return call

    def poll(self) -> None:
        """Give up every call whose deadline has passed. It is cheap: call it before looking at ``StoreCall.over``."""
        for side in self._sides:
            side.poll()

    def status(self) -> GuardStatus:
        """Return the counts. The store is not called."""
        reads, writes = self._sides
        ended = Counter(reads.ended) + Counter(writes.ended)
        late, stuck = reads.late + writes.late, reads.stuck + writes.stuck
        return GuardStatus(ended, late, stuck, self.breaker.state, self.breaker.trips, reads.waiting, writes.waiting)

    def close(self) -> None:
        """Drop every call, and close the store on a thread of its own, because closing may hang too."""
        if self._closed:
            return
        self._closed = True
        _close_all(self._sides)
        with contextlib.suppress(RuntimeError):  # the process ends, and no thread can be started
            threading.Thread(target=self.backend.close, name="prefixloom-close", daemon=True).start()


def _nothing() -> None:
    pass


def _close_all(sides: tuple[CallQueue, ...]) -> None:
    for side in sides:
        side.close()
