"""Breaker: stops the calls to a store that fails, and after a pause lets one call probe it. It knows no store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import attrs

from prefixloom import CompositionError

Now = Callable[[], float]
"""Returns the seconds since a fixed moment. A test decides when time passes."""
BreakerState = Literal["closed", "open", "half_open"]


def at_least(low: float) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    """Return a validator of a number, which is a whole one if the field's default is."""

    def check(instance: object, field: attrs.Attribute[Any], value: Any) -> None:
        wanted = (int,) if isinstance(field.default, int) else (int, float)
        if type(value) not in wanted or not value >= low:  # a NaN is not
            told = "whole number" if wanted == (int,) else "number"
            raise CompositionError(f"{field.name} must be a {told} of at least {low}, got {value!r}")

    return check


@attrs.frozen
class BreakerLimits:
    """When a breaker opens, and for how long.

    ``failures``  the number of failures in a row that opens it
    ``pause``     seconds that it stays open; each failed probe doubles them
    ``longest``   the longest pause in seconds
    """

    failures: int = attrs.field(default=5, validator=at_least(1))
    pause: float = attrs.field(default=1.0, validator=at_least(0))
    longest: float = attrs.field(default=60.0, validator=at_least(0))


class Breaker:
    """A circuit breaker. A call that got a token by ``allow`` ends once, by ``ended``. ``trips``: how often it opened.

    A token is the number of openings and probes so far. If that is another number at the end of a call, the call says
    nothing about the store now.
    """

    def __init__(self, limits: BreakerLimits, now: Now) -> None:
        self.limits, self._now = limits, now
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = limits.pause
        self._opened_at: float | None = None
        self._probing = False
        self._token = 0
        self.trips = 0

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return "closed"
        return "half_open" if self._probing or self._now() - self._opened_at >= self._pause else "open"

    def allow(self) -> int | None:
        """Return a token for one call. Return None if the breaker is open or another call is probing."""
        with self._lock:
            state = self.state
            if state == "open" or self._probing:
                return None
            if state == "half_open":
                self._probing = True
                self._token += 1
            return self._token

    def ended(self, token: int, well: bool | None) -> None:
        """Record how the call of this token ended. None: the store was never called."""
        with self._lock:
            if token != self._token:
                return
            probed, self._probing = self._probing, False
            if well:
                self._failures, self._opened_at, self._pause = 0, None, self.limits.pause
            elif well is not None:
                self._failures += 1
                if probed:
                    self._pause = min(2 * self._pause, self.limits.longest)
                if probed or self._failures >= self.limits.failures:
                    self._opened_at = self._now()
                    self._token += 1
                    self.trips += 1
