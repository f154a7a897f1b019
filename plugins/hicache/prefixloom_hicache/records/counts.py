"""Counts: what a store counts, in one place, so that every answer is counted once. It knows no store."""

from __future__ import annotations

from collections import Counter

from prefixloom.storage import Key, Miss, Reason, Record, Refused, Status, Stored


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
        foreign: tuple[str, ...],
        notes: tuple[str, ...] = (),
    ) -> Status:
        """Return the status of a store: these counts, and what the store says of itself."""
        counts = (self.hits, self.written, self.evicted)
        return Status(records, used, capacity, *counts, dict(self.misses), dict(self.refusals), foreign, notes)
