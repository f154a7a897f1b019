"""Guards: any store behind a deadline, a circuit breaker, a write rate and a bounded backlog.

The guards make a store safe for a scheduler: a call returns at once, and a store that hangs or fails costs misses and
refusals, never time. They know the contract of stores (``prefixloom.storage``) and no particular store, and nothing of
the cache, of records on a disk, or of the host tier.

Read ``guarded`` first. Below it are ``worker`` (threads and deadlines) and ``limits`` (breaker, rate, backlog).
"""

from __future__ import annotations

from .guarded import Guarded, GuardLimits, GuardStatus, StoreCall
from .limits import BreakerLimits

__all__ = [
    "BreakerLimits",
    "GuardLimits",
    "GuardStatus",
    "Guarded",
    "StoreCall",
]
