"""Random scripts for an adapted cache, and how one that fails is made shorter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ..kit.bench import text_of
from .player import ForeignOp, MakeForeign, failure_of

WEIGHTS = {
    "open": 9, "pass": 22, "device": 14, "result": 6, "turn": 6, "crowd": 2, "finish": 6, "abort": 2, "retract": 2,
    "evict": 3,
}  # fmt: skip


def random_script(seed: str, length: int, page: int) -> list[ForeignOp]:
    """Make a script of random operations. ``page``: prompts and chunks often end near its multiples."""
    chance = random.Random(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    ops: list[ForeignOp] = []
    while len(ops) < length:
        (kind,) = chance.choices(kinds, weights)
        ops += _some(kind, chance, page)
    return ops[:length]


def _prompt(chance: random.Random, page: int) -> tuple[int, ...]:
    near = chance.choice((-1, 0, 0, 1, 1, 2))
    length = max(1, chance.randrange(1, 8) * page + near)
    tokens = text_of(chance.randrange(3))[:length]
    if chance.randrange(3) == 0:  # the same prefix, and then another tail
        kept = chance.randrange(length + 1)
        tokens = tokens[:kept] + tuple(chance.randrange(3) for _ in range(length - kept))
    return tokens


def _some(kind: str, chance: random.Random, page: int) -> list[ForeignOp]:
    number = chance.randrange(4)
    if kind == "open":
        return [("open", _prompt(chance, page), chance.choice(("", "", "", "", "b")), chance.randrange(4))]
    if kind == "turn":  # a request alone, from its beginning to its end
        chunks = [("pass", ((-1, chance.choice((page, 2 * page, 8 * page))),)) for _ in range(3)]
        decode = [("pass", ((-1, 1),)) for _ in range(chance.randrange(2 * page))]
        return [*_some("open", chance, page), *chunks, *decode, ("finish", -1)]
    if kind == "crowd":  # several long prompts at once: more than a tight pool has room for
        prompts = [(*text_of(chance.randrange(2))[: chance.randrange(4, 7) * page], each) for each in range(3)]
        opened = [("open", prompt, "", chance.randrange(4)) for prompt in prompts]
        passes = [("pass", tuple((each, page) for each in chance.sample(range(4), 4))) for _ in range(6)]
        return [*opened, *passes, ("open", prompts[0], "", 0), ("pass", ((-1, 8 * page),))]
    if kind == "pass":
        counts = (1, 2, page, page, page + 1, 2 * page, 3 * page, 8 * page)
        numbers = chance.sample(range(4), chance.choice((1, 1, 2, 3, 4)))
        made = ("pass", tuple((each, chance.choice(counts)) for each in numbers))
        return [made] * chance.choice((1, 1, 1, 2, 4))
    if kind == "evict":
        return [("evict", chance.choice((1, page, 4 * page, 1000)))]
    return [(kind,)] if kind in ("device", "result") else [(kind, number)]


def shorter_script(make: MakeForeign, script: Sequence[ForeignOp], topic: str, tries: int = 1000) -> list[ForeignOp]:
    """Return a shorter script that fails with the same topic: parts are left out, then passes and prompts are cut."""
    best = list(script)

    def fails(ops: Sequence[ForeignOp]) -> bool:
        nonlocal tries
        tries -= 1
        found = failure_of(make, ops) if tries >= 0 else None
        return found is not None and found.topic == topic

    before = -1
    while before != len(best):
        before, size = len(best), len(best) // 2
        while size:
            at = 0
            while at < len(best):
                shorter = best[:at] + best[at + size :]
                if fails(shorter):
                    best = shorter
                else:
                    at += size
            size //= 2
    for at in range(len(best)):
        for smaller in _smaller(best[at]):
            if fails([*best[:at], smaller, *best[at + 1 :]]):
                best[at] = smaller
    return best


def _smaller(op: ForeignOp) -> list[Any]:
    """Simpler operations of the same kind, from the simplest to the one that is most like it."""
    if op[0] == "pass":
        return [("pass", (entry,)) for entry in op[1]] if len(op[1]) > 1 else []
    if op[0] == "open":
        plain = [("open", op[1], "", op[3])] if op[2] else []
        return [("open", op[1][:cut], op[2], op[3]) for cut in range(1, len(op[1]))] + plain
    return []
