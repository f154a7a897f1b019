"""The contract of a storage backend: what it is asked and what it answers.

A backend moves records and knows nothing else: no tree, no tensor, no policy, no deadline. What can go wrong with a
store is an answer, never an exception: a read misses, a write is refused, and both are counted with their reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs

from ..errors import CompositionError
from .keys import Key
from .record import Record

Reason = Literal[
    "absent",  # nothing under this key
    "fingerprint",  # something, of a cache with another fingerprint
    "format",  # something, in a format that this version does not read
    "corrupt",  # something that is not what was written
    "size",  # larger than the buffer for it, or than the store
    "capacity",  # the store has no room, and nothing that may go
    "io",  # the store failed
    "read_only",  # opened for reading
    "closed",
    # Said by the guards around a store, never by a store:
    "deadline",  # no answer in time
    "breaker",  # not asked, since it failed again and again
    "backlog",  # not asked, since too much waits for it
    "rate",  # not asked, since too much was asked in a short time
    "error",  # it raised, or answered something that is no answer
]
REASONS: tuple[Reason, ...] = Reason.__args__  # type: ignore[attr-defined]
FAULTS: frozenset[str] = frozenset({"io"})
"""What says something of the store's health; the other reasons are its everyday life."""


@attrs.frozen
class Miss:
    """Why a read gave nothing."""

    key: Key
    reason: Reason
    detail: str = ""


@attrs.frozen
class Stored:
    """A write that succeeded. ``fresh`` is False if the key was there already, and nothing was written."""

    key: Key
    fresh: bool = True


@attrs.frozen
class Refused:
    """Why a write did nothing."""

    key: Key
    reason: Reason
    detail: str = ""


@attrs.frozen
class Status:
    """A store at one moment. ``used`` counts what takes room, overhead included, and never exceeds ``capacity``.

    ``misses`` and ``refused`` count by reason since it was opened. ``foreign`` says, per other fingerprint that has
    records here, how many and what is different from the one last asked for.
    """

    records: int
    used: int
    capacity: int
    hits: int = 0
    stored: int = 0
    evicted: int = 0
    misses: Mapping[str, int] = attrs.field(factory=dict)
    refused: Mapping[str, int] = attrs.field(factory=dict)
    foreign: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Backend(Protocol):
    """A store of records. Calls may come from several threads at once.

    Keys are written once: the content of a key cannot change, so a put of what is there already writes nothing. What
    was put is found until it is deleted or evicted; a store may evict whenever it wants.
    """

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        """One answer per key, in their order. A record's payload is checked against its checksum before it is given.

        With ``into``, one writable buffer per key, the payload is read there and is a view of its beginning; after a
        miss the buffer's content is undefined. Without, the payload belongs to whoever asked.
        """

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        """One answer per record, in their order. Payloads are not looked at after the return.

        ``Stored`` survives the death of this process, in a store that outlives it.
        """

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        """Whether a get would probably succeed. Reads no payload, counts nothing."""

    def delete(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        """Remove them; True for those that were there."""

    def flush(self) -> bool:
        """Wait until what was stored also survives the death of the machine; False if that cannot be said."""

    def status(self) -> Status: ...

    def close(self) -> None:
        """Give up what it holds. Afterwards reads miss and writes are refused as ``closed``; closing again is fine."""


CALLS = ("get", "put", "exists", "delete", "flush", "status", "close")


@attrs.frozen
class BackendType:
    """What ``prefixloom_storage`` returns: how to open stores of one kind.

    ``open(**options)`` gives a ``Backend``, or raises a ``StorageError`` that says what to do.
    """

    name: str
    open: Callable[..., Backend]
    summary: str = ""


def opened(kind: BackendType, **options: Any) -> Backend:
    """A store of this kind, checked to be one."""
    backend = kind.open(**options)
    lacking = [name for name in CALLS if not callable(getattr(backend, name, None))]
    if lacking:
        raise CompositionError(f"storage {kind.name!r} opened a {type(backend).__name__} without {', '.join(lacking)}")
    return backend
