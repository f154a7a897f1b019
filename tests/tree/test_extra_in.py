"""What a key says of extra keys: the spans that it was made with, as far as the key goes."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from prefixloom import encode
from prefixloom.tree.keys import TOKEN_BYTES, KeyMaker, Span, numbers_in

KEYS = ("cat", "dog", 1, True, 1.0, ("cat", 1))
LENGTH = 24


def by_position(spans: tuple[Span, ...]) -> list[Counter[str]]:
    """Which keys each position has, and whether a span begins there."""
    found: list[Counter[str]] = [Counter() for _ in range(LENGTH)]
    for start, end, key in spans:
        for at in range(start, end):
            found[at][f"{key!r} {at == start}"] += 1
    return found


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_every_part_of_a_key_says_what_its_positions_have(lookahead: int) -> None:
    chance = random.Random(f"spans {lookahead}")
    for _ in range(300):
        maker = KeyMaker(lookahead)
        tokens = encode([chance.randrange(3) for _ in range(LENGTH)])
        spans = []
        for _ in range(chance.randrange(5)):
            start = chance.randrange(LENGTH)
            spans.append((start, chance.randrange(start, LENGTH) + 1, chance.choice(KEYS)))
        key = maker.widen(maker.name_extra(tokens, spans))
        low = chance.randrange(LENGTH - lookahead)
        high = chance.randrange(low, LENGTH - lookahead) + 1
        width = TOKEN_BYTES * (lookahead + 1)
        shown = maker.extra_in(key[low * width : high * width], low)
        assert all(low <= start < end <= high for start, end, _ in shown)
        wanted = by_position(tuple((max(low, a), min(high, b), k) for a, b, k in spans if a < high and b > low))
        assert by_position(shown) == wanted, (spans, low, high, shown)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_what_a_key_says_makes_the_same_key_again(lookahead: int) -> None:
    """Also where one position has several keys: which of them lies over which is a part of what they mean."""
    chance = random.Random(f"again {lookahead}")
    for _ in range(300):
        maker = KeyMaker(lookahead)
        tokens = encode([chance.randrange(3) for _ in range(LENGTH)])
        starts = [chance.randrange(LENGTH) for _ in range(1 + chance.randrange(5))]
        spans = [(start, chance.randrange(start, LENGTH) + 1, chance.choice(KEYS[:3])) for start in starts]
        single = maker.name_extra(tokens, spans)
        key = maker.widen(single)
        assert set(numbers_in(single)) == {number for number in array("i", single) if number < 0}
        told = maker.tokens_in(key)
        assert told == tokens
        assert maker.name_extra(told, told.extra) == single, (spans, told.extra)
        if not lookahead:
            assert maker.with_extra(tokens, maker.extra_in(key, 0)) == key, spans
