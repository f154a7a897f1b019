"""The file store: records in preallocated segment files of one directory. One process writes, any number reads.

It knows the contract of stores and the room ``records``. It knows nothing of the guards, of the host tier or of the
memory store.

Read ``backend`` first. Below it, each module imports only those that come later in this list:

``backend``         the store itself: answers, and the index of where each record is
``segment_set``     the segments of the directory: which one is written, recycled or removed
``segment``         one segment file: reading its headers, appending a record
``segment_format``  where heads, headers and payloads stand in a segment, and how to scan them
``open_files``      the descriptors: a bounded number of them, however many segments there are
``directory``       permissions and owners, and the lock of the one writer
``disk``            the system calls, in one place
"""

from __future__ import annotations

from .backend import FileBackend

__all__ = ["FileBackend"]
