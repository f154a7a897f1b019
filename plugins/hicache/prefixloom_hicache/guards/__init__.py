"""Guards: any store behind a deadline, a circuit breaker and a bounded backlog.

The guards make a store safe for a scheduler: a call returns at once, and a store that hangs or fails costs misses and
refusals, never time. They know the contract of stores (``prefixloom.storage``) and no particular store, and nothing of
the cache, of records on a disk, or of the host tier.

Read ``guarded`` first. Below it are ``calls`` (a queue, its thread, deadlines and the backlog) and ``breaker``.
"""

from __future__ import annotations

from .breaker import BreakerLimits
from .calls import GuardLimits, StoreCall
from .guarded import Guarded, GuardStatus

__all__ = [
    "BreakerLimits",
    "GuardLimits",
    "GuardStatus",
    "Guarded",
    "StoreCall",
]
