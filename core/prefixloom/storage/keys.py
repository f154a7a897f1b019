"""Keys: the address of a record, which follows from what the record holds and from nothing else.

The content digest is a strong hash over the identity of the record's last page (``prefixloom.keys.pages``), the
component and the span. The address adds the fingerprint, so that caches of different models never read each other's
records. This module knows no store.
"""

from __future__ import annotations

import hashlib
import struct

import attrs

from .fingerprint import Fingerprint

CONTENT_BYTES = 32


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


def key(page: bytes, component: str, start: int, end: int, fingerprint: Fingerprint) -> Key:
    """Return the key of what ``component`` has for [start, end), or of its state at ``end`` if both are equal.

    ``page`` is the identity of the page that ends at ``end``, or in which ``end`` lies.
    """
    hashed = hashlib.blake2b(page, digest_size=CONTENT_BYTES, person=b"loom.record")
    hashed.update(struct.pack("<QQ", start, end))
    hashed.update(component.encode())
    return Key(hashed.digest(), fingerprint)
