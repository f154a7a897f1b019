"""Two engines in one process: messages through two queues. It needs no extra, and opens no socket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from .transport import CAME, GONE, KINDS, MOST_AT_ONCE, PREFILL, PeerGone, PeerMessage

MOST_WAITING = 256
"""Messages that wait for one side. More are not taken."""


class InProcessEnd:
    """One side of a pair, made by ``in_process_pair``. The two sides may be driven by two threads."""

    def __init__(self, address: str, peer: bytes, changed: threading.Condition) -> None:
        self.address = address
        self._peer, self._changed = peer, changed
        self._came: deque[PeerMessage] = deque()
        self._other: InProcessEnd | None = None

    def join(self, other: InProcessEnd) -> None:
        """Connect to the other side. ``in_process_pair`` does this."""
        self._other = other
        if self._peer == PREFILL:
            self._came.append(PeerMessage(PREFILL, CAME, 0))

    def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
        with self._changed:
            other = self._other
            if other is None or peer != self._peer:
                raise PeerGone("the other side is closed")
            if len(other._came) >= MOST_WAITING:
                return False
            if kind in KINDS:
                other._came.append(PeerMessage(other._peer, kind, number, [memoryview(each) for each in frames]))
                self._changed.notify_all()
            return True

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        with self._changed:
            if seconds and not self._came:
                self._changed.wait(seconds)
            return [self._came.popleft() for _ in range(min(len(self._came), MOST_AT_ONCE))]

    def close(self) -> None:
        with self._changed:
            other, self._other = self._other, None
            if other is not None:
                other._other = None
                if other._peer == PREFILL:
                    other._came.append(PeerMessage(PREFILL, GONE, 0))
            self._came.clear()
            self._changed.notify_all()


def in_process_pair(name: str = "in this process") -> tuple[InProcessEnd, InProcessEnd]:
    """Return the side of a ``PrefillServer`` and that of a ``DecodeEngine``. ``name``: in place of an address."""
    changed = threading.Condition()
    prefill = InProcessEnd(name, b"decode", changed)
    decode = InProcessEnd(name, PREFILL, changed)
    prefill.join(decode)
    decode.join(prefill)
    return prefill, decode
