"""The file store: one file a record, in a directory of one user. One process writes, any number read.

It knows the contract of stores and the room ``records``. It knows nothing of the guards, of the host tier or of the
memory store.

Read ``backend`` first. Below it, each module imports only those that come later in this list:

``backend``    the store itself: reads, writes and evictions
``directory``  permissions and owners, and the lock of the one writer
``disk``       the system calls, in one place
"""

from __future__ import annotations

from .backend import FileBackend

__all__ = ["FileBackend"]
