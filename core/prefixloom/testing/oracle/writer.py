"""Random scripts for the world of sets, and where they are played: a case's component in small pools."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import attrs

from ...script import Op, Writer, text_of
from ..kit.bench import Bench
from ..kit.case import ComponentCase
from .operations import Operations
from .sequence_operations import BOOK, TEXTS

NAMESPACES = ("", "b")
EXTRA_KEYS: tuple[Hashable, ...] = ("an image", 1, True, 1.0)
"""The last three are equal to Python, and three keys to a cache."""
WEIGHTS = {
    "turn": 24, "open": 9, "grow": 12, "append": 7, "step": 14, "commit": 6, "publish": 12, "rewind": 6, "close": 10,
    "evict": 3, "match": 8, "plan": 4, "open_plan": 4, "lease": 4, "release": 5, "drop_namespace": 1, "flush": 0.6,
    "poll": 1, "arrive": 2, "decode": 6, "illegal": 2, "advance": 6,
}  # fmt: skip
ARRIVALS = {"beside": 10, "turn": 4, "decode": 3, "evict": 2, "close": 3, "rewind": 2, "match": 1}
"""The weights of scripts in which much of what is computed elsewhere arrives."""
CHECKPOINTS = {"tracked": 10, "turn": 3, "decode": 2, "evict": 2, "close": 3, "rewind": 2, "step": 2, "match": 1}
"""The weights of scripts in which requests keep several checkpoints before they publish."""

TIMES = {
    "turn": 12, "want": 4, "expire": 6, "evict": 6, "close": 6, "decode": 2, "lease": 2, "release": 3, "plan": 1,
    "open_plan": 2, "rewind": 1, "flush": 0.3, "drop_namespace": 0.5,
}  # fmt: skip
"""The weights of scripts in which what is cached is wanted for some time only."""


ARGUMENTS: dict[str, Callable[[Any], tuple[object, ...]]] = {
    "open": lambda w: (*w.request(), w.below(3), w.below(16)),
    "match": lambda w: w.request(),
    "plan": lambda w: w.request(),
    "open_plan": lambda w: (w.below(4), w.below(16)),
    "lease": lambda w: (w.below(4),),
    "release": lambda w: (w.below(4), w.below(3)),
    "grow": lambda w: (w.below(5), w.chance.choice((-1, -1, -2, 1, 2, 5, 1 + w.below(w.longest)))),
    "arrive": lambda w: (w.below(5), 1 + w.below(w.longest)),
    "append": lambda w: w.appended(w.below(5), w.chance.choice((1, 1, 2, 4, 9))),
    "step": lambda w: (w.chance.choice((31, 31, 1, 2, 3, 5)), w.below(9)),
    "commit": lambda w: (w.below(5), w.chance.choice((0, 0, 1, 2, 5))),
    "publish": lambda w: (w.below(5), w.chance.choice((-1, 1, 2, w.below(8)))),
    "close": lambda w: (w.below(5), w.below(5)),
    "insert": lambda w: w.inserted(*w.request()),
    "evict": lambda w: (w.below(7), w.chance.choice((0, 1, 2, 5, 30))),
    "want": lambda w: (w.below(5), w.below(16)),
    "expire": lambda w: (w.below(16),),
    "drop_namespace": lambda w: (NAMESPACES[w.below(2)],),
    "illegal": lambda w: (w.below(5), w.below(5)),
}
"""By verb: what its arguments are drawn from."""


class Arena(Protocol):
    """What a writer knows of the cache that its script will be played on.

    ``unit``: how many tokens a page of the tree has. ``longest``: the most tokens of a prompt. ``lookahead``: how many
    tokens content looks ahead at. ``lent``: an engine lends the slots.
    """

    @property
    def unit(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def lent(self) -> bool: ...


class SetsWriter(Writer):
    """Writes scripts for the world of sets, to be played in an arena."""

    weights, arguments = WEIGHTS, ARGUMENTS

    def __init__(self, seed: str, arena: Arena) -> None:
        super().__init__(seed, arena.unit)
        self.longest, self.lookahead, self.lent = arena.longest, arena.lookahead, arena.lent

    def script(self, length: int, weights: Mapping[str, float] | None = None) -> list[Op]:
        return super().script(length, {**(weights or self.weights), **({"insert": 12.0} if self.lent else {})})

    def prompt(self) -> tuple[int, ...]:
        """Return the beginning of a document, sometimes with a changed end, sometimes empty or a single token."""
        length = self.below(3) if self.below(20) == 0 else self.below(self.longest + 1)
        if self.below(2):
            length = min(self.longest, length // self.unit * self.unit + self.below(2))
        tokens = text_of(self.chance.choice((0, 0, 0, 1, 1, *range(2, TEXTS))), BOOK)[:length]
        return self.varied(tokens, 4) if tokens else tokens

    def extra(self, tokens: tuple[int, ...]) -> tuple[tuple[int, int, Hashable], ...]:
        """Return up to three spans, each as long as it happens to be."""
        if len(tokens) < 2 or self.below(5):
            return ()
        cuts = iter(sorted({self.below(len(tokens) + 1) for _ in range(2 + 2 * self.below(3))}))
        return tuple((start, end, self.chance.choice(EXTRA_KEYS)) for start, end in zip(cuts, cuts, strict=False))

    def request(self) -> tuple[object, ...]:
        tokens = self.prompt()
        namespace = NAMESPACES[self.below(8) == 0]
        return namespace, tokens, self.chance.choice((0, 0, 1, 1, 3)), self.extra(tokens)

    def appended(self, number: int, count: int) -> tuple[object, ...]:
        return number, count, *(EXTRA_KEYS[number % 4 : number % 4 + 1] if count > 2 else ())

    def inserted(self, namespace: str, tokens: object, _: int, extra: object) -> tuple[object, ...]:
        lacking = self.chance.choice((1, 3, self.below(256), self.below(256)))
        return namespace, tokens, extra, self.below(3), lacking

    def write_turn(self) -> None:
        """Write one whole request, from start to end."""
        self.write("open")
        chunks = 1 + self.below(3)
        for chunk in range(chunks):
            if self.below(3) == 0:
                self.say("grow", -1, (1 + self.below(4)) * self.unit)
            elif chunk < chunks - 1:
                self.say("grow", -1, 1 + self.below(self.longest // 2))
            else:
                self.say("grow", -1, -1 - self.below(2) * self.below(3))
            self.say("step", 31, 0)
            if self.below(3) == 0:
                self.say("publish", -1, -1)
        if self.lookahead:
            self.name_behind(-1)
        if self.below(2):
            self.say("append", -1, 1 + self.below(6))
            self.say("grow", -1, -1)
            self.say("step", 31, 0)
        if self.below(3):
            self.say("close", -1, 0)

    def write_beside(self) -> None:
        """Write two requests of one prompt at once: one is computed, and of the other the tokens arrive."""
        request, salt = self.request(), self.below(16)
        for _ in range(2):
            self.say("open", *request, 0, salt)
        self.say("grow", -2, self.chance.choice((-1, -1, 1 + self.below(self.longest))))
        self.say("step", 31, 0)
        if self.below(2):
            self.say("publish", -2, -1)
        for _ in range(1 + self.below(2)):
            self.say("arrive", -1, 1 + self.below(self.longest))
            if self.below(2):
                self.say("rewind", -1, 1 + self.below(9), salt)
            self.say("append", -1, 1 + self.below(4))
            self.say("step", 31, self.below(9))
        if self.below(2):
            self.say("close", -2, 0)
        self.say("publish", -1, -1)
        self.say("close", -1, self.below(3))

    def write_advance(self) -> None:
        """Compute a part of a request, each step of which ends where a state can be kept."""
        number, budget = self.below(5), self.chance.choice((1, self.unit, self.unit + 1, 1 + self.below(self.longest)))
        for _ in range(1 + self.below(3)):
            self.say("advance", number, budget)

    def write_tracked(self) -> None:
        """Write one request that is computed in whole pages, some steps of which fail, and published late."""
        self.write("open")
        for _ in range(2 + self.below(4)):
            self.say("append", -1, self.below(2 * self.unit + 1))
            self.say("grow", -1, (1 + self.below(3)) * self.unit)
            self.say("step", self.chance.choice((31, 31, 1)), self.chance.choice((0, 0, 0, 0, 6, 7)))
            if self.below(5) == 0:
                self.say("rewind", -1, 1 + self.below(2 * self.unit), self.below(16))
        self.say("publish", -1, self.chance.choice((-1, self.below(8))))
        self.say("close", -1, self.below(3))

    def write_decode(self) -> None:
        """Write several small steps of one request, part of which is rewound."""
        number = self.below(5)
        for _ in range(1 + self.below(4)):
            tokens = 1 + self.below(4)
            self.say("append", number, tokens)
            self.say("grow", number, tokens)
            self.say("step", 31, 1 + tokens)
            if self.below(12) == 0:
                self.say("grow", number, 1)
                self.say("step", 31, 8)
            if self.below(2):
                self.say("rewind", number, 1 + self.below(tokens), self.below(16))
            if self.lookahead:
                self.name_behind(number)
            if self.below(4) == 0:
                self.say("publish", number, -1)

    def name_behind(self, number: int) -> None:
        """Name tokens that follow what was computed, some of which has waited for them, and publish."""
        for _ in range(self.below(3)):
            kind = self.below(5)
            if kind == 0:
                self.say("rewind", number, 1 + self.below(3), self.below(16))
            self.say("append", number, 1 + self.below(self.lookahead + 1))
            if kind == 1:
                self.say("step", 31, 6)
            if kind == 2:
                self.say("commit", number, 0)
            self.say("publish", number, -1)

    def write_rewind(self) -> None:
        number = self.below(5)
        for _ in range(1 + self.below(2)):
            self.say("rewind", number, self.chance.choice((0, 1, 2, 3, 8, 40)), self.below(16))


@attrs.frozen
class Pit:
    """Where a case's component is compared with the sets, with others ``beside`` it, in pools that are too small.

    A call returns a new world. States are stored without a codec, because sets say nothing about the error of a codec,
    and large pages are small.
    """

    case: ComponentCase = attrs.field(repr=False)
    beside: tuple[str, ...] = ()
    units: int = 14
    page: int | None = None
    lent: bool = False

    def bench(self, raising: str = "") -> Bench:
        """Return a new bench. ``raising``: a hook in which the component's spy can raise."""
        return Bench(
            self.case, self.beside, units=self.units, page=self.page, lent=self.lent, raising=raising, exact=False
        )

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

    def __call__(self) -> Operations:
        return Operations(self.bench().cache)

    def __str__(self) -> str:
        return f"Pit(case, {self.beside!r}, units={self.units}, page={self.page}, lent={self.lent})"
