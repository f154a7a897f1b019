"""Consensus: what the ranks of one model know together. A rank applies nothing that another one may not know yet.

Every rank drives a cache of its own with the same calls, so their decisions are the same, as long as these depend on
nothing but the calls. What depends on time (a read that is over, a timeout, a rate, a breaker) differs between ranks.
It enters as the completion of a *ticket*, with how much arrived, and a completion counts when all ranks have it: at the
same poll everywhere, with the least amount of any. Sizes and settings are agreed on when a cache is composed.

It must not know what a ticket stands for. Calls of a consensus are collective: every rank makes the same ones, in the
same order.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from .errors import ProtocolError, RankError


class Consensus(Protocol):
    """What ranks agree on."""

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        """Of the tickets that are done here, with how much arrived, those done everywhere, with the least amount."""

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        """The least of every value. ``RankError`` if the ranks name different ones."""

    def agree_same(self, values: Mapping[str, str]) -> None:
        """``RankError`` names what is not the same on all ranks."""


class LocalConsensus:
    """One rank, which agrees with itself."""

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        return done_everywhere([done])

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        return least([values])

    def agree_same(self, values: Mapping[str, str]) -> None:
        check_same([values])


# ---------------------------------------------------------------- what follows from what all said, by rank


def done_everywhere(told: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """In the tickets' order."""
    common = set(told[0]).intersection(*told[1:])
    return {ticket: min(each[ticket] for each in told) for ticket in sorted(common)}


def least(told: Sequence[Mapping[str, int]]) -> dict[str, int]:
    for rank, values in enumerate(told):
        strange = sorted(values.keys() ^ told[0].keys())
        if strange:
            raise RankError(f"ranks 0 and {rank} do not have the same: only one of them has {', '.join(strange)}")
    return {name: min(values[name] for values in told) for name in told[0]}


def check_same(told: Sequence[Mapping[str, str]]) -> None:
    for rank, values in enumerate(told):
        for name in sorted(values.keys() | told[0].keys()):
            if values.get(name) != told[0].get(name):
                raise RankError(
                    f"{name} is {told[0].get(name)!r} on rank 0 and {values.get(name)!r} on rank {rank}: start all "
                    f"ranks with the same"
                )


# ---------------------------------------------------------------- completions


class Completions:
    """Tickets for work whose end is not ours to decide. ``done`` may be called from any thread, the rest from one.

    Every ticket must be done some time, on every rank, even if nothing came of it: then its amount is 0. Otherwise the
    others wait for it for ever (they go on serving, but what it holds stays held).
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._done: dict[int, int] = {}

    def open(self) -> int:
        """A ticket. Since decisions are the same everywhere, it has the same number on every rank."""
        ticket = next(self._numbers)
        with self._lock:
            self._open.add(ticket)
        return ticket

    def done(self, ticket: int, amount: int) -> None:
        """Here it is over, and so much arrived. It is said once."""
        with self._lock:
            if ticket not in self._open or ticket in self._done:
                raise ProtocolError(f"ticket {ticket} is not open, or was said to be done before")
            if amount < 0:
                raise ProtocolError(f"ticket {ticket}: {amount} cannot have arrived")
            self._done[ticket] = amount

    def poll(self) -> dict[int, int]:
        """What is done on all ranks since the last poll, in the tickets' order. Nothing is asked if none is open."""
        with self._lock:
            if not self._open:
                return {}
            done = dict(self._done)
        agreed = self._consensus.agree(done)
        with self._lock:
            for ticket in agreed:
                self._open.remove(ticket)
                del self._done[ticket]
        return agreed

    @property
    def waiting(self) -> tuple[int, ...]:
        """Tickets that are open."""
        with self._lock:
            return tuple(sorted(self._open))


def pairs_of(numbers: Iterable[int]) -> dict[int, int]:
    """From ticket, amount, ticket, amount..."""
    flat = list(numbers)
    return dict(zip(flat[::2], flat[1::2], strict=True))
