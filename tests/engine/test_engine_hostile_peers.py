"""What a prefill and a decode process make of peers that are not honest, slow or silent."""

from __future__ import annotations

import json
import random
import socket
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest

from prefixloom import Cache, ProtocolError
from prefixloom.storage import HEADER_BYTES, RecordHeader, decode_header
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.disaggregation import (
    PrefillServer,
    arrival,
    decode_engine,
    in_process_pair,
    prefill_peer,
    prefill_server,
)
from prefixloom_engine.disaggregation.messages import Question, encode_question
from prefixloom_engine.disaggregation.transport import (
    ANSWER,
    ASK,
    BUSY,
    DROP,
    FETCHED,
    HELLO,
    KINDS,
    OWED,
    PART,
    PREFILL,
    REFUSED,
    PeerMessage,
    Transport,
)
from tests.support.engines import CAPACITY, cache_for, model, nothing_left, plain, prompt
from tests.support.sampling import slow
from tests.support.transports import (
    FakeTime,
    LocalMover,
    Meddling,
    Sent,
    all_of,
    honest_answer,
    impostors,
    introduced,
    pair,
    served_by,
    two,
)

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
ASKED = Request(prompt(1, 150), 4)


@pytest.fixture(params=["in process", "zmq"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    with pair(request.param, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def honest(request: pytest.FixtureRequest) -> list[Sent]:
    """What an honest prefill process answers to ``ASKED``."""
    return honest_answer(ASKED)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    for module in (decode_engine, prefill_peer, prefill_server):
        monkeypatch.setattr(module, "time", made)
    return made


def handed_over(*answers: Sequence[Sent], until: Callable[[], object] = lambda: None) -> list[bool]:
    """Of each of these answers to ``ASKED``: whether it was taken. Whatever comes, the tokens are right."""
    told: list[Sequence[Sent]] = []
    taken = []
    with impostors("it", answer=lambda number: told[-1], longest=100.0) as (decode, (other,)):
        for each in answers:
            told.append(each)
            before, computed = decode.handed_over, decode.engine.counts.prefilled

            def turn() -> None:
                other.turn()
                until()

            assert served_by(decode, turn, [ASKED]) == plain(model(), [ASKED])
            taken.append(decode.handed_over > before)
            assert decode.engine.counts.prefilled - computed == (0 if taken[-1] else 150)
            other.waiting.clear()
            decode.engine.cache.flush()
    return taken


def with_head(honest: Sequence[Sent], **fields: Any) -> list[Sent]:
    """The honest answer with other fields in its head, and a checksum that fits."""
    (kind, (head, headers)), *rest = honest
    said = json.dumps({**json.loads(head[4:]), **fields}).encode()
    return [(kind, [struct.pack("<I", zlib.crc32(said)) + said, headers]), *rest]


# ---------------------------------------------------------------- movers


@pytest.mark.parametrize(
    ("options", "moved", "handed"),
    [
        ({}, 4, 4), ({"polls": 50}, 4, 4), ({"room": 0}, 0, 4), ({"fault": "damage"}, 4, 0), ({"fault": "fetch"}, 0, 0),
        ({"fault": "poll"}, 4, 0), ({"polls": 1 << 30}, 4, 0),
    ],
    ids=["at once", "late", "no room", "damaged", "cannot be fetched", "lost", "never"],
)  # fmt: skip
def test_answers_are_right_and_nothing_is_left_whatever_a_mover_does(
    options: dict[str, Any], moved: int, handed: int, clock: FakeTime
) -> None:
    mover, requests = LocalMover(**options), [Request(prompt(n, 150), 4) for n in range(4)]
    with two(server={"mover": mover}, mover=mover, longest=3) as both:
        answers = [both.decode.add(each) for each in requests]
        for _ in range(200):
            both.turn()
        clock.now += 4
        both.until(lambda: all(each.done for each in answers))
        assert [each.tokens for each in answers] == plain(model(), requests)
        both.until(lambda: not mover.offered)
        assert (mover.fetched, both.decode.handed_over, mover.landed) == (moved, handed, 0)


@pytest.mark.parametrize("name", ["local", "other"])
def test_content_is_offered_for_so_long_and_only_to_a_mover_of_the_same_kind(name: str, clock: FakeTime) -> None:
    mover, (prefill, decode) = LocalMover(), in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill, mover=mover, patience=3)
    assert decode.send(PREFILL, ASK, 1, encode_question(Question(ASKED, 0, model().identity, name), server.cache))
    kinds = [each.kind for each in came(server, decode, 1 + (name == "other"), (ANSWER, PART))]
    assert kinds == ([ANSWER] if name == "local" else [ANSWER, PART])
    assert len(mover.offered) == (name == "local")
    clock.now += 4
    server.serve_once()
    assert not mover.offered
    server.close()


# ---------------------------------------------------------------- a prefill process that is not honest


WRONG_HEADS: list[dict[str, Any]] = [
    {"have": "x"}, {"have": None}, {"have": -1}, {"have": 16}, {"have": 150}, {"end": 149}, {"end": "x"},
    {"boundary": None}, {"boundary": 100}, {"boundary": 4000}, {"boundary": -5}, {"boundary": 0}, {"token": -1},
    {"token": 1.5}, {"token": 10**6}, {"token": True}, {"logprob": None}, {"ticket": 5}, {"ticket": "ab"},
    {"more": 1}, {"have": 1e999}, {"hit": -1}, {"hit": 150}, {"hit": True},
]  # fmt: skip


def test_honest_answer_is_taken_and_one_with_a_wrong_field_in_its_head_costs_a_recompute(
    honest: list[Sent], caplog: pytest.LogCaptureFixture
) -> None:
    taken = handed_over(honest, *(with_head(honest, **fields) for fields in WRONG_HEADS), honest)
    assert taken == [True, *[False] * len(WRONG_HEADS), True]
    assert caplog.text.count("what came of it cannot be used") == len(WRONG_HEADS)


def test_content_of_another_question_or_model_costs_a_recompute() -> None:
    others = [
        honest_answer(Request(prompt(2, 150), 4)),
        honest_answer(Request(ASKED.tokens, 4, namespace="tenant")),
        honest_answer(Request(ASKED.tokens, 4, temperature=5.0, seed=2)),
        honest_answer(ASKED, ThreeWay("tiny", dtype="float64", seed=1)),
        honest_answer(ASKED, ThreeWay("tiny", dtype="float32")),
    ]
    assert handed_over(*others) == [False] * 5


def test_answer_with_a_flipped_bit_costs_a_recompute(honest: list[Sent], clock: FakeTime) -> None:
    """In each of its frames, in each digit of its head, and anywhere in its content."""
    rng, spoiled = random.Random(1), []
    sizes = [(m, f, len(frame)) for m, (_, frames) in enumerate(honest) for f, frame in enumerate(frames)]
    places = [
        (m, f, rng.randrange(8 * size)) for m, f, size in [*sizes, *rng.choices(sizes, [s for *_, s in sizes], k=9)]
    ]
    head = honest[0][1][0]
    places += [(0, 0, 8 * at) for at in range(len(head)) if at < 4 or head[at : at + 1].isdigit()]
    for m, f, bit in places:
        sent = [(kind, [bytearray(frame) for frame in frames]) for kind, frames in honest]
        sent[m][1][f][bit // 8] ^= 1 << bit % 8
        spoiled.append(sent)

    def later() -> None:  # a part of another offset is refused, and what lacks is awaited
        clock.now += 60

    assert handed_over(*spoiled, until=later) == [False] * len(places)


def test_parts_that_lack_come_twice_or_in_another_order_cost_a_recompute(honest: list[Sent], clock: FakeTime) -> None:
    answer, part = honest[0], honest[1]
    offset, content = part[1]
    half = len(content) // 2
    first, second = (PART, [offset, content[:half]]), (PART, [struct.pack("<Q", half), content[half:]])
    wrong: list[list[Sent]] = [
        [answer, second, first], [answer, first, first, second], [answer, first], [first, second], [part, answer],
        [answer, (PART, [offset, content + b"x"])], [answer, (PART, [offset, b""])], [answer, (PART, [content])],
        [answer, answer, part], [answer, (PART, [])], [(ANSWER, [answer[1][0]]), part], [(ANSWER, []), part],
    ]  # fmt: skip

    def later() -> None:
        clock.now += 60

    taken = handed_over([answer, first, second], *wrong, until=later)
    assert taken == [True, *[False] * len(wrong)], "in two parts in their order it is the same"


@pytest.mark.parametrize("count", [300, slow(20_000)])
def test_prefill_process_that_sends_anything_changes_no_answer(
    ends: tuple[Transport, Transport], honest: list[Sent], count: int
) -> None:
    rng, left = random.Random(count), [count]
    requests = [ASKED, Request(prompt(4, 90), 5), Request(prompt(5, 200), 3)]

    def anything(number: int) -> Sequence[Sent]:
        sent = []
        for _ in range(rng.randrange(12)):
            left[0] -= 1
            kind, frames = rng.choice(honest)
            if rng.random() < 0.3:
                kind = rng.choice(sorted(KINDS - {HELLO}))
            sent.append((kind, [changed(rng, bytes(frame)) for frame in frames[: rng.randrange(3)]]))
        return [*sent, (REFUSED, [rng.randbytes(rng.randrange(20))])] if rng.random() < 0.7 else sent

    with impostors(ends, answer=anything, longest=0.2) as (decode, (other,)):
        while left[0] > 0:
            assert served_by(decode, other.turn, requests) == plain(model(), requests)
            decode.cache.flush()


def changed(rng: random.Random, frame: bytes) -> bytes:
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(300))
    cut = bytearray(frame[: rng.randrange(len(frame) + 1)] if rng.random() < 0.5 else frame)
    for _ in range(rng.randrange(3) if cut else 0):
        cut[rng.randrange(len(cut))] = rng.randrange(256)
    return bytes(cut)


def test_process_that_greets_with_something_else_is_never_asked(caplog: pytest.LogCaptureFixture) -> None:
    for hello in (b"", b"not json", b"[]", b"7", b'{"identity": 5}', b"[" * 60_000, bytes(1 << 20)):
        caplog.clear()
        with impostors("it") as (decode, (other,)):
            for _ in range(3):
                other.waiting = [(b"decode", 0, (HELLO, [hello]))]
                other.turn()
                assert served_by(decode, other.turn, [ASKED]) == plain(model(), [ASKED])
            assert other.asked() == []
        assert caplog.text.count("says something else than this protocol") == 1


def test_process_that_says_for_ever_that_it_is_busy_costs_a_recompute(clock: FakeTime) -> None:
    with impostors("it", answer=lambda number: [(BUSY, [])] * 100_000, patience=30, longest=40) as (decode, (other,)):

        def turn() -> None:
            other.turn(1)
            clock.now += 1

        assert served_by(decode, turn, [ASKED]) == plain(model(), [ASKED])
        assert (decode.handed_over, decode.lost, clock.now > 1040) == (0, 1, True)


def test_silent_process_is_not_asked_again_until_it_says_something(
    honest: list[Sent], clock: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    with impostors("it", answer=lambda number: honest, patience=5) as (decode, (other,)):

        def silent() -> None:
            clock.now += 1

        for _ in range(2):
            assert served_by(decode, silent, [ASKED]) == plain(model(), [ASKED])
            decode.cache.flush()
            assert (decode.handed_over, decode.lost, decode.peers) == (0, 1, {"it": "silent"})
        assert "it has said nothing for 5 s" in caplog.text
        while decode.peers != {"it": "agreed"}:
            other.turn()
            decode.step()
        assert other.asked() == [1]
        assert served_by(decode, other.turn, [ASKED]) == plain(model(), [ASKED])
        assert (decode.handed_over, decode.lost) == (1, 1)


def test_answer_that_takes_long_to_come_over_is_no_silence(honest: list[Sent], clock: FakeTime) -> None:
    answer, (_, (_, content)) = honest
    step = len(content) // 12 + 1
    parts = [(PART, [struct.pack("<Q", at), content[at : at + step]]) for at in range(0, len(content), step)]
    with impostors("it", answer=lambda number: [answer, *parts], patience=3) as (decode, (other,)):

        def turn() -> None:
            other.turn(1)
            clock.now += 2

        assert served_by(decode, turn, [ASKED]) == plain(model(), [ASKED])
        assert (decode.handed_over, decode.lost) == (1, 0)


class Watching(Meddling):
    """A transport that notes how long it was told to wait."""

    def __init__(self, honest: Transport) -> None:
        super().__init__(honest, lambda message: [message])
        self.waited: list[float] = []

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        self.waited.append(seconds)
        return super().receive(seconds)


def test_engine_that_decodes_never_waits_for_a_prefill_process_that_hangs() -> None:
    prefill, end = in_process_pair()
    watching = Watching(end)
    with impostors((prefill, watching), patience=30) as (decode, _):
        hung = decode.add(ASKED)
        begun = [decode.add(Request(prompt(n, 20), 30)) for n in range(3)]
        watching.waited.clear()
        steps = 0
        while not all(each.done for each in begun):
            decode.step()
            steps += 1
        assert steps > 20 and watching.waited == [0.0] * steps, "neither a step nor the prompts that came waited"
        assert decode.awaited == 1 and not hung.done


# ---------------------------------------------------------------- decode processes that are not honest


@pytest.fixture
def server(ends: tuple[Transport, Transport]) -> Iterator[PrefillServer]:
    made = PrefillServer(Engine(model(), cache_for(model(), CAPACITY), chunk=128), ends[0], patience=0.5, most=20)
    assert all_of(ends[1], 1)
    yield made
    made.close()
    nothing_left(made.engine.cache)


@pytest.fixture
def local() -> Iterator[tuple[PrefillServer, Transport]]:
    """A server in this process that computes little in a step, and the end of who asks it."""
    prefill, end = in_process_pair()
    made = PrefillServer(Engine(model(), cache_for(model()), chunk=16), prefill, most=20)
    assert all_of(end, 1)
    yield made, end
    made.close()
    nothing_left(made.engine.cache)


def question(seed: int, length: int = 40) -> list[bytes]:
    return encode_question(Question(Request(prompt(seed, length), 1), 0, model().identity), composed())


@remembered
def composed() -> Cache:
    """One cache, of which all questions tell what it keeps."""
    return cache_for(model())


def came(server: PrefillServer, end: Transport, count: int, kinds: Sequence[bytes] = (ANSWER, REFUSED)) -> list[Any]:
    """Drive the server until so many messages of these kinds have come."""
    found = list[PeerMessage]()
    for _ in range(3000):
        if len(found) >= count:
            break
        server.serve_once()
        found += [each for each in end.receive(0.001) if each.kind in kinds]
    return found


@pytest.mark.parametrize("count", [300, slow(20_000)])
def test_decode_process_that_sends_anything_harms_nobody(
    server: PrefillServer, ends: tuple[Transport, Transport], count: int
) -> None:
    rng, end, good = random.Random(count), ends[1], question(3, 150)
    for _ in range(count):
        frames = [changed(rng, frame) if rng.random() < 0.7 else frame for frame in good[: rng.randrange(1, 3)]]
        kind = ASK if rng.random() < 0.7 else rng.choice(sorted(KINDS))
        end.send(PREFILL, kind, rng.randrange(40), frames)
        server.serve_once()
        end.receive()
    for kind, number, frames in [*((DROP, number, []) for number in range(40)), (ASK, 1000, good)]:
        while not end.send(PREFILL, kind, number, frames):
            server.serve_once()
            end.receive()
    answers: set[tuple[bytes, int]] = set()
    while (ANSWER, 1000) not in answers:
        found = came(server, end, 1)
        assert found, "and who asks honestly is served"
        answers |= {(each.kind, each.number) for each in found}
    assert server.prompts == 0


def test_more_prompts_than_a_bounded_number_are_refused(local: tuple[PrefillServer, Transport]) -> None:
    server, end = local
    for number in range(35):
        assert end.send(PREFILL, ASK, number, question(number, 8))
    server.serve_once()
    assert server.prompts <= 20
    kinds = [each.kind for each in came(server, end, 35)]
    assert (kinds.count(ANSWER), kinds.count(REFUSED), server.prompts) == (20, 15, 0)


UNREADABLE = [
    [], [b"{}"], [b"not json}", b""], [b"7", b""], [b'{"have": 1e999}', b""], [b"[" * 60_000, b""],
    [b" " * 100_000, b""], [b"{}", b"abc"], [bytes((255, 254)), b""],
]  # fmt: skip
DISHONEST: list[dict[str, Any]] = [
    {"have": -1}, {"have": "x"}, {"have": 2**80}, {"seed": "x"}, {"identity": "other"}, {"format": "other"},
    {"max_tokens": 5}, {"temperature": -1}, {"namespace": 5}, {"mover": 7}, {"inputs": {}}, {"priority": None},
]  # fmt: skip


def test_question_that_is_unreadable_or_dishonest_is_refused(local: tuple[PrefillServer, Transport]) -> None:
    server, end = local
    asked, tokens = question(1)
    wrong = [[json.dumps({**json.loads(asked), **fields}).encode(), tokens] for fields in DISHONEST]
    for number, frames in enumerate([*UNREADABLE, *wrong]):
        assert end.send(PREFILL, ASK, number, frames)
        assert [(each.kind, each.number) for each in came(server, end, 1)] == [(REFUSED, number)], frames
    for kind in (DROP, FETCHED, PART, ANSWER, BUSY, REFUSED):
        assert end.send(PREFILL, kind, 5, [b"x"])
    server.serve_once()
    assert (server.prompts, [each for each in end.receive() if each.kind != BUSY]) == (0, [])


class Stubborn(Meddling):
    """A transport whose peer takes nothing from some time on."""

    takes = True

    def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
        return self.takes and super().send(peer, kind, number, frames)


def test_decode_process_that_takes_nothing_loses_its_prompts(clock: FakeTime) -> None:
    prefill, end = in_process_pair()
    stubborn = Stubborn(prefill, lambda message: [message])
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), stubborn, patience=5)
    for number in (1, 2, 3):
        assert end.send(PREFILL, ASK, number, question(number, 40 if number == 1 else 1900))
    stubborn.takes = False
    server.serve_once()
    assert server.prompts == 3
    while server.prompts:
        server.serve_once()
        clock.now += 0.5
    assert server.engine.counts.prefilled < 40 + 2 * 1900, "those that nobody takes are not computed to the end"
    stubborn.takes = True
    assert end.send(PREFILL, ASK, 9, question(9))
    assert [each.number for each in came(server, end, 1)] == [9]
    server.close()
    nothing_left(server.engine.cache)


def test_prompt_that_is_taken_back_is_not_computed(local: tuple[PrefillServer, Transport]) -> None:
    server, end = local
    assert end.send(PREFILL, ASK, 7, question(1, 1500))
    server.serve_once()
    assert server.prompts == 1
    for number in (8, 7):  # the first is no such prompt
        assert end.send(PREFILL, DROP, number)
    server.serve_once()
    assert (server.prompts, server.engine.load) == (0, (0, 0))
    assert {each.kind for each in end.receive()} <= {BUSY}


def test_decode_process_that_goes_leaves_nothing_behind(
    server: PrefillServer, ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_server, "BUSY_SECONDS", 0.0)
    for number in range(3):
        assert ends[1].send(PREFILL, ASK, number, question(number, 800))
    while server.prompts < 3:
        server.serve_once()
    ends[1].close()
    while server.prompts:
        server.serve_once()
    assert server.engine.counts.prefilled < 3 * 800, "they are not computed"


def test_connections_that_say_nothing_or_anything_cost_nobody_anything(tmp_path: Path) -> None:
    with pair("zmq", tmp_path) as ends:
        port = int(ends[0].address.rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for n, stranger in enumerate(strangers[:100]):
            stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", bytes(1000), random.Random(n).randbytes(3000))[n % 3])
        with two(ends) as both:
            assert both.tokens(ASKED) == plain(model(), [ASKED])
            assert both.decode.handed_over == 1
        for stranger in strangers:
            stranger.close()


# ---------------------------------------------------------------- slow peers, and what is forgotten


class Slow(Meddling):
    """A decode side that takes one message at a time, each of which takes it a while."""

    def __init__(self, honest: Transport, clock: FakeTime) -> None:
        super().__init__(honest, lambda message: [message])
        self.clock, self.waiting = clock, list[PeerMessage]()

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        self.waiting += [] if self.waiting else self.honest.receive(seconds)
        first, self.waiting = self.waiting[:1], self.waiting[1:]
        self.clock.now += 0.01 * len(first)
        return first


def test_decode_process_that_takes_little_and_steadily_is_served(
    clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "PART_BYTES", 64)
    prefill, end = in_process_pair()
    with two((prefill, Slow(end, clock)), server={"patience": 3}) as both:
        begun = clock.now
        assert both.tokens(ASKED) == plain(model(), [ASKED])
        assert (both.decode.handed_over, both.decode.lost) == (1, 0)
        assert clock.now > begun + 3, "it took longer than a peer may be stuck"


def test_prompts_that_a_prefill_process_has_forgotten_are_computed_while_it_serves_others(
    ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_server, "BUSY_SECONDS", 0.0)
    requests = [Request(prompt(n, 150), 4) for n in range(6)]
    with two(ends, patience=600, longest=600) as both:
        pending = [both.decode.add(each) for each in requests[:4]]
        while both.server.prompts < 4:
            both.server.serve_once()
        both.server.drop_peers()
        pending += [both.decode.add(each) for each in requests[4:]]
        both.until(lambda: all(each.done for each in pending))
        assert [each.tokens for each in pending] == plain(model(), requests)
        assert (both.decode.lost, both.decode.handed_over) == (4, 2)


@pytest.mark.parametrize(
    ("last", "owed", "lost"), [(1, [], 1), (0, [], 0), (1, [1], 0), (9, [2, 3], 1)], ids=str
)  # fmt: skip
def test_prompt_that_was_asked_after_the_last_question_that_came_is_not_missing(
    last: int, owed: list[int], lost: int
) -> None:
    told = b"".join(map(OWED.pack, (last, *owed)))
    with impostors("it", answer=lambda number: [(BUSY, [told])], longest=600) as (decode, (other,)):
        decode.add(ASKED)
        for _ in range(3):
            other.turn()
            decode.step()
        assert decode.lost == lost


def test_refusals_are_told_while_content_waits(
    ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each question it is said that it is refused, however much of other content a process has not taken."""
    monkeypatch.setattr(arrival, "PART_BYTES", 16)
    prefill, decode = ends
    introduced(prefill, decode)
    server = PrefillServer(Engine(model(), cache_for(model())), prefill, patience=600)
    assert decode.send(PREFILL, ASK, 1, question(1, 150))
    while server.prompts or not server.engine.counts.prefilled:
        server.serve_once(0.01)
    for number in range(2, 20):
        assert decode.send(PREFILL, ASK, number, [b"no question"])
    for _ in range(20):
        server.serve_once(0.01)
    told, parts = set[int](), 0
    for _ in range(3000):
        for message in decode.receive():
            parts += message.kind == PART
            told |= {message.number} if message.kind == REFUSED else set()
        if len(told) == 18:
            break
        server.serve_once(0.001)
    assert told == set(range(2, 20))
    assert parts * 16 < server.engine.cache.pool("full").buffers["k"][:, 0].nbytes, "they did not wait for the content"
    server.close()


def test_refusals_that_are_left_out_are_told_by_what_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_server, "BUSY_SECONDS", 1e9)
    prefill, end = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), prefill, most=2)
    assert end.send(PREFILL, ASK, 1, question(1, 1900))
    assert came(server, end, 1, [BUSY])
    for number in range(2, 12):
        assert end.send(PREFILL, ASK, number, [b"no question"])
    told = set[int]()
    while told != set(range(2, 12)):
        found = came(server, end, 1, [BUSY, REFUSED])
        assert found
        for message in found:
            if message.kind == REFUSED:
                told.add(message.number)
            else:
                last, *owed = (number for (number,) in OWED.iter_unpack(message.frames[0]))
                told.update(number for number in range(2, last + 1) if number not in owed)
    assert server.prompts == 1
    server.close()


def test_number_that_is_in_use_is_refused() -> None:
    mover, (prefill, decode) = LocalMover(), in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill, mover=mover, patience=600)
    asked = encode_question(Question(ASKED, 0, model().identity, "local"), server.engine.cache)
    kinds = []
    for _ in range(3):
        assert decode.send(PREFILL, ASK, 1, asked)
        kinds += [each.kind for each in came(server, decode, 1)]
    assert (kinds, len(mover.offered)) == ([ANSWER, REFUSED, REFUSED], 1)
    server.close()
    assert not mover.offered


def test_interrupt_while_a_question_is_sent_leaves_its_number_to_it() -> None:
    """What comes late of the interrupted one is not taken for the next."""
    numbers = list[int]()

    class Interrupted(Meddling):
        def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
            sent = super().send(peer, kind, number, frames)
            if kind == ASK:
                numbers.append(number)
                if len(numbers) == 1:
                    raise KeyboardInterrupt
            return sent

    prefill, end = in_process_pair()
    with two((prefill, Interrupted(end, lambda message: [message]))) as both:
        with pytest.raises(KeyboardInterrupt):
            both.decode.add(Request(ASKED.tokens, 4, temperature=5.0, seed=1))
        request = Request(ASKED.tokens, 4, temperature=5.0, seed=2)
        assert both.tokens(request) == plain(model(), [request])
        assert len(set(numbers)) == 2 and not both.decode.step()


def test_content_that_is_computed_or_waits_is_bounded_on_both_sides() -> None:
    requests = [Request(prompt(n, 150), 4) for n in range(6)]
    with two(server={"room": 1}) as both:
        assert both.tokens(*requests) == plain(model(), requests)
        assert 1 <= both.decode.handed_over < 6 and both.decode.lost == 0, "one at a time is served, whatever it needs"
        one = both.decode.received // both.decode.handed_over
    with two(room=2 * one) as both:
        for each in requests:
            both.decode.add(each)
        assert both.decode.awaited == 2


@pytest.mark.parametrize(("named", "used"), [("crc32", "crc32"), ("md5", "crc32"), (None, "crc32"), ("xxh3", "xxh3")])
def test_content_has_checksums_that_the_other_side_can_compute(named: Any, used: str) -> None:
    prefill, decode = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    asked = Question(ASKED, 0, model().identity, checksum=named)
    assert decode.send(PREFILL, ASK, 1, encode_question(asked, server.engine.cache))
    (found,) = came(server, decode, 1)
    header = decode_header(found.frames[1][:HEADER_BYTES])
    assert isinstance(header, RecordHeader) and header.checksum.algorithm == used
    server.close()


def test_closed_engine_takes_nothing_more_and_what_it_awaited_has_ended() -> None:
    with impostors("it") as (decode, _):
        pending = decode.add(ASKED)
        assert decode.awaited == 1
        for _ in range(2):
            decode.close()
        assert pending.done
        for call in (decode.step, lambda: decode.add(ASKED), lambda: decode.generate([ASKED]), decode.connect):
            with pytest.raises(ProtocolError, match="is closed"):
                call()
