"""Consensus over a group of ``torch.distributed``: gloo, since what is agreed on is on the CPU.

Every call is one ``all_gather`` of a small tensor of fixed size; who has more to say than fits makes all ranks do a
second one. The first says which call it is, so ranks that have come apart are seen, not misread. A rank that died or
does not answer is an error after ``timeout`` seconds, and from then on every call is refused: the others may have heard
what this one did not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .consensus import check_same, done_everywhere, least, pairs_of
from .errors import CompositionError, InputError, RankError

if TYPE_CHECKING:
    from torch import Tensor

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
