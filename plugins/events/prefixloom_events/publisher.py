"""EventPublisher: announces over ZeroMQ what a cache has cached, as it changes.

The thread that drives the cache only takes the journal, in ``poll``. A thread of the publisher's own makes events of
it, numbers and sends them, keeps the last ones for those who missed some, and answers them. If that thread is busy,
the changes wait in the journal, which is bounded; so there is no second queue. What a subscriber does not read, ZeroMQ
drops without a word: the subscriber sees it by the gap in the sequence numbers.

First read ``EventPublisher.poll`` and ``_Sender.run``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import attrs
import zmq

from prefixloom import Cache, Change, InputError, PrefixloomError
from prefixloom.connections import SideKeys, is_local, read_keys
from prefixloom.storage import shown_url

from .hashes import PageLabel
from .mirror import Mirror
from .wire import END_OF_REPLAY, AllBlocksCleared, EventBatch, beside, encode_batch, frames_of, is_ipv6, sequence_bytes

log = logging.getLogger("prefixloom.events")
BUFFERED_BATCHES = 10_000
BUFFERED_BYTES = 64 << 20
HIGH_WATER = 100_000
"""Messages that ZeroMQ keeps for a subscriber that is slow, before it drops what comes."""
LONGEST_REQUEST = 1 << 12
"""Bytes of a frame that a subscriber may send. ZeroMQ drops the connection of one that sends more."""
MOST_SUBSCRIPTIONS = 1024
"""Different topics of all subscribers. ZeroMQ keeps each. If there are more, all subscribers are dropped."""
REBIND_SECONDS = 5.0
"""How long the system may take to free the address of the socket whose subscribers were dropped."""
REPLAYS_WAITING = 64
"""Requests for a replay that ZeroMQ keeps, and replays that are under way at once."""
REPLAY_SLICE = 64
"""Messages of a replay that are sent before the publisher looks at the cache again."""
REPLAY_PATIENCE = 10.0
"""Seconds after which a replay ends of which its client has read nothing more."""
REPLAY_SHARE = 0.05
"""The share of time that the publisher's thread gives to those who ask it, however many they are."""
CONTENTS_SHARE = 0.01
"""The share of time for which the thread that drives the cache may read all contents, when changes were lost."""
IDLE_SECONDS = 1.0
"""How long the publisher's thread sleeps while nobody wants anything of it."""
REPLAY_RETRY = 0.01
"""Seconds until something is sent again that a client could not take."""


@attrs.define
class PublisherCounts:
    """What a publisher has done so far.

    ``batches``, ``events``, ``sent_bytes``  what was announced
    ``restarts``  times that changes were lost, so that everything was announced anew; 1 at the beginning
    ``unsent``    batches that ZeroMQ did not take
    ``replays``, ``replayed``, ``snapshots``  requests that were answered; batches sent again; of all that is cached
    ``dropped``   times that all subscribers were dropped, since they had too many topics
    ``refused``   requests that had a wrong form, or came while their sender was still being answered
    ``seconds``   of the publisher's own thread
    """

    batches: int = 0
    events: int = 0
    sent_bytes: int = 0
    restarts: int = 0
    unsent: int = 0
    replays: int = 0
    replayed: int = 0
    snapshots: int = 0
    dropped: int = 0
    refused: int = 0
    seconds: float = 0.0


@attrs.frozen
class _Changes:
    """What is handed to the sender's thread: changes, or with ``anew`` all that is cached."""

    changes: list[Change]
    anew: bool
    base: str
    """The namespace that events do not name."""


class EventPublisher:
    """Publishes the events of one cache until ``close``. Call ``poll`` once per step.

    ``endpoint``    where subscribers connect to, such as ``tcp://127.0.0.1:5557``; a port of 0 takes any that is free
    ``replay``      where they ask for what they missed (default: the next port, or ``endpoint`` + ".replay")
    ``topic``       the first frame of every message
    ``rank``        the data-parallel rank that batches carry
    ``components``  announce what each component keeps, and the boundaries. Without, only pages that lead to one
    ``label``       what a namespace is called in events (default: by its name, and the plain one not at all)
    ``keys``        the file that ``prefixloom.connections.write_keys`` made: followers need it, and all is encrypted
    ``in_clear``    publish the tokens of all prompts to whoever reaches an address of other machines, without keys
    """

    def __init__(
        self,
        cache: Cache,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        components: bool = True,
        label: Callable[[str], PageLabel] | None = None,
        keys: str | os.PathLike[str] | None = None,
        in_clear: bool = False,
        buffered: int = BUFFERED_BATCHES,
        buffered_bytes: int = BUFFERED_BYTES,
        high_water: int = HIGH_WATER,
    ) -> None:
        for name, value in (("buffered", buffered), ("buffered_bytes", buffered_bytes), ("high_water", high_water)):
            if value.__class__ is not int or value < 1:
                raise InputError(f"{name} is a whole number from 1 up, got {value!r}")
        replay = replay or beside(endpoint)
        for address in (endpoint, replay):
            if keys is None and not in_clear and not is_local(address):
                raise InputError(
                    f"{shown_url(address)} can be reached from other machines, and without keys anybody there may read "
                    f"the tokens of all prompts: give keys=FILE (--events-keys), or in_clear=True (--events-in-clear)"
                )
        known = None if keys is None else read_keys(keys, "server")
        self._cache = cache
        self._journal = cache.journal()
        self._closed = False
        self._lost = True
        self._contents_after = 0.0
        try:
            self._sender = _Sender(
                cache.composition,
                endpoint,
                replay,
                known,
                topic,
                rank,
                components,
                label,
                buffered,
                buffered_bytes,
                high_water,
            )
        except BaseException:
            self._journal.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where subscribers connect to."""
        return self._sender.endpoint

    @property
    def replay_endpoint(self) -> str:
        return self._sender.replay_endpoint

    @property
    def counts(self) -> PublisherCounts:
        """The counts as they are now."""
        return attrs.evolve(self._sender.counts)

    @property
    def failed(self) -> Exception | None:
        """The last error of the publisher's thread. After one, everything is announced anew."""
        return self._sender.failed

    def poll(self) -> None:
        """Hand on the changes without waiting. To be called on the thread that drives the cache."""
        sender = self._sender
        if sender.handed is not None or self._closed:  # the thread is busy: the journal keeps what comes
            return
        if sender.broken:
            sender.broken = False
            self._lost = True
        if self._lost or self._journal.missing:
            self._hand_everything()
            return
        changes = self._journal.take()
        if changes:
            sender.hand(_Changes(changes, False, self._base))

    def _hand_everything(self) -> None:
        began = time.monotonic()
        if began < self._contents_after:
            if not self._lost:  # subscribers are not left with what is old
                self._lost = True
                self._journal.take()
                self._sender.hand(_Changes([Change("cleared")], False, self._base))
            return
        self._journal.take()
        self._sender.hand(_Changes(self._cache.contents(), True, self._base))
        self._lost = False
        now = time.monotonic()
        self._contents_after = now + (now - began) / CONTENTS_SHARE

    @property
    def _base(self) -> str:
        identity = self._cache.identity
        return "" if identity is None else identity.namespace()

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until all changes were sent, for tests and tools. Return whether they were."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._closed:
            self.poll()
            sender = self._sender
            if sender.handed is None and not (sender.broken or self._lost or self._journal.missing):
                return True
            time.sleep(0.001)
        return False

    def close(self, seconds: float = 1.0) -> None:
        """Send the batches that still wait, for ``seconds`` at most, and end. A second call does nothing."""
        if self._closed:
            return
        self.flush(seconds)
        self._closed = True
        self._journal.close()
        self._sender.close(seconds)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class ReplayBuffer:
    """The last batches with their numbers, bounded in number and in bytes."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._bytes += len(payload)
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]] | None:
        """Return the batches from ``number`` on. None: some of them are gone, or were never there."""
        if not self._kept or not self._kept[0][0] <= number <= self._kept[-1][0] + 1:
            return None
        return [self._kept[at] for at in range(number - self._kept[0][0], len(self._kept))]


@attrs.define
class _Replay:
    """What one client is being answered, and how far that is."""

    batches: list[tuple[bytes, bytes]]
    until: float
    at: int = 0


def bound_at(bound: zmq.Socket[bytes]) -> str:
    """Return the endpoint to which others connect."""
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)


class _Sender:
    """The publisher's thread: mirror, sockets and replays."""

    def __init__(
        self,
        composition: object,
        endpoint: str,
        replay: str,
        keys: SideKeys | None,
        topic: str,
        rank: int,
        components: bool,
        label: Callable[[str], PageLabel] | None,
        buffered: int,
        buffered_bytes: int,
        high_water: int,
    ) -> None:
        self.handed: _Changes | None = None
        """What the thread is to do next. It sets this to None when it is done."""
        self.broken = False
        self.failed: Exception | None = None
        self.counts = PublisherCounts()
        self._label = label
        self._base: str | None = None
        self._mirror = Mirror(composition, self._label_of, components)
        self._topic, self._rank = topic.encode(), rank
        self._buffer = ReplayBuffer(buffered, buffered_bytes)
        self._next = 0
        self._snapshot: tuple[int, bytes] | None = None
        self._replays: dict[bytes, _Replay] = {}
        self._answer_after = 0.0
        self._ending = False
        self._is_cleared = False
        """Whether subscribers have nothing; those of a publisher before this one may have anything."""
        self._subscriptions, self._high_water = 0, high_water
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys, self._authenticator = keys, None if keys is None else keys.authenticator(self._context)
        try:
            self._pub = self._bound(zmq.XPUB, endpoint, zmq.SNDHWM, high_water)
            self.endpoint = bound_at(self._pub)
            self._router = self._bound(zmq.ROUTER, replay, zmq.RCVHWM, REPLAYS_WAITING)
            self._router.set(zmq.SNDHWM, 2 * REPLAY_SLICE)
            self._router.set(zmq.ROUTER_MANDATORY, 1)  # what a client does not read is not lost without a word
            self.replay_endpoint = bound_at(self._router)
        except BaseException:
            self._close()
            raise
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._thread = threading.Thread(target=self.run, name="prefixloom-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str, limit: int, most: int) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.set(zmq.RCVHWM, REPLAYS_WAITING)
        bound.set(limit, most)
        bound.set(zmq.MAXMSGSIZE, LONGEST_REQUEST)
        if self._keys is not None:
            bound.curve_publickey, bound.curve_secretkey = self._keys.public, self._keys.secret
            bound.curve_server = True
        bound.set(zmq.IPV6, is_ipv6(endpoint))
        bound.set(zmq.LINGER, 0)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            bound.close()
            raise PrefixloomError(f"events cannot be published at {shown_url(endpoint)}: {error}") from error
        return bound

    def _close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _label_of(self, namespace: str) -> PageLabel:
        if self._label is not None:
            return self._label(namespace)
        base = self._base or ""
        if namespace == base:
            return PageLabel()
        return PageLabel(namespace[len(base) :] if namespace.startswith(base) else namespace)

    # ------------------------------------------------------------ from the cache's thread
    def hand(self, changes: _Changes) -> None:
        self.handed = changes
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so the thread is woken anyway; or the thread has ended
            self._wake.send(b".")

    def close(self, seconds: float) -> None:
        self._ending = True
        self._wake_up()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("the publisher of events did not end within %s seconds", seconds)

    # ------------------------------------------------------------ the thread
    def run(self) -> None:
        counts = self.counts
        try:
            while not self._ending or self.handed is not None:
                self._sleep()
                began = time.thread_time()
                handed = self.handed
                try:
                    self._hear_subscribers()
                    if handed is not None:
                        self._announce(handed)
                    self._answer()
                except Exception as error:
                    self._fail(error, handed)
                counts.seconds += time.thread_time() - began
        finally:
            self._close()
            self._woken.close()
            self._wake.close()

    def _sleep(self) -> None:
        """Wait for changes, for requests, or until the next slice of a replay may be sent."""
        pause = self._answer_after - time.monotonic()
        waits: list[tuple[Any, int]] = [(self._woken, zmq.POLLIN)]
        if pause <= 0:
            pause = REPLAY_RETRY if self._replays else IDLE_SECONDS
            waits.append((self._router, zmq.POLLIN))
        zmq.zmq_poll(waits, max(1, int(pause * 1000)))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(64)

    def _hear_subscribers(self) -> None:
        """Count subscriptions. If there are too many, open the socket anew: subscribers connect again, and see a gap.

        ZeroMQ does not say whose they are.
        """
        while int(self._pub.get(zmq.EVENTS)) & zmq.POLLIN:
            told = self._pub.recv_multipart(zmq.DONTWAIT)[0][:1]
            self._subscriptions += (told == b"\1") - (told == b"\0")
        if self._subscriptions <= MOST_SUBSCRIPTIONS:
            return
        if not self.counts.dropped:
            log.warning("subscribers have more than %d topics together: all are dropped", MOST_SUBSCRIPTIONS)
        self.counts.dropped += 1
        self._pub.close()
        self._subscriptions, until = 0, time.monotonic() + REBIND_SECONDS
        while self._pub.closed:
            try:
                self._pub = self._bound(zmq.XPUB, self.endpoint, zmq.SNDHWM, self._high_water)
            except PrefixloomError:  # the system still closes the old socket
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _fail(self, error: Exception, handed: _Changes | None) -> None:
        """Continue after an error, and announce everything anew: no error here may reach the engine."""
        if self.failed is None:
            log.exception("the publisher of events failed, and begins again")
        self.failed = error
        self._replays.clear()
        with contextlib.suppress(zmq.ZMQError):
            self._clear()
        if self.handed is handed:  # else ``poll`` has handed in more, since the error was in an answer
            self.handed = None

    def _clear(self) -> None:
        """Make subscribers forget all until it is announced anew: later, if an error stays or it is too early."""
        self._mirror.begin_again()
        self.broken = True
        if not self._is_cleared:
            self._is_cleared = True
            self._send(EventBatch(time.time(), [AllBlocksCleared()], self._rank))

    def _announce(self, handed: _Changes) -> None:
        """Follow the changes that were handed in, and send their events."""
        if handed.anew:
            self._base = handed.base
            self._mirror.begin_again()
            self.counts.restarts += 1
        elif handed.base != self._base:  # names have changed: everything is announced by its new one
            self._base = handed.base
            self._clear()
        if handed.anew or not self.broken:  # else these changes follow what was forgotten
            events = self._mirror.apply(handed.changes)
            if events:
                self._send(EventBatch(time.time(), events, self._rank))
                self._is_cleared = False
        self.handed = None

    def _send(self, batch: EventBatch) -> None:
        payload = encode_batch(batch)
        number = self._next
        self._next += 1
        self._buffer.add(number, payload)
        self._snapshot = None
        try:
            self._pub.send_multipart(frames_of(self._topic, number, payload), zmq.DONTWAIT, copy=len(payload) < 1 << 16)
        except zmq.Again:
            self.counts.unsent += 1
        counts = self.counts
        counts.batches += 1
        counts.events += len(batch.events)
        counts.sent_bytes += len(payload)

    # ------------------------------------------------------------ those who missed something
    def _answer(self) -> None:
        """Take requests and send a slice of each replay, for no more than a small share of time."""
        began = time.monotonic()
        if began < self._answer_after:
            return
        asked = 0
        while asked < REPLAYS_WAITING and int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            self._ask(self._router.recv_multipart(zmq.DONTWAIT))
            asked += 1
        sent = 0
        for client, replay in list(self._replays.items()):
            while sent < REPLAY_SLICE and replay.at <= len(replay.batches):
                ends = replay.at == len(replay.batches)
                number, payload = (END_OF_REPLAY, b"") if ends else replay.batches[replay.at]
                try:
                    self._router.send_multipart((client, b"", self._topic, number, payload), zmq.DONTWAIT)
                except zmq.Again:  # it does not read
                    if began < replay.until:
                        break
                    replay.at = len(replay.batches)
                except zmq.ZMQError:  # it has gone
                    replay.at = len(replay.batches)
                else:
                    replay.until = began + REPLAY_PATIENCE
                    self.counts.replayed += not ends
                replay.at += 1
                sent += 1
            if replay.at > len(replay.batches):
                del self._replays[client]
        if asked or sent:
            now = time.monotonic()
            self._answer_after = now + (now - began) / REPLAY_SHARE

    def _ask(self, frames: list[bytes]) -> None:
        """Begin to answer a request: ``[client, b"", the first number that is wanted]``."""
        client = frames[0]
        if len(frames) != 3 or len(frames[2]) != 8 or client in self._replays or len(self._replays) >= REPLAYS_WAITING:
            self.counts.refused += 1
            return
        answers = self._buffer.since(int.from_bytes(frames[2], "big"))
        if answers is None:
            answers = self._everything()
        batches = [(sequence_bytes(number), payload) for number, payload in answers]
        self._replays[client] = _Replay(batches, time.monotonic() + REPLAY_PATIENCE)
        self.counts.replays += 1

    def _everything(self) -> list[tuple[int, bytes]]:
        """Return one batch with all pages, numbered as the last batch that was sent; none before the first."""
        if not self._next:
            return []
        if self._snapshot is None:
            batch = EventBatch(time.time(), self._mirror.snapshot(), self._rank)
            self._snapshot = (self._next - 1, encode_batch(batch))
            self.counts.snapshots += 1
        return [self._snapshot]
