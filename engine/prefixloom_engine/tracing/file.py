"""The file of a trace: written by a thread of its own, with bounded memory and a bounded size.

It is an array of JSON with one event a line, Chrome's trace event format. Its readers need no end of the array, so a
process that is killed leaves a file that can be read.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prefixloom import InputError

Event = dict[str, Any]
Making = Callable[..., Iterable[Event]]
log = logging.getLogger("prefixloom.engine")
AT_ONCE = 256
"""How many entries are turned into bytes before other threads get their turn."""


class TraceFile:
    """Takes entries from the engine's thread, and writes the events that they make. ``put`` neither waits nor raises.

    ``left_out``  makes the events that say how many entries are missing
    ``last``      makes the events at the end
    ``most``      entries that may wait; further ones are left out
    ``size``      bytes of the file
    ``seconds``   how often it is written
    """

    def __init__(
        self, path: str | os.PathLike[str], first: Iterable[Event], left_out: Making, last: Making,
        *, most: int, size: int, seconds: float,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self.error = ""
        """Why nothing is written any more, such as a full disk; empty while it is."""
        self.dropped = self._told = 0
        """How many entries were left out, and how many of these the file tells."""
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            raise InputError(f"the trace cannot be written: {error}") from error
        self._waiting: deque[tuple[Making, tuple[Any, ...]]] = deque()
        self._left_out, self._last = left_out, last
        self._most, self._size, self._seconds = most, size, seconds
        self._written = 0
        self._ending = threading.Event()
        self._write(first, before="[\n")
        self._thread = threading.Thread(target=self._live, name="prefixloom trace", daemon=True)
        self._thread.start()

    def put(self, making: Making, *arguments: Any, urgent: bool = False) -> None:
        """Write what ``making`` returns. ``urgent``: even if too many wait; the caller bounds the number of these."""
        if self.error:
            return
        if len(self._waiting) >= self._most and not urgent:
            self.dropped += 1
        else:
            self._waiting.append((making, arguments))

    def close(self, seconds: float = 10.0) -> None:
        """Write the entries that wait, for at most so many seconds. A second call does nothing."""
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
            self._write(self._last())
        except Exception as error:
            log.exception("the trace ends here")
            self.error = self.error or repr(error)
        finally:
            self._waiting.clear()
            os.close(self._file)

    def _write_some(self) -> None:
        found: list[Event] = []
        for _ in range(min(AT_ONCE, len(self._waiting))):
            making, arguments = self._waiting.popleft()
            found += making(*arguments)
        missing, self._told = self.dropped - self._told, self.dropped
        self._write([*found, *(self._left_out(missing) if missing else ())])

    def _write(self, events: Iterable[Event], before: str = "") -> None:
        """Write all of these events, unless the file has no room for them. An error ends the trace."""
        data = (before + "".join(f"{json.dumps(each)},\n" for each in events)).encode()
        if self.error:
            return
        try:
            if self._written + len(data) > self._size:
                raise OSError(f"it has {self._written} of the {self._size} bytes that it may have")
            while data:
                written = os.write(self._file, data)
                self._written, data = self._written + written, data[written:]
        except OSError as error:
            self.error = str(error)
            log.warning("the trace %s ends here: %s", self.path, error)
