"""The transport contract: messages between a prefill process and the decode processes that it serves.

A transport carries messages. It knows no prompt and no engine. No call of it waits for a peer: what a peer does not
take now is refused, and what has not come yet comes with a later call. ``Mover`` is the contract of what may carry the
content of answers past the transport.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

HELLO, ASK, DROP, ANSWER, PART, BUSY, REFUSED, FETCHED = b"h", b"a", b"d", b"r", b"p", b"b", b"x", b"f"
"""The kinds of messages: what the sender computes; a prompt is wanted; it is wanted no more; what was computed of it; a
part of its content; prompts are being computed, and which; a prompt is refused; all content of an answer is here."""
CAME, GONE = b"+", b"-"
"""Kinds that only a transport itself makes, for its own side: the peer is connected; it is not any more."""
KINDS = frozenset({HELLO, ASK, DROP, ANSWER, PART, BUSY, REFUSED, FETCHED})
OWED = struct.Struct("<Q")
"""The frame of a busy message: the number of the last prompt that was asked for, and those that are still owed."""
LONGEST_FRAME = 4 << 20
"""Bytes. A transport closes the connection of whoever sends more in one frame."""
MOST_FRAMES = 2
"""Of one message, besides what the transport itself adds. A longer message is ignored."""
MOST_AT_ONCE = 64
"""Messages that one call returns at most, so that a flood does not keep an engine from its steps."""
PREFILL = b""
"""The name of its prefill process in a decode process, which has only one."""


class PeerGone(Exception):
    """Nobody has this name any more."""


@attrs.frozen
class PeerMessage:
    """A message that came: who sent it, its kind, the number of the prompt that it is about, and what it carries."""

    peer: bytes
    kind: bytes
    number: int
    frames: Sequence[memoryview] = ()


class Transport(Protocol):
    """One side of it. All calls come from the thread that drives the engine.

    ``address``: where the other side finds this one; of a decode process the address that it connects to
    """

    address: str

    def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
        """Hand a message over, whole or not at all. False: the peer takes nothing now. ``PeerGone``: it is gone.

        Messages to one peer arrive in their order. True does not promise that they arrive.
        """

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        """Return at most ``MOST_AT_ONCE`` messages. If there is none, wait so many seconds for one.

        Messages of another protocol are not returned. Any message that is returned may be hostile.
        """

    def close(self) -> None:
        """Disconnect at once. What has not been sent is lost. It may be called twice."""


@attrs.frozen
class OfferedMemory:
    """Memory of a mover. What is written there before the ticket is sent is what a fetch brings."""

    ticket: bytes
    memory: memoryview = attrs.field(repr=False)


class Landing(Protocol):
    """Content that a mover is fetching."""

    def poll(self) -> memoryview | None:
        """Return the content once it is here; None: not yet. ``MoveFailed``: it will not come."""

    def close(self) -> None:
        """Give back what the fetch holds. The content must not be used after it. It may be called before it is here."""


class MoveFailed(Exception):
    """A mover cannot bring this content."""


class Mover(Protocol):
    """Carries content from the memory of one process to that of another, where a transport is too slow for it.

    ``name``: movers of the same name understand each other's tickets
    """

    name: str

    def offer(self, size: int) -> OfferedMemory | None:
        """Give memory for content of ``size`` bytes, above 0. None: there is no room now."""

    def release(self, ticket: bytes) -> None:
        """Forget content that was offered: it has arrived, or nobody wants it any more."""

    def fetch(self, ticket: bytes, size: int) -> Landing:
        """Begin to fetch content of ``size`` bytes. ``MoveFailed``: this ticket is none, or there is no room."""

    def close(self) -> None:
        """Release everything. It may be called twice."""
