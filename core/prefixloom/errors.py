"""The errors of prefixloom: a small family, each saying what was wrong, with what, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


class PrefixloomError(Exception):
    """Base of every error that prefixloom raises on purpose."""


class CompositionError(PrefixloomError):
    """A set of components cannot become a cache: nothing was allocated."""


class InputError(PrefixloomError, ValueError):
    """Tokens, a namespace or a number that the cache cannot accept. Nothing changed."""


class ProtocolError(PrefixloomError):
    """A call that breaks the contract (closed sequence, stale plan, foreign thread...). Nothing changed."""


class PluginError(PrefixloomError):
    """A hook implementation raised or answered something that its contract forbids.

    The operation it was part of has been undone; the cause is chained.
    """


class StorageError(PrefixloomError):
    """A store cannot be opened: it says why and what to do. Once open, a store answers and never raises."""


class RankError(PrefixloomError):
    """The ranks of a model differ, have come apart, or one of them does not answer. It says which and in what."""


class InvariantError(PrefixloomError):
    """Debug mode found the cache's own books wrong. Always a bug in prefixloom or in a plugin."""


class RaceError(InvariantError):
    """Debug mode found two accesses to a slot that nothing orders. It names both, and the edge that is missing."""


@attrs.frozen
class Shortage:
    """What one pool lacked: ``wanted`` pages were needed, ``free`` were free, the rest is held as told."""

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
    """All-or-nothing refusal: no slot was taken. ``shortages`` says which pool lacks how much and who holds it."""

    def __init__(self, shortages: tuple[Shortage, ...], what: str) -> None:
        self.shortages = shortages
        told = "; ".join(str(s) for s in shortages)
        super().__init__(f"cannot {what}: {told}. Close or wait for a sequence, or compose a larger cache")

    @property
    def lacking(self) -> Mapping[str, int]:
        """Pages missing per component."""
        return {s.component: s.wanted - s.free - s.evictable for s in self.shortages}
