"""Consensus: what the ranks of one model know together. A rank applies nothing that another one may not know yet.

Every rank drives a cache of its own with the same calls, so their decisions are the same, as long as these depend on
nothing but the calls. What depends on time (a read that is over, a timeout, a rate, a breaker) differs between ranks.
It enters as the completion of a *ticket*, with how much arrived, and a completion counts when all ranks have it: at the
same poll everywhere, with the least amount of any. Sizes and settings are agreed on when a cache is composed.

It must not know what a ticket stands for. Calls of a consensus are collective: every rank makes the same ones, in the
same order.

Consensus over a group of ``torch.distributed``: gloo, since what is agreed on is on the CPU.

Every call is one ``all_gather`` of a small tensor of fixed size; who has more to say than fits makes all ranks do a
second one. The first says which call it is, so ranks that have come apart are seen, not misread. A rank that died or
does not answer is an error after ``timeout`` seconds, and from then on every call is refused: the others may have heard
what this one did not.
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


ROOM = 125
"""Numbers that the first exchange carries: with its head it is 1 KiB a rank."""

MOST = 1 << 18
"""More are not sent at once: the oldest tickets go first."""

CALLS = ("agree", "agree_min", "agree_same")


class GroupConsensus:
    """``group`` is a gloo group; None: the default one."""

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
        told = self._exchange("agree", [number for ticket in oldest for number in (ticket, done[ticket])])
        return done_everywhere([pairs_of(numbers) for numbers in told])

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        return least(self._exchange_values("agree_min", values))

    def agree_same(self, values: Mapping[str, str]) -> None:
        check_same(self._exchange_values("agree_same", values))

    def _exchange_values(self, call: str, values: Mapping[str, Any]) -> list[Any]:
        text = json.dumps(dict(values)).encode()
        if len(text) > 8 * (MOST - 1):
            raise InputError(f"{len(text)} bytes are too much to agree on")
        padded = text.ljust(-(-len(text) // 8) * 8)
        words = [int.from_bytes(padded[at : at + 8], "little", signed=True) for at in range(0, len(padded), 8)]
        told = self._exchange(call, words)
        return [json.loads(b"".join(word.to_bytes(8, "little", signed=True) for word in each)) for each in told]

    # ------------------------------------------------------------ exchange

    def _exchange(self, call: str, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank said, by rank."""
        if self._broken is not None:
            raise RankError("the ranks have come apart before, and nothing can be agreed on: restart") from self._broken
        self._calls += 1
        try:
            return self._exchanged(call, numbers)
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

    def _exchanged(self, call: str, numbers: Sequence[int]) -> list[list[int]]:
        head = [self._calls, CALLS.index(call), len(numbers)]
        first = self._gathered([*head, *numbers[:ROOM]], len(head) + ROOM)
        for rank, (calls, kind, _, *_) in enumerate(first):
            if [calls, kind] != head[:2]:
                raise RankError(
                    f"ranks have come apart: rank {rank} is at call {calls}, {CALLS[kind]!r}, and this one at call "
                    f"{self._calls}, {call!r}. Every rank must make the same calls in the same order"
                )
        counts = [each[2] for each in first]
        told = [each[3:] for each in first]
        if max(counts) > ROOM:
            told = self._gathered(numbers, max(counts))
        return [each[:count] for each, count in zip(told, counts, strict=True)]

    def _gathered(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        import torch
        import torch.distributed as dist

        mine = torch.zeros(size, dtype=torch.int64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        every: list[Tensor] = [torch.empty_like(mine) for _ in range(self._ranks)]
        work = dist.all_gather(every, mine, group=self._group, async_op=True)
        work.wait(self._timeout)
        return [each.tolist() for each in every]
