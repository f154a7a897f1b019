"""The state machine: scripts replayed on a cache beside the sets, shrunk where they fail, and told as code.

What a script is played in is an *arena*: something that composes a new cache each time and says how long prompts are.
"""

from __future__ import annotations

import logging
import pprint
import re
import time
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from ...errors import InvariantError, PluginError, PrefixloomError
from ..bench import Bench, Failure
from ..case import ComponentCase
from .operations import Op, Operations
from .writer import Writer

SCRIPT = 250
"""Operations of one script: then everything is closed, and a new cache begins."""
FAILURES = (
    AssertionError, PrefixloomError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError,
)  # fmt: skip


class Arena(Protocol):
    """Where scripts are played."""

    @property
    def unit(self) -> int:
        """Tokens of a page of the tree."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt, at most."""

    def compose(self) -> Any:
        """A new cache."""


@attrs.frozen
class Pit:
    """An arena of a case's component, and others ``beside`` it, in pools that are too small.

    States rest as they run: what a codec does to them is no matter of sets.
    """

    case: ComponentCase = attrs.field(repr=False)
    beside: tuple[str, ...] = ()
    units: int = 14
    page: int | None = None

    def bench(self) -> Bench:
        return Bench(self.case, self.beside, units=self.units, page=self.page, coded=False)

    @property
    def unit(self) -> int:
        """Tokens of a page of the tree."""
        return self.bench().unit

    @property
    def longest(self) -> int:
        return self.unit * self.units * 5 // 8

    def compose(self) -> Any:
        return self.bench().cache

    def __str__(self) -> str:
        return f"Pit(case, {self.beside!r}, units={self.units}, page={self.page})"


def written(seed: str, arena: Arena, length: int = SCRIPT) -> list[Op]:
    """A random script for this arena."""
    return Writer(seed, arena.longest, arena.unit).script(length)


def replay(arena: Arena, ops: Sequence[Op]) -> Operations:
    """Run a script to its end; whatever the cache gets wrong is raised."""
    log = logging.getLogger("prefixloom")
    before = log.level
    log.setLevel(logging.ERROR)  # dropped sequences are reported, and meant here
    try:
        world = Operations(arena.compose())
        for op in ops:
            world.apply(op)
        world.finish()
    finally:
        log.setLevel(before)
    return world


def fails(arena: Arena, ops: Sequence[Op]) -> BaseException | None:
    try:
        replay(arena, ops)
    except FAILURES as error:
        return error.with_traceback(None)
    return None


def shrink(arena: Arena, ops: Sequence[Op], limit: float = 60.0) -> list[Op]:
    """A shorter script that fails in the same way, by leaving out ever smaller parts, for at most ``limit`` seconds."""
    best = list(ops)
    kind = failure(fails(arena, best))
    end = time.monotonic() + limit
    size = len(best) // 2
    while size and time.monotonic() < end:
        at, before = 0, len(best)
        while at < len(best) and time.monotonic() < end:
            shorter = best[:at] + best[at + size :]
            if failure(fails(arena, shorter)) == kind:
                best = shorter
            else:
                at += size
        if size > 1 or len(best) == before:
            size //= 2
    return best


def failure(error: BaseException | None) -> str:
    """What kind of failure it is: its text without the numbers."""
    return "" if error is None else f"{type(error).__name__} {re.sub(r'[^a-z ]+', '', str(error))}"


def told(error: BaseException) -> Failure:
    """What went wrong, with a topic by which a law knows that it is meant."""
    if isinstance(error, Failure):
        return error
    topics = {InvariantError: "books", PluginError: "raise"}
    topic = next((topic for kind, topic in topics.items() if isinstance(error, kind)), "sets")
    return Failure(topic, f"{type(error).__name__}: {error}")


def pasted(case: ComponentCase, arena: Arena, ops: Sequence[Op]) -> str:
    """A script as code that can be pasted into a test."""
    body = pprint.pformat(list(ops), width=110, compact=True)
    return (
        f"from prefixloom.testing import Pit, replay\n\n"
        f"# case: the ComponentCase of your test ({case.label})\nreplay({arena}, {body})"
    )
