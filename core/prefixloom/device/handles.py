"""Handles: objects that own slots or protection, and the recovery of a handle that was dropped without being released.

A copy of a handle would give the same slots back twice, so a handle cannot be copied. A finalizer runs at any time and
in any thread, so it may only report the drop (``Dropped``); the thread that drives the cache takes the slots back
before its next operation.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import NoReturn, SupportsIndex

from ..errors import ProtocolError

log = logging.getLogger("prefixloom")

_INSIDE = __file__.rsplit("/", 2)[0]


class Handle:
    """Base class of objects that can be moved or ended, but neither copied nor pickled."""

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} stands for what it holds and cannot be copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} stands for what it holds here and cannot be pickled")


class Dropped:
    """The dropped handles that were not taken back yet: for each its name, what happened, and how to take it back.

    The next operation must call ``recover``.
    """

    __slots__ = ("items", "recovered")

    def __init__(self) -> None:
        self.items: list[tuple[object, str, Callable[[], object]]] = []
        self.recovered = 0
        """The number of handles that were ever taken back."""

    def add(self, name: object, what_happened: str, take_back: Callable[[], object]) -> None:
        """Report a dropped handle, maybe from another thread. ``recover`` logs ``what_happened`` to ``name``."""
        self.items.append((name, what_happened, take_back))

    def forget(self) -> None:
        """Note that nothing belongs to a handle any more: what was dropped needs no way back of its own."""
        self.recovered += len(self.items)
        for _, what_happened, _ in self.items:
            log.warning("before a flush, a handle was %s", what_happened)
        self.items.clear()

    def recover(self) -> None:
        """Take back all dropped handles."""
        while self.items:
            name, what_happened, take_back = self.items.pop()
            self.recovered += 1
            log.warning("%r was %s", name, what_happened)
            take_back()


def dropped_without_release(made_at: str | None) -> str:
    """Return the text for the log about a handle that was never released."""
    where = made_at or "a place that is known with PREFIXLOOM_DEBUG=1"
    return f"dropped without release (made at {where}); its slots were taken back"


def call_site() -> str:
    """Return the place in the caller's code: the innermost frame outside of this package."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_INSIDE):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "unknown"


def caller() -> str:
    """Return the name of the function that called the caller. Keep no frame, which would keep its variables alive."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    return "" if frame is None else frame.f_code.co_name
