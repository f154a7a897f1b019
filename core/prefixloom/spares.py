"""Spares: the memory between a store and the host's slots, used again and again.

New memory is mapped and cleared by the system page by page, which takes several times as long as filling it. A buffer
that nobody needs any more is kept instead, up to so many bytes in all. It must not know records, stores or slots.
"""

from __future__ import annotations

import threading
from typing import Any

MOST = 64 << 20


class Spare(bytearray):
    """A buffer of ours: whatever else a view may be of belongs to somebody."""

    __slots__ = ()


class Spares:
    """Buffers that may be had again, by size. Any thread takes and gives."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.kept = 0
        self._lock = threading.Lock()
        self._by_size: dict[int, list[Spare]] = {}

    def take(self, size: int) -> Spare:
        """``size`` bytes of any content, the caller's alone."""
        with self._lock:
            buffers = self._by_size.get(size)
            if buffers:
                self.kept -= size
                return buffers.pop()
        return Spare(size)

    def give(self, view: Any) -> None:
        """Nobody looks at the buffer behind ``view`` any more. If it is none of ours, nothing is done."""
        buffer = memoryview(view).obj
        if buffer.__class__ is not Spare:
            return
        size = len(buffer)
        with self._lock:
            if self.kept + size <= self.most:
                self.kept += size
                self._by_size.setdefault(size, []).append(buffer)
