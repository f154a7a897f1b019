"""What hits where nothing was evicted: a cache that silently never hits is told so.

How many tokens could hit is a matter of the tokens alone: the common prefix of what was computed and of the prompt, in
whole pages, with one token left to compute. A cache may have its reasons to hit less, for example because it keeps
states at few boundaries. So less is told as a figure; none at all is told as a warning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from .player import ForeignPlayer, MakeForeign


@attrs.frozen
class HitRow:
    """How many tokens of one prompt hit, and how many could."""

    what: str
    hit: int
    could: int


def _text(seed: str, count: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(10, 1000) for _ in range(count))


def _common(first: Sequence[int], second: Sequence[int], page: int) -> int:
    same = 0
    while same < min(len(first), len(second) - 1) and first[same] == second[same]:
        same += 1
    return same // page * page


def hit_rows(make: MakeForeign, boundary: int) -> list[HitRow]:
    """Serve a few requests on an empty cache each time, and see what the next one hits.

    ``boundary``: a hit can end at its multiples. Prompts are as long as for pages of at least four tokens.
    """
    page = max(boundary, 4)
    shared, tails = _text("shared", 4 * page), [_text(f"tail {n}", 2 * page + 1) for n in range(3)]
    first = (*shared, *tails[0])
    whole = 100 * page
    return [
        _row("the same prompt again", make, boundary, [(first, whole)], first),
        _row("the same prompt again, after chunks of two pages", make, boundary, [(first, 2 * page)], first),
        _row("the next turn of a conversation", make, boundary, [(first, whole)], None),
        _row("another prompt with the same beginning", make, boundary, [(first, whole)], (*shared, *tails[1])),
        _row("the same, after chunks of two pages", make, boundary, [(first, 2 * page)], (*shared, *tails[1])),
        _row(
            "a third prompt with the same beginning",
            make,
            boundary,
            [(first, whole), ((*shared, *tails[1]), whole)],
            (*shared, *tails[2]),
        ),
    ]


def _row(
    what: str,
    make: MakeForeign,
    boundary: int,
    served: Sequence[tuple[tuple[int, ...], int]],
    asked: tuple[int, ...] | None,
) -> HitRow:
    player, page = ForeignPlayer(make), max(boundary, 4)
    computed: tuple[int, ...] = ()
    for prompt, chunk in served:
        player.apply(("open", prompt, "", 1))
        request = player.requests[-1]
        while request.in_prompt:
            player.apply(("pass", ((-1, chunk),)))
        for _ in range(page + 1):
            player.apply(("pass", ((-1, 1),)))
        player.apply(("finish", -1))
        computed = request.text[: request.scheduled]
    prompt = (*computed, *_text("turn", page)) if asked is None else asked
    hit = player.ask(prompt, "")
    could = max(_common(each, prompt, boundary) for each in (computed, *(each for each, _ in served)))
    player.finish()
    return HitRow(what, hit, could)
