"""The storage tier's backends for prefixloom: records, the contract of a store, two stores, and guards around any."""

from __future__ import annotations

from prefixloom.storage import (
    Backend,
    BackendType,
    Checksum,
    Fingerprint,
    Key,
    Miss,
    Record,
    Refused,
    Status,
    Stored,
    key,
    links,
    opened,
)

from .file import FileBackend
from .guarded import Guarded, GuardLimits
from .host import HostTier
from .memory import MemoryBackend

__all__ = [
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
    "key",
    "links",
    "opened",
]
