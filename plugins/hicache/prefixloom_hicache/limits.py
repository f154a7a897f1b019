"""Limits: how much may be asked of a store per second, and how much may wait for it. They know no store."""

from __future__ import annotations

import threading

from .clock import Clock


class Rate:
    """A bucket of ``burst`` that fills with ``per_second``. What is larger than it passes once it is brimming."""

    def __init__(self, per_second: float, burst: float, clock: Clock) -> None:
        if per_second <= 0 or burst <= 0:
            raise ValueError(f"a rate and its burst are more than 0, got {per_second} and {burst}")
        self.per_second, self.burst, self._clock = per_second, burst, clock
        self._lock = threading.Lock()
        self._left, self._at = burst, clock.now()

    def take(self, cost: float) -> bool:
        """Whether ``cost`` may pass now; then it is taken. A large one leaves a debt, so that the rate holds."""
        with self._lock:
            now = self._clock.now()
            self._left = min(self.burst, self._left + (now - self._at) * self.per_second)
            self._at = now
            if self._left < min(cost, self.burst):
                return False
            self._left -= cost
            return True


class Backlog:
    """At most so many calls and so many bytes at once, waiting or running."""

    def __init__(self, calls: int, size: int) -> None:
        self.calls, self.size = calls, size
        self._lock = threading.Lock()
        self._calls = self._size = 0

    @property
    def waiting(self) -> tuple[int, int]:
        """Calls and bytes."""
        return self._calls, self._size

    def enter(self, size: int) -> bool:
        """Whether there is room; a call that is larger than all of it enters alone."""
        with self._lock:
            if self._calls >= self.calls or (self._calls and self._size + size > self.size):
                return False
            self._calls += 1
            self._size += size
            return True

    def leave(self, size: int) -> None:
        with self._lock:
            self._calls -= 1
            self._size -= size
