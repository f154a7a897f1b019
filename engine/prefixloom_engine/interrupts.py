"""Ctrl-C, where it must not come in the midst of something.

An interrupt is an exception between any two instructions: half of a walk through the cache would be done. And some
large packages catch everything while they are imported, an interrupt with it. Whoever has a handler of their own keeps
it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def held() -> Iterator[None]:
    """An interrupt within the block is raised behind it; a second one at once, so that nobody waits for what hangs."""
    seen: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            signal.signal(number, signal.default_int_handler)
            raise KeyboardInterrupt

    try:
        with _handled(interrupted):
            yield
    finally:
        if seen:
            raise KeyboardInterrupt


@contextmanager
def kept() -> Iterator[None]:
    """An interrupt that the block swallows is raised behind it."""
    seen: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    with _handled(interrupted):
        yield
    if seen:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    """In the place of Python's own handler alone; a handler that the block installs stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # another thread: signals are the main thread's
            signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
