"""The store ``memory``: records in this process's memory, up to a number of bytes. It is for tests.

It knows the contract of stores and ``records``, and no other store.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from prefixloom import StorageError, hookimpl
from prefixloom.storage import (
    DIGEST_BYTES,
    HEADER_BYTES,
    BackendType,
    Fingerprint,
    Key,
    Miss,
    Record,
    Refused,
    Status,
    Stored,
    encode_header,
    flat,
)

from .records import StoreCounts, checked, differences, header_for


class MemoryBackend:
    """A dict of frames by address. When there is no room, it evicts the least recently read or written record."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        if not isinstance(capacity, int) or capacity <= HEADER_BYTES:
            raise StorageError(f"capacity must be more than the {HEADER_BYTES} bytes of a header, got {capacity!r}")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._frames: OrderedDict[bytes, bytearray] = OrderedDict()
        self._digests: Counter[bytes] = Counter()
        """The number of records by the digest of their fingerprint."""
        self._fingerprints: dict[bytes, Fingerprint] = {}
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
            return self._absent(key)
        size = max(len(frame) - HEADER_BYTES, 0)
        header = header_for(key, frame, size, into)
        if isinstance(header, Miss):
            found: Record | Miss = header
        else:
            target = memoryview(bytearray(size)) if into is None else into[:size]
            target[:] = memoryview(frame)[HEADER_BYTES:]
            found = checked(key, header, target)
        if isinstance(found, Record):
            self._frames.move_to_end(key.address)
        elif found.reason != "size":
            self._drop(key.address)
        return found

    def _absent(self, key: Key) -> Miss:
        """Return the miss for a record that is not here: ``fingerprint``, if all records have another one."""
        if not self._digests or self._digests[key.fingerprint.digest]:
            return Miss(key, "absent")
        return Miss(key, "fingerprint", differences(key.fingerprint, map(self._fingerprints.get, self._digests))[0])

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
            self._drop(next(iter(self._frames)))
            self._counts.evicted += 1
        frame = bytearray(encode_header(record))
        frame += record.payload
        self._frames[key.address] = frame
        self._fingerprints[key.fingerprint.digest] = key.fingerprint
        self._digests[key.fingerprint.digest] += 1
        self._used += size
        return self._counts.stored(key)

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._lock:
            return tuple(key.address in self._frames for key in keys)

    def _drop(self, address: bytes) -> None:
        self._used -= len(self._frames.pop(address))
        self._digests -= Counter({address[:DIGEST_BYTES]: 1})  # without those of no record

    def status(self) -> Status:
        with self._lock:
            return self._counts.status(len(self._frames), self._used, self.capacity)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._frames.clear()
            self._digests.clear()
            self._used = 0


prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_storage() -> BackendType:
    """Offer the store to the registry."""
    return BackendType("memory", MemoryBackend, "records in this process's memory, for tests")
