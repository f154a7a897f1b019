"""Paths as pages: what a page of a path is, and a digest that is made of everything before it.

The digest of a page is blake2b (16 bytes) of its parent's digest and its own tokens. So whoever knows the tokens, and
the digest of the root, can compute it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from prefixloom import Tokens

TOKEN_BYTES = 4
Span = tuple[int, int, Any]
"""Of a path: from which position on, up to which, and the extra key."""
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
    count, spans = (tokens.count - lookahead) // page, tuple(spans)
    for index in range(first, count):
        start, end = index * page, (index + 1) * page + lookahead
        extra = (
            ()
            if not spans
            else tuple(
                (max(lo, start) - start, min(hi, end) - start, lo >= start, key)
                for lo, hi, key in spans
                if lo < end and hi > start
            )
        )
        yield bytes(tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]), extra
