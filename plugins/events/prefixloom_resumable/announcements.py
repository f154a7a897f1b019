"""Announcements: hands the changes of a cache to whoever makes an engine's events of them, and keeps errors there.

The engine's scheduler asks for events once in each step, on the thread that drives the cache. Subscribers must not be
left with what is wrong, and the scheduler must go on. So there are three ways to answer:

| | events |
|---|---|
| usually | of the changes since the last call |
| the journal could not keep all changes | of everything that is cached, after "cleared" |
| the code that makes events raised an error | what was announced is withdrawn; then of everything that is cached |

Everything is announced again for at most a hundredth of the time. If it is too early for that, what was announced is
withdrawn, and what is cached is announced later.

It knows no engine, and no form of events. First read ``Announcements.take``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefixloom import Cache, Change

ANEW_SHARE = 0.01
"""The share of time for which everything may be announced again."""


class Announcements:
    """What is announced of one cache.

    ``failures``  errors so far. The first one is logged with its traceback, further ones at the level of debugging
    """

    def __init__(
        self,
        cache: Cache,
        announce: Callable[[list[Change]], list[Any]],
        withdraw: Callable[[], list[Any]],
        log: logging.Logger,
    ) -> None:
        """
        ``announce``  makes the events of changes. After a change "cleared" they are all that is cached
        ``withdraw``  forgets what was announced, and makes the events after which subscribers take nothing for cached.
                      What ``announce`` is given next begins with "cleared"
        """
        self._cache = cache
        self._announce = announce
        self._withdraw = withdraw
        self._log = log
        self._journal = cache.journal()
        self.failures = 0
        self._is_wrong = False
        """Something failed since everything was announced, so subscribers may have anything."""
        self._is_withdrawn = True
        """Subscribers take nothing for cached, so everything is to be announced."""
        self._anew_after = 0.0

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        with self.guard():
            if not (self._is_wrong or self._is_withdrawn or self._journal.missing):
                return self._announce(self._journal.take())
        events: list[Any] = []
        too_early = time.monotonic() < self._anew_after
        with self.guard():
            if self._is_wrong or (too_early and not self._is_withdrawn):
                events = self._withdraw_everything()
            self._journal.take()  # what is missing in it, ``contents`` has
            if not too_early:
                with self.guard():
                    events = events + self._announce_everything()
                if self._is_wrong and not self._is_withdrawn:  # that failed, and subscribers have what is old
                    events = self._withdraw_everything()
        return events

    def _withdraw_everything(self) -> list[Any]:
        events = self._withdraw()
        self._is_wrong, self._is_withdrawn = False, True
        return events

    def _announce_everything(self) -> list[Any]:
        began = time.monotonic()
        try:
            events = self._announce([Change("cleared"), *self._cache.contents()])
            self._is_withdrawn = False
            return events
        finally:
            now = time.monotonic()
            self._anew_after = now + (now - began) / ANEW_SHARE

    @contextmanager
    def guard(self, *, harms: bool = True) -> Iterator[None]:
        """Guard this block: its errors do not leave it, except in debug mode.

        ``harms``  after an error subscribers may have anything, so everything is announced again. Else they only lack
                   something
        """
        try:
            yield
        except Exception:
            self._is_wrong = self._is_wrong or harms
            if self._cache.composition.debug:
                raise
            self.failures += 1
            self._log.log(
                logging.ERROR if self.failures == 1 else logging.DEBUG,
                "an error in the code for KV events: subscribers %s. The engine goes on. Further errors are logged at "
                "level DEBUG",
                "forget what they have of this cache, and then everything is announced again" if harms
                else "do not learn of some pages until another request has these, too",
                exc_info=True,
            )  # fmt: skip
