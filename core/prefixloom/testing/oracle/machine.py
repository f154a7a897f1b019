"""The state machine: it replays scripts on a cache beside the model, shrinks those that fail, and prints them as code.

A script is played in an *arena*, which composes a new cache each time and says how long prompts are.
"""

from __future__ import annotations

import logging
import pprint
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from ...errors import InvariantError, PluginError, PrefixloomError
from ..kit.bench import Bench, Failure
from ..kit.case import ComponentCase
from .operations import Op, Operations
from .writer import WEIGHTS, Writer

SCRIPT = 250
"""How many operations a script has. After it everything is closed, and the next script gets a new cache."""
FAILURES = (
    AssertionError, PrefixloomError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError,
)  # fmt: skip


class Arena(Protocol):
    """What scripts are played in."""

    @property
    def unit(self) -> int:
        """How many tokens a page of the tree has."""

    @property
    def longest(self) -> int:
        """The most tokens of a prompt."""

    @property
    def lookahead(self) -> int:
        """How many tokens content looks ahead at."""

    @property
    def lent(self) -> bool:
        """Whether an engine lends the slots."""

    def compose(self) -> Any:
        """Compose a new cache."""


@attrs.frozen
class Pit:
    """An arena with a case's component, and others ``beside`` it, in pools that are too small.

    States are stored without a codec, because sets say nothing about the error of a codec, and large pages are small.
    """

    case: ComponentCase = attrs.field(repr=False)
    beside: tuple[str, ...] = ()
    units: int = 14
    page: int | None = None
    lent: bool = False

    def bench(self) -> Bench:
        return Bench(self.case, self.beside, units=self.units, page=self.page, lent=self.lent, exact=False)

    @property
    def unit(self) -> int:
        """How many tokens a page of the tree has."""
        return self.bench().unit

    @property
    def longest(self) -> int:
        return self.unit * self.units * 5 // 8

    @property
    def lookahead(self) -> int:
        return self.case.manifest.lookahead

    def compose(self) -> Any:
        return self.bench().cache

    def __str__(self) -> str:
        return f"Pit(case, {self.beside!r}, units={self.units}, page={self.page}, lent={self.lent})"


def written(seed: str, arena: Arena, length: int = SCRIPT, of: Mapping[str, float] = WEIGHTS) -> list[Op]:
    """Return a random script for this arena. ``of``: how often each kind of operation is written."""
    return Writer(seed, arena.longest, arena.unit, arena.lookahead, arena.lent).script(length, of)


def replay(arena: Arena, ops: Sequence[Op]) -> Operations:
    """Run a script to its end. Every mistake of the cache raises."""
    log = logging.getLogger("prefixloom")
    before = log.level
    log.setLevel(logging.ERROR)  # scripts drop sequences on purpose, which the cache logs
    try:
        world = Operations(arena.compose())
        for op in ops:
            world.apply(op)
        world.finish()
    finally:
        log.setLevel(before)
    return world


def fails(arena: Arena, ops: Sequence[Op]) -> BaseException | None:
    """Run a script; return its error, or None if all went well."""
    try:
        replay(arena, ops)
    except FAILURES as error:
        return error.with_traceback(None)
    return None


def shrink(arena: Arena, ops: Sequence[Op], tries: int = 600) -> list[Op]:
    """Return a shorter script that fails in the same way, found with at most so many tries."""
    best = list(ops)
    kind = failure_kind(fails(arena, best))
    size = len(best) // 2
    while size and tries > 0:
        at, before = 0, len(best)
        while at < len(best) and tries > 0:
            shorter = best[:at] + best[at + size :]
            tries -= 1
            if failure_kind(fails(arena, shorter)) == kind:
                best = shorter
            else:
                at += size
        if size > 1 or len(best) == before:
            size //= 2
    return best


def failure_kind(error: BaseException | None) -> str:
    """Return the kind of an error: its type and its text without numbers."""
    return "" if error is None else f"{type(error).__name__} {re.sub(r'[^a-z ]+', '', str(error))}"


def as_failure(error: BaseException) -> Failure:
    """Return an error as a Failure with a topic."""
    if isinstance(error, Failure):
        return error
    topics = {InvariantError: "books", PluginError: "raise"}
    topic = next((topic for kind, topic in topics.items() if isinstance(error, kind)), "sets")
    return Failure(topic, f"{type(error).__name__}: {error}")


def as_code(case: ComponentCase, arena: Arena, ops: Sequence[Op]) -> str:
    """Return a script as code that can be pasted into a test."""
    body = pprint.pformat(list(ops), width=110, compact=True)
    return (
        f"from prefixloom.testing import Pit, replay\n\n"
        f"# case: the ComponentCase of your test ({case.label})\nreplay({arena}, {body})"
    )
