"""The tiers below the device: the host's memory, two stores behind it, and guards around any store."""

from __future__ import annotations

from .file import FileBackend
from .guarded import Guarded, GuardLimits
from .host import HostTier
from .memory import MemoryBackend

__all__ = [
    "FileBackend",
    "GuardLimits",
    "Guarded",
    "HostTier",
    "MemoryBackend",
]
