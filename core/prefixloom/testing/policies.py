"""Cases of policies: an eviction policy and what it is asked, an admission policy and the views that it sees.

from prefixloom.testing import PolicyCase, parametrize_with_laws

@parametrize_with_laws(PolicyCase(lambda: EvictionPolicy("shortest", key=lambda use: use.tokens)))
def test_conformance(case, law):
    law(case)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from ..compose.registry import default_registry
from ..contract.admission import AdmissionPolicy, StateView
from ..contract.policy import EvictionPolicy, Use
from ..contract.queues import Queue
from ..errors import CompositionError


class Edge:
    """What a queue knows of a node: where it ends, what is above it, and how much it matters."""

    def __init__(self, parent: Edge | None, end: int, priority: int = 0) -> None:
        self.parent, self.end, self.priority = parent, end, priority


class Piece:
    """A cell as a queue sees it, with a number to know it by."""

    __slots__ = ("__weakref__", "next", "node", "number", "prev")

    def __init__(self, number: int, node: Edge) -> None:
        self.number, self.node = number, node
        self.prev: Any = None
        self.next: Any = None

    @property
    def linked(self) -> bool:
        return self.next is not None

    def __repr__(self) -> str:
        return f"<piece {self.number}, {self.node.end} tokens deep>"


class Crowd:
    """A queue, the pieces that were made for it, and which of them stand in it."""

    def __init__(self, queue: Queue, seed: object = 0) -> None:
        self.queue = queue
        self.chance = random.Random(f"crowd {seed}")
        self.root = Edge(None, 0)
        self.linked: dict[int, Piece] = {}
        self.idle: list[Piece] = []
        self.numbers = itertools.count()

    def piece(self) -> Piece:
        depth = self.chance.randrange(4)
        above = Edge(self.root, 16 * depth) if depth else self.root
        edge = Edge(above, above.end + 16 * self.chance.randrange(1, 5), self.chance.randrange(3))
        return Piece(next(self.numbers), edge)

    def add(self, piece: Piece | None = None, first: bool = False) -> Piece:
        piece = piece or (self.idle.pop() if self.idle and self.chance.randrange(2) else self.piece())
        (self.queue.add_first if first else self.queue.add)(piece)
        self.linked[piece.number] = piece
        return piece

    def some(self) -> Piece | None:
        """One that stands in the queue."""
        return self.chance.choice(list(self.linked.values())) if self.linked else None

    def remove(self, piece: Piece) -> None:
        self.queue.remove(piece)
        del self.linked[piece.number]

    def pop(self) -> Piece | None:
        found: Piece | None = self.queue.pop()
        if found is not None:
            self.linked.pop(found.number, None)
        return found

    def split(self, lower: Piece) -> Piece:
        """The upper half of a piece's edge becomes one of its own, as in the tree."""
        above = lower.node.parent
        assert above is not None
        upper = Piece(next(self.numbers), Edge(above, (above.end + lower.node.end) // 2, lower.node.priority))
        lower.node.parent = upper.node
        linked = lower.number in self.linked
        self.queue.inherit(upper, lower, linked)
        if linked:
            self.linked[upper.number] = upper
        return upper

    def turn(self) -> Piece | None:
        """Something that the core does, chosen by chance; what came out of the queue, if that was it."""
        kind, piece = self.chance.randrange(12), self.some()
        if kind < 5 or piece is None:
            self.add(first=kind == 0)
        elif kind < 7:
            self.queue.touch(piece)
        elif kind < 9:
            self.remove(piece)  # a lease covers it
            self.idle.append(piece)
        elif kind == 9:
            self.split(piece)
        elif kind == 10:
            self.remove(piece)
            self.queue.forget(piece)
        else:
            return self.pop()
        return None


@attrs.define(eq=False)
class PolicyCase:
    """An eviction policy to be tested; ``make()`` returns it."""

    make: Callable[[], EvictionPolicy]
    label: str = "policy"
    seed: int = 0

    @classmethod
    def installed(cls, name: str) -> PolicyCase:
        from ..contract.policy import BUILT_IN

        return cls(lambda: BUILT_IN.get(name) or default_registry().policy(name), label=f"policy:{name}")

    @property
    def laws(self) -> tuple[Any, ...]:
        from . import laws_of_policies

        return tuple(law for name, law in vars(laws_of_policies).items() if name.startswith("law_"))

    def policy(self) -> EvictionPolicy:
        policy = self.make()
        if not isinstance(policy, EvictionPolicy):
            raise CompositionError(f"{self.label}: what was made is {policy!r}, and must be an EvictionPolicy")
        return policy

    def crowd(self, seed: object = 0) -> Crowd:
        return Crowd(self.policy().queue(), f"{self.seed} {seed}")

    def __str__(self) -> str:
        return self.label


@attrs.define(eq=False)
class AdmissionCase:
    """An admission policy to be tested; ``make()`` returns it."""

    make: Callable[[], AdmissionPolicy]
    label: str = "admission"
    seed: int = 0

    @classmethod
    def installed(cls, name: str) -> AdmissionCase:
        from ..contract.admission import ADMISSIONS

        return cls(lambda: ADMISSIONS.get(name) or default_registry().admission(name), label=f"admission:{name}")

    @property
    def laws(self) -> tuple[Any, ...]:
        from . import laws_of_admission

        return tuple(law for name, law in vars(laws_of_admission).items() if name.startswith("law_"))

    def policy(self) -> AdmissionPolicy:
        policy = self.make()
        if not isinstance(policy, AdmissionPolicy):
            raise CompositionError(f"{self.label}: what was made is {policy!r}, and must be an AdmissionPolicy")
        return policy

    def views(self) -> Iterator[StateView]:
        """States of all kinds that can be met."""
        chance = random.Random(f"views {self.seed}")
        for number in range(300):
            kept = chance.randrange(4)
            above = 4 * chance.randrange(1, 40) if kept else 0
            boundary = above + 4 * chance.randrange(1, 1 + 10 ** chance.randrange(1, 4))
            yield StateView(
                chance.choice(("state", "conv")), chance.choice(("", "b")), boundary, above, kept,
                chance.randrange(3) == 0, number % 3 == 0,
            )  # fmt: skip

    def __str__(self) -> str:
        return self.label


def uses(seed: object) -> Iterator[Use]:
    """What a key may be asked about."""
    chance = random.Random(f"uses {seed}")
    for _ in range(200):
        born = chance.randrange(1, 1000)
        last = born + chance.randrange(1000)
        yield Use(
            born,
            last,
            1 + chance.randrange(50),
            1 + chance.randrange(4096),
            1 + chance.randrange(1 << 20),
            chance.randrange(-3, 9),
        )
