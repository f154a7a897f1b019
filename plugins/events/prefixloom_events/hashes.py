"""Block hashes: a page's name, made of everything before it.

The digest of a page is blake2b (16 bytes) of its parent's digest and its own tokens; that of the root is made of the
cache salt and the adapter's name. So nothing of two namespaces has the same hash, and whoever knows the tokens can
compute the hashes. On the wire a hash is the first 8 bytes of the digest, as an unsigned number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from prefixloom import Tokens

TOKEN_BYTES = 4
ExtraKey = tuple[int, int, bool, Any]
"""In a page: from which position on, up to which, whether the span begins here, and the key."""


@attrs.frozen
class PageLabel:
    """What events call a namespace: the salt and the adapter of its requests; None where they have none."""

    salt: str | None = None
    lora_name: str | None = None


def root_digest(label: PageLabel) -> bytes:
    said = json.dumps([label.salt, label.lora_name]).encode()
    return hashlib.blake2b(said, digest_size=16, person=b"loom.events.root").digest()


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


def block_hash(digest: bytes, part: int = -1) -> int:
    """The hash on the wire: of a page, or of a component's smaller page, the ``part``-th of it."""
    if part >= 0:
        digest = hashlib.blake2b(digest + part.to_bytes(4, "big"), digest_size=8).digest()
    return int.from_bytes(digest[:8], "big")


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
