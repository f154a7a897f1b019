"""Limits: the three reasons not to call a store now.

``Breaker``  the store failed several times in a row
``Rate``     too many bytes were written in the last seconds
``Backlog``  too many calls are waiting already

They know no store and no call: each only says yes or no. Each has its own lock, so that any thread may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import attrs

Now = Callable[[], float]
"""Returns the seconds since a fixed moment. A test decides when time passes."""
BreakerState = Literal["closed", "open", "half_open"]


@attrs.frozen
class BreakerLimits:
    """When a breaker opens, and for how long.

    ``failures``  the number of failures in a row that opens it
    ``pause``     seconds that it stays open; each failed probe doubles them
    ``longest``   the longest pause in seconds
    """

    failures: int = 5
    pause: float = 1.0
    longest: float = 60.0


class Breaker:
    """A circuit breaker: it stops the calls to a store that fails, and after a pause lets one call probe the store.

    Call ``allow`` before a call to the store. Then call exactly one of ``succeeded``, ``failed`` and ``withdrawn`` with
    the token that ``allow`` returned.
    """

    def __init__(self, limits: BreakerLimits, now: Now) -> None:
        self.limits, self._now = limits, now
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = limits.pause
        self._opened_at: float | None = None
        self._probe: object | None = None
        self.trips = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            return self._state_now()

    def _state_now(self) -> BreakerState:
        if self._opened_at is None:
            return "closed"
        if self._probe is not None or self._now() - self._opened_at >= self._pause:
            return "half_open"
        return "open"

    def allow(self) -> object | None:
        """Return a token for one call. Return None if the breaker is open or another call is probing."""
        with self._lock:
            state = self._state_now()
            if state == "closed":
                return object()
            if state == "open" or self._probe is not None:
                return None
            self._probe = object()
            return self._probe

    def succeeded(self, token: object) -> None:
        """Record that the call of this token succeeded."""
        with self._lock:
            if self._opened_at is not None and token is not self._probe:
                return  # the call began before the breaker opened: it says nothing about the store now
            self._failures, self._opened_at, self._probe, self._pause = 0, None, None, self.limits.pause

    def failed(self, token: object) -> None:
        """Record that the call of this token failed."""
        with self._lock:
            if self._opened_at is not None:
                if token is not self._probe:
                    return
                self._pause = min(2 * self._pause, self.limits.longest)
            else:
                self._failures += 1
                if self._failures < self.limits.failures:
                    return
            self._opened_at, self._probe = self._now(), None
            self.trips += 1

    def withdrawn(self, token: object) -> None:
        """Record that the store was never called."""
        with self._lock:
            if token is self._probe:
                self._probe = None


class Rate:
    """A token bucket: it holds at most ``burst`` and refills by ``per_second``.

    A cost above ``burst`` passes when the bucket is full.
    """

    def __init__(self, per_second: float, burst: float, now: Now) -> None:
        if per_second <= 0 or burst <= 0:
            raise ValueError(f"a rate and its burst must be more than 0, got {per_second} and {burst}")
        self.per_second, self.burst, self._now = per_second, burst, now
        self._lock = threading.Lock()
        self._left, self._filled_at = burst, now()

    def take(self, cost: float) -> bool:
        """Take ``cost`` from the bucket and return True, or return False if there is too little in it.

        A cost above ``burst`` leaves a debt, so that the rate holds over time.
        """
        with self._lock:
            now = self._now()
            self._left = min(self.burst, self._left + (now - self._filled_at) * self.per_second)
            self._filled_at = now
            if self._left < min(cost, self.burst):
                return False
            self._left -= cost
            return True


class Backlog:
    """A bound on the calls and the bytes that wait or run at one time."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls, self.max_bytes = max_calls, max_bytes
        self._lock = threading.Lock()
        self._calls = self._bytes = 0

    @property
    def waiting(self) -> tuple[int, int]:
        """The calls and the bytes that wait or run."""
        return self._calls, self._bytes

    def enter(self, size: int) -> bool:
        """Count in a call of ``size`` bytes and return True, or return False if there is no room.

        A call above ``max_bytes`` enters when nothing else waits.
        """
        with self._lock:
            if self._calls >= self.max_calls or (self._calls and self._bytes + size > self.max_bytes):
                return False
            self._calls += 1
            self._bytes += size
            return True

    def leave(self, size: int) -> None:
        """Count out a call of ``size`` bytes."""
        with self._lock:
            self._calls -= 1
            self._bytes -= size
