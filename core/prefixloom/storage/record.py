"""Record: one piece of one component, with what is needed to identify it and to check that it is complete.

It knows keys and checksums. It knows no store, and not what the bytes of a payload mean.
"""

from __future__ import annotations

import functools

import attrs
from typing_extensions import Buffer

from .checksum import Checksum
from .keys import Key

MAX_PAYLOAD = 1 << 31
MAX_COMPONENT, MAX_LAYOUT = 63, 31
"""The largest number of bytes of each name in UTF-8."""
MAX_POSITION = 1 << 62


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
