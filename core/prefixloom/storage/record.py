"""Record: one piece of one component, with its address and what is needed to check that it is complete.

The address follows from what the record holds and from nothing else: a strong hash over the identity of its last page
(``prefixloom.keys.pages``), the component and the span, under the fingerprint. So caches of different models never read
each other's records. This module knows no store, and not what the bytes of a payload mean.
"""

from __future__ import annotations

import functools
import hashlib
import struct

import attrs
from typing_extensions import Buffer

from .checksum import Checksum
from .fingerprint import Fingerprint

CONTENT_BYTES = 32
MAX_PAYLOAD = 1 << 31
MAX_COMPONENT, MAX_LAYOUT = 63, 31
"""The largest number of bytes of each name in UTF-8."""
MAX_POSITION = 1 << 62


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


def flat(content: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer, without a copy."""
    view = memoryview(content)
    if not view.c_contiguous:
        raise ValueError("a payload must be a contiguous buffer")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _payload(content: Buffer) -> memoryview:
    return flat(content).toreadonly()


@functools.lru_cache(maxsize=1024)
def check_names(component: str, layout: str) -> None:
    """Raise ``ValueError`` if a name is empty, too long or contains a zero byte."""
    for name, text, limit in (("component", component, MAX_COMPONENT), ("layout", layout, MAX_LAYOUT)):
        if not isinstance(text, str) or not 0 < len(text.encode()) <= limit or "\0" in text:
            raise ValueError(f"{name} must be a name of 1 to {limit} bytes, got {text!r}")


@attrs.frozen
class Record:
    """What ``component`` has for the tokens [start, end), or its state at ``end`` where the two are equal.

    ``payload`` is not copied: it must not change as long as the record is used. ``checksum`` is computed here and goes
    with the record to its next reader, so that damage is found wherever it happened.
    """

    key: Key
    component: str
    start: int
    end: int
    layout: str
    payload: memoryview = attrs.field(converter=_payload, repr=lambda view: f"<{len(view)} bytes>")
    checksum: Checksum = attrs.field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        check_names(self.component, self.layout)
        if not 0 <= self.start <= self.end <= MAX_POSITION:
            raise ValueError(f"a record's span must be 0 <= start <= end, got [{self.start}, {self.end})")
        if not 0 < len(self.payload) <= MAX_PAYLOAD:
            raise ValueError(f"a payload has 1 to {MAX_PAYLOAD} bytes, got {len(self.payload)}")
        if self.checksum is None:
            object.__setattr__(self, "checksum", Checksum.of(self.payload))
