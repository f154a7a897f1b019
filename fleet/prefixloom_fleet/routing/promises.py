"""Promises: whether requests hit at a replica what its events say it has. It knows no clock: it is told the time."""

from __future__ import annotations

import math

import attrs

JUDGED = 24
"""So many promises are looked at before a replica is called a liar."""
HONEST = 0.4
"""The share of the promised tokens that have to hit. Some do not, since they are evicted before the request comes."""
KEPT = 0.95
"""What counts of the earlier promises, each time another one is looked at."""
BAN_SECONDS = 60.0
"""How long a liar's events are not gone by."""


@attrs.define
class Promises:
    """What the events promised of the last requests, and what hit: sums that forget."""

    promised: float = 0.0
    hit: float = 0.0
    count: int = 0
    banned_until: float = -math.inf

    def settle(self, promised: int, hit: int, now: float) -> bool:
        """Compare a promise with what hit. True: from now on the replica is called a liar."""
        if promised <= 0:
            return False
        self.promised = KEPT * self.promised + promised
        self.hit = KEPT * self.hit + min(hit, promised)
        self.count += 1
        if self.count < JUDGED or self.hit >= HONEST * self.promised:
            return False
        self.promised = self.hit = 0.0
        self.count = 0
        self.banned_until = now + BAN_SECONDS
        return True
