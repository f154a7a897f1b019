"""EventFollower: subscribes to the events of a cache, and notices and repairs what it has missed.

``OrderedEvents`` is the part without sockets: it puts batches into order, and says from which number on something is
missing. First read it.
"""

from __future__ import annotations

import os
import time
from types import TracebackType

import attrs
import zmq

from prefixloom import PrefixloomError
from prefixloom.connections import read_keys
from prefixloom.storage import shown_url

from .rebuilt import RebuiltCache
from .wire import EventBatch, decode_batch, is_ipv6, is_snapshot, read_frames, sequence_bytes

MOST_WAITING = 10_000
"""Batches that are kept while an earlier one is missing."""
LONGEST_BATCH = 1 << 28
"""Bytes of a batch that is taken. ZeroMQ drops the connection to a publisher that sends more."""
ASK_FOR_ALL = 2**64 - 1
"""Asked for this number, a publisher sends one batch with all there is."""


@attrs.define
class FollowerCounts:
    """What a follower has seen so far.

    ``applied``    batches
    ``gaps``       times that a number was missing
    ``repaired``   batches that it missed and got by a replay
    ``snapshots``  batches with all there is, which it got in place of those that it missed
    ``late``       batches that came twice, or after they were not wanted any more
    ``malformed``  messages and batches that were none
    """

    applied: int = 0
    gaps: int = 0
    repaired: int = 0
    snapshots: int = 0
    late: int = 0
    malformed: int = 0


class OrderedEvents:
    """Batches in order, however they come. ``cache`` is rebuilt from them.

    ``missing`` is the number from which on a replay is wanted; None: nothing is missing that is known of.
    """

    def __init__(self) -> None:
        self.cache = RebuiltCache()
        self.counts = FollowerCounts()
        self.expected = 0
        """The number of the next batch."""
        self._waiting: dict[int, bytes] = {}
        self._last_time = 0.0

    @property
    def missing(self) -> int | None:
        return self.expected if self._waiting else None

    def receive(self, number: int, payload: bytes) -> None:
        """Take a batch that was sent to everybody."""
        if number < self.expected and not self._begins_again(payload):
            self.counts.late += 1
            return
        if number > self.expected and not self._waiting:
            self.counts.gaps += 1
        if len(self._waiting) < MOST_WAITING:
            self._waiting[number] = payload
        self._go_on()

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a batch of a replay that was asked for: of the missing ones, or one with all there is."""
        batch = self._decoded(payload)
        if number == self.expected:
            self.counts.repaired += 1
            self._apply(number, batch)
        elif batch is not None and is_snapshot(batch.events) and (number > self.expected or batch.ts > self._last_time):
            self.counts.snapshots += 1
            self._apply(number, batch)
        self._go_on()

    def _begins_again(self, payload: bytes) -> bool:
        """Return whether a publisher that was started again sent this batch with a smaller number; if so, reset."""
        try:
            batch = decode_batch(payload)
        except ValueError:
            return False
        if batch.ts <= self._last_time or not is_snapshot(batch.events):
            return False
        self._waiting.clear()
        self.expected = 0
        return True

    def _go_on(self) -> None:
        for number in [number for number in self._waiting if number < self.expected]:
            del self._waiting[number]
        while self.expected in self._waiting:
            self._apply(self.expected, self._decoded(self._waiting.pop(self.expected)))

    def _decoded(self, payload: bytes) -> EventBatch | None:
        try:
            return decode_batch(payload)
        except ValueError:
            self.counts.malformed += 1
            return None

    def _apply(self, number: int, batch: EventBatch | None) -> None:
        if batch is not None:
            self.cache.apply(batch.events)
            self._last_time = max(self._last_time, batch.ts)
            self.counts.applied += 1
        self.expected = number + 1


class EventFollower:
    """Follows a publisher from another thread or process. ``cache`` says what is cached there.

    ``replay``: where to ask for what was missed; without it, gaps are counted and stay. ``keys``: the publisher's file.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None = None,
        *,
        topic: str = "",
        keys: str | os.PathLike[str] | None = None,
        high_water: int = 100_000,
    ) -> None:
        self._keys = None if keys is None else read_keys(keys, "client")
        self.stream = OrderedEvents()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay = replay
        try:
            self._sub = self._to(zmq.SUB, endpoint, high_water)
            self._sub.subscribe(topic)
            self._sub.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PrefixloomError(f"events cannot be read from {shown_url(endpoint)}: {error}") from error

    def _to(self, kind: int, endpoint: str, high_water: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVHWM, high_water)
        made.set(zmq.MAXMSGSIZE, LONGEST_BATCH)
        made.set(zmq.IPV6, is_ipv6(endpoint))
        if self._keys is not None:
            made.curve_publickey, made.curve_secretkey = self._keys.public, self._keys.secret
            made.curve_serverkey = self._keys.other
        return made

    @property
    def cache(self) -> RebuiltCache:
        return self.stream.cache

    @property
    def counts(self) -> FollowerCounts:
        return self.stream.counts

    def poll(self, seconds: float = 0.0) -> bool:
        """Read messages, waiting for ``seconds`` at most, and ask for missing ones. Return whether any arrived."""
        came = self.receive(seconds)
        if self.stream.missing is not None and self._replay is not None:
            self.ask(self.stream.missing)
        return came

    def receive(self, seconds: float = 0.0) -> bool:
        """Read messages, waiting for ``seconds`` at most, and ask for none. Return whether any arrived."""
        came = False
        while self._sub.poll(0 if came else int(seconds * 1000)):
            read = read_frames(self._sub.recv_multipart())
            if read is None:
                self.counts.malformed += 1
            else:
                self.stream.receive(*read)
            came = True
        return came

    def catch_up(self, seconds: float = 5.0) -> bool:
        """Ask for all batches from the next one on, as a new subscriber does. Return whether it was answered."""
        return self.ask(self.stream.expected, seconds)

    def ask(self, number: int, seconds: float = 5.0) -> bool:
        """Ask for all batches from ``number`` on again. Return whether the replay came to its end."""
        if self._replay is None:
            return False
        answers = self.answers(number, seconds)
        for each, payload in answers or ():
            self.stream.replayed(each, payload)
        return answers is not None

    def answers(self, number: int, seconds: float = 5.0) -> list[tuple[int, bytes]] | None:
        """Return the batches of a replay from ``number`` on. None: the replay did not end in time."""
        assert self._replay is not None
        found: list[tuple[int, bytes]] = []
        with self._to(zmq.DEALER, self._replay, 0) as dealer:
            dealer.connect(self._replay)
            dealer.send_multipart((b"", sequence_bytes(number)))
            until = time.monotonic() + seconds
            while dealer.poll(max(0, int((until - time.monotonic()) * 1000))):
                frames = dealer.recv_multipart()
                if frames[-1] == b"":
                    return found
                read = read_frames(frames[1:])
                if read is not None:
                    found.append(read)
        return None

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> EventFollower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
