"""Arrival: the content of one answer while it comes to a decode process, in parts or by a mover."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from prefixloom import InputError

from ..contract.handover import Handover
from .messages import AnswerHead
from .records import ExpectedContent
from .transport import Landing, Mover

PART_BYTES = 256 << 10
PART_OFFSET = struct.Struct("<Q")


def parts_of(content: memoryview) -> list[list[bytes | memoryview]]:
    """Return the frames of the messages that bring this content: an offset, and so many bytes."""
    return [[PART_OFFSET.pack(at), content[at : at + PART_BYTES]] for at in range(0, len(content), PART_BYTES)]


class Arrival:
    """An answer of which the head has come."""

    def __init__(self, head: AnswerHead, expected: ExpectedContent, mover: Mover | None) -> None:
        self.head, self.expected = head, expected
        self._came = 0
        self._content = bytearray()
        self._landing: Landing | None = None
        if head.ticket:
            if mover is None:
                raise InputError("content was offered to a mover, and this process has none")
            self._landing = mover.fetch(bytes.fromhex(head.ticket), expected.size)
        else:
            self._content = bytearray(expected.size)

    @property
    def moved(self) -> bool:
        """Whether a mover brings the content."""
        return self._landing is not None

    def take_part(self, frames: Sequence[memoryview]) -> None:
        """Take the next part of the content."""
        if self._landing is not None or len(frames) != 2 or len(frames[0]) != PART_OFFSET.size:
            raise InputError("this is no part of an answer's content")
        (at,), part = PART_OFFSET.unpack(frames[0]), frames[1]
        if at != self._came or not 0 < len(part) <= len(self._content) - at:
            raise InputError(f"{len(part)} bytes came for byte {at}, and {self._came} of {len(self._content)} are here")
        self._content[at : at + len(part)] = part
        self._came += len(part)

    def handover(self) -> Handover | None:
        """Return the handover once all of its content is here and has been checked; None: not yet."""
        if self._landing is not None:
            content = self._landing.poll()
            if content is None:
                return None
        elif self._came < len(self._content):
            return None
        else:
            content = memoryview(self._content)
        self.expected.check(content)
        found, states = self.expected.unpack(content)
        head = self.head
        return Handover(
            head.have, head.boundary, head.end, head.token, head.logprob, self.expected.pages, found, states, head.hit
        )

    def close(self) -> None:
        """Give back what the arrival holds."""
        if self._landing is not None:
            self._landing.close()
