"""A store of records on a server, shared by whoever opens it with the same prefix.

A record is one value: its header, and the payload behind it. So whatever a server answers, the header's address and
the two checksums decide whether it is the record. The name of a value follows from the record's address:

    PREFIX/<digest of the fingerprint>/<content>

A server evicts by its own rules, and loses everything when it begins anew. Each is a miss. What is damaged is removed,
so that it can be written again; a record of another format stays, since somebody else can read it.

It knows no server and no client. First read ``ServerStore.get``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from prefixloom import PrefixloomError, StorageError
from prefixloom.storage import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Fingerprint,
    Key,
    Miss,
    Reason,
    Record,
    Refused,
    Status,
    Stored,
    encode_header,
    flat,
    shown_url,
    without_passwords,
)

from ..records import StoreCounts, checked, differences, header_for
from .values import Busy, Full, Values

BATCH_BYTES = 32 << 20
"""The most bytes that one call to a server moves, unless a single value is larger."""
BATCH_VALUES = 256
"""The most names in one call to a server."""
UNKNOWN_BATCH = 8
"""The most values that one call reads without a buffer for each: their sizes are not known before."""
PREFIX = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)*")
"""What the names of a store's values may begin with."""
MANY = 0.25
"""The part of the records of a call that must have been there for the next call to ask which are."""
NOTED_FOR = 600.0
"""Seconds after which a fingerprint is noted again: the server may have lost it."""
NOTES_FOR = 5.0
"""Seconds for which the notes that were read are taken for what the server has."""

P = ParamSpec("P")
T = TypeVar("T")


class ServerStore:
    """A store over the values of a server. Its counts are those of this process.

    Damage, a server that fails and a server that lost everything are misses and refusals, as in every store.
    """

    def __init__(self, values: Values, prefix: str = "prefixloom") -> None:
        if not PREFIX.fullmatch(prefix):
            raise StorageError(f"a prefix has lower-case letters, digits, - and single slashes, got {prefix!r}")
        self.values = values
        self._prefix = prefix
        self._counts = StoreCounts()
        self._lock = threading.Lock()  # of the counts and the notes; never held while the server is called
        self._noted: dict[bytes, float] = {}
        self._notes: dict[bytes, Fingerprint | None] = {}
        self._notes_until = 0.0
        self._error = ""
        self._calls = 0
        self._closed = False
        self._asks_first = False

    # ------------------------------------------------------------ reading
    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        targets = [None] * len(keys) if into is None else [flat(buffer) for buffer in into]
        answers: dict[int, Record | Miss] = {}
        sizes = [0 if target is None else HEADER_BYTES + len(target) for target in targets]
        for lot in batches(sizes, UNKNOWN_BATCH if into is None else BATCH_VALUES):
            answers |= self._read(lot, keys, targets)
            # what was removed while it was read may have had another value's bytes, so only the second time counts
            if damaged := [at for at in lot if is_damaged(answers[at])]:
                answers |= self._read(damaged, keys, targets)
            if names := {self.name_of(keys[at]) for at in damaged if is_damaged(answers[at])}:
                self._ask(self.values.remove, [*names])
        told = self._told([answers[at] for at in range(len(keys))])
        with self._lock:
            return self._counts.read(told)

    def _read(
        self, lot: Sequence[int], keys: Sequence[Key], targets: Sequence[memoryview | None]
    ) -> dict[int, Record | Miss]:
        """Read the records of ``lot`` in one call."""
        names: dict[str, int] = {}  # each once, with the largest of its buffers
        for at in lot:
            name, target = self.name_of(keys[at]), targets[at]
            names[name] = max(HEADER_BYTES + (MAX_PAYLOAD if target is None else len(target)), names.get(name, 0))
        found = self._ask(self.values.read, [*names], [*names.values()])
        if isinstance(found, Exception):
            return {at: self._failed(keys[at], found) for at in lot}
        by_name = dict(zip(names, found, strict=True))
        return {at: self._record(keys[at], by_name[self.name_of(keys[at])], targets[at]) for at in lot}

    def _record(self, key: Key, value: memoryview | Exception | None, target: memoryview | None) -> Record | Miss:
        """Return the record of a value, or why the value is none."""
        if isinstance(value, Exception):
            return self._failed(key, value)
        if value is None:
            return Miss(key, "absent")
        payload = value[HEADER_BYTES:]
        header = header_for(key, value, len(payload), target)
        if isinstance(header, Miss):
            return header
        if target is not None:
            target[: header.size] = payload
            payload = target[: header.size]
        return checked(key, header, payload)

    def _told(self, answers: Sequence[Record | Miss]) -> tuple[Record | Miss, ...]:
        """Explain records that are absent because the server has other fingerprints only: say how these differ."""
        absent = {a.key.fingerprint for a in answers if isinstance(a, Miss) and a.reason == "absent"}
        others = {each: self._differences(each) for each in absent if not self._has(each)}
        return tuple(
            Miss(answer.key, "fingerprint", told[0])
            if isinstance(answer, Miss) and answer.reason == "absent" and (told := others.get(answer.key.fingerprint))
            else answer
            for answer in answers
        )

    # ------------------------------------------------------------ writing
    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        first: dict[str, int] = {}
        for at, record in enumerate(records):
            first.setdefault(self.name_of(record.key), at)
        answers: dict[str, Stored | Refused] = {}
        wanted = []
        for name, at in first.items():
            record, size = records[at], HEADER_BYTES + len(records[at].payload)
            if size > self.values.largest:
                detail = f"{size} bytes, and the server takes {self.values.largest}"
                answers[name] = Refused(record.key, "size", detail)
            else:
                wanted.append((name, record, size))
        for lot in batches([size for *_, size in wanted], BATCH_VALUES):
            self._put([wanted[at][:2] for at in lot], answers)
        with self._lock:
            return tuple(
                self._counted(answers[name], first[name] == at, record.key)
                for at, (name, record) in enumerate((self.name_of(record.key), record) for record in records)
            )

    def _put(self, records: Sequence[tuple[str, Record]], answers: dict[str, Stored | Refused]) -> None:
        """Write the records that the server does not have.

        Ask the server first only while it had many of the last records. A question takes as long as a small write, and
        a record that is written twice stays as it is.
        """
        there: Sequence[bool] | Exception = [False] * len(records)
        if self._asks_first:
            there = self._ask(self.values.present, [name for name, _ in records])
        if isinstance(there, Exception):
            answers.update({name: self._refused(record.key, there) for name, record in records})
            return
        answers.update({name: Stored(record.key, fresh=False) for name, record in records})
        absent = [each for each, is_there in zip(records, there, strict=True) if not is_there]
        if absent:
            self._write(absent, answers)
        found = [answers[name] for name, _ in records]
        known = sum(isinstance(answer, Stored) and not answer.fresh for answer in found)
        self._asks_first = known >= MANY * len(records)

    def _write(self, records: Sequence[tuple[str, Record]], answers: dict[str, Stored | Refused]) -> None:
        parts = [(name, (memoryview(encode_header(record)), record.payload)) for name, record in records]
        failed = self._note({record.key.fingerprint for _, record in records})
        written = self._ask(self.values.write, parts) if failed is None else failed
        for at, (name, record) in enumerate(records):
            answer = written if isinstance(written, Exception) else written[at]
            if isinstance(answer, Exception):
                answers[name] = self._refused(record.key, answer)
            else:
                answers[name] = Stored(record.key, fresh=answer)

    def _counted(self, answer: Stored | Refused, is_first: bool, key: Key) -> Stored | Refused:
        if isinstance(answer, Refused):
            return self._counts.refused(key, answer.reason, answer.detail)
        return self._counts.stored(key, answer.fresh and is_first)

    # ------------------------------------------------------------ the rest of the contract
    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        found: list[bool] = [False] * len(keys)
        for lot in batches([0] * len(keys), BATCH_VALUES):
            names = dict.fromkeys(self.name_of(keys[at]) for at in lot)
            answers = self._ask(self.values.present, [*names])
            if not isinstance(answers, Exception):
                by_name = dict(zip(names, answers, strict=True))
                for at in lot:
                    found[at] = by_name[self.name_of(keys[at])]
        return tuple(found)

    def status(self) -> Status:
        """Return this process's counts, and the whole server's room. How many records the server has is not known."""
        room = self._ask(self.values.room)
        used, capacity = (0, None) if isinstance(room, Exception) else room
        with self._lock:
            notes = (self._error,) if self._error else ()
            return self._counts.status(None, used, capacity, notes)

    def close(self) -> None:
        """Take no more calls. The client is closed when the last call that runs has returned."""
        with self._lock:
            was, self._closed = self._closed, True
            idle = not self._calls
        if idle and not was:
            self.values.close()

    # ------------------------------------------------------------ the server
    def name_of(self, key: Key) -> str:
        """Return the name of a record's value."""
        return f"{self._prefix}/{key.fingerprint.digest.hex()}/{key.content.hex()}"

    def _ask(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | Exception:
        """Return the server's answer, or its error."""
        with self._lock:
            if self._closed:
                return Closed("the store was closed")
            self._calls += 1
        try:
            return call(*given, **named)
        except Exception as error:
            self._error = f"the last error of the server: {shown(error)}"
            return error
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closed and not self._calls
            if last:
                self.values.close()

    def _failed(self, key: Key, error: Exception) -> Miss:
        return Miss(key, "closed" if isinstance(error, Closed) else "io", shown(error))

    def _refused(self, key: Key, error: Exception) -> Refused:
        return Refused(key, REFUSED.get(type(error), "io"), shown(error))

    # ------------------------------------------------------------ fingerprints in full
    def _note(self, fingerprints: set[Fingerprint]) -> Exception | None:
        """Keep fingerprints in full on the server, so that others can explain misses. Return the error, if any."""
        now = time.monotonic()
        for each in fingerprints:
            if self._noted.get(each.digest, -NOTED_FOR) + NOTED_FOR > now:
                continue
            failed = self._ask(self.values.note, each.digest.hex(), each.text)
            if isinstance(failed, Exception):
                return failed
            with self._lock:
                self._noted[each.digest] = now
                self._notes[each.digest] = each
        return None

    def _has(self, own: Fingerprint) -> bool:
        """Return whether the server has records of a fingerprint, as far as is known."""
        if own.digest not in self._noted and own.digest not in self._notes:
            self._read_notes()
        return own.digest in self._noted or own.digest in self._notes

    def _read_notes(self) -> None:
        if time.monotonic() < self._notes_until:
            return
        found = self._ask(self.values.notes)
        if not isinstance(found, Exception):
            read = [note for note in map(read_note, found.items()) if note is not None]
            with self._lock:
                self._notes, self._notes_until = dict(read), time.monotonic() + NOTES_FOR

    def _differences(self, own: Fingerprint) -> tuple[str, ...]:
        """Return how each other fingerprint of the server differs, the most similar one first."""
        with self._lock:
            others = [there for digest, there in self._notes.items() if digest != own.digest]
        return tuple(differences(own, others))


class Closed(Exception):
    """The store was closed."""


REFUSED: dict[type[Exception], Reason] = {Full: "capacity", Busy: "busy", Closed: "closed"}
"""Why a write is refused, if it is not that the server failed."""


def is_damaged(answer: Record | Miss) -> bool:
    return isinstance(answer, Miss) and answer.reason == "corrupt"


def read_note(item: tuple[str, str]) -> tuple[bytes, Fingerprint | None] | None:
    """Return the digest and the fingerprint of a note; None if its name is no digest."""
    name, text = item
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    found = Fingerprint.read(text)
    return digest, found if found is not None and found.digest == digest else None


@contextmanager
def opening(url: str) -> Iterator[None]:
    """Raise a ``StorageError`` of this URL for what a client raises in the block: anything, such as a panic of Rust."""
    try:
        yield
    except (PrefixloomError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise StorageError(f"{shown_url(url)}: {shown(error)}") from error


def shown(error: BaseException) -> str:
    """Return an error as one line of bounded length."""
    text = without_passwords(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def batches(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Yield ranges of items for one call to the server each: at most ``most``, and ``BATCH_BYTES`` of ``sizes``."""
    first = held = 0
    for at, size in enumerate(sizes):
        if at > first and (at - first >= most or held + size > BATCH_BYTES):
            yield range(first, at)
            first, held = at, 0
        held += size
    if first < len(sizes):
        yield range(first, len(sizes))
