"""Scripts: programs of operations as plain data, one player that performs them, and one shrinker.

An operation is a tuple of a verb and its arguments. A script is played on a ``World``, which has a method ``do_VERB``
for each verb and checks itself after each operation. A number selects a sequence, lease or request modulo how many
there are, so that every part of a script is itself a script. Among tokens there may be ranges of them.

Read ``World`` and ``play`` first. This module must not know what a world is made of.
"""

from __future__ import annotations

import inspect
import logging
import pprint
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache as memoised
from typing import Any, ClassVar, TypeVar

from .errors import CompositionError, InvariantError, PluginError, PrefixloomError, RaceError

Op = tuple[Any, ...]
T = TypeVar("T")
WORK = 20_000
"""The most work that is played to shrink a script (``work_of``)."""
FEW = 8
"""A number up to this one is not made smaller: that would make no script easier to read."""
TEXT = 10 * 4096
"""How many tokens a text has: several of the largest pages."""


class Failure(AssertionError):
    """Something that must hold of a world does not. ``topic``: one word for what it is about."""

    def __init__(self, topic: str, sentence: str) -> None:
        self.topic, self.sentence = topic, sentence
        super().__init__(f"{topic}: {sentence}")

    @property
    def kind(self) -> str:
        """The topic; of the sets, which check everything, the words of the sentence as well."""
        return re.sub(r"[^a-z ]+", "", self.sentence) if self.topic == "sets" else self.topic


class ScriptError(PrefixloomError):
    """A world cannot be made so, or has no such operation with these arguments. Of the cache this says nothing."""


class PlannedStepError(Exception):
    """A world raises this inside a step on purpose."""


def require(condition: object, topic: str, message: str, *args: object) -> None:
    """Raise a Failure of this topic unless the condition is true."""
    if not condition:
        raise Failure(topic, message % args)


# ---------------------------------------------------------------- playing


class World:
    """What a script is played on.

    ``counts``: how often each thing happened. ``said``: what the library has warned of since the world was made.
    """

    said: Sequence[str] = ()

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    def apply(self, op: Op) -> None:
        """Perform an operation, and check everything."""
        self.perform(op)
        self.check()

    def perform(self, op: Op) -> None:
        verb = getattr(self, f"do_{op[0]}", None)
        if verb is None:
            known = ", ".join(sorted(name[3:] for name in dir(self) if name.startswith("do_")))
            raise ScriptError(f"no operation {op[0]!r} in {op!r}; there are {known}")
        try:
            verb(*op[1:])
        except TypeError:
            try:
                inspect.signature(verb).bind(*op[1:])
            except TypeError as error:
                raise ScriptError(f"{op!r}: {error}; it is {op[0]}{inspect.signature(verb)}") from None
            raise

    def do_repeat(self, count: int, ops: Sequence[Op]) -> None:
        """Do these operations so many times."""
        for _ in range(count):
            for op in ops:
                self.apply(op)

    def check(self) -> None:
        """Check what must hold after each operation."""

    def finish(self) -> None:
        """End everything that is open, and check that nothing is left."""

    def blame(self) -> None:
        """Raise what explains a failure better than its error. It is called at the end of every script."""


W = TypeVar("W", bound=World)


def picked(those: Sequence[T], number: int) -> T | None:
    """Return the one that a number selects; None if there is none."""
    return those[number % len(those)] if those else None


def play(make: Callable[[], W], script: Iterable[Op]) -> W:
    """Play a script on a new world. Failure: something that must hold does not, or anything raised.

    ScriptError: the world has no such operation.
    """
    try:
        with heard() as said:
            world = make()
            world.said = said
            try:
                for op in script:
                    world.apply(op)
                world.finish()
            finally:
                world.blame()
            return world
    except (Failure, CompositionError, ScriptError):
        raise
    except Exception as error:
        topics = {RaceError: "race", InvariantError: "books", PluginError: "raise"}
        topic = next((topic for kind, topic in topics.items() if isinstance(error, kind)), None)
        raise Failure(topic or "books", str(error) if topic else f"{type(error).__name__}: {error}") from error


def failure(make: Callable[[], World], script: Iterable[Op]) -> Failure | None:
    """Play a script; return its failure, or None if all went well."""
    try:
        play(make, script)
    except Failure as error:
        return error.with_traceback(None)
    return None


class _Heard(logging.Handler):
    """Keeps what the library says, in place of a log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings of the library in this context, and write them to no log."""
    log, handler = logging.getLogger("prefixloom"), _Heard()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield handler.said
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


# ---------------------------------------------------------------- writing


class Writer:
    """Writes a script from a seed, without looking at any world.

    A method ``write_KIND`` writes a part of this kind. A kind without one is a verb, and one operation. ``unit``: the
    tokens of a page of the tree, near whose multiples prompts and steps often end.
    """

    weights: ClassVar[Mapping[str, float]] = {}
    """How often each kind of part is written."""
    arguments: ClassVar[Mapping[str, Callable[[Any], tuple[object, ...]]]] = {}
    """By verb: the arguments of one operation, drawn by the writer that is given."""

    def __init__(self, seed: str, unit: int) -> None:
        self.chance = random.Random(seed)
        self.unit = unit
        self.ops: list[Op] = []

    def script(self, length: int, weights: Mapping[str, float] | None = None) -> list[Op]:
        """Return so many operations. ``weights`` stand in place of the writer's own."""
        weights = weights or self.weights
        kinds, often = list(weights), list(weights.values())
        while len(self.ops) < length:
            (kind,) = self.chance.choices(kinds, often)
            write = getattr(self, f"write_{kind}", None)
            write() if write else self.write(kind)
        return self.ops[:length]

    def write(self, verb: str) -> None:
        """Write one operation."""
        self.say(verb, *(self.arguments[verb](self) if verb in self.arguments else ()))

    def say(self, *op: object) -> None:
        self.ops.append(op)

    def below(self, n: int) -> int:
        return self.chance.randrange(n)

    def varied(self, tokens: tuple[int, ...], one_in: int, letters: int = 2) -> tuple[int, ...]:
        """Return a prompt, of which one in so many ends with other tokens."""
        if self.below(one_in):
            return tokens
        kept = self.below(len(tokens) + 1)
        return tokens[:kept] + tuple(self.below(letters) for _ in range(len(tokens) - kept))


@memoised
def text_of(number: int, book: str = "text {}") -> tuple[int, ...]:
    """Return a text that prompts begin with. Text 2k + 1 begins like text 2k and differs from it later.

    ``book``: the seed of its texts. The kill table counts operations of scripts with these texts.
    """
    chance = random.Random(book.format(number))
    text = (*(chance.randrange(2) for _ in range(4000)), *chance.choices((0, 1), k=TEXT - 4000))
    if number % 2:
        shared = 5 + 7 * number
        text = text_of(number - 1, book)[:shared] + text[shared:]
    return text


def flat(tokens: Iterable[Any]) -> tuple[int, ...]:
    """Return tokens in which ranges are written out."""
    out: list[int] = []
    for token in tokens:
        if isinstance(token, range):
            out += token
        else:
            out.append(token)
    return tuple(out)


# ---------------------------------------------------------------- shrinking


def fewest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return few of ``items`` with which ``fails`` is still true: without any one of them it is not.

    Smaller and smaller parts are left out (the complements of Zeller's delta debugging).
    """
    best, size = list(items), (len(items) + 1) // 2
    while size:
        at, before = 0, len(best)
        while at < len(best):
            shorter = best[:at] + best[at + size :]
            if fails(shorter):
                best = shorter
            else:
                at += size
        if size > 1 or len(best) == before:
            size //= 2
    return best


def shrink(make: Callable[[], World], script: Sequence[Op], work: int = WORK) -> list[Op]:
    """Return a short script that fails in the same way, and no more without any one of its operations.

    ``work``: how much is played at most. No clock is read, so a slow machine returns the same.
    """
    found, left = failure(make, script), work
    if found is None:
        return list(script)
    kind = found.kind

    def fails(ops: list[Op]) -> bool:
        nonlocal left
        left -= work_of(ops)
        again = failure(make, ops) if left > 0 else None
        return again is not None and again.kind == kind

    best = fewest(script, fails)
    for at in range(len(best)):
        while less := next((each for each in smaller(best[at]) if fails([*best[:at], each, *best[at + 1 :]])), None):
            best[at] = less
    return best


def work_of(script: Iterable[Op]) -> int:
    """Return about how much work a script is: each operation, and every eighth token of a prompt, counts as one."""
    total = 0
    for op in script:
        total += 1
        for given in op[1:]:
            if isinstance(given, list):  # operations
                total += work_of(given) * (op[1] if op[0] == "repeat" else 1)
            elif isinstance(given, tuple):
                total += sum(len(token) if isinstance(token, range) else 1 for token in given) // 8
    return total


def smaller(op: Op) -> Iterator[Op]:
    """Yield the operation with one smaller argument: shorter prompts, fewer entries, smaller counts."""
    for at, given in enumerate(op[1:], 1):
        for less in _less(given):
            yield (*op[:at], less, *op[at + 1 :])


def _less(given: Any) -> Iterator[Any]:
    if isinstance(given, tuple) and given and isinstance(given[-1], range) and len(given[-1]) > 1:
        for less in _less(given[-1]):
            yield (*given[:-1], less)
    elif isinstance(given, tuple | list | range) and len(given) > 1:
        yield given[: len(given) // 2]
        yield given[: len(given) * 3 // 4]
        yield given[:-1]
        if isinstance(given[-1], tuple):  # entries: any of them may be the one
            yield given[1:]
    elif isinstance(given, int) and given > FEW:
        yield given // 2
        yield given * 3 // 4


def as_code(world: object, script: Sequence[Op]) -> str:
    """Return the line of Python that plays a script again."""
    return f"play({world}, {pprint.pformat(list(script), width=110, compact=True)})"
