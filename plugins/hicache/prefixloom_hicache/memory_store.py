"""The store ``memory``: records in this process's memory, up to a number of bytes. It is for tests.

It knows the room ``records`` and the contract of stores, and no other store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from prefixloom import StorageError, hookimpl
from prefixloom.storage import (
    DIGEST_BYTES,
    HEADER_BYTES,
    BackendType,
    Flaw,
    Key,
    Miss,
    Record,
    Refused,
    Status,
    Stored,
    decode_header,
    encode_header,
    flat,
)

from .records.counts import StoreCounts
from .records.index import RecordIndex


class MemoryBackend:
    """A dict of frames by address. When there is no room, it evicts the least recently read or written record."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        if not isinstance(capacity, int) or capacity <= HEADER_BYTES:
            raise StorageError(f"capacity must be more than the {HEADER_BYTES} bytes of a header, got {capacity!r}")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._frames: OrderedDict[bytes, bytearray] = OrderedDict()
        self._index: RecordIndex[bool] = RecordIndex()
        self._used = 0
        self._counts = StoreCounts()
        self._closed = False

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        with self._lock:
            out = [self._read(key, None if into is None else flat(into[i])) for i, key in enumerate(keys)]
            return self._counts.read(tuple(out))

    def _read(self, key: Key, into: memoryview | None) -> Record | Miss:
        if self._closed:
            return Miss(key, "closed")
        frame = self._frames.get(key.address)
        if frame is None:
            return self._index.missing(key)
        size = max(len(frame) - HEADER_BYTES, 0)
        if into is not None and len(into) < size:
            return Miss(key, "size", f"the record has {size} bytes, the buffer {len(into)}")
        target = memoryview(bytearray(size)) if into is None else into[:size]
        target[:] = memoryview(frame)[HEADER_BYTES:]
        header = decode_header(frame)
        found = header if isinstance(header, Flaw) else header.record(key, target)
        if isinstance(found, Flaw):
            self._drop(key)
            return Miss(key, found.reason, found.detail)
        self._frames.move_to_end(key.address)
        return found

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        with self._lock:
            return tuple(map(self._write, records))

    def _write(self, record: Record) -> Stored | Refused:
        key, size = record.key, HEADER_BYTES + len(record.payload)
        if self._closed:
            return self._counts.refused(key, "closed", "the store was closed")
        if size > self.capacity:
            return self._counts.refused(key, "size", f"{size} bytes do not fit into {self.capacity}")
        if key.address in self._frames:
            self._frames.move_to_end(key.address)
            return self._counts.stored(key, fresh=False)
        while self._used + size > self.capacity:
            address, frame = self._frames.popitem(last=False)
            self._index.drop(address[:DIGEST_BYTES], address[DIGEST_BYTES:])
            self._used -= len(frame)
            self._counts.evicted += 1
        frame = bytearray(encode_header(record))
        frame += record.payload
        self._frames[key.address] = frame
        self._index.add_fingerprint(key.fingerprint)
        self._index.add(key.fingerprint.digest, key.content, True)
        self._used += size
        return self._counts.stored(key)

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._lock:
            return tuple(key.address in self._frames for key in keys)

    def delete(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._lock:
            return tuple(map(self._drop, keys))

    def _drop(self, key: Key) -> bool:
        frame = self._frames.pop(key.address, None)
        if frame is None:
            return False
        self._index.drop(key.fingerprint.digest, key.content)
        self._used -= len(frame)
        return True

    def flush(self) -> bool:
        return not self._closed

    def status(self) -> Status:
        with self._lock:
            return self._counts.status(len(self._frames), self._used, self.capacity, foreign=self._index.foreign())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._frames.clear()
            self._index = RecordIndex()
            self._used = 0


prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_storage() -> BackendType:
    """Offer the store to the registry."""
    return BackendType("memory", MemoryBackend, "records in this process's memory, for tests")
