"""A mover over NIXL: the decode process reads content from the memory of the prefill process (extra ``nixl``).

Each process registers one block of memory when it begins. Content is written into a part of it, and a ticket says which
part, and how to reach the process. NIXL moves it in the background (RDMA where there is some, shared memory or TCP
elsewhere), and is only asked how far it is. If a part is used again before it was read, its records' checksums tell.
"""

from __future__ import annotations

import contextlib
import importlib.util
import struct
import uuid
from collections import Counter
from typing import Any

import torch

from prefixloom import InputError

from .transport import MoveFailed, OfferedMemory

METADATA_LENGTH = struct.Struct("<I")
LONGEST_TICKET = 16 << 10
"""Bytes. A ticket goes with the head of an answer."""
MOST_PEERS = 16
"""Processes that a mover remembers; it forgets the oldest first. A prefill process that is started again is another."""


class MemoryBlock:
    """A block of memory, and which parts of it are taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = memoryview(bytearray(size))
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return where ``size`` free bytes begin, which are taken now; None: there is no such place."""
        at = 0
        for begin, length in sorted(self._taken.items()):
            if begin - at >= size:
                break
            at = begin + length
        if size < 1 or self.size - at < size:
            return None
        self._taken[at] = size
        return at

    def give(self, at: int) -> None:
        """Give back the memory that was taken at this place."""
        self._taken.pop(at, None)


class NixlMover:
    """One for each process. ``room``: bytes of the block that it registers. Who made it closes it, after the engine."""

    name = "nixl"

    def __init__(self, room: int = 256 << 20) -> None:
        if importlib.util.find_spec("nixl") is None:
            raise InputError("moving content by NIXL needs nixl: pip install 'prefixloom[nixl]'")
        from nixl._api import nixl_agent, nixl_agent_config

        self._block = MemoryBlock(room)
        self._tensor = torch.frombuffer(self._block.memory, dtype=torch.uint8)
        self._agent: Any = nixl_agent(f"prefixloom-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory(self._tensor)
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._offered: dict[bytes, int] = {}
        self._peers: dict[bytes, str] = {}
        self._reading: Counter[bytes] = Counter()
        self._left: list[NixlLanding] = []

    def offer(self, size: int) -> OfferedMemory | None:
        at = None if self._agent is None else self._block.take(size)
        if at is None:
            return None
        part = self._agent.get_serialized_descs(self._agent.get_xfer_descs(self._tensor[at : at + size]))
        ticket = METADATA_LENGTH.pack(len(self._metadata)) + self._metadata + bytes(part)
        if len(ticket) > LONGEST_TICKET:
            self._block.give(at)
            return None
        self._offered[ticket] = at
        return OfferedMemory(ticket, self.view(at, size))

    def release(self, ticket: bytes) -> None:
        at = self._offered.pop(ticket, None)
        if at is not None:
            self._block.give(at)

    def fetch(self, ticket: bytes, size: int) -> NixlLanding:
        self._left = [each for each in self._left if not each.end()]
        at = None if self._agent is None else self._block.take(size)
        if at is None:
            raise MoveFailed(f"there is no room for {size} bytes")
        try:
            peer, handle = self._read(ticket, at, size)
        except Exception as error:  # a ticket may be anything, and NIXL raises classes of its own
            self._block.give(at)
            raise MoveFailed(f"NIXL cannot fetch it: {error!r}") from error
        self._reading[peer] += 1
        return NixlLanding(self, handle, peer, at, size)

    def _read(self, ticket: bytes, at: int, size: int) -> tuple[bytes, Any]:
        """Begin to read. Return the metadata of the other process, and NIXL's handle."""
        (length,) = METADATA_LENGTH.unpack_from(ticket)
        metadata = ticket[METADATA_LENGTH.size : METADATA_LENGTH.size + length]
        if metadata not in self._peers:
            if len(self._peers) == MOST_PEERS:
                idle = next((peer for peer in self._peers if not self._reading[peer]), None)
                if idle is None:
                    raise MoveFailed(f"content of {MOST_PEERS} processes is read already")
                self._agent.remove_remote_agent(self._peers.pop(idle))
            self._peers[metadata] = bytes(self._agent.add_remote_agent(metadata)).decode()
        theirs = self._agent.deserialize_descs(ticket[METADATA_LENGTH.size + length :])
        mine = self._agent.get_xfer_descs(self._tensor[at : at + size])
        handle = self._agent.initialize_xfer("READ", mine, theirs, self._peers[metadata])
        self._agent.transfer(handle)
        return metadata, handle

    def state(self, handle: Any) -> str:
        """Return how far a read is: "DONE", "PROC" or "ERR"."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception:  # of a peer that is gone NIXL raises
            return "ERR"

    def view(self, at: int, size: int) -> memoryview:
        """Return a part of this mover's memory."""
        return self._block.memory[at : at + size]

    def end(self, handle: Any, peer: bytes, at: int) -> None:
        """Forget a read that is over."""
        self._reading[peer] -= 1
        if self._agent is not None:
            with contextlib.suppress(Exception):  # of a peer that is gone NIXL raises
                self._agent.release_xfer_handle(handle)
        self._block.give(at)

    def leave(self, landing: NixlLanding) -> None:
        """Keep the memory of a read that nobody wants any more until NIXL does not write there."""
        self._left.append(landing)

    def close(self) -> None:
        if self._agent is None:
            return
        self._agent.deregister_memory(self._registered)
        self._agent = None


class NixlLanding:
    """A read of a ``NixlMover``."""

    def __init__(self, mover: NixlMover, handle: Any, peer: bytes, at: int, size: int) -> None:
        self._mover, self._handle, self._peer, self._at, self._size = mover, handle, peer, at, size
        self._over = False

    def poll(self) -> memoryview | None:
        state = self._mover.state(self._handle)
        if state == "PROC":
            return None
        if state != "DONE":
            raise MoveFailed(f"NIXL says {state}")
        return self._mover.view(self._at, self._size)

    def close(self) -> None:
        if not self.end():
            self._mover.leave(self)

    def end(self) -> bool:
        """Give everything back, unless NIXL may still write. False: it may."""
        if not self._over and self._mover.state(self._handle) != "PROC":
            self._over = True
            self._mover.end(self._handle, self._peer, self._at)
        return self._over
