"""What stores share: checking the bytes of a record, saying why a record is missing, and counting answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from prefixloom.storage import (
    Fingerprint,
    Flaw,
    Key,
    Miss,
    Reason,
    Record,
    RecordHeader,
    Refused,
    Status,
    Stored,
    decode_header,
)


def header_for(key: Key, encoded: Any, present: int, buffer: memoryview | None) -> RecordHeader | Miss:
    """Return the header of the record of ``key``, or the miss if the bytes are no such header.

    ``present`` bytes of payload lie beside it. A payload that ``buffer`` cannot take is a miss, too.
    """
    header = decode_header(encoded)
    if isinstance(header, Flaw):
        return Miss(key, header.reason, header.detail)
    if not header.is_of(key):
        return Miss(key, "corrupt", "the header belongs to another record")
    if buffer is not None and len(buffer) < header.size:
        return Miss(key, "size", f"the record has {header.size} bytes, the buffer {len(buffer)}")
    if present != header.size:
        return Miss(key, "corrupt", f"the payload has {present} of {header.size} bytes")
    return header


def checked(key: Key, header: RecordHeader, payload: memoryview) -> Record | Miss:
    """Return the record, or the miss if the payload is not what was written."""
    found = header.record(key, payload)
    return Miss(key, found.reason, found.detail) if isinstance(found, Flaw) else found


def differences(own: Fingerprint, others: Iterable[Fingerprint | None]) -> list[str]:
    """Say how each other fingerprint differs, the most similar one first. None represents unreadable text."""
    told = ["a fingerprint that cannot be read" if each is None else own.difference(each) for each in others]
    return sorted(told, key=lambda text: text.count(";"))


class StoreCounts:
    """Counts since a store was opened: hits, writes and evictions, and misses and refusals by reason.

    It has no lock: a store that answers several threads holds one.
    """

    def __init__(self) -> None:
        self.hits = self.written = self.evicted = 0
        self.misses: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def read(self, answers: tuple[Record | Miss, ...]) -> tuple[Record | Miss, ...]:
        """Count the answers of a read, and return them."""
        missed = [answer.reason for answer in answers if isinstance(answer, Miss)]
        self.hits += len(answers) - len(missed)
        if missed:
            self.misses.update(missed)
        return answers

    def stored(self, key: Key, fresh: bool = True) -> Stored:
        """Count a write that succeeded, and return its answer. ``fresh`` is False if nothing had to be written."""
        self.written += fresh
        return Stored(key, fresh)

    def refused(self, key: Key, reason: Reason, detail: str) -> Refused:
        """Count a refusal, and return it."""
        self.refusals[reason] += 1
        return Refused(key, reason, detail)

    def status(
        self,
        records: int | None,
        used: int,
        capacity: int | None,
        notes: tuple[str, ...] = (),
    ) -> Status:
        """Return the status of a store: these counts, and what the store says of itself."""
        counts = (self.hits, self.written, self.evicted)
        return Status(records, used, capacity, *counts, dict(self.misses), dict(self.refusals), notes)
