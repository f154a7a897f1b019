"""The wire between a prefill process and a decode process: frames over TCP, never waited for.

A frame is a kind, a number and bytes. Both sides look in once per step; what is not there yet comes later. Whatever
goes wrong with a connection closes it, and is told once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

HEAD = struct.Struct("<cIQ")
LONGEST = 1 << 33
"""Bytes of a frame: a longer one is no frame of ours."""
ASK, DROP, ANSWER, BUSY, MEET, REFUSED = b"a", b"d", b"r", b"b", b"m", b"x"
"""A prompt is wanted; it is not wanted any more; it is computed; it is being computed; who one is; it is refused."""
KINDS = (ASK, DROP, ANSWER, BUSY, MEET, REFUSED)
ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Seconds (milliseconds the last) after which a machine that has gone without a word counts as gone."""


class Closed(Exception):
    """The other side is gone, or does not talk as we do."""


class Wire:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket = connection
        self._in = bytearray()
        self._out = bytearray()
        self.sent = self.received = 0

    def send(self, kind: bytes, number: int, data: bytes) -> None:
        """Sent as far as the other side takes it; the rest with ``look``."""
        self._out += HEAD.pack(kind, number, len(data)) + data
        self.sent += len(data)
        self._push()

    def _push(self) -> None:
        try:
            while self._out:
                count = self.socket.send(self._out[: 1 << 20])
                del self._out[:count]
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(str(error)) from error

    def look(self, timeout: float = 0.0) -> list[tuple[bytes, int, bytes]]:
        """The frames that have come. With a timeout it waits so long for something to happen."""
        if timeout:
            select.select([self.socket], [self.socket] if self._out else [], [], timeout)
        self._push()
        try:
            while True:
                data = self.socket.recv(1 << 20)
                if not data:
                    raise Closed("the connection was closed")
                self._in += data
                self.received += len(data)
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed(str(error)) from error
        return self._frames()

    def _frames(self) -> list[tuple[bytes, int, bytes]]:
        found, at = [], 0
        while len(self._in) - at >= HEAD.size:
            kind, number, length = HEAD.unpack_from(self._in, at)
            if length > LONGEST or kind not in KINDS:
                raise Closed("what came is no frame of ours")
            if len(self._in) - at - HEAD.size < length:
                break
            at += HEAD.size
            found.append((kind, number, bytes(self._in[at : at + length])))
            at += length
        del self._in[:at]
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
