"""Keys: where a record lies, told by what it holds and by nothing else.

A content digest is a strong hash over namespace, tokens up to the boundary, component and span. The address adds the
fingerprint, so that two caches of different models never meet, in any store. Nothing here knows a store.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import attrs

from .fingerprint import DIGEST_BYTES, Fingerprint

CONTENT_BYTES = 32
ADDRESS_BYTES = DIGEST_BYTES + CONTENT_BYTES


@attrs.frozen
class Key:
    """A content digest under a fingerprint. ``address`` is what a store files it under; keys compare by it."""

    content: bytes = attrs.field(eq=False)
    fingerprint: Fingerprint = attrs.field(eq=False, repr=False)
    address: bytes = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.content, bytes) or len(self.content) != CONTENT_BYTES:
            raise ValueError(f"a key's content is a digest of {CONTENT_BYTES} bytes, got {self.content!r}")
        object.__setattr__(self, "address", self.fingerprint.digest + self.content)


def root_link(namespace: str) -> bytes:
    """The link before the first page of a namespace."""
    name = namespace.encode("utf-8", "surrogatepass")  # any text
    return hashlib.blake2b(name, digest_size=CONTENT_BYTES, person=b"loom.namespace").digest()


def next_link(link: bytes, page: bytes, extra: bytes = b"") -> bytes:
    """The link after one more page of encoded tokens; ``extra`` is what else its content depends on (an image)."""
    told = hashlib.blake2b(link, digest_size=CONTENT_BYTES, person=b"loom.page")
    told.update(struct.pack("<QQ", len(page), len(extra)))
    told.update(page)
    told.update(extra)
    return told.digest()


def links(namespace: str, tokens: bytes, page_bytes: int) -> Iterator[bytes]:
    """A link for every whole page of ``tokens``, as the core's ``encode`` gives them."""
    link = root_link(namespace)
    for at in range(0, len(tokens) // page_bytes * page_bytes, page_bytes):
        link = next_link(link, tokens[at : at + page_bytes])
        yield link


def key(link: bytes, component: str, start: int, end: int, fingerprint: Fingerprint) -> Key:
    """The key of what ``component`` has for [start, end) under the link of ``end`` (its state, if equal)."""
    told = hashlib.blake2b(link, digest_size=CONTENT_BYTES, person=b"loom.record")
    told.update(struct.pack("<QQ", start, end))
    told.update(component.encode())
    return Key(told.digest(), fingerprint)
