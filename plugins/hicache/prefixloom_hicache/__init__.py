"""The tiers below the device: the host's memory, the stores behind it, and guards around any store.

The package knows the public names of ``prefixloom`` and ``prefixloom.storage``. It knows no component, no model and no
engine. It imports no torch.

Read ``host`` first. Each module or room imports only those that come later in this list:

``host``          the tier plugin: what the host keeps, and the store behind it
``guards``        a deadline, a breaker and a backlog around any store
``file_store``    a store in files of one machine
``servers``       stores on servers, which several engines share
``memory_store``  a store in this process's memory, for tests
``records``       what stores share: checks of a record's bytes, reasons of misses, counts
"""

from __future__ import annotations

from .file_store import FileBackend
from .guards import Guarded, GuardLimits
from .host import HostTier
from .memory_store import MemoryBackend

__all__ = [
    "FileBackend",
    "GuardLimits",
    "Guarded",
    "HostTier",
    "MemoryBackend",
]
