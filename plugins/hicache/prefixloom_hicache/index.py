"""Index: which records a store has, by fingerprint and content, and why it does not have one. Holds no payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from prefixloom.storage import Fingerprint, Key, Miss

Entry = TypeVar("Entry")


class Index(Generic[Entry]):
    """Entries by address. Dicts within: whoever shares it between threads holds a lock."""

    def __init__(self) -> None:
        self._tables: dict[bytes, dict[bytes, Entry]] = {}
        self._told: dict[bytes, Fingerprint] = {}
        self._asked: Fingerprint | None = None

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def tell(self, fingerprint: Fingerprint) -> None:
        """Know a fingerprint in full, so that a difference can be told."""
        self._told.setdefault(fingerprint.digest, fingerprint)

    def find(self, key: Key) -> Entry | None:
        table = self._tables.get(key.address[:16])
        return None if table is None else table.get(key.content)

    def at(self, digest: bytes, content: bytes) -> Entry | None:
        return self._tables.get(digest, {}).get(content)

    def add(self, digest: bytes, content: bytes, entry: Entry) -> None:
        self._tables.setdefault(digest, {})[content] = entry

    def drop(self, digest: bytes, content: bytes, entry: Entry | None = None) -> bool:
        """Forget an entry; with ``entry``, only if it is still this one."""
        table = self._tables.get(digest)
        if table is None or content not in table or (entry is not None and table[content] is not entry):
            return False
        del table[content]
        if not table:
            del self._tables[digest]
        return True

    def items(self) -> Iterator[tuple[bytes, bytes, Entry]]:
        for digest, table in self._tables.items():
            for content, entry in table.items():
                yield digest, content, entry

    def missing(self, key: Key) -> Miss:
        """Why there is no entry: another fingerprint has this content, or all that is here."""
        self._asked = key.fingerprint
        own = key.fingerprint.digest
        others = [digest for digest, table in self._tables.items() if digest != own and key.content in table]
        if not others and own not in self._tables:
            others = list(self._tables)
        if not others:
            return Miss(key, "absent")
        return Miss(key, "fingerprint", self._difference(key.fingerprint, others[0]))

    def foreign(self) -> tuple[str, ...]:
        """Per other fingerprint than the one last asked for: how many records, and what is different."""
        asked = self._asked
        if asked is None:
            return ()
        counts = Counter({digest: len(table) for digest, table in self._tables.items() if digest != asked.digest})
        return tuple(f"{count} records: {self._difference(asked, digest)}" for digest, count in counts.most_common())

    def _difference(self, here: Fingerprint, digest: bytes) -> str:
        there = self._told.get(digest)
        return "a fingerprint that cannot be read" if there is None else here.difference(there)
