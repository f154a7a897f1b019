"""The contract of a storage backend: the calls to a store and its answers.

A backend moves records. It knows no tree, no tensor, no policy and no deadline. A failure of a store is an answer and
never an exception: a read is a miss, a write is refused, and the store counts both by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs

from ..errors import CompositionError, PrefixloomError
from .record import Key, Record
from .url import shown_url, without_passwords

Reason = Literal[
    "absent",  # the store has no record under this key
    "fingerprint",  # the store has records, but of a cache with another fingerprint
    "format",  # the record has a format that this version does not read
    "corrupt",  # the bytes are not those that were written
    "size",  # the record is larger than the buffer for it, or than the store allows
    "capacity",  # the store has no room, and nothing to evict
    "io",  # reading or writing failed
    "busy",  # somebody else is writing this record
    "read_only",  # the store was opened for reading
    "closed",  # the store was closed
    # These are given by the guards around a store, never by a store:
    "deadline",  # the store did not answer in time
    "breaker",  # the store was not called, because it failed several times in a row
    "backlog",  # the store was not called, because too many calls wait for it
    "error",  # the store raised, or its answer breaks the contract
]
REASONS: tuple[Reason, ...] = Reason.__args__  # type: ignore[attr-defined]
FAULTS: frozenset[str] = frozenset({"io"})
"""The reasons that mean that the store itself fails. The other reasons occur in a healthy store too."""


@attrs.frozen
class Miss:
    """The answer to a read that found no valid record, and why."""

    key: Key
    reason: Reason
    detail: str = ""


@attrs.frozen
class Stored:
    """The answer to a write that succeeded. ``fresh`` is False if the store had the key already and wrote nothing."""

    key: Key
    fresh: bool = True


@attrs.frozen
class Refused:
    """The answer to a write that wrote nothing, and why."""

    key: Key
    reason: Reason
    detail: str = ""


@attrs.frozen
class Status:
    """The state of a store at one moment.

    ``records``  how many there are; None: a server has them, and does not say
    ``used``     bytes that take room, overhead included; never more than ``capacity``. On a server, of all its users
    ``capacity`` None: a server bounds it, or nobody does
    ``misses``, ``refused``  counts by reason since the store was opened
    ``notes``    what is unusual, in words
    """

    records: int | None
    used: int
    capacity: int | None
    hits: int = 0
    stored: int = 0
    evicted: int = 0
    misses: Mapping[str, int] = attrs.field(factory=dict)
    refused: Mapping[str, int] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()


class Backend(Protocol):
    """A store of records. Several threads may call it at the same time.

    A key is written once: its content cannot change, so a put of a key that is there writes nothing. A record is found
    until it is evicted, which a store may do at any time, or until a read finds damage in it.
    """

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        """Return one answer per key, in the order of the keys. Every payload is checked against its checksum.

        ``into`` has one writable buffer per key. Then a payload is read into its buffer, and is a view of the buffer's
        beginning. After a miss the content of the buffer is undefined. Without ``into``, a payload is memory of its
        own, which belongs to the caller.
        """

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        """Return one answer per record, in the order of the records. The store reads no payload after the return.

        In a store that outlives its process, a record that was answered by ``Stored`` survives a crash of the process.
        """

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        """Return, per key, whether a get would probably succeed. It reads no payload and counts nothing."""

    def status(self) -> Status:
        """Return the counts and the sizes of the store."""

    def close(self) -> None:
        """Release everything. Later reads miss and later writes are refused, as ``closed``. It may be called twice."""


CALLS = ("get", "put", "exists", "status", "close")


@attrs.frozen
class BackendType:
    """What the hook ``prefixloom_storage`` returns: a kind of store, and how to open one.

    ``open(**options)`` returns a ``Backend``, or raises a ``StorageError`` that says what to do.
    ``open_url(url)``   the same for a URL, whose scheme is ``name``; None: it has none
    """

    name: str
    open: Callable[..., Backend]
    summary: str = ""
    open_url: Callable[[str], Backend] | None = None


def opened(kind: BackendType, url: str = "", /, **options: Any) -> Backend:
    """Open a store of this kind by a URL or by options. Refuse options that it does not take."""
    if url and kind.open_url is None:
        raise CompositionError(f"storage {kind.name!r} is not opened by a URL: give its name and its options")
    try:
        if url:
            assert kind.open_url is not None
            backend = kind.open_url(url)
        else:
            backend = kind.open(**options)
    except PrefixloomError:
        raise
    except (TypeError, ValueError) as error:
        told = shown_url(url) if url else f"the options {', '.join(options) or 'that it has by default'}"
        raise CompositionError(
            f"storage {kind.name!r} cannot be opened with {told}: {without_passwords(str(error))}"
        ) from error
    lacking = [name for name in CALLS if not callable(getattr(backend, name, None))]
    if lacking:
        raise CompositionError(f"storage {kind.name!r} opened a {type(backend).__name__} without {', '.join(lacking)}")
    return backend
