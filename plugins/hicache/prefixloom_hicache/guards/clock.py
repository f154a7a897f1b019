"""Clock: the time that the guards read, so that a test can decide when it passes.

It knows no store and no guard.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol


class Clock(Protocol):
    """What the guards need of a clock."""

    def now(self) -> float:
        """Return the seconds since a fixed moment. The value never decreases."""

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Wait until a held condition is notified, or until ``seconds`` have passed. It may return early."""


class SystemClock:
    """The monotonic clock of the system."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        condition.wait(seconds)


class ManualClock:
    """A clock for tests: time passes only in ``advance``. A wait ends there, or when its condition is notified."""

    PATIENCE = 30.0
    """Real seconds after which a wait that nothing has ended raises ``TimeoutError``."""

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
            raise TimeoutError("nobody advances the clock, and nobody notifies the condition")

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass and wake every wait."""
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()
