"""Ctrl-C, where it must not come in the midst of something.

An interrupt is an exception between any two instructions: half of a walk through the cache would be done. And some
large packages catch everything while they are imported, an interrupt with it. Whoever has a handler of their own keeps
it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def held() -> Iterator[None]:
    """An interrupt within the block is raised behind it; a second one at once, so that nobody waits for what hangs."""
    seen: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
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
    """In the main thread, where signals are handled, and in place of Python's own handler alone."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # another thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
