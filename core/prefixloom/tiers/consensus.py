"""Consensus: what all ranks of one model know. A rank applies nothing that another rank may not know yet.

Every rank drives a cache of its own with the same calls. So the caches make the same decisions, as long as these depend
only on the calls. What depends on time (a read that is over, a timeout, a rate, a breaker) differs between ranks. It
enters as the completion of a *ticket*, with the amount that arrived. A completion counts when all ranks have it: at the
same poll on every rank, with the least amount of any rank. Sizes and settings are agreed on when a cache is composed.

A consensus does not know what a ticket stands for.
"""

from __future__ import annotations

import itertools
import json
import struct
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ..errors import CompositionError, ProtocolError, RankError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

V = TypeVar("V", int, str)


class Consensus:
    """The calls by which ranks agree. Every rank makes the same calls in the same order."""

    def exchange(self, call: str, values: Mapping[str, V]) -> list[dict[str, V]]:
        """Return the values of each rank, after all ranks have made the same call."""
        raise NotImplementedError

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        """Return the tickets that are done on all ranks, in their order, with the least amount of any rank.

        ``done`` has the tickets that are done on this rank, with the amount that arrived.
        """
        by_rank = self.exchange("agree", {str(ticket): amount for ticket, amount in done.items()})
        common = set(by_rank[0]).intersection(*by_rank[1:])
        return {int(ticket): min(amounts[ticket] for amounts in by_rank) for ticket in sorted(common, key=int)}

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        """Return the least of each value over all ranks. It raises ``RankError`` if the names differ."""
        by_rank = self.exchange("agree_min", values)
        for rank, theirs in enumerate(by_rank):
            different = sorted(theirs.keys() ^ by_rank[0].keys())
            if different:
                raise RankError(f"ranks 0 and {rank} do not have the same: only one of them has {', '.join(different)}")
        return {name: min(theirs[name] for theirs in by_rank) for name in by_rank[0]}

    def agree_same(self, values: Mapping[str, str]) -> None:
        """Raise ``RankError`` if a value is not the same on all ranks."""
        by_rank = self.exchange("agree_same", values)
        first = by_rank[0]
        for rank, theirs in enumerate(by_rank):
            for name in sorted(theirs.keys() | first.keys()):
                if theirs.get(name) != first.get(name):
                    raise RankError(
                        f"{name} is {first.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}: start all "
                        f"ranks with the same"
                    )


class LocalConsensus(Consensus):
    """The consensus of a single rank."""

    def exchange(self, call: str, values: Mapping[str, V]) -> list[dict[str, V]]:
        return [dict(values)]


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
        """Return the tickets that became done on all ranks since the last poll, in their order, with their amounts.

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


# ---------------------------------------------------------------- a group of torch.distributed

HEAD = struct.Struct("<qqq")
ROOM = 1000
"""The most bytes of values in the first exchange of a call: with its head it is 1 KiB per rank."""

CALLS = ("agree", "agree_min", "agree_same")


class GroupConsensus(Consensus):
    """The consensus of a gloo ``group`` of ``torch.distributed``; None: the default group.

    Every call is one ``all_gather`` of a small tensor of fixed size; if the values of a rank do not fit, all ranks make
    a second one. The first says which call it is, so different calls on different ranks are detected. If a rank dies or
    does not answer within ``timeout`` seconds, the call raises ``RankError``, and so does every later call: other ranks
    may have got values that this one did not.
    """

    def __init__(self, group: ProcessGroup | None = None, timeout: float = 30.0) -> None:
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

    def exchange(self, call: str, values: Mapping[str, V]) -> list[dict[str, V]]:
        if self._broken is not None:
            raise RankError("the ranks have come apart before, and nothing can be agreed on: restart") from self._broken
        self._calls += 1
        try:
            return [json.loads(text) for text in self._exchange_text(call, json.dumps(dict(values)).encode())]
        except RankError as error:
            self._broken = error
            raise
        except ValueError as error:
            self._broken = RankError("another rank's values cannot be read: start all ranks with the same version")
            raise self._broken from error
        except RuntimeError as error:  # what torch.distributed raises
            seconds = self._timeout.total_seconds()
            self._broken = RankError(
                f"the {self._ranks} ranks did not agree at call {self._calls}, {call!r}: one of them died, or did not "
                f"answer for {seconds:g} s. Restart them ({str(error).splitlines()[0]})"
            )
            raise self._broken from error

    def _exchange_text(self, call: str, text: bytes) -> list[bytes]:
        """Exchange texts, and check that all ranks make the same call."""
        kind = CALLS.index(call)
        first = self._gather(HEAD.pack(self._calls, kind, len(text)) + text[:ROOM], HEAD.size + ROOM)
        heads = [HEAD.unpack_from(each) for each in first]
        for rank, (calls, other, _) in enumerate(heads):
            if (calls, other) != (self._calls, kind):
                raise RankError(
                    f"ranks have come apart: rank {rank} is at call {calls}, {CALLS[other]!r}, and this one at call "
                    f"{self._calls}, {call!r}. Every rank must make the same calls in the same order"
                )
        texts = [each[HEAD.size :] for each in first]
        longest = max(length for _, _, length in heads)
        if longest > ROOM:
            texts = self._gather(text, longest)
        return [each[:length] for each, (_, _, length) in zip(texts, heads, strict=True)]

    def _gather(self, text: bytes, size: int) -> list[bytes]:
        import torch
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        every: list[Tensor] = [torch.empty_like(mine) for _ in range(self._ranks)]
        work = dist.all_gather(every, mine, group=self._group, async_op=True)
        work.wait(self._timeout)
        return [bytes(each.tolist()) for each in every]
