"""The identity of pages: what a tree shares, every name of pages takes for the same, and nothing else."""

from __future__ import annotations

import random

import pytest

from prefixloom import PageChain, Tokens, encode
from prefixloom.keys.elements import KeyMaker, NamedTokens, extra_numbers, numbers_of
from prefixloom.keys.tokens import Span, exact_key

KEYS = ("cat", "dog", 1, True, 1.0, ("cat", 1), b"cat", None)
LENGTH = 24


def prompt(chance: random.Random, longest: int = LENGTH, keys: tuple[object, ...] = KEYS) -> Tokens:
    """Tokens with some extra keys: of few kinds, so that two prompts often agree far."""
    cuts = iter(sorted(chance.choices(range(longest + 1), k=2 * chance.randrange(4))))
    spans = [(start, end, chance.choice(keys)) for start, end in zip(cuts, cuts, strict=True) if start < end]
    chance.shuffle(spans)
    return encode([chance.randrange(2) for _ in range(longest)]).keyed(spans)  # type: ignore[arg-type]


def by_position(tokens: Tokens) -> list[tuple[object, ...]]:
    """What each position is: its token, its extra key, and whether a span begins there."""
    found: list[tuple[object, ...]] = [(token,) for token in tokens.tolist()]
    for start, end, key in tokens.extra:
        for at in range(max(start, 0), end):
            found[at] += (exact_key(key), at == start)
    return found


def agree(one: Tokens, other: Tokens) -> int:
    """How many of the first positions of two prompts are the same."""
    pairs = zip(by_position(one), by_position(other), strict=False)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(one.count, other.count))


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_page_has_the_same_identity_exactly_where_the_keys_of_the_tree_agree(lookahead: int) -> None:
    chance, chain, shared = random.Random(lookahead), PageChain(4, lookahead), 0
    for _ in range(500):
        maker = KeyMaker(lookahead)
        one, other = prompt(chance), prompt(chance)
        if chance.random() < 0.7:
            at = chance.randrange(LENGTH)
            other = one.part(0, at).extended(prompt(chance, LENGTH - at))
        agreed = agree(one, other)
        assert one.common(other) == agreed
        assert one.begins_with(other.part(0, agreed)) and other.begins_with(one.part(0, agreed))
        assert agreed == LENGTH or not one.begins_with(other.part(0, agreed + 1))
        mine, theirs = (chain.pages(each, chain.root("")) for each in (one, other))
        same = [a == b for a, b in zip(mine, theirs, strict=True)]
        assert same == [4 * at + 4 + lookahead <= agreed for at in range(len(same))]
        keys = [maker.name(each) for each in (one, other)]
        width = 4 * maker.element_bytes
        assert same == [keys[0][: at + width] == keys[1][: at + width] for at in range(0, width * len(same), width)]
        shared += sum(same)
    assert shared > 300


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_key_says_the_prompt_that_it_was_made_of_and_any_edge_of_it_a_piece(lookahead: int) -> None:
    chance, chain = random.Random(f"pieces {lookahead}"), PageChain(4, lookahead)
    for _ in range(300):
        maker = KeyMaker(lookahead)
        tokens = prompt(chance)
        key = maker.name(tokens)
        told = maker.tokens_in(key)
        assert (told, told.extra) == (tokens, tokens.extra)
        assert extra_numbers(key) == {number for number in numbers_of(key) if number < 0}
        first = chance.randrange(chain.whole(LENGTH))
        last = chance.randrange(first, chain.whole(LENGTH)) + 1
        width = 4 * maker.element_bytes
        edge = key[first * width : last * width]
        piece = tokens.piece(4 * first, 4 * last + lookahead)
        pages = chain.pages(tokens, b"", 0, last)
        assert chain.pages(maker.tokens_in(edge), pages[first - 1] if first else b"", 0, last - first) == pages[first:]
        assert chain.pages(piece, pages[first - 1] if first else b"") == pages[first:]
        shown = maker.extra_in(edge, 4 * first)
        assert shown == tuple(
            (max(low, 4 * first), min(high, 4 * last), key)
            for low, high, key in tokens.extra
            if low < 4 * last and high > 4 * first
        )


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_names_that_grow_and_are_cut_have_the_elements_of_their_tokens(lookahead: int) -> None:
    chance = random.Random(f"grown {lookahead}")
    for _ in range(200):
        maker = KeyMaker(lookahead)
        whole = prompt(chance, chance.randrange(6))
        names = NamedTokens(maker, whole, maker.name(whole))
        for _ in range(chance.randrange(8)):
            if chance.random() < 0.2:
                kept = chance.randrange(names.count + 1)
                names.cut(kept)
                whole = whole.part(0, kept)
            more = prompt(chance, chance.randrange(4))
            names.append(more)
            whole = whole.extended(more)
            count = max(0, whole.count - lookahead)
            assert (names.tokens, names.tokens.extra, names.count) == (whole, whole.extra, whole.count)
            assert names.key_between(0, count) == maker.find(whole)
            maker.keep(names.extra_numbers)


def test_identity_depends_on_namespace_page_lookahead_and_salt() -> None:
    tokens = encode(range(33))
    chains = [PageChain(16), PageChain(16, 1), PageChain(8), PageChain(16, salt=b"secret")]
    made = [tuple(chain.pages(tokens, chain.root(name))) for chain in chains for name in ("", "a", "\udc80")]
    assert len({page for pages in made for page in pages}) == sum(map(len, made)) == 3 * (2 + 2 + 4 + 2)


def test_spans_of_a_piece_begin_where_they_began() -> None:
    tokens = encode(range(8)).keyed([(1, 6, "cat")])
    spans: tuple[Span, ...] = ((-2, 3, "cat"),)
    assert tokens.piece(3).extra == spans
    assert tokens.part(3).extra == ((0, 3, "cat"),)
    assert tokens.piece(3).part(0).extra == ((0, 3, "cat"),)
    assert tokens.piece(6).extra == tokens.piece(0, 1).extra == ()
