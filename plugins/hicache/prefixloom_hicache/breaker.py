"""Breaker: stops asking a store that fails, and tries again with one call after a pause. It knows no store."""

from __future__ import annotations

import threading
from typing import Literal

import attrs

from .clock import Clock

State = Literal["closed", "open", "half_open"]


@attrs.frozen
class BreakerLimits:
    """``failures`` in a row open it, for ``pause`` seconds; each failed probe doubles that, up to ``longest``."""

    failures: int = 5
    pause: float = 1.0
    longest: float = 60.0


class Breaker:
    """``allow`` before a call, then exactly one of ``succeeded``, ``failed`` and ``withdrawn`` with its answer."""

    def __init__(self, limits: BreakerLimits, clock: Clock) -> None:
        self.limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = limits.pause
        self._opened: float | None = None
        self._probe: object | None = None
        self.trips = 0

    @property
    def state(self) -> State:
        with self._lock:
            return self._state()

    def _state(self) -> State:
        if self._opened is None:
            return "closed"
        if self._probe is not None or self._clock.now() - self._opened >= self._pause:
            return "half_open"
        return "open"

    def allow(self) -> object | None:
        """A token for one call; None while it is open, or somebody else is probing."""
        with self._lock:
            state = self._state()
            if state == "closed":
                return object()
            if state == "open" or self._probe is not None:
                return None
            self._probe = object()
            return self._probe

    def succeeded(self, token: object) -> None:
        with self._lock:
            if self._opened is not None and token is not self._probe:
                return  # a call from before it opened says nothing of now
            self._failures, self._opened, self._probe, self._pause = 0, None, None, self.limits.pause

    def failed(self, token: object) -> None:
        with self._lock:
            if self._opened is not None:
                if token is not self._probe:
                    return
                self._pause = min(2 * self._pause, self.limits.longest)
            else:
                self._failures += 1
                if self._failures < self.limits.failures:
                    return
            self._opened, self._probe = self._clock.now(), None
            self.trips += 1

    def withdrawn(self, token: object) -> None:
        """The call was never made."""
        with self._lock:
            if token is self._probe:
                self._probe = None
