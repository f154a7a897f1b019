"""Observers of one engine: each call goes to all of them, and none can harm the engine by raising."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from prefixloom import InputError

from ..contract.observer import Observer

log = logging.getLogger("prefixloom.engine")


class Observers:
    """The observers of one engine: it has their methods, and calls those that an observer overrides."""

    attached: Callable[..., None]
    queued: Callable[..., None]
    admitted: Callable[..., None]
    restored: Callable[..., None]
    launched: Callable[..., None]
    over: Callable[..., None]
    first_token: Callable[..., None]
    requeued: Callable[..., None]
    ended: Callable[..., None]
    stepped: Callable[..., None]
    closed: Callable[..., None]

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        wrong = [each for each in self._observers if not isinstance(each, Observer)]
        if wrong:
            raise InputError(f"an observer is a prefixloom_engine.Observer, got {wrong[0]!r}")
        self._bind()

    def _bind(self) -> None:
        for name in self.__annotations__:
            overriding = [each for each in self._observers if getattr(type(each), name) is not getattr(Observer, name)]
            called = [(each, getattr(each, name)) for each in overriding]
            setattr(self, name, functools.partial(self._call, called))

    def _call(self, called: list[tuple[Observer, Callable[..., None]]], *arguments: Any) -> None:
        for observer, method in called:
            try:
                method(*arguments)
            except Exception:
                log.exception("an observer of the engine is told nothing more: %r", observer)
                self._observers.remove(observer)
                self._bind()


def observers_of(observers: Iterable[Observer]) -> Observers | None:
    """Combine these observers; None: there are none."""
    found = tuple(observers)
    return Observers(found) if found else None
