"""The wire: frames over one TCP connection between a prefill process and a decode process, without blocking.

A frame is a kind, a number and bytes. Each side receives once per step whatever has come. Any error closes the
connection and is raised once, as ``WireClosed``.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

Address = tuple[str, int]
"""A host and a port."""
FRAME_HEADER = struct.Struct("<cIQ")
"""Kind, number, length of the bytes."""
LONGEST_FRAME = 1 << 33
"""Bytes. A header with a greater length is not one of this protocol."""
ASK, DROP, ANSWER, BUSY, HELLO, REFUSED = b"a", b"d", b"r", b"b", b"m", b"x"
"""The kinds: a prompt is wanted; it is wanted no more; here is its content; prompts are being computed; the format of
the sender's cache; a prompt is refused."""
KINDS = (ASK, DROP, ANSWER, BUSY, HELLO, REFUSED)
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Seconds (the last one milliseconds) after which a machine that does not answer counts as gone."""


class WireClosed(Exception):
    """The other side is gone, or sends something else than this protocol."""


class Wire:
    """One connection. ``sent`` counts bytes without headers, ``received`` all bytes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket = connection
        self._in = bytearray()
        self._out = bytearray()
        self.sent = self.received = 0

    def send(self, kind: bytes, number: int, data: bytes) -> None:
        """Send as much as the other side takes now; ``receive`` sends the rest."""
        self._out += FRAME_HEADER.pack(kind, number, len(data)) + data
        self.sent += len(data)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                count = self.socket.send(self._out[: 1 << 20])
                del self._out[:count]
        except BlockingIOError:
            return
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, int, bytes]]:
        """Return the frames that have come. With a timeout, wait at most that many seconds for something to come."""
        if timeout:
            select.select([self.socket], [self.socket] if self._out else [], [], timeout)
        self._flush()
        try:
            while True:
                data = self.socket.recv(1 << 20)
                if not data:
                    raise WireClosed("the connection was closed")
                self._in += data
                self.received += len(data)
        except BlockingIOError:
            pass
        except OSError as error:
            raise WireClosed(str(error)) from error
        return self._frames()

    def _frames(self) -> list[tuple[bytes, int, bytes]]:
        """Take the complete frames out of the received bytes."""
        found, at = [], 0
        while len(self._in) - at >= FRAME_HEADER.size:
            kind, number, length = FRAME_HEADER.unpack_from(self._in, at)
            if length > LONGEST_FRAME or kind not in KINDS:
                raise WireClosed("what came is no frame of this protocol")
            if len(self._in) - at - FRAME_HEADER.size < length:
                break
            at += FRAME_HEADER.size
            found.append((kind, number, bytes(self._in[at : at + length])))
            at += length
        del self._in[:at]
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
