"""Connections: what a client may do with one before, between and after its requests.

uvicorn speaks HTTP. This adds what it leaves open: a client that begins a request and does not go on, or does not read
what it asked for, is cut; and what is no HTTP is refused in the API's own shape.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .protocol import ApiError

HEAD_SECONDS = 20.0
"""How long a client may take for the head of a request, from its first byte on, or from the connection's begin."""
EVENTS = "prefixloom.events"
"""In the state of a request: it is answered by a stream of events."""
PROBE_SECONDS = 0.2
"""How often something is sent to a client that sends nothing more and waits. Of one that has left, the system hears."""
STALLED_SECONDS = 120.0
"""How long a client may take nothing of what waits for it."""


class Connection(H11Protocol):
    """One connection of a client."""

    head_seconds = HEAD_SECONDS
    stalled_seconds = STALLED_SECONDS
    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _ended = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        plain = transport.get_extra_info("socket")
        if plain is not None and hasattr(socket, "TCP_USER_TIMEOUT") and plain.family != getattr(socket, "AF_UNIX", -1):
            # What waits to be sent when the connection is closed, the system gives up in the same time.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.stalled_seconds * 1000))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()
        self.resume_writing()

    # ------------------------------------------------------------ clients that send nothing more
    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes
        """Keep the connection while a whole request is answered: its client may have closed its own side alone."""
        if not self._ended and self.conn.their_state is not h11.SEND_BODY:  # asyncio says it again when it reads on
            self._ended = True
            self._probe()
        return self._ended and self._is_answering

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _probe(self) -> None:
        """Send what clients skip: "100 Continue" before an answer, a comment in a stream of events."""
        if not self._is_answering or self.transport.is_closing():
            return
        if not self.flow.write_paused and self.scope["http_version"] != "1.0":
            if self.conn.our_state is h11.SEND_RESPONSE:
                self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
            elif EVENTS in self.scope["state"]:
                self.transport.write(self.conn.send(h11.Data(data=b":\n\n")))
        self.loop.call_later(PROBE_SECONDS, self._probe)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ended and not self._is_answering:
            self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering:
            self._forget_head()
        elif self.cycle is None or self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY:
            self._await_head()

    # ------------------------------------------------------------ clients that do not go on
    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self._refuse_late)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _refuse_late(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(ApiError(408, f"the head of the request took more than {self.head_seconds:g} seconds"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # ------------------------------------------------------------ what is no HTTP
    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no request of HTTP/1.1, or its head is too large", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless something was answered already, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"content-length", b"%d" % len(body)))
            response = h11.Response(status_code=error.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()
