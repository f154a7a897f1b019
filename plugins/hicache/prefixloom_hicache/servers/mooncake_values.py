"""Mooncake Store as a store: ``mooncake://MASTER:PORT``. It needs the extra ``mooncake``.

The records lie in the memory of the processes that give it: Mooncake's own services, or this process (``segment=``).
What lay in a process is gone with it. Records go to the client and come from it through memory that it has registered
once, so that it can move them by RDMA. The client tells no name and counts nothing; who wrote first is not known for
certain if two write at once, and what they write is the same.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from prefixloom import StorageError, parse_memory
from prefixloom.storage import UrlOption, options_of, shown_url

from .schemes import Scheme
from .server_store import BATCH_BYTES, ServerStore
from .values import Busy, Full

CONNECT = 5.0
"""Seconds in which the master must answer when a store is opened."""
NOT_FOUND, NOT_READY, NO_SPACE, TOO_LARGE, NOT_OURS = -704, -703, -200, -600, -601
"""What Mooncake's client answers in place of a size, or of 0. ``NOT_OURS``: another client is writing it."""
NOTE_TRIES, NOTE_PAUSE = 5, 0.02
"""How often a note is written while others write theirs, and the seconds between."""
OPTIONS: Mapping[str, UrlOption] = {
    "prefix": str,
    "segment": lambda text: parse_memory(text, "segment"),
    "metadata": str,
    "protocol": str,
    "devices": str,
    "host": str,
}


class MooncakeFailed(Exception):
    """The client answered an error number."""


class RegisteredMemory:
    """Memory that the client has registered, for one call at a time."""

    def __init__(self, client: Any) -> None:
        self.lock = threading.Lock()
        self.memory = memoryview(bytearray(BATCH_BYTES))
        self.address = ctypes.addressof((ctypes.c_char * BATCH_BYTES).from_buffer(self.memory))
        answer = client.register_buffer(self.address, BATCH_BYTES)
        if answer:
            raise MooncakeFailed(f"memory cannot be registered: error {answer}")


class MooncakeValues:
    """Values of a Mooncake Store. ``client`` is a ``MooncakeDistributedStore`` that was set up."""

    largest = BATCH_BYTES

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self._fingerprints = f"{prefix}/fingerprints"
        self._reads, self._writes = RegisteredMemory(client), RegisteredMemory(client)

    def read(self, names: Sequence[str], most: Sequence[int]) -> list[memoryview | Exception | None]:
        with self._reads.lock:
            if sum(most) <= BATCH_BYTES:
                return self._read(names, most)
            one_by_one = zip(names, most, strict=True)
            return [self._read([name], [min(size, BATCH_BYTES)])[0] for name, size in one_by_one]

    def _read(self, names: Sequence[str], sizes: Sequence[int]) -> list[memoryview | Exception | None]:
        begins = [*itertools.accumulate(sizes, initial=0)][:-1]
        places = [self._reads.address + begin for begin in begins]
        answers = self.client.batch_get_into([*names], places, [*sizes])
        return [*map(self._value, names, begins, sizes, answers)]

    def _value(self, name: str, begin: int, size: int, answer: int) -> memoryview | Exception | None:
        if answer in (NOT_FOUND, NOT_READY):  # not ready: somebody writes it, or died while writing it
            return None
        if answer == TOO_LARGE:  # of a value that is longer, its beginning
            address = self._reads.address
            (((answer,),),) = self.client.get_into_ranges([address], [[name]], [[[begin]]], [[[0]]], [[[size]]])
        if answer < 0:
            return MooncakeFailed(f"error {answer}")
        return memoryview(bytes(self._reads.memory[begin : begin + answer]))

    def write(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> list[bool | Exception]:
        before = self.present([name for name, _ in values])  # the client does not tell who wrote a value
        absent = [value for value, is_there in zip(values, before, strict=True) if not is_there]
        written = iter(self._write(absent) if absent else ())
        return [False if is_there else next(written) for is_there in before]

    def _write(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> list[bool | Exception]:
        names, places, sizes, at = [], [], [], 0
        with self._writes.lock:
            for name, parts in values:
                names.append(name)
                places.append(self._writes.address + at)
                begin = at
                for part in parts:
                    self._writes.memory[at : at + len(part)] = part
                    at += len(part)
                sizes.append(at - begin)
            answers = self.client.batch_put_from(names, places, sizes)
        # it answers 0 also for a name that another client is writing, and may never finish
        there = self.present(names)
        return [self._written(each, is_there) for each, is_there in zip(answers, there, strict=True)]

    def _written(self, answer: int, is_there: bool) -> bool | Exception:
        if answer == NO_SPACE:
            return Full("no segment of the store has room")
        if answer == 0 and not is_there:
            return Busy("another client has begun to write it")
        return MooncakeFailed(f"error {answer}") if answer else True

    def present(self, names: Sequence[str]) -> list[bool]:
        answers = self.client.batch_is_exist([*names])
        failed = [each for each in answers if each not in (0, 1)]
        if failed:
            raise MooncakeFailed(f"error {failed[0]}")
        return [each == 1 for each in answers]

    def remove(self, names: Sequence[str]) -> None:
        failed = [each for each in self.client.batch_remove([*names], force=True) if each not in (0, NOT_FOUND)]
        if failed:
            raise MooncakeFailed(f"error {failed[0]}")

    def note(self, name: str, text: str) -> None:
        """Add a note to those of all clients, which are one value. They may write it at once, so look whether it stays.

        While others write it without end, this note is left out: it only explains misses.
        """
        for _ in range(NOTE_TRIES):
            answer = self.client.upsert(self._fingerprints, json.dumps({**self.notes(), name: text}).encode())
            if answer == NO_SPACE:
                raise Full("no segment of the store has room")
            if answer not in (0, NOT_OURS):
                raise MooncakeFailed(f"error {answer}")
            if self.notes().get(name) == text:
                return
            time.sleep(NOTE_PAUSE)

    def notes(self) -> dict[str, str]:
        content = self.client.get(self._fingerprints)
        try:
            found = json.loads(content) if content else {}
        except (ValueError, RecursionError):
            return {}
        return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}

    def room(self) -> tuple[int, int | None]:
        return 0, None

    def close(self) -> None:
        self.client.close()


def open_mooncake(
    master: str, prefix: str = "prefixloom", segment: int = 0, metadata: str = "P2PHANDSHAKE", protocol: str = "tcp",
    devices: str = "", host: str = "127.0.0.1",
) -> ServerStore:  # fmt: skip
    """Open a Mooncake Store.

    ``master``    address of its master, HOST:PORT
    ``segment``   bytes of this process's memory that are given to the store
    ``metadata``  address of the metadata service, if there is one
    ``protocol``, ``devices``  "tcp", or "rdma" and its devices
    ``host``      the name under which others reach this process
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StorageError(
            f"a Mooncake Store needs the extra mooncake (pip install 'prefixloom[mooncake]', and the system's "
            f"libibverbs1): {error}"
        ) from error
    address, _, port = master.rpartition(":")
    try:
        socket.create_connection(
            (address.strip("[]"), int(port)), CONNECT
        ).close()  # the client would try for a minute and more
    except (OSError, ValueError) as error:
        raise StorageError(f"mooncake://{master}: the master cannot be reached: {error}") from error
    client = MooncakeDistributedStore()
    answer = client.setup(host, metadata, segment, 2 * BATCH_BYTES, protocol, devices, master)
    if answer:
        raise StorageError(f"mooncake://{master}: the client cannot be set up, error {answer}")
    try:
        return ServerStore(MooncakeValues(client, prefix), prefix)
    except MooncakeFailed as error:
        client.close()
        raise StorageError(f"mooncake://{master}: {error}") from error


def open_url(url: str) -> ServerStore:
    """Open ``mooncake://MASTER:PORT?segment=4GiB``."""
    plain, options, others = options_of(url, OPTIONS)
    parts = urlsplit(plain)
    if not parts.netloc or parts.path not in ("", "/"):
        raise StorageError(f"{shown_url(url)} names no master: write mooncake://HOST:PORT")
    if others:
        raise StorageError(f"{shown_url(url)} has {', '.join(map(repr, others))}: the store takes {', '.join(OPTIONS)}")
    return open_mooncake(parts.netloc, **options)


mooncake = Scheme("mooncake", open_mooncake, open_url, "records in the memory of a Mooncake Store")
