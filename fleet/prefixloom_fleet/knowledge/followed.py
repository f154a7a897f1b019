"""FollowedEvents: what one replica has cached, as its events say, and whether that may be believed.

A thread reads the events, so that a router never waits for a replica. The router gets an answer, or None where there is
none that it should go by:

- the publisher was not heard yet, or has not answered what was missed;
- the replica says that it has sent more than has come, for longer than ``LATE_SECONDS``;
- the events contradict each other;
- requests hit much less there than the events had promised (``settle``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from prefixloom import PrefixloomError
from prefixloom_events import EventFollower
from prefixloom_events.follower import ASK_FOR_ALL

from ..routing.promises import Promises

log = logging.getLogger("prefixloom.fleet")
EVERY_SECONDS = 0.02
"""How often events are read."""
LATE_SECONDS = 3.0
"""Events that the replica sent so long ago, and that have not come, make its events doubtful."""
ANSWER_SECONDS = 2.0
"""How long a publisher may take to answer what was missed."""
LOCK_SECONDS = 0.02
"""How long a router waits while the thread applies events."""


class FollowedEvents:
    """The events of one replica. ``doubt`` says in words why they are not gone by now; "": they are."""

    def __init__(self, name: str, endpoint: str, replay: str, keys: str | None = None) -> None:
        self.name = name
        self.promises = Promises()
        self._follower = EventFollower(endpoint, replay, keys=keys)
        self._lock = threading.Lock()
        self._heard = False
        self._told, self._told_at = 0, 0.0
        self._faults = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"prefixloom events of {name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the router
    def boundary(self, tokens: Sequence[int], namespace: str) -> int | None:
        """Return the deepest boundary of ``tokens`` that the replica can resume at. None: that is not known."""
        return self._ask(tokens, namespace, "boundary")

    def pages(self, tokens: Sequence[int], namespace: str) -> int | None:
        """Return how many of ``tokens`` have their pages there under full attention. None: that is not known."""
        return self._ask(tokens, namespace, "pages")

    def _ask(self, tokens: Sequence[int], namespace: str, what: str) -> int | None:
        if self.doubt or not self._lock.acquire(timeout=LOCK_SECONDS):
            return None
        try:
            cache, salt = self._follower.cache, namespace or None
            if what == "boundary":
                return cache.boundary(tokens, salt=salt)
            # of the components' own groups, that of full attention has the longest run of pages from the beginning
            groups = [group for group, component in cache.names.items() if component]
            return max((cache.pages(tokens, group=group, salt=salt) for group in groups), default=0)
        finally:
            self._lock.release()

    @property
    def doubt(self) -> str:
        now = time.monotonic()
        if self.promises.banned_until > now:
            return "requests hit less than its events promised"
        if not self._heard:
            return "its events were not heard yet"
        if self._told > self._follower.stream.expected and now - self._told_at > LATE_SECONDS:
            return "its events are late"
        if self._follower.stream.missing is not None:
            return "events were missed"
        return ""

    def told(self, batches: int) -> None:
        """Note that the replica says that it has sent so many batches."""
        if self._told <= self._follower.stream.expected or batches < self._told:
            self._told, self._told_at = batches, time.monotonic()

    def settle(self, promised: int, hit: int) -> None:
        """Compare what the events promised of a request with what hit."""
        if self.promises.settle(promised, hit, time.monotonic()):
            log.warning("%s: requests hit less than its events promised: they are not gone by for a while", self.name)

    def close(self) -> None:
        """End the following. The thread ends a little later: a router does not wait for a replica that has ended."""
        self._ending.set()

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            while not self._ending.wait(EVERY_SECONDS):
                with self._lock:
                    self._receive()
                stream = self._follower.stream
                if stream.missing is not None or not self._heard or self._late:
                    self._catch_up(stream.expected)
                elif self._follower.cache.fault_count > self._faults:
                    self._begin_again()
        except PrefixloomError:
            log.exception("the events of %s cannot be read", self.name)
            self._heard = False
        finally:
            self._follower.close()

    def _receive(self) -> None:
        """Apply the batches that have arrived. ``_catch_up`` repairs a gap, without the lock."""
        self._follower.receive()

    @property
    def _late(self) -> bool:
        return self._told > self._follower.stream.expected and time.monotonic() - self._told_at > LATE_SECONDS / 2

    def _catch_up(self, number: int) -> None:
        answers = self._follower.answers(number, ANSWER_SECONDS)
        if answers is None:
            if self._follower.stream.missing is not None:
                self._heard = False
            return
        with self._lock:
            for each, payload in answers:
                self._follower.stream.replayed(each, payload)
        self._heard = True

    def _begin_again(self) -> None:
        """Read all there is anew, because the events contradict each other."""
        self._faults = self._follower.cache.fault_count
        log.warning("the events of %s contradict each other: they are read anew", self.name)
        self._heard = False
        self._catch_up(ASK_FOR_ALL)
