"""Messages over ZeroMQ: a ROUTER in the prefill process, a DEALER in each decode process (extra ``transport``).

ZeroMQ connects, reconnects and sends in a thread of its own, without ``select``. It says so when a connection ends. It
takes no more than ``MOST_QUEUED`` messages for a peer, of frames that are bounded. With keys, both sides prove to each
other who they are, and all is encrypted (CURVE).
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from prefixloom import InputError
from prefixloom.connections import SideKeys

from .transport import (
    CAME,
    GONE,
    KINDS,
    LONGEST_FRAME,
    MOST_AT_ONCE,
    MOST_FRAMES,
    PREFILL,
    PeerGone,
    PeerMessage,
)

log = logging.getLogger("prefixloom.engine")
LOCAL, TCP = "ipc://", "tcp://"
MESSAGE_HEADER = struct.Struct("<cQ")
"""Kind and number."""
MOST_QUEUED = 32
"""Messages that ZeroMQ holds for one peer, in each direction."""
HEARTBEAT_MS, DEAD_MS = 5_000, 20_000
"""How often each side asks the other's machine whether it is there, and after how long without a word it is not."""
HANDSHAKE_MS = 10_000
"""After so long a connection that says nothing, or something else than this protocol, is closed."""
RECONNECT_MS, MOST_RECONNECT_MS = 100, 1_000
REFUSED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def has_message(waiting: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received. To ask is cheaper than to try, or to poll."""
    return bool(int(waiting.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def is_ipv6(address: str) -> bool:
    """Return whether an address needs IPv6: its host is a number in brackets, or a name without IPv4 address."""
    host = address.removeprefix(TCP).rpartition(":")[0]
    if not address.startswith(TCP) or host.startswith("["):
        return address.startswith(TCP)
    try:
        return {found[0] for found in socket.getaddrinfo(host, None)} == {socket.AF_INET6}
    except (OSError, UnicodeError):  # it has no address now, or is none
        return False


class ZmqSocket:
    """What both sides share: bounded queues, messages of a header and frames, and no call that waits for a peer."""

    def __init__(self, kind: int, address: str, keys: SideKeys | None) -> None:
        self._context = zmq.Context()
        made = self._socket = self._context.socket(kind)
        made.linger = 0
        made.ipv6 = is_ipv6(address)
        made.sndhwm = made.rcvhwm = MOST_QUEUED
        made.maxmsgsize = LONGEST_FRAME
        made.handshake_ivl = HANDSHAKE_MS
        made.heartbeat_ivl, made.heartbeat_timeout = HEARTBEAT_MS, DEAD_MS
        if keys is not None:
            made.curve_publickey, made.curve_secretkey = keys.public, keys.secret

    def _send(self, before: list[bytes], kind: bytes, number: int, frames: Sequence[Any]) -> bool:
        try:
            parts = [*before, MESSAGE_HEADER.pack(kind, number), *frames]
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:  # no route to it, or this side is closed
            raise PeerGone(str(error)) from error
        return True

    def _receive(self, seconds: float, named: bool) -> list[PeerMessage]:
        """Receive the messages that are there. ``named``: the first frame names the sender."""
        if seconds:
            self._socket.poll(int(1000 * seconds))
        found = []
        for _ in range(MOST_AT_ONCE):
            if not has_message(self._socket):
                break
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = parts.pop(0).bytes if named else PREFILL
            if not 1 <= len(parts) <= 1 + MOST_FRAMES or len(parts[0]) != MESSAGE_HEADER.size:
                continue
            kind, number = MESSAGE_HEADER.unpack(parts[0].buffer)
            if kind in KINDS:
                found.append(PeerMessage(peer, kind, number, [part.buffer for part in parts[1:]]))
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


class PrefillSocket(ZmqSocket):
    """The side of a prefill process: any number of decode processes connect to it."""

    def __init__(self, address: str, keys: SideKeys | None = None) -> None:
        super().__init__(zmq.ROUTER, address, keys)
        self._socket.router_mandatory = 1
        self._authenticator: Any = None
        if keys is not None:
            self._authenticator = keys.authenticator(self._context)
            self._socket.curve_server = True
        self._path: Path | None = None
        try:
            if address.startswith(LOCAL) and not address.startswith(f"{LOCAL}@"):
                remove_stale_socket(Path(address.removeprefix(LOCAL)))
            self._socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise InputError(f"a prefill process cannot listen at {address}: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.address.startswith(LOCAL) and not self.address.startswith(f"{LOCAL}@"):
            self._path = Path(self.address.removeprefix(LOCAL))

    def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
        return self._send([peer], kind, number, frames)

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        return self._receive(seconds, named=True)

    def close(self) -> None:
        authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.stop()
        super().close()
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)


def remove_stale_socket(path: Path) -> None:
    """Remove the socket of a process that ended. OSError: this is something else, or somebody listens there."""
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError("this file is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise FileExistsError("a process listens there")


class DecodeSocket(ZmqSocket):
    """The side of a decode process. It connects again and again while there is nobody at the address."""

    def __init__(self, address: str, keys: SideKeys | None = None) -> None:
        super().__init__(zmq.DEALER, address, keys)
        self.address = address
        self._refused = False
        made = self._socket
        made.immediate = True  # what cannot be sent now is refused, and not kept for a process that comes later
        made.reconnect_ivl, made.reconnect_ivl_max = RECONNECT_MS, MOST_RECONNECT_MS
        made.connect_timeout = HANDSHAKE_MS
        if keys is not None:
            made.curve_serverkey = keys.other
        self._monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSED_EVENTS)
        try:
            made.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise InputError(f"a decode process cannot connect to {address}: {error}") from error

    def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
        return self._send([], kind, number, frames)

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        events = self._events()
        return [*events, *self._receive(0.0 if events else seconds, named=False)]

    def _events(self) -> list[PeerMessage]:
        """Return what became of the connection since the last call."""
        found = []
        while has_message(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refused = False
                found.append(PeerMessage(PREFILL, CAME, 0))
            elif event == zmq.EVENT_DISCONNECTED:
                found.append(PeerMessage(PREFILL, GONE, 0))
            elif not self._refused:
                self._refused = True
                log.error("the prefill process at %s refuses this process: do both have the same keys?", self.address)
        return found

    def close(self) -> None:
        if not self._socket.closed:
            while has_message(self._monitor):  # ZeroMQ waits where too many events were not read
                recv_monitor_message(self._monitor)
            self._socket.disable_monitor()
        super().close()
