"""Tally: what a store counts, in one place, so that every answer is counted once."""

from __future__ import annotations

from collections import Counter

from prefixloom.storage import Key, Miss, Reason, Record, Refused, Status, Stored


class Tally:
    """Counts by reason since a store was opened. Whoever shares it between threads holds a lock."""

    def __init__(self) -> None:
        self.hits = self.written = self.evicted = 0
        self.misses: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def answered(self, answers: tuple[Record | Miss, ...]) -> tuple[Record | Miss, ...]:
        missed = [answer.reason for answer in answers if isinstance(answer, Miss)]
        self.hits += len(answers) - len(missed)
        if missed:
            self.misses.update(missed)
        return answers

    def stored(self, key: Key, fresh: bool = True) -> Stored:
        self.written += fresh
        return Stored(key, fresh)

    def refuse(self, key: Key, reason: Reason, detail: str) -> Refused:
        self.refusals[reason] += 1
        return Refused(key, reason, detail)

    def status(
        self, records: int, used: int, capacity: int, foreign: tuple[str, ...], notes: tuple[str, ...] = ()
    ) -> Status:
        counts = (self.hits, self.written, self.evicted)
        return Status(records, used, capacity, *counts, dict(self.misses), dict(self.refusals), foreign, notes)
