"""Paths as pages: what a page of a path is, and a digest that is made of everything before it.

The digest of a page is blake2b (16 bytes) of its parent's digest and its own tokens. So whoever knows the tokens, and
the digest of the root, can compute it.

Extra keys belong to spans of a path. Two paths have a page in common if its tokens are equal, and the spans as far as
they lie in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from prefixloom import Tokens

TOKEN_BYTES = 4
Span = tuple[int, int, Any]
"""Of a path: from which position on, up to which, and the extra key."""
TypedSpan = tuple[int, int, str, Any]
"""A span, with the type of its key before it: keys of two types differ, though they be equal (1, 1.0 and True)."""
ExtraKey = tuple[int, int, bool, Any]
"""In a page: from which position on, up to which, whether the span begins here, and the key."""


def page_digest(parent: bytes, tokens: bytes, extra: tuple[ExtraKey, ...]) -> bytes:
    """``tokens`` are encoded: those of the page, and with a lookahead of L the L that follow."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(tokens)
    if extra:
        digest.update(said_of(extra))
    return digest.digest()


def said_of(extra: tuple[ExtraKey, ...]) -> bytes:
    """Extra keys as text: equal for equal keys. An object's own is its ``repr``."""
    return repr([(lo, hi, first, type(key).__qualname__, key) for lo, hi, first, key in extra]).encode(
        "utf-8", "backslashreplace"
    )


def pages_of(
    tokens: Tokens, spans: Iterable[tuple[int, int, Any]], page: int, lookahead: int, first: int = 0
) -> Iterator[tuple[bytes, tuple[ExtraKey, ...]]]:
    """The encoded tokens and the extra keys of each whole page from the ``first`` on. ``spans`` have the extra keys."""
    count = (tokens.count - lookahead) // page
    extras = extras_of(spans, page, lookahead, first, count)
    for index, extra in zip(range(first, count), extras, strict=True):
        start, end = index * page, (index + 1) * page + lookahead
        yield bytes(tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]), extra


def extras_of(spans: Iterable[Span], page: int, lookahead: int, first: int, end: int) -> Iterator[tuple[ExtraKey, ...]]:
    """The extra keys of each of the pages [first, end) of a path. Each page looks at its own spans alone."""
    coming = sorted(enumerate(spans), key=lambda item: -item[1][0])  # the next one is the last
    here: list[tuple[int, Span]] = []
    for index in range(first, end):
        start, behind = index * page, (index + 1) * page + lookahead
        if here:
            here = [item for item in here if item[1][1] > start]
        while coming and coming[-1][1][0] < behind:
            if (item := coming.pop())[1][1] > start:
                here.append(item)
        if len(here) > 1:
            here.sort(key=lambda item: item[0])  # in the order of the spans
        yield tuple((max(lo, start) - start, min(hi, behind) - start, lo >= start, key) for _, (lo, hi, key) in here)


def typed(spans: Iterable[Span]) -> tuple[TypedSpan, ...]:
    return tuple((lo, hi, type(key).__qualname__, key) for lo, hi, key in spans)


def cut(spans: tuple[TypedSpan, ...], start: int, end: int) -> tuple[TypedSpan, ...]:
    """What matters of ``spans`` to the positions [start, end): where one began counts, but not where it ends behind."""
    return tuple((lo, min(hi, end), kind, key) for lo, hi, kind, key in spans if lo < end and hi > start)
