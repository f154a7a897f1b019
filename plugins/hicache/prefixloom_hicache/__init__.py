"""The storage tier's backends for prefixloom: records, the contract of a store, two stores, and guards around any."""

from __future__ import annotations

from .backend import API_VERSION, Backend, BackendType, Miss, Refused, Status, Stored, accepted, opened
from .checksum import Checksum
from .file import FileBackend
from .fingerprint import Fingerprint
from .guarded import Guarded, GuardLimits
from .host import HostTier
from .keys import Key, key, links
from .memory import MemoryBackend
from .record import Record

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendType",
    "Checksum",
    "FileBackend",
    "Fingerprint",
    "GuardLimits",
    "Guarded",
    "HostTier",
    "Key",
    "MemoryBackend",
    "Miss",
    "Record",
    "Refused",
    "Status",
    "Stored",
    "accepted",
    "key",
    "links",
    "opened",
]
