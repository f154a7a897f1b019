"""Ctrl-C, or any error, made by tests: at a chosen line of ours, or sent to a child that never outlives its test."""

from __future__ import annotations

import linecache
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as File
from types import FrameType
from typing import Any

import prefixloom
import prefixloom_hicache
from prefixloom.insight import debug

CORE = str(File(prefixloom.__file__).parent)
PLUGINS = str(File(prefixloom_hicache.__file__).parent)
DEBUG = str(debug.__file__)


class Interrupt:
    """Raises ``error`` at that line of the core or of a plugin, counted from where it is entered.

    Not in a finalizer: Python goes on behind it, and the drop that was to be told is lost, as a flush does not mind.
    Not in debug mode's checks: they change nothing. Not where a ``with`` block ends: Python traces its line once more
    there, and takes no signal between the block's last line and the release of its lock.
    """

    def __init__(self, line: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left = line
        self.error = error

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name == "__del__" or above.f_code.co_filename in (DEBUG, weakref.__file__):
                return None
            above = above.f_back
        if not frame.f_code.co_filename.startswith((CORE, PLUGINS)):
            return None
        before = 0

        def line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "line":
                ends = frame.f_lineno < before and self._is_with(frame)
                before = frame.f_lineno
                self.left -= not ends
                if self.left == 0 and not ends:
                    raise self.error
            return line

        return line

    @staticmethod
    def _is_with(frame: FrameType) -> bool:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


@contextmanager
def interruptible(call: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child that SIGINT ends, with pipes; killed if the test did not see it end.

    A background job of a shell that is not interactive ignores SIGINT, and children inherit that. What has a handler
    they have as the default; so no code need run between fork and exec, where threads would make it unsafe.
    """
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, inherited)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
