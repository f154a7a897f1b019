"""Clock: time as the guards see it, so that a test can be the one who lets it pass."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some moment, never going back."""

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Wait for a notification of a held condition, or for so long. May return early."""


class SystemClock:
    """Time as it passes."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        condition.wait(seconds)


class ManualClock:
    """Time that passes only in ``advance``; waits end there, or when they are notified."""

    PATIENCE = 30.0
    """Real seconds after which a wait that nobody ends is an error of the test."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._waiting: weakref.WeakSet[threading.Condition] = weakref.WeakSet()

    def now(self) -> float:
        return self._now

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        with self._lock:
            self._waiting.add(condition)
        if not condition.wait(self.PATIENCE):
            raise TimeoutError("nobody advances the clock, and nobody notifies")

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()
