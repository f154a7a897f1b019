"""A line of progress on a terminal."""

from __future__ import annotations

import shutil
import sys


class Progress:
    """One line on stderr that is overwritten. Shows nothing where stderr is no terminal."""

    def __init__(self, quiet: bool) -> None:
        self._on = not quiet and sys.stderr.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        if self._on:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be overwritten
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0
