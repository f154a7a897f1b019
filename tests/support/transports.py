"""Transports for tests: pairs of each kind, and peers that are not honest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache as remembered
from pathlib import Path
from typing import Any

import attrs

from prefixloom import Cache
from prefixloom.connections import write_keys
from prefixloom_engine import Answer, Engine, Request
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer, in_process_pair
from prefixloom_engine.disaggregation.addresses import open_transport
from prefixloom_engine.disaggregation.messages import greeting
from prefixloom_engine.disaggregation.transport import (
    ANSWER,
    ASK,
    CAME,
    HELLO,
    PART,
    PREFILL,
    MoveFailed,
    OfferedMemory,
    PeerGone,
    PeerMessage,
    Transport,
)
from tests.support.engines import cache_for, model, nothing_left

Frames = Sequence[Any]
Sent = tuple[bytes, Frames]
"""A message without its number: kind and frames."""


@contextmanager
def pair(kind: str, folder: Path) -> Iterator[tuple[Transport, Transport]]:
    """The two sides, connected: of ``kind`` "in process", "zmq", or "zmq with keys"."""
    if kind == "in process":
        prefill, decode = in_process_pair()
        ends: tuple[Transport, Transport] = (prefill, decode)
    else:
        keys = folder / "keys" if "keys" in kind else None
        if keys is not None and not keys.exists():
            write_keys(keys)
        bound = open_transport("tcp://127.0.0.1:0", "server", keys)
        ends = (bound, open_transport(bound.address, "client", keys))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def all_of(end: Transport, count: int, seconds: float = 30.0) -> list[PeerMessage]:
    """The next ``count`` messages. Fewer, if so much time is over."""
    found, until = list[PeerMessage](), time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found += end.receive(0.02)
    return found


def introduced(prefill: Transport, decode: Transport) -> bytes:
    """Wait until the decode side is connected, and return its name on the other side."""
    assert [message.kind for message in all_of(decode, 1)] == [CAME]
    assert decode.send(PREFILL, HELLO, 0, [b"hello"])
    (message,) = all_of(prefill, 1)
    return message.peer


class Meddling:
    """A transport of which a test changes what is received: ``change`` gives the messages in place of each."""

    def __init__(self, honest: Transport, change: Callable[[PeerMessage], Sequence[PeerMessage]]) -> None:
        self.honest, self.change, self.address = honest, change, honest.address

    def send(self, peer: bytes, kind: bytes, number: int, frames: Frames = ()) -> bool:
        return self.honest.send(peer, kind, number, frames)

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        return [each for message in self.honest.receive(seconds) for each in self.change(message)]

    def close(self) -> None:
        self.honest.close()


class Impostor:
    """A prefill process that greets honestly, and gives each question what ``answer`` returns, turn by turn.

    ``seen``: kind and number of each message that came
    """

    def __init__(self, end: Transport, answer: Callable[[int], Sequence[Sent]] = lambda number: []) -> None:
        self.end, self.answer, self.hello = end, answer, honest_greeting()
        self.waiting: list[tuple[bytes, int, Sent]] = []
        self.seen: list[tuple[bytes, int]] = []

    def turn(self, most: int = 1_000_000) -> None:
        """Take what has come, and send at most so many messages of those that wait."""
        for message in self.end.receive():
            self.seen.append((message.kind, message.number))
            if message.kind == HELLO:
                self.waiting.append((message.peer, 0, (HELLO, [self.hello])))
            if message.kind == ASK:
                self.waiting += [(message.peer, message.number, each) for each in self.answer(message.number)]
        while self.waiting and most:
            peer, number, (kind, frames) = self.waiting[0]
            try:
                if not self.end.send(peer, kind, number, frames):
                    return
            except PeerGone:
                pass
            self.waiting.pop(0)
            most -= 1

    def asked(self, kind: bytes = ASK) -> list[int]:
        """The numbers of the questions, or of messages of another kind, that have come so far."""
        self.turn()
        return [number for each, number in self.seen if each == kind]


@remembered
def honest_greeting() -> bytes:
    with Engine(model(), cache_for(model())) as engine:
        return greeting(engine)


def greeted(decode: DecodeEngine, turn: Callable[[], object], seconds: float = 30.0) -> bool:
    """Whether the two have greeted each other, where one thread drives both."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        turn()
        if decode.connect(0.02):
            return True
    return False


def served_by(decode: DecodeEngine, turn: Callable[[], object], requests: Sequence[Request]) -> list[list[int]]:
    """The answers to requests, where ``turn`` is a turn of the other side."""
    answers = [decode.add(request) for request in requests]
    while not all(each.done for each in answers):
        turn()
        decode.step()
    assert [each.error for each in answers if each.error is not None] == []
    return [each.tokens for each in answers]


@attrs.define
class Two:
    """A prefill server and a decode engine, which one thread drives in turns."""

    server: PrefillServer
    decode: DecodeEngine

    def turn(self) -> None:
        self.server.serve_once()
        self.decode.step()

    def until(self, reached: Callable[[], object], seconds: float = 30.0) -> None:
        """Turn until something is so."""
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, "it never comes to that"
            self.turn()

    def answer(self, *requests: Request) -> list[Answer]:
        answers = [self.decode.add(request) for request in requests]
        self.until(lambda: all(each.done for each in answers), 120.0)
        assert [each.error for each in answers if each.error is not None] == []
        return answers

    def tokens(self, *requests: Request) -> list[list[int]]:
        return [each.tokens for each in self.answer(*requests)]


@contextmanager
def two(
    ends: tuple[Transport, Transport] | None = None,
    it: Any = None,
    *,
    theirs: Any = None,
    cache: Cache | None = None,
    make: Callable[[Any], Cache] = cache_for,
    engine: Mapping[str, Any] = {},
    prefill: Mapping[str, Any] = {},
    server: Mapping[str, Any] = {},
    agree: bool = True,
    **decode: Any,
) -> Iterator[Two]:
    """A prefill server and a decode engine that have greeted each other; of both nothing is left in the end.

    ``it``, ``theirs``      the models of the decode engine and of the server
    ``cache``, ``make``     the cache of the decode engine, and what makes one of a model
    ``engine``, ``prefill``  options of the engines of the two; ``server`` and further ones of what is around them
    """
    it = it or model()
    theirs = theirs or it
    one, other = ends or in_process_pair()
    serving = PrefillServer(Engine(theirs, make(theirs), **{"chunk": 128, **prefill}), one, **server)
    cache = cache or make(it)
    with DecodeEngine(Engine(it, cache, **{"chunk": 128, **engine}), other, **decode) as decoding:
        made = Two(serving, decoding)
        assert not agree or greeted(decoding, serving.serve_once)
        yield made
    serving.close()
    for each in (cache, serving.engine.cache):
        nothing_left(each)


@contextmanager
def impostors(
    *ends: str | tuple[Transport, Transport],
    answer: Callable[[int], Sequence[Sent]] = lambda number: [],
    cache: Cache | None = None,
    **options: Any,
) -> Iterator[tuple[DecodeEngine, list[Impostor]]]:
    """A decode engine, and prefill processes that greet and give each question ``answer``; nothing is left of it.

    ``ends``: names of processes in this one, or pairs
    """
    pairs = [in_process_pair(each) if isinstance(each, str) else each for each in ends]
    others = [Impostor(prefill, answer) for prefill, _ in pairs]
    cache = cache or cache_for(model())
    with DecodeEngine(Engine(model(), cache), [end for _, end in pairs], **options) as decode:
        assert greeted(decode, lambda: [each.turn() for each in others])
        yield decode, others
    nothing_left(cache)


def honest_answer(request: Request, it: Any = None) -> list[Sent]:
    """What an honest prefill process sends for a prompt of which nothing is there yet."""
    prefill, decode = in_process_pair()
    recording = Recording(decode)
    with two((prefill, recording), it) as made:
        made.tokens(request)
    return recording.told


class FakeTime:
    """Time that a test lets pass, besides a little at each look, in place of the module ``time``."""

    now = 1000.0

    def monotonic(self) -> float:
        self.now += 0.004
        return self.now


class Recording(Meddling):
    """A transport that keeps the messages of answers as they come."""

    def __init__(self, honest: Transport) -> None:
        super().__init__(honest, self._keep)
        self.told: list[Sent] = []

    def _keep(self, message: PeerMessage) -> Sequence[PeerMessage]:
        if message.kind in (ANSWER, PART):
            self.told.append((message.kind, [bytes(each) for each in message.frames]))
        return [message]


class LocalMover:
    """A mover between two engines of one process, of which a test says what goes wrong.

    ``polls``    how often a fetch is asked before its content is here
    ``fault``    "fetch" or "poll": where it fails; "damage": one bit is flipped
    ``offered``  what the prefill process has offered, by ticket; ``landed``: fetches that were not given back
    """

    def __init__(self, name: str = "local", room: int = 1 << 30, polls: int = 2, fault: str = "") -> None:
        self.name, self.room, self.polls, self.fault = name, room, polls, fault
        self.offered: dict[bytes, bytearray] = {}
        self.landed = self.fetched = self.offers = 0

    def offer(self, size: int) -> OfferedMemory | None:
        if size > self.room:
            return None
        self.offers += 1
        ticket, memory = b"%d" % self.offers, bytearray(size)
        self.offered[ticket] = memory
        return OfferedMemory(ticket, memoryview(memory))

    def release(self, ticket: bytes) -> None:
        del self.offered[ticket]

    def fetch(self, ticket: bytes, size: int) -> LocalLanding:
        if self.fault == "fetch" or len(self.offered[ticket]) != size:
            raise MoveFailed("it cannot be fetched")
        self.fetched += 1
        self.landed += 1
        return LocalLanding(self, self.offered[ticket])

    def close(self) -> None:
        pass


class LocalLanding:
    def __init__(self, mover: LocalMover, content: bytearray) -> None:
        self._mover, self._content, self._left, self._open = mover, bytearray(content), mover.polls, True

    def poll(self) -> memoryview | None:
        self._left -= 1
        if self._left > 0:
            return None
        if self._mover.fault == "poll":
            raise MoveFailed("it was lost on its way")
        if self._mover.fault == "damage":
            self._content[len(self._content) // 2] ^= 1
        return memoryview(self._content)

    def close(self) -> None:
        self._mover.landed -= self._open
        self._open = False
