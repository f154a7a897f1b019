"""The contract of storage backends: records, how they are addressed and known again, what a store is asked and answers.

A store of one's own, the storage tier and the conformance suite meet here; nothing in it knows a tree, a pool or a
backend. It is public: plugins import it as they import ``prefixloom``.
"""

from __future__ import annotations

from .checksum import ALGORITHMS, NUMBERS, Algorithm, Checksum, function, preferred
from .contract import (
    FAULTS,
    REASONS,
    Backend,
    BackendType,
    Miss,
    Reason,
    Refused,
    Status,
    Stored,
    opened,
)
from .fingerprint import DIGEST_BYTES, MAX_TEXT, Fingerprint
from .keys import Key, key, links, next_link
from .record import MAX_PAYLOAD, MAX_POSITION, Record, flat

__all__ = [
    "ALGORITHMS",
    "DIGEST_BYTES",
    "FAULTS",
    "MAX_PAYLOAD",
    "MAX_POSITION",
    "MAX_TEXT",
    "NUMBERS",
    "REASONS",
    "Algorithm",
    "Backend",
    "BackendType",
    "Checksum",
    "Fingerprint",
    "Key",
    "Miss",
    "Reason",
    "Record",
    "Refused",
    "Status",
    "Stored",
    "flat",
    "function",
    "key",
    "links",
    "next_link",
    "opened",
    "preferred",
]
