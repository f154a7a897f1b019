"""Paths as pages: what a page of a path is, and a digest that is made of everything before it.

The digest of a page is blake2b (16 bytes) of its parent's digest and its own tokens. So whoever knows the tokens, and
the digest of the root, can compute it.

Extra keys belong to spans of a path. Two paths have a page in common if its tokens are equal, and the spans as far as
they lie in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from prefixloom import Tokens, exact_key

TOKEN_BYTES = 4
Span = tuple[int, int, Any]
"""Of a path: from which position on, up to which, and the extra key."""
ExactSpan = tuple[int, int, Hashable, Any]
"""A span, with its key in exact form before it: what Python takes for equal may be several keys (1, 1.0 and True)."""
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
    return repr([(lo, hi, first, exact_key(key)) for lo, hi, first, key in extra]).encode("utf-8", "backslashreplace")


def pages_of(tokens: Tokens, page: int, lookahead: int) -> Iterator[tuple[bytes, tuple[ExtraKey, ...]]]:
    """The encoded tokens and the extra keys of each whole page. ``tokens`` are those of a change, or ``keyed``."""
    count = (tokens.count - lookahead) // page
    for index, extra in enumerate(extras_of(tokens.extra, page, lookahead, 0, count)):
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


def exact(spans: Iterable[Span]) -> tuple[ExactSpan, ...]:
    return tuple((lo, hi, exact_key(key), key) for lo, hi, key in spans)


def cut(spans: tuple[ExactSpan, ...], start: int, end: int) -> tuple[ExactSpan, ...]:
    """What of ``spans`` matters to the positions [start, end): the spans that touch them, which end at ``end`` at last.

    One that begins before ``start`` is not cut there: where it begins counts for what its content depends on.
    """
    return tuple((lo, min(hi, end), name, key) for lo, hi, name, key in spans if lo < end and hi > start)
