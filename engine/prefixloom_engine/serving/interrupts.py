"""Interrupts: Ctrl-C must not stop a step halfway, and must not be lost.

Python raises KeyboardInterrupt between any two instructions, so it could stop the cache in the middle of a change. And
some large packages catch every exception while they are imported, and so lose an interrupt. Both functions here act
only where Python's own handler is installed: a handler that the program has set stays in place.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Raise an interrupt that comes within the block at the block's end. A second one is raised at once, so that a
    block that hangs can be left."""
    seen: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            signal.signal(number, signal.default_int_handler)
            raise KeyboardInterrupt

    try:
        with _handled_by(interrupted):
            yield
    finally:
        if seen:
            raise KeyboardInterrupt


@contextmanager
def reraise_interrupts() -> Iterator[None]:
    """Raise an interrupt at once, and again at the end of the block if the block has swallowed it."""
    seen: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    with _handled_by(interrupted):
        yield
    if seen:
        raise KeyboardInterrupt


@contextmanager
def _handled_by(handler: Handler) -> Iterator[None]:
    """Install ``handler`` in place of Python's own, and restore that unless the block has installed another one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # only the main thread may set a handler
            signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
