"""Ctrl-C while a large package is imported: some of them catch everything on their way, and an interrupt with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept() -> Iterator[None]:
    """An interrupt that the block swallows is raised behind it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen = False

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # signals are the main thread's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
