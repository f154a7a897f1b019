"""The contract of storage backends: what a record is, how it is addressed, and what a store is asked and answers.

A third-party store, the storage tier and the conformance suite share this package. It knows no tree, no pool and no
particular store. It is public: plugins import it as they import ``prefixloom``.

Read ``contract`` first. Below it, each module imports only those that come later in this list:

``contract``     the protocol of a store, and its answers
``frame``        a record as bytes
``record``       a record: one piece of one component, and its address
``fingerprint``  everything beside the tokens that decides what a record's bytes mean
``checksum``     how damage is found
``url``          the options in a store's URL, for whoever opens one
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
from .frame import (
    HEADER_BYTES,
    Flaw,
    RecordHeader,
    decode_header,
    decode_record,
    encode_header,
)
from .record import MAX_PAYLOAD, MAX_POSITION, Key, Record, flat, key
from .url import UrlOption, options_of, seconds, shown_url, without_passwords, yes_or_no

__all__ = [
    "ALGORITHMS",
    "DIGEST_BYTES",
    "FAULTS",
    "HEADER_BYTES",
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
    "Flaw",
    "Key",
    "Miss",
    "Reason",
    "Record",
    "RecordHeader",
    "Refused",
    "Status",
    "Stored",
    "UrlOption",
    "decode_header",
    "decode_record",
    "encode_header",
    "flat",
    "function",
    "key",
    "opened",
    "options_of",
    "preferred",
    "seconds",
    "shown_url",
    "without_passwords",
    "yes_or_no",
]
