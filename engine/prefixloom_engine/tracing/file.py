"""The file of a trace: written by a thread of its own, with bounded memory and a bounded size.

Whoever puts something in never waits and never fails. What does not fit is left out and counted. If the file cannot be
written any more, such as on a full disk, that is logged once, and what comes later is dropped. Only whole packets are
written at a time, so a process that is killed leaves a file that is good up to its end, or nearly.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefixloom import InputError

log = logging.getLogger("prefixloom.engine")
Rendered = Callable[..., bytes]
SLICE = 256
"""How many entries are turned into bytes before other threads get their turn."""


class TraceFile:
    """``most``: entries that may wait. ``size``: bytes of the file. ``seconds``: how often it is written.

    An entry is a function that makes its bytes, with its arguments; it is called on the writing thread.
    ``left_out(count)`` makes those that say that entries are missing, ``last()`` those at the end.
    """

    def __init__(
        self, path: str | os.PathLike[str], first: bytes, left_out: Callable[[int], bytes], last: Callable[[], bytes],
        *, most: int, size: int, seconds: float,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self.error: str = ""
        """Why nothing is written any more; empty while it is."""
        self.dropped = 0
        """How many entries were left out so far."""
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            raise InputError(f"the trace cannot be written: {error}") from error
        self._waiting: deque[tuple[Rendered, tuple[Any, ...]]] = deque()
        self._left_out, self._last = left_out, last
        self._most, self._size, self._seconds = most, size, seconds
        self._told_dropped = 0
        self._written = 0
        self._ending = threading.Event()
        self._write(first)
        self._thread = threading.Thread(target=self._live, name="prefixloom trace", daemon=True)
        self._thread.start()

    def put(self, rendered: Rendered, *arguments: Any, urgent: bool = False) -> None:
        """Write this later. ``urgent``: even if too much waits; the caller bounds the number of these."""
        if self.error:
            return
        if len(self._waiting) >= self._most and not urgent:
            self.dropped += 1
            return
        self._waiting.append((rendered, arguments))

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits, for at most so many seconds. A second call does nothing."""
        self._ending.set()
        self._thread.join(seconds)

    # ------------------------------------------------------------ on the writing thread
    def _live(self) -> None:
        ending = False
        try:
            while not ending:
                ending = self._ending.wait(self._seconds)
                while self._waiting and not self.error:
                    self._write_some()
            if not self.error:
                self._write(self._last())
        except Exception as error:
            log.exception("the trace ends here")
            self.error = self.error or repr(error)
        finally:
            self._waiting.clear()
            os.close(self._file)

    def _write_some(self) -> None:
        found = []
        for _ in range(min(SLICE, len(self._waiting))):
            rendered, arguments = self._waiting.popleft()
            found.append(rendered(*arguments))
        if self.dropped != self._told_dropped:
            missing, self._told_dropped = self.dropped - self._told_dropped, self.dropped
            found.append(self._left_out(missing))
        self._write(b"".join(found))

    def _write(self, data: bytes) -> None:
        """Write all of it or nothing."""
        if self._written + len(data) > self._size:
            self._stop(f"it has {self._written} of the {self._size} bytes that it may have")
            return
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with suppress(OSError):  # as of a pipe
                os.ftruncate(self._file, self._written)
            self._stop(str(error))
            return
        self._written += len(data)

    def _stop(self, why: str) -> None:
        self.error = why
        self._waiting.clear()
        log.warning("the trace %s ends here: %s", self.path, why)
