"""Consensus: what all ranks of one model know. A rank applies nothing that another rank may not know yet.

Every rank drives a cache of its own with the same calls. So the caches make the same decisions, as long as these depend
only on the calls. What depends on time (a read that is over, a timeout, a rate, a breaker) differs between ranks. It
enters as the completion of a *ticket*, with the amount that arrived. A completion counts when all ranks have it: at the
same poll on every rank, with the least amount of any rank. Sizes and settings are agreed on when a cache is composed.

A consensus does not know what a ticket stands for. Its calls are collective: every rank makes the same calls in the
same order.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CompositionError, InputError, ProtocolError, RankError

if TYPE_CHECKING:
    from torch import Tensor


class Consensus(Protocol):
    """The collective calls by which ranks agree."""

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        """Return the tickets that are done on all ranks, with the least amount that arrived on any rank.

        ``done`` has the tickets that are done on this rank, with the amount that arrived.
        """

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        """Return the least of each value over all ranks. It raises ``RankError`` if the names differ."""

    def agree_same(self, values: Mapping[str, str]) -> None:
        """Raise ``RankError`` if a value is not the same on all ranks."""


class LocalConsensus:
    """The consensus of a single rank."""

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        return done_everywhere([done])

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        return least([values])

    def agree_same(self, values: Mapping[str, str]) -> None:
        check_same([values])


# ---------------------------------------------------------------- results, from the values of all ranks


def done_everywhere(by_rank: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """The tickets that are done on all ranks, in their order, with the least amount."""
    common = set(by_rank[0]).intersection(*by_rank[1:])
    return {ticket: min(done[ticket] for done in by_rank) for ticket in sorted(common)}


def least(by_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The least of each value."""
    for rank, values in enumerate(by_rank):
        different = sorted(values.keys() ^ by_rank[0].keys())
        if different:
            raise RankError(f"ranks 0 and {rank} do not have the same: only one of them has {', '.join(different)}")
    return {name: min(values[name] for values in by_rank) for name in by_rank[0]}


def check_same(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise ``RankError`` if the ranks' values differ."""
    first = by_rank[0]
    for rank, values in enumerate(by_rank):
        for name in sorted(values.keys() | first.keys()):
            if values.get(name) != first.get(name):
                raise RankError(
                    f"{name} is {first.get(name)!r} on rank 0 and {values.get(name)!r} on rank {rank}: start all "
                    f"ranks with the same"
                )


# ---------------------------------------------------------------- completions


class Completions:
    """Tickets for work that may end at different times on different ranks.

    Any thread may call ``done``; the other methods belong to one thread. Every ticket must be done at some time on
    every rank, with the amount 0 if nothing arrived. Otherwise the other ranks wait for it for ever: they go on
    serving, but what the ticket holds stays held.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._done: dict[int, int] = {}

    def open(self) -> int:
        """Return a new ticket. It has the same number on every rank, since all ranks make the same decisions."""
        ticket = next(self._numbers)
        with self._lock:
            self._open.add(ticket)
        return ticket

    def done(self, ticket: int, amount: int) -> None:
        """Note that a ticket is done on this rank, and how much arrived. It is called once per ticket."""
        with self._lock:
            if ticket not in self._open or ticket in self._done:
                raise ProtocolError(f"ticket {ticket} is not open, or was said to be done before")
            if amount < 0:
                raise ProtocolError(f"ticket {ticket}: {amount} cannot have arrived")
            self._done[ticket] = amount

    def poll(self) -> dict[int, int]:
        """The tickets that became done on all ranks since the last poll, in their order, with their amounts.

        Without an open ticket no collective call is made.
        """
        with self._lock:
            if not self._open:
                return {}
            done = dict(self._done)
        agreed = self._consensus.agree(done)
        with self._lock:
            for ticket in agreed:
                del self._done[ticket]  # first: an interrupt between them must not have it agreed on again
                self._open.remove(ticket)
        return agreed

    @property
    def waiting(self) -> tuple[int, ...]:
        """The open tickets."""
        with self._lock:
            return tuple(sorted(self._open))


def pairs_of(numbers: Iterable[int]) -> dict[int, int]:
    """Return {ticket: amount} from a flat list of tickets, each followed by its amount."""
    flat = list(numbers)
    return dict(zip(flat[::2], flat[1::2], strict=True))


# ---------------------------------------------------------------- a group of torch.distributed

ROOM = 125
"""The most numbers in the first exchange of a call: with its head it is 1 KiB per rank."""

MOST = 1 << 18
"""The most numbers in one call. If there are more, the oldest tickets go first."""

CALLS = ("agree", "agree_min", "agree_same")


class GroupConsensus:
    """The consensus of a gloo ``group`` of ``torch.distributed``; None: the default group.

    Every call is one ``all_gather`` of a small tensor of fixed size; if the values of a rank do not fit, all ranks make
    a second one. The first says which call it is, so different calls on different ranks are detected. If a rank dies or
    does not answer within ``timeout`` seconds, the call raises ``RankError``, and so does every later call: other ranks
    may have got values that this one did not.
    """

    def __init__(self, group: Any = None, timeout: float = 30.0) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise CompositionError("ranks agree over torch.distributed: call init_process_group first")
        backend = dist.get_backend(group)
        if backend != "gloo":
            raise CompositionError(
                f"ranks agree on the CPU, and the group's backend is {backend}: make one beside, with "
                f"torch.distributed.new_group(backend='gloo')"
            )
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout)
        self._calls = 0
        self._broken: RankError | None = None

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        oldest = sorted(done)[: MOST // 2]
        by_rank = self._exchange("agree", [number for ticket in oldest for number in (ticket, done[ticket])])
        return done_everywhere([pairs_of(numbers) for numbers in by_rank])

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        return least(self._exchange_values("agree_min", values))

    def agree_same(self, values: Mapping[str, str]) -> None:
        check_same(self._exchange_values("agree_same", values))

    def _exchange_values(self, call: str, values: Mapping[str, Any]) -> list[Any]:
        text = json.dumps(dict(values)).encode()
        if len(text) > 8 * (MOST - 1):
            raise InputError(f"{len(text)} bytes are too much to agree on")
        padded = text.ljust(-(-len(text) // 8) * 8)
        words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
        by_rank = self._exchange(call, words)
        return [json.loads(b"".join(word.to_bytes(8, "little") for word in each)) for each in by_rank]

    # ------------------------------------------------------------ exchange

    def _exchange(self, call: str, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange numbers with all ranks, and return those of each rank."""
        if self._broken is not None:
            raise RankError("the ranks have come apart before, and nothing can be agreed on: restart") from self._broken
        self._calls += 1
        try:
            return self._exchange_checked(call, numbers)
        except RankError as error:
            self._broken = error
            raise
        except RuntimeError as error:  # what torch.distributed raises
            seconds = self._timeout.total_seconds()
            self._broken = RankError(
                f"the {self._ranks} ranks did not agree at call {self._calls}, {call!r}: one of them died, or did not "
                f"answer for {seconds:g} s. Restart them ({str(error).splitlines()[0]})"
            )
            raise self._broken from error

    def _exchange_checked(self, call: str, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange numbers, and check that all ranks make the same call."""
        head = [self._calls, CALLS.index(call), len(numbers)]
        first = self._gather([*head, *numbers[:ROOM]], len(head) + ROOM)
        for rank, (calls, kind, _, *_) in enumerate(first):
            if [calls, kind] != head[:2]:
                raise RankError(
                    f"ranks have come apart: rank {rank} is at call {calls}, {CALLS[kind]!r}, and this one at call "
                    f"{self._calls}, {call!r}. Every rank must make the same calls in the same order"
                )
        counts = [each[2] for each in first]
        by_rank = [each[3:] for each in first]
        if max(counts) > ROOM:
            by_rank = self._gather(numbers, max(counts))
        return [each[:count] for each, count in zip(by_rank, counts, strict=True)]

    def _gather(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        import torch
        import torch.distributed as dist

        mine = torch.zeros(size, dtype=torch.int64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        every: list[Tensor] = [torch.empty_like(mine) for _ in range(self._ranks)]
        work = dist.all_gather(every, mine, group=self._group, async_op=True)
        work.wait(self._timeout)
        return [each.tolist() for each in every]
