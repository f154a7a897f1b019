"""Index: which records a store has, by fingerprint and content, and why a record is missing.

It holds no payload. What it keeps for a record, a store decides.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from prefixloom.storage import DIGEST_BYTES, Fingerprint, Key, Miss

Entry = TypeVar("Entry")


class RecordIndex(Generic[Entry]):
    """One entry per record. It is made of dicts and has no lock: a store that answers several threads holds one."""

    def __init__(self) -> None:
        self._tables: dict[bytes, dict[bytes, Entry]] = {}
        self._fingerprints: dict[bytes, Fingerprint] = {}
        self._last_asked: Fingerprint | None = None

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def add_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Keep a fingerprint in full, so that a miss can say what is different."""
        self._fingerprints.setdefault(fingerprint.digest, fingerprint)

    def find(self, key: Key) -> Entry | None:
        table = self._tables.get(key.address[:DIGEST_BYTES])
        return None if table is None else table.get(key.content)

    def at(self, digest: bytes, content: bytes) -> Entry | None:
        """Return the entry under the digest of a fingerprint and a content."""
        return self._tables.get(digest, {}).get(content)

    def add(self, digest: bytes, content: bytes, entry: Entry) -> None:
        self._tables.setdefault(digest, {})[content] = entry

    def drop(self, digest: bytes, content: bytes, entry: Entry | None = None) -> bool:
        """Remove an entry, and return whether it was there. With ``entry``, remove it only if it is this object."""
        table = self._tables.get(digest)
        if table is None or content not in table or (entry is not None and table[content] is not entry):
            return False
        del table[content]
        if not table:
            del self._tables[digest]
        return True

    def missing(self, key: Key) -> Miss:
        """Return the miss for a key without an entry.

        Its reason is ``fingerprint`` if another fingerprint has a record of this content, or if all records here have
        another fingerprint.
        """
        self._last_asked = key.fingerprint
        own = key.fingerprint.digest
        others = [digest for digest, table in self._tables.items() if digest != own and key.content in table]
        if not others and own not in self._tables:
            others = list(self._tables)
        if not others:
            return Miss(key, "absent")
        return Miss(key, "fingerprint", self._difference(key.fingerprint, others[0]))

    def foreign(self) -> tuple[str, ...]:
        """Say, per fingerprint other than the last one asked for, how many records it has and what is different."""
        asked = self._last_asked
        if asked is None:
            return ()
        counts = Counter({digest: len(table) for digest, table in self._tables.items() if digest != asked.digest})
        return tuple(f"{count} records: {self._difference(asked, digest)}" for digest, count in counts.most_common())

    def _difference(self, here: Fingerprint, digest: bytes) -> str:
        there = self._fingerprints.get(digest)
        return "a fingerprint that cannot be read" if there is None else here.difference(there)
