"""Compositions for the property test: test-only components of every reach, alone and together, in pools too small."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import prefixloom
from prefixloom import (
    Buffer,
    Chunk,
    Claim,
    Component,
    EvictionPolicy,
    Manifest,
    Optional,
    Path,
    Point,
    Reach,
    Sinks,
    Tail,
    WalkView,
    Window,
    hookimpl,
)
from prefixloom.testing.oracle.operations import Operations

MRU = EvictionPolicy("mru", key=lambda use: -use.last)
FIFO = EvictionPolicy("fifo", key=lambda use: use.born)


class Strided(Reach):
    """Plain Python, no shape: every second group of 4 among the last 24 positions, and the newest 5."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        low = max(0, n - 24)
        groups = [(g * 4, min(g * 4 + 4, n)) for g in range(low // 4, n // 4) if g % 2 == 0 and g * 4 >= low]
        return (*groups, (max(0, n - 5), n)) if n else ()

    def until(self, p: int) -> float:
        return p + 24


class Landmarks(Reach):
    """One position in 8 for good, and the newest 5."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return (*((p, p + 1) for p in range(0, n, 8)), (max(0, n - 5), n)) if n else ()

    def until(self, p: int) -> float:
        return p + 5 if p % 8 else math.inf


class Secret(Reach):
    """A window written as bare ``needs``: nothing is known of when a position is no longer needed."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((max(0, n - 6), n),) if n else ()


class ConvexSecret(Secret):
    """The same window, which says that it is convex and still not when a position is no longer needed."""

    convex = True


class ConvexLate(ConvexSecret):
    """The same window, which says of each position that it is needed for longer than it is."""

    def until(self, p: int) -> float:
        return p + 21


class Nothing(Reach):
    """Needs nothing at any boundary, and does not know until when."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ()


class NeverNeeded(Nothing):
    """Needs nothing at any boundary, and says so of each position."""

    def until(self, p: int) -> float:
        return p


class BarePath(Reach):
    """A path written as bare ``needs``, which does not say that it is closed upward."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((0, n),) if n else ()


class Choosy(Component):
    """It keeps some of the victims of every eviction, from the leaves up or from the root down."""

    @hookimpl
    def evict_component(self, node: Any, tier: str) -> Claim:
        return Claim(
            keep=tuple(i for i, victim in enumerate(node) if (victim.start // 4 + victim.end + len(node)) % 3 == 0)
        )


class Sparing(Component):
    """It keeps of many publications the last tokens alone, and gives the rest back while its sequence runs on."""

    @hookimpl
    def commit_insert(self, walk: WalkView) -> Claim | None:
        return Claim(keep=((walk.boundary - 2, walk.boundary),)) if walk.boundary % 3 else None


DEBUG = True
"""Whether the caches keep their own second books; the model does without."""


@dataclass(frozen=True)
class Setup:
    """One composition: components as (name, reach, manifest facts), and how small the pools are."""

    parts: tuple[tuple[str, Reach, dict[str, Any]], ...]
    page: int = 4
    policy: str = "lru"
    max_rewind: int = 0
    tokens: int = 64
    """Tokens that each page component holds."""
    slots: int = 8
    own: dict[str, int] = field(default_factory=dict)
    lent: bool = False
    kind: type[Component] = Component
    shares: dict[str, float] | None = None

    @property
    def unit(self) -> int:
        """Tokens of a page of the tree."""
        return math.lcm(
            *(n for _, _, facts in self.parts for n in (facts.get("page_size", self.page), facts.get("grid", 1)))
        )

    @property
    def longest(self) -> int:
        """Prompts are up to so long."""
        return self.tokens * 5 // 8

    @property
    def lookahead(self) -> int:
        """How many tokens content looks ahead at."""
        return max(facts.get("lookahead", 0) for _, _, facts in self.parts)

    def __call__(self) -> Operations:
        """A new world of the oracle's, for a script."""
        return Operations(self.compose())

    def compose(self) -> Any:
        plugins = [
            self.kind(name, Manifest([Buffer("content", (), "int64")], **facts), reach)
            for name, reach, facts in self.parts
        ]
        capacity = {
            name: self.own.get(name, self.slots if reach.unit == "boundary" else self.tokens)
            for name, reach, _ in self.parts
        }
        return prefixloom.compose(
            None,
            plugins=plugins,
            page_size=self.page,
            capacity=capacity,
            policy=self.policy,
            shares=self.shares,
            max_rewind=self.max_rewind,
            slots="lent" if self.lent else "own",
            debug=DEBUG,
        )


def one(reach: Reach, **facts: Any) -> tuple[tuple[str, Reach, dict[str, Any]], ...]:
    return (("a", reach, facts),)


def parts(*reaches: Reach, **facts: dict[str, Any]) -> tuple[tuple[str, Reach, dict[str, Any]], ...]:
    """Components named a, b, c...; manifest facts by that name."""
    return tuple((name, reach, facts.get(name, {})) for name, reach in zip("abcdef", reaches, strict=False))


def setups() -> dict[str, Setup]:
    make: Callable[..., Setup] = Setup
    return {
        "path": make(parts(Path())),
        "path, page 1, lfu": make(parts(Path()), page=1, policy="lfu", tokens=40),
        "path, page 16, mru": make(parts(Path()), page=16, policy=MRU, tokens=192),
        "two paths, slru": make(parts(Path(), Path()), policy="slru", own={"b": 52}),
        "path, groups of 2": make(parts(Path(), a={"tokens_per_slot": 2}), policy=FIFO),
        "path, lookahead 1": make(parts(Path(), Path(), b={"lookahead": 1}), policy="lru"),
        "path and window, lookahead 2": make(parts(Path(), Window(7), b={"lookahead": 2}), page=1, tokens=40),
        "lookahead 1, rewind": make(parts(Path(), Window(7), b={"lookahead": 1}), page=1, tokens=40, max_rewind=4),
        "path and window": make(parts(Path(), Window(9)), own={"b": 48}),
        "path and window, page 1, priority": make(parts(Path(), Window(6)), page=1, policy="priority", tokens=44),
        "path and window, rewind": make(parts(Path(), Window(6)), max_rewind=5),
        "path and window, page 16": make(parts(Path(), Window(21)), page=16, tokens=192, policy="slru"),
        "window": make(parts(Window(10)), tokens=48),
        "window of 1": make(parts(Window(1)), tokens=40),
        "window of 2, page 1": make(parts(Window(2)), page=1, tokens=32, policy="lfu"),
        "window smaller than a page": make(parts(Path(), Window(3)), policy=FIFO),
        "window longer than prompts": make(parts(Window(500)), policy=MRU),
        "two windows": make(parts(Window(5), Window(14)), own={"a": 48}, max_rewind=3),
        "two windows and a path": make(parts(Window(6), Path(), Window(13)), policy="lfu", own={"c": 52}),
        "point": make(parts(Point()), tokens=40, slots=9),
        "point, page 1, lfu": make(parts(Point()), page=1, policy="lfu", slots=10, tokens=24),
        "path and point": make(parts(Path(), Point())),
        "path and point, grid": make(parts(Path(), Point(), b={"grid": 8}), slots=7),
        "window and point": make(parts(Window(7), Point()), slots=7, policy=MRU),
        "path, window and point": make(parts(Path(), Window(9), Point()), slots=9, policy="slru"),
        "path, window and two points": make(parts(Path(), Window(5), Point(), Point()), own={"d": 7}),
        "chunk": make(parts(Chunk(12))),
        "path and chunk": make(parts(Path(), Chunk(8)), page=1, tokens=40),
        "chunk, page 1": make(parts(Chunk(5)), page=1, tokens=20, policy=MRU),
        "chunk off the page": make(parts(Path(), Chunk(10)), max_rewind=4),
        "path and tail": make(parts(Path(), Tail(16, 6)), policy=FIFO),
        "sinks": make(parts(Sinks(6))),
        "path and sinks": make(parts(Path(), Sinks(5)), own={"b": 40}),
        "sinks and window in one": make(parts(Sinks(3) | Window(8))),
        "path, sinks and window in one": make(parts(Path(), Sinks(5) | Window(10)), page=1, tokens=44, policy="lfu"),
        "sinks and chunk in one": make(parts(Path(), Sinks(2) | Chunk(12)), max_rewind=3),
        "shifted window": make(parts(Path(), Window(9).shift(4))),
        "shifted window, page 1": make(parts(Window(5).shift(3)), page=1, tokens=36),
        "strided": make(parts(Strided(), Path())),
        "landmarks": make(parts(Path(), Landmarks()), page=1, tokens=44),
        "secret window": make(parts(Secret(), Path()), policy="lfu"),
        "secret window alone": make(parts(Secret())),
        "convex secret window": make(parts(ConvexSecret(), Path()), page=1, tokens=40),
        "convex window with a late until": make(parts(ConvexLate()), tokens=48, max_rewind=3),
        "bare path": make(parts(BarePath())),
        "path and optional": make(parts(Path(), Optional()), own={"b": 40}),
        "optional, window and point": make(parts(Optional(), Window(6), Point()), page=1, tokens=44, slots=9),
        "window or strided": make(parts(Path(), Window(3) | Strided()), page=1, tokens=44),
        "different pages": make(
            parts(Path(), Window(9), Point(), a={"page_size": 8}, b={"page_size": 2}), tokens=96, slots=8
        ),
        "pages of 1 and 4": make(parts(Path(), Path(), b={"page_size": 1}), policy="slru", own={"b": 56}),
        "states to rewind to": make(parts(Path(), Point(), b={"max_rewind": 3}), max_rewind=3, slots=20),
        "window and states to rewind to": make(
            parts(Window(6), Point(), b={"max_rewind": 2}), max_rewind=2, slots=18, page=1, tokens=44
        ),
        "checkpoints": make(parts(Path(), Point(), b={"checkpoint_every": 8}), slots=14),
        "checkpoints under a window": make(
            parts(Window(7), Point(), Point(), b={"checkpoint_every": 4}, c={"checkpoint_every": 12}), slots=15
        ),
        "close checkpoints": make(parts(Path(), Point(), b={"checkpoint_every": 4}), slots=16, policy="lfu"),
        "checkpoints and rewinds": make(
            parts(Path(), Window(9), Point(), c={"checkpoint_every": 4, "max_rewind": 3}),
            max_rewind=3, slots=24,
        ),
        "never needed": make(parts(Path(), NeverNeeded()), page=1, tokens=40),
        "lent": make(parts(Path(), Window(9), Point()), slots=9, policy="slru", lent=True),
        "lent, page 1, lookahead 1": make(
            parts(Path(), Window(6), Point(), a={"lookahead": 1}), page=1, tokens=44, lent=True
        ),
        "lent sinks and strides": make(
            parts(Sinks(3) | Window(8), Strided(), Path(), a={"page_size": 2}), tokens=72, lent=True, policy="lfu"
        ),
        "lent checkpoints": make(
            parts(Window(7), Point(), b={"checkpoint_every": 4}), slots=12, lent=True
        ),
        "windows that keep less": make(parts(Window(9), Window(14)), kind=Sparing, tokens=72),
        "convex secret window that keeps less": make(parts(Path(), ConvexSecret()), kind=Sparing, page=1, tokens=48),
        "path that keeps victims": make(parts(Path()), kind=Choosy),
        "path, window and point that keep victims": make(parts(Path(), Window(9), Point()), kind=Choosy, slots=9),
        "path, window and point of several owners": make(
            parts(Path(), Window(9), Point()), slots=9, policy="priority", shares={"a": 2}
        ),
        "sinks and checkpoints of several owners that keep victims": make(
            parts(Sinks(3) | Window(8), Point(), b={"checkpoint_every": 4}), kind=Choosy, slots=12, shares={}
        ),
        "everything": make(
            parts(Path(), Window(9), Point(), Chunk(8), Sinks(4) | Window(5), Strided(), d={"page_size": 2}),
            tokens=80, slots=9,
        ),
    }  # fmt: skip
