"""Write memory: values in one piece each, for clients that take them so.

A value comes as a header and a payload, which lie apart. To join them is a copy. Into new memory it costs several times
as much as into memory that was used before, so the memory is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from .server_store import BATCH_BYTES

KEPT_BYTES = BATCH_BYTES + (1 << 20)
"""The longest memory that is kept: that of a call with headers."""
MOST_KEPT = 2
"""As many calls as write at the same time without new memory."""


@attrs.define
class Joined:
    """Values in one piece each. ``keep``: whether their memory may be used again."""

    pieces: list[memoryview]
    keep: bool = True


class WriteMemory:
    """Memory for the values of the calls that write. Several threads may use it at the same time."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    @contextmanager
    def joined(self, values: Sequence[Sequence[memoryview]]) -> Iterator[Joined]:
        """Join the parts of each value. What it gives must not be used after the block.

        A client that failed may still read what it was given. So the memory of a block that raised is not kept, nor
        that of one which says so.
        """
        size = sum(len(part) for parts in values for part in parts)
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = bytearray()
        if len(memory) < size:
            memory = bytearray(size)
        pieces, view, end = [], memoryview(memory), 0
        for parts in values:
            begin = end
            for part in parts:
                view[end : end + len(part)] = part
                end += len(part)
            pieces.append(view[begin:end])
        joined = Joined(pieces)
        yield joined
        if joined.keep and len(memory) <= KEPT_BYTES and len(self._kept) < MOST_KEPT:
            self._kept.append(memory)
