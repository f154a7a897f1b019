"""Keys: the address of a record, which follows from what the record holds and from nothing else.

The content digest is a strong hash over the namespace, the tokens up to the boundary, the component and the span. The
address adds the fingerprint, so that caches of different models never read each other's records. This module knows no
store.
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
    """A content digest under a fingerprint. A store keeps a record under its ``address``. Keys compare by it."""

    content: bytes = attrs.field(eq=False)
    fingerprint: Fingerprint = attrs.field(eq=False, repr=False)
    address: bytes = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.content, bytes) or len(self.content) != CONTENT_BYTES:
            raise ValueError(f"a key's content is a digest of {CONTENT_BYTES} bytes, got {self.content!r}")
        object.__setattr__(self, "address", self.fingerprint.digest + self.content)


def root_link(namespace: str) -> bytes:
    """Return the link before the first page of a namespace. A link is the hash of a prefix."""
    name = namespace.encode("utf-8", "surrogatepass")  # any text
    return hashlib.blake2b(name, digest_size=CONTENT_BYTES, person=b"loom.namespace").digest()


def next_link(link: bytes, page: bytes, extra: bytes = b"") -> bytes:
    """Return the link after one more page of encoded tokens. ``extra`` is what else the page depends on (an image)."""
    hashed = hashlib.blake2b(link, digest_size=CONTENT_BYTES, person=b"loom.page")
    hashed.update(struct.pack("<QQ", len(page), len(extra)))
    hashed.update(page)
    hashed.update(extra)
    return hashed.digest()


def links(namespace: str, tokens: bytes, page_bytes: int) -> Iterator[bytes]:
    """Yield the link after every whole page of ``tokens``, which ``prefixloom.encode`` made."""
    link = root_link(namespace)
    for at in range(0, len(tokens) // page_bytes * page_bytes, page_bytes):
        link = next_link(link, tokens[at : at + page_bytes])
        yield link


def key(link: bytes, component: str, start: int, end: int, fingerprint: Fingerprint) -> Key:
    """Return the key of what ``component`` has for [start, end), or of its state at ``end`` if both are equal.

    ``link`` is the link of the boundary ``end``.
    """
    hashed = hashlib.blake2b(link, digest_size=CONTENT_BYTES, person=b"loom.record")
    hashed.update(struct.pack("<QQ", start, end))
    hashed.update(component.encode())
    return Key(hashed.digest(), fingerprint)
