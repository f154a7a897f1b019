"""Content that follows from the tokens: what every slot of a cache must hold, whoever computed it.

A checksum of (namespace, tokens up to the position) for each position, and of all tokens for a state. The components
are those of ``two_processes``: any with pages, and one called "state".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from prefixloom.cache.cache import Cache


def sums_of(namespace: str, tokens: Sequence[int]) -> list[int]:
    """The checksum of every prefix, the empty one first."""
    digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=8)
    sums = [int.from_bytes(digest.digest(), "little", signed=True)]
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        sums.append(int.from_bytes(digest.digest(), "little", signed=True))
    return sums


class Content:
    """What the slots of a cache hold, written and compared by what the tokens say."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.compared = 0

    def values(self, sums: list[int], positions: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[sums[p + 1], p] for p in positions], dtype=torch.int64).reshape(-1, 2)

    def compute(self, sequence: Any, upto: int) -> None:
        """One step over what is reserved up to ``upto``: its positions, the running state, those of single tokens."""
        start = sequence.committed
        sequence.grow(upto - sequence.reserved)
        with self.cache.step([sequence]) as step:
            step.run_ops()
            self.state_is(sequence, start)
            sums = sums_of(sequence.namespace, sequence.tokens.tolist()[:upto])
            for part in self.cache.composition.parts:
                if part.page_tokens:
                    self.write(sequence, part.name, range(start, upto), self.values(sums, range(start, upto)))
            states = self.cache.pool("state").buffers["data"][0]
            states[sequence.pages("state")[0]] = torch.tensor([sums[upto], upto])
            for slot, at in zip(sequence.rewind_slots("state"), range(start + 1, upto + 1), strict=False):
                states[slot] = torch.tensor([sums[at], at])

    def write(self, sequence: Any, name: str, positions: Sequence[int], values: torch.Tensor) -> None:
        if len(positions):
            slots, offsets = self.places(sequence, name, positions)
            self.cache.pool(name).buffers["data"][0][slots, offsets] = values

    def places(self, sequence: Any, name: str, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        page = self.cache.composition.page
        table = torch.tensor(sequence.pages(name), dtype=torch.int64)
        at = torch.tensor(positions, dtype=torch.int64)
        slots = table[at // page]
        assert bool((slots >= 0).all()), f"{name}: an absent page is used"
        return slots, at % page

    def read(self, sequence: Any, name: str, positions: Sequence[int]) -> torch.Tensor:
        slots, offsets = self.places(sequence, name, positions)
        return self.cache.pool(name).buffers["data"][0][slots, offsets]

    def check(self, sequence: Any) -> None:
        """What going on from what is committed reads is what the tokens say."""
        at = sequence.committed
        sums = sums_of(sequence.namespace, sequence.tokens.tolist()[:at])
        for part in self.cache.composition.parts:
            name = part.name
            for positions in (range(low, high) for low, high in part.reach.needs(at) if low < high):
                self.compared += len(positions)
                wrong = (self.read(sequence, name, positions) != self.values(sums, positions)).any(1)
                assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} entries are somebody else's"

    def state_is(self, sequence: Any, boundary: int) -> None:
        """After the ops the running state stands for ``boundary``; zeros before the first token."""
        found = self.cache.pool("state").buffers["data"][0][sequence.pages("state")[0]].tolist()
        sums = sums_of(sequence.namespace, sequence.tokens.tolist()[:boundary])
        assert found == ([sums[boundary], boundary] if boundary else [0, 0]), "the state is somebody else's"
        self.compared += 1
