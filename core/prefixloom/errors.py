"""The errors of prefixloom. Each message says what was wrong, with what, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


class PrefixloomError(Exception):
    """Base class of every error that prefixloom raises on purpose."""


class CompositionError(PrefixloomError):
    """A set of components cannot become a cache. Nothing was allocated."""


class InputError(PrefixloomError, ValueError):
    """Tokens, a namespace or a number that the cache cannot accept. Nothing changed."""


class ProtocolError(PrefixloomError):
    """A call that breaks the contract (closed sequence, stale plan, foreign thread...). Nothing changed."""


class BrokenError(ProtocolError):
    """An operation was interrupted amid its changes, so the cache's records may be wrong. It is refused until a flush.

    The message says what was interrupted. After ``cache.flush()``, which forgets all that is cached, the cache serves.
    """


class WorkError(PrefixloomError):
    """Work that ran at once, such as a copy of states, raised. The operation failed, and the cache goes on.

    The cause is chained.
    """


class PluginError(PrefixloomError):
    """A hook raised, or gave an answer that its contract forbids.

    The operation that called it failed, and the cache goes on. The cause is chained.
    """


class StorageError(PrefixloomError):
    """A store cannot be opened. A store that is open answers and never raises."""


class RankError(PrefixloomError):
    """The ranks of a model differ, made different calls, or one of them does not answer. The message names the rank."""


class InvariantError(PrefixloomError):
    """Debug mode found that the cache's own records are wrong. It is always a bug in prefixloom or in a plugin."""


class RaceError(InvariantError):
    """Debug mode found two unordered accesses to a slot. The message names both, and the missing edge."""


@attrs.frozen
class Shortage:
    """A lack of pages (or state slots) in one pool: how many were ``wanted``, and in what state the pool's pages were.

    ``holders`` names the running sequences that own most of them, with the number of pages of each.
    """

    component: str
    wanted: int
    free: int
    evictable: int
    leased: int
    running: int
    capacity: int
    holders: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        text = (
            f"{self.component}: needs {self.wanted} pages (or state slots), {self.free} free + {self.evictable} "
            f"evictable of {self.capacity}; {self.leased} pinned by leases, {self.running} owned by running sequences"
        )
        if self.holders:
            text += " (most: " + ", ".join(f"{name} {pages}" for name, pages in self.holders) + ")"
        return text


class CapacityError(PrefixloomError):
    """A pool has too little room for an operation. Nothing was taken from any pool.

    ``shortages`` says which pools lack how many pages, and which sequences hold them.
    """

    def __init__(self, shortages: tuple[Shortage, ...], what: str) -> None:
        self.shortages = shortages
        reasons = "; ".join(str(s) for s in shortages)
        super().__init__(f"cannot {what}: {reasons}. Close or wait for a sequence, or compose a larger cache")

    @property
    def lacking(self) -> Mapping[str, int]:
        """The number of missing pages by component."""
        return {s.component: s.wanted - s.free - s.evictable for s in self.shortages}
