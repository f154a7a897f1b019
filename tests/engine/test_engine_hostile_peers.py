"""What a prefill and a decode process make of peers that are not honest, slow or silent, over any transport."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixloom import ProtocolError
from prefixloom.storage import HEADER_BYTES, RecordHeader, decode_header
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer, arrival, in_process_pair, prefill_server
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
    Impostor,
    LocalMover,
    Meddling,
    Sent,
    all_of,
    greeted,
    honest_answer,
    introduced,
    pair,
    served_by,
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


def answered_by(
    ends: tuple[Transport, Transport], answer: Any, turns: int = 1_000_000, **options: Any
) -> tuple[DecodeEngine, Impostor]:
    """One request, answered right whatever the impostor says; the engine is closed, and nothing is left."""
    impostor = Impostor(ends[0], answer)
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), ends[1], **options) as decode:
        assert greeted(decode, impostor.turn)
        assert served_by(decode, lambda: impostor.turn(turns), [ASKED]) == plain(model(), [ASKED])
    nothing_left(cache)
    return decode, impostor


def with_head(honest: Sequence[Sent], **fields: Any) -> list[Sent]:
    """The honest answer with other fields in its head, and a checksum that fits."""
    (kind, (head, headers)), *rest = honest
    said = json.dumps({**json.loads(head[4:]), **fields}).encode()
    return [(kind, [struct.pack("<I", zlib.crc32(said)) + said, headers]), *rest]


# ---------------------------------------------------------------- movers


@pytest.mark.parametrize(
    ("options", "moved", "handed_over"),
    [
        ({}, 4, 4), ({"polls": 50}, 4, 4), ({"room": 0}, 0, 4), ({"fault": "damage"}, 4, 0), ({"fault": "fetch"}, 0, 0),
        ({"fault": "poll"}, 4, 0), ({"polls": 1 << 30}, 4, 0),
    ],
    ids=["at once", "late", "no room", "damaged", "cannot be fetched", "lost", "never"],
)  # fmt: skip
def test_whatever_a_mover_does_the_answers_are_right_and_it_has_nothing_left(
    ends: tuple[Transport, Transport], options: dict[str, Any], moved: int, handed_over: int
) -> None:
    mover, requests, cache = LocalMover(**options), [Request(prompt(n, 150), 4) for n in range(4)], cache_for(model())
    server = PrefillServer(Engine(model(), cache_for(model())), ends[0], mover=mover)
    with DecodeEngine(Engine(model(), cache), ends[1], mover=mover, longest=3) as decode:
        assert greeted(decode, server.serve_once)
        assert served_by(decode, server.serve_once, requests) == plain(model(), requests)
        while server.serve_once(0.02):
            pass
        assert (mover.fetched, decode.handed_over, mover.landed, mover.offered) == (moved, handed_over, 0, {})
    server.close()
    nothing_left(cache)


@pytest.mark.parametrize("name", ["local", "other"])
def test_content_that_nobody_fetches_is_kept_so_long_and_another_kind_of_mover_is_not_used(
    ends: tuple[Transport, Transport], name: str
) -> None:
    mover, (prefill, decode) = LocalMover(), ends
    peer = introduced(prefill, decode)
    server = PrefillServer(Engine(model(), cache_for(model())), prefill, mover=mover, patience=0.3)
    question = Question(ASKED, 0, model().identity, name)
    assert peer and decode.send(PREFILL, ASK, 1, encode_question(question, server.engine.cache))
    kinds: list[bytes] = []
    until = time.monotonic() + 30
    while ANSWER not in kinds and time.monotonic() < until:
        server.serve_once(0.02)
        kinds += [message.kind for message in decode.receive() if message.kind != BUSY]
    assert len(mover.offered) == (name == "local") and PART not in kinds[: kinds.index(ANSWER)]
    while mover.offered and time.monotonic() < until:
        server.serve_once(0.02)
    kinds += [message.kind for message in decode.receive(0.3)]
    assert not mover.offered and (PART in kinds) == (name == "other")
    server.close()


# ---------------------------------------------------------------- a prefill process that is not honest


def test_the_honest_answer_is_taken(ends: tuple[Transport, Transport], honest: list[Sent]) -> None:
    decode, _ = answered_by(ends, lambda number: honest)
    assert (decode.handed_over, decode.lost, decode.engine.counts.prefilled) == (1, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"have": "x"}, {"have": None}, {"have": -1}, {"have": 16}, {"have": 150}, {"end": 149}, {"end": "x"},
        {"boundary": None}, {"boundary": 100}, {"boundary": 4000}, {"boundary": -5}, {"boundary": 0}, {"token": -1},
        {"token": 1.5}, {"token": 10**6}, {"token": True}, {"logprob": None}, {"ticket": 5}, {"ticket": "ab"},
        {"more": 1}, {"have": 1e999}, {"hit": -1}, {"hit": 150}, {"hit": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_nobody_honest_hands_over_costs_a_recompute(
    fields: dict[str, Any], honest: list[Sent], caplog: pytest.LogCaptureFixture
) -> None:
    decode, impostor = answered_by(in_process_pair(), lambda number: with_head(honest, **fields))
    assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150)
    assert "what came of it cannot be used" in caplog.text
    impostor.turn()
    assert (DROP, 1) in impostor.seen, "and the other is told"


def test_content_of_another_prompt_weights_or_namespace_costs_a_recompute() -> None:
    others = [
        honest_answer(Request(prompt(2, 150), 4)),
        honest_answer(Request(ASKED.tokens, 4, namespace="tenant")),
        honest_answer(ASKED, ThreeWay("tiny", dtype="float64", seed=1)),
        honest_answer(ASKED, ThreeWay("tiny", dtype="float32")),
    ]
    for sent in others:
        decode, _ = answered_by(in_process_pair(), lambda number, sent=sent: sent)
        assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_of_which_any_bit_was_flipped_costs_a_recompute(honest: list[Sent], seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(m, f, len(frame)) for m, (_, frames) in enumerate(honest) for f, frame in enumerate(frames)]
    for m, f, size in [*sizes, *rng.choices(sizes, [each[2] for each in sizes], k=8)]:
        sent = [(kind, [bytearray(frame) for frame in frames]) for kind, frames in honest]
        bit = rng.randrange(8 * size)
        sent[m][1][f][bit // 8] ^= 1 << bit % 8
        decode, _ = answered_by(in_process_pair(), lambda number, sent=sent: sent, longest=1.0)
        assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150), (m, f, bit)


def test_a_head_of_which_any_digit_was_changed_costs_a_recompute(honest: list[Sent]) -> None:
    """Its numbers have no checksum besides that of the head."""
    (kind, (head, headers)), *rest = honest
    for at in (at for at in range(len(head)) if at < 4 or head[at : at + 1].isdigit()):
        bad = bytearray(head)
        bad[at] ^= 1
        decode, _ = answered_by(in_process_pair(), lambda number, bad=bad: [(kind, [bad, headers]), *rest])
        assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150), at


def test_parts_that_lack_come_twice_or_in_another_order_cost_a_recompute(honest: list[Sent]) -> None:
    answer, part = honest[0], honest[1]
    offset, content = part[1]
    half = len(content) // 2
    first, second = (PART, [offset, content[:half]]), (PART, [struct.pack("<Q", half), content[half:]])
    decode, _ = answered_by(in_process_pair(), lambda number: [answer, first, second])
    assert decode.handed_over == 1, "in two parts it is the same"
    for sent in (
        [answer, second, first], [answer, first, first, second], [answer, first], [first, second], [part, answer],
        [answer, (PART, [offset, content + b"x"])], [answer, (PART, [offset, b""])], [answer, (PART, [content])],
        [answer, answer, part], [answer, (PART, [])], [(ANSWER, [answer[1][0]]), part], [(ANSWER, []), part],
    ):  # fmt: skip
        decode, _ = answered_by(in_process_pair(), lambda number, sent=sent: sent, longest=0.5)
        assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150)


@pytest.mark.parametrize("count", [300, slow(20_000)])
def test_a_prefill_process_that_sends_anything_changes_no_answer(
    ends: tuple[Transport, Transport], honest: list[Sent], count: int
) -> None:
    rng = random.Random(count)
    cache = cache_for(model())
    requests = [ASKED, Request(prompt(4, 90), 5), Request(prompt(5, 200), 3)]
    right, left = plain(model(), requests), [count]

    def anything(number: int) -> Sequence[Sent]:
        sent = []
        for _ in range(rng.randrange(12)):
            left[0] -= 1
            kind, frames = rng.choice(honest)
            if rng.random() < 0.3:
                kind = rng.choice(sorted(KINDS - {HELLO}))
            sent.append((kind, [changed(rng, bytes(frame)) for frame in frames[: rng.randrange(3)]]))
        return [*sent, (REFUSED, [rng.randbytes(rng.randrange(20))])] if rng.random() < 0.5 else sent

    impostor = Impostor(ends[0], anything)
    with DecodeEngine(Engine(model(), cache), ends[1], longest=0.2) as decode:
        assert greeted(decode, impostor.turn)
        while left[0] > 0:
            assert served_by(decode, impostor.turn, requests) == right
            cache.flush()
    nothing_left(cache)


def changed(rng: random.Random, frame: bytes) -> bytes:
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(300))
    cut = bytearray(frame[: rng.randrange(len(frame) + 1)] if rng.random() < 0.5 else frame)
    for _ in range(rng.randrange(3) if cut else 0):
        cut[rng.randrange(len(cut))] = rng.randrange(256)
    return bytes(cut)


@pytest.mark.parametrize("hello", [b"", b"not json", b"[]", b"7", b'{"identity": 5}', b"[" * 60_000, bytes(1 << 20)])
def test_who_greets_with_something_else_is_never_asked(hello: bytes, caplog: pytest.LogCaptureFixture) -> None:
    ends = in_process_pair()
    impostor = Impostor(ends[0], lambda number: [])
    impostor.hello = hello
    with DecodeEngine(Engine(model(), cache_for(model())), ends[1]) as decode:
        for _ in range(3):
            impostor.turn()
            impostor.waiting = [(b"decode", 0, (HELLO, [hello]))]
            assert served_by(decode, impostor.turn, [ASKED]) == plain(model(), [ASKED])
        assert ASK not in {kind for kind, _ in impostor.seen}
    assert len([each for each in caplog.records if "says something else than this protocol" in each.message]) == 1


def test_a_prefill_process_that_says_for_ever_that_it_is_busy_costs_a_recompute() -> None:
    ends = in_process_pair()
    decode, _ = answered_by(ends, lambda number: [(BUSY, [])] * 100_000, turns=1, patience=30, longest=0.3)
    assert (decode.handed_over, decode.lost) == (0, 1)


def test_a_silent_prefill_process_is_not_asked_again_until_it_says_something(
    honest: list[Sent], caplog: pytest.LogCaptureFixture
) -> None:
    ends = in_process_pair()
    silent, cache = [True], cache_for(model())
    impostor = Impostor(ends[0], lambda number: honest)

    def turn() -> None:
        if not silent[0]:
            impostor.turn()

    with DecodeEngine(Engine(model(), cache), ends[1], patience=0.2) as decode:
        assert greeted(decode, impostor.turn)
        assert served_by(decode, turn, [ASKED]) == plain(model(), [ASKED])
        assert "it has said nothing for 0.2 s" in caplog.text
        cache.flush()
        impostor.turn(0)
        before = len(impostor.seen)
        assert served_by(decode, turn, [ASKED]) == plain(model(), [ASKED])
        assert (decode.handed_over, decode.lost) == (0, 1)
        impostor.turn(0)
        assert ASK not in {kind for kind, _ in impostor.seen[before:]}
        silent[0] = False
        assert greeted(decode, turn)
        cache.flush()
        assert served_by(decode, turn, [ASKED]) == plain(model(), [ASKED])
        assert (decode.handed_over, decode.lost) == (1, 1)
    nothing_left(cache)


def test_an_answer_that_takes_long_to_come_over_is_no_silence(honest: list[Sent]) -> None:
    answer, (_, (_, content)) = honest
    step = len(content) // 12 + 1
    parts = [(PART, [struct.pack("<Q", at), content[at : at + step]]) for at in range(0, len(content), step)]
    ends = in_process_pair()
    impostor = Impostor(ends[0], lambda number: [answer, *parts])
    cache = cache_for(model())

    def turn() -> None:
        impostor.turn(1)
        time.sleep(0.1)

    with DecodeEngine(Engine(model(), cache), ends[1], patience=0.8) as decode:
        assert greeted(decode, impostor.turn)
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


def test_while_there_is_something_to_decode_nobody_waits_for_a_prefill_process_that_hangs() -> None:
    ends = in_process_pair()
    impostor = Impostor(ends[0], lambda number: [])
    watching, cache = Watching(ends[1]), cache_for(model())
    with DecodeEngine(Engine(model(), cache), watching, patience=30) as decode:
        assert greeted(decode, impostor.turn)
        hung = decode.add(ASKED)
        assert decode.awaited == 1 and not hung.done
        begun = [decode.add(Request(prompt(n, 20), 30)) for n in range(3)]
        watching.waited.clear()
        steps = 0
        while not all(each.done for each in begun):
            decode.step()
            steps += 1
        assert steps > 20
        assert watching.waited == [0.0] * steps, "neither a step nor the prompts that came waited"
        assert not hung.done
        decode.abort(hung)
    nothing_left(cache)


# ---------------------------------------------------------------- decode processes that are not honest


@pytest.fixture
def server(ends: tuple[Transport, Transport]) -> Iterator[PrefillServer]:
    made = PrefillServer(Engine(model(), cache_for(model(), CAPACITY), chunk=128), ends[0], patience=0.5, most=20)
    yield made
    made.close()
    nothing_left(made.engine.cache)


def question(seed: int, length: int = 40) -> list[bytes]:
    return encode_question(Question(Request(prompt(seed, length), 1), 0, model().identity), cache_for(model()))


def came(server: PrefillServer, end: Transport, count: int) -> list[PeerMessage]:
    """Drive the server until so many answers or refusals have come, or nothing more does."""
    found, until = list[PeerMessage](), time.monotonic() + 30
    while len(found) < count and time.monotonic() < until:
        server.serve_once()
        found += [each for each in end.receive() if each.kind in (ANSWER, REFUSED)]
    return found


@pytest.mark.parametrize("count", [500, slow(20_000)])
def test_a_decode_process_that_sends_anything_harms_nobody(
    server: PrefillServer, ends: tuple[Transport, Transport], count: int
) -> None:
    rng = random.Random(count)
    end, good = ends[1], question(3, 150)
    assert all_of(end, 1)
    for _ in range(count):
        frames = [changed(rng, frame) if rng.random() < 0.7 else frame for frame in good[: rng.randrange(1, 3)]]
        kind = ASK if rng.random() < 0.7 else rng.choice(sorted(KINDS))
        end.send(PREFILL, kind, rng.randrange(40), frames)
        server.serve_once()
        end.receive()
    for number in range(40):
        while not end.send(PREFILL, DROP, number):
            server.serve_once()
    until = time.monotonic() + 20
    while server.prompts and time.monotonic() < until:
        server.serve_once()
        end.receive()
    assert server.prompts == 0
    while not end.send(PREFILL, ASK, 1000, good):
        server.serve_once()
        end.receive()
    answers = came(server, end, 1)
    while 1000 not in {each.number for each in answers} and time.monotonic() < until + 20:
        answers += came(server, end, 1)
    assert (ANSWER, 1000) in {(each.kind, each.number) for each in answers}, "and who asks honestly is served"


def test_more_prompts_than_a_bounded_number_are_refused(
    server: PrefillServer, ends: tuple[Transport, Transport]
) -> None:
    end = ends[1]
    assert all_of(end, 1)
    answers: list[PeerMessage] = []
    most = 0
    for number in range(60):
        while not end.send(PREFILL, ASK, number, question(number)):
            server.serve_once()
        if number % 30 == 0:
            server.serve_once()
        most = max(most, server.prompts)
        answers += [each for each in end.receive() if each.kind in (ANSWER, REFUSED)]
    answers += came(server, end, 60 - len(answers))
    assert most <= 20
    kinds = [each.kind for each in answers]
    assert kinds.count(ANSWER) >= 20 and kinds.count(REFUSED) >= 20
    assert server.prompts == 0


@pytest.mark.parametrize(
    "frames",
    [
        [], [b"{}"], [b"not json}", b""], [b"7", b""], [b'{"have": 1e999}', b""], [b"[" * 60_000, b""],
        [b" " * 100_000, b""], [b"{}", b"abc"], [bytes((255, 254)), b""],
    ],
    ids=lambda frames: repr(frames)[:20],
)  # fmt: skip
def test_a_question_that_cannot_be_read_is_refused(
    server: PrefillServer, ends: tuple[Transport, Transport], frames: list[bytes]
) -> None:
    assert all_of(ends[1], 1)
    assert ends[1].send(PREFILL, ASK, 1, frames)
    assert [each.kind for each in came(server, ends[1], 1)] == [REFUSED]


@pytest.mark.parametrize(
    "fields",
    [
        {"have": -1}, {"have": "x"}, {"have": 2**80}, {"seed": "x"}, {"identity": "other"}, {"format": "other"},
        {"max_tokens": 5}, {"temperature": -1}, {"namespace": 5}, {"mover": 7}, {"inputs": {}}, {"priority": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_question_that_nobody_honest_asks_is_refused(
    server: PrefillServer, ends: tuple[Transport, Transport], fields: dict[str, Any]
) -> None:
    asked, tokens = question(1)
    assert all_of(ends[1], 1)
    assert ends[1].send(PREFILL, ASK, 1, [json.dumps({**json.loads(asked), **fields}).encode(), tokens])
    assert [each.kind for each in came(server, ends[1], 1)] == [REFUSED]


class Stubborn(Meddling):
    """A transport whose peer takes nothing from some time on."""

    takes = True

    def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
        return self.takes and super().send(peer, kind, number, frames)


def test_a_decode_process_that_takes_nothing_loses_its_prompts() -> None:
    prefill, end = in_process_pair()
    stubborn = Stubborn(prefill, lambda message: [message])
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), stubborn, patience=0.3)
    for number in (1, 2, 3):
        assert end.send(PREFILL, ASK, number, question(number, 40 if number == 1 else 1900))
    stubborn.takes = False
    until = time.monotonic() + 20
    seen = 0
    while time.monotonic() < until:
        server.serve_once()
        seen = max(seen, server.prompts)
        if seen and not server.prompts:
            break
    assert (seen, server.prompts) == (3, 0)
    assert server.engine.counts.prefilled < 40 + 2 * 1900, "those that nobody takes are not computed to the end"
    stubborn.takes = True
    assert end.send(PREFILL, ASK, 9, question(9))
    assert [each.number for each in came(server, end, 1)] == [9]
    server.close()
    nothing_left(server.engine.cache)


def test_a_prompt_that_nobody_wants_any_more_is_not_computed(ends: tuple[Transport, Transport]) -> None:
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), ends[0])
    assert all_of(ends[1], 1)
    assert ends[1].send(PREFILL, ASK, 7, question(1, 1500))
    until = time.monotonic() + 20
    while not server.prompts and time.monotonic() < until:
        server.serve_once()
    assert server.prompts == 1
    for number in (8, 7):  # the first is no such prompt
        assert ends[1].send(PREFILL, DROP, number)
    while server.prompts and time.monotonic() < until:
        server.serve_once()
    assert server.engine.counts.prefilled < 1500
    assert {each.kind for each in ends[1].receive()} <= {BUSY}
    server.close()
    nothing_left(server.engine.cache)


def test_an_aborted_request_is_taken_back_where_it_was_asked() -> None:
    ends = in_process_pair()
    impostor = Impostor(ends[0], lambda number: [])
    with DecodeEngine(Engine(model(), cache_for(model())), ends[1]) as decode:
        assert greeted(decode, impostor.turn)
        pending = decode.add(ASKED)
        decode.abort(pending)
        assert pending.done
        assert not decode.step()
        impostor.turn()
    assert (DROP, 1) in impostor.seen


def test_a_decode_process_that_goes_leaves_nothing_behind(
    ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_server, "BUSY_SECONDS", 0.0)
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), ends[0])
    assert all_of(ends[1], 1)
    for number in range(3):
        assert ends[1].send(PREFILL, ASK, number, question(number, 1300))
    until = time.monotonic() + 30
    while server.prompts < 3 and time.monotonic() < until:
        server.serve_once()
    ends[1].close()
    while server.prompts and time.monotonic() < until:
        server.serve_once()
    assert server.prompts == 0
    while server.engine.step():
        pass
    assert server.engine.counts.prefilled < 3 * 1300, "they are not computed"
    server.close()
    nothing_left(server.engine.cache)


def test_what_a_prefill_process_owes_when_it_goes_is_computed_at_once(ends: tuple[Transport, Transport]) -> None:
    impostor = Impostor(ends[0], lambda number: [])
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), ends[1], patience=600, longest=600) as decode:
        assert greeted(decode, impostor.turn)
        pending = decode.add(ASKED)
        ends[0].close()
        until = time.monotonic() + 30
        while not pending.done and time.monotonic() < until:
            decode.step()
        assert [pending.tokens] == plain(model(), [ASKED])
        assert decode.lost == 1
    nothing_left(cache)


def test_what_nobody_asked_for_is_ignored(server: PrefillServer, ends: tuple[Transport, Transport]) -> None:
    introduced(*ends)
    for kind in (DROP, FETCHED, PART, ANSWER, BUSY, REFUSED):
        assert ends[1].send(PREFILL, kind, 5, [b"x"])
    for _ in range(5):
        server.serve_once(0.01)
    assert (server.prompts, ends[1].receive()) == (0, [])


def test_connections_that_say_nothing_or_anything_cost_nobody_anything(tmp_path: Path) -> None:
    with pair("zmq", tmp_path) as ends:
        server = PrefillServer(Engine(model(), cache_for(model())), ends[0])
        port = int(server.address.rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for n, stranger in enumerate(strangers[:100]):
            stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", bytes(1000), random.Random(n).randbytes(3000))[n % 3])
        cache = cache_for(model())
        with DecodeEngine(Engine(model(), cache), ends[1]) as decode:
            assert greeted(decode, server.serve_once)
            assert served_by(decode, server.serve_once, [ASKED]) == plain(model(), [ASKED])
            assert decode.handed_over == 1
        for stranger in strangers:
            stranger.close()
        server.close()
        nothing_left(cache)
        nothing_left(server.engine.cache)


# ---------------------------------------------------------------- slow peers, and what is forgotten


class Slow(Meddling):
    """A decode side that takes one message at a time."""

    def __init__(self, honest: Transport) -> None:
        super().__init__(honest, lambda message: [message])
        self.waiting: list[PeerMessage] = []

    def receive(self, seconds: float = 0.0) -> list[PeerMessage]:
        self.waiting += [] if self.waiting else self.honest.receive(seconds)
        first, self.waiting = self.waiting[:1], self.waiting[1:]
        time.sleep(0.001 * len(first))
        return first


def test_a_decode_process_that_takes_little_and_steadily_is_served(
    ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "PART_BYTES", 64)
    cache = cache_for(model())
    server = PrefillServer(Engine(model(), cache_for(model())), ends[0], patience=0.3)
    with DecodeEngine(Engine(model(), cache), Slow(ends[1])) as decode:
        assert greeted(decode, server.serve_once)
        begun = time.monotonic()
        assert served_by(decode, server.serve_once, [ASKED]) == plain(model(), [ASKED])
        assert (decode.handed_over, decode.lost) == (1, 0)
        assert time.monotonic() > begun + 0.3, "it took longer than a peer may be stuck"
    server.close()
    nothing_left(cache)


def test_what_a_prefill_process_has_forgotten_is_computed_while_it_serves_others(
    ends: tuple[Transport, Transport],
) -> None:
    cache = cache_for(model())
    server = PrefillServer(Engine(model(), cache_for(model())), ends[0], patience=0.2)
    requests = [Request(prompt(n, 150), 4) for n in range(30)]
    with DecodeEngine(Engine(model(), cache), ends[1], patience=600, longest=600) as decode:
        assert greeted(decode, server.serve_once)
        pending = [decode.add(each) for each in requests[:4]]
        until = time.monotonic() + 30
        while server.prompts < 4 and time.monotonic() < until:
            server.serve_once()
        server.drop_peers()
        for request in requests[4:]:  # the prefill process has never anything else to say of the first four
            pending.append(decode.add(request))
            begun = time.monotonic()
            while time.monotonic() < begun + 0.1:
                server.serve_once()
                decode.step()
        while not all(each.done for each in pending) and time.monotonic() < until:
            server.serve_once()
            decode.step()
        assert [each.tokens for each in pending] == plain(model(), requests)
        assert decode.lost == 4 and decode.handed_over > 10
    server.close()
    nothing_left(cache)


def test_what_is_owed_is_told_and_compared(ends: tuple[Transport, Transport]) -> None:
    """Prompts that were asked after the last question that came are not missing."""
    for last, owed, lost in ((1, [], 1), (0, [], 0), (1, [1], 0), (9, [2, 3], 1)):
        pair_of = in_process_pair()
        impostor = Impostor(pair_of[0], lambda number, told=(last, *owed): [(BUSY, [b"".join(map(OWED.pack, told))])])
        with DecodeEngine(Engine(model(), cache_for(model())), pair_of[1], longest=600) as decode:
            assert greeted(decode, impostor.turn)
            decode.add(ASKED)
            for _ in range(3):
                impostor.turn()
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
    until = time.monotonic() + 30
    while (server.prompts or not server.engine.counts.prefilled) and time.monotonic() < until:
        server.serve_once(0.01)
    for number in range(2, 20):
        assert decode.send(PREFILL, ASK, number, [b"no question"])
    for _ in range(50):
        server.serve_once(0.01)
    told, parts = set[int](), 0
    while len(told) < 18 and time.monotonic() < until:
        for message in decode.receive():
            parts += message.kind == PART
            if message.kind == REFUSED:
                told.add(message.number)
        server.serve_once(0.01)
    assert told == set(range(2, 20))
    assert parts * 16 < server.engine.cache.pool("full").buffers["k"][:, 0].nbytes, "they did not wait for the content"
    server.close()


def test_refusals_that_are_left_out_are_told_by_what_is_owed(
    ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_server, "BUSY_SECONDS", 1e9)
    prefill, decode = ends
    introduced(prefill, decode)
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), prefill, most=2)
    assert decode.send(PREFILL, ASK, 1, question(1, 1900))
    known, until = False, time.monotonic() + 30
    while not known and time.monotonic() < until:
        server.serve_once(0.01)
        known = any(message.kind == BUSY for message in decode.receive())
    for number in range(2, 12):
        assert decode.send(PREFILL, ASK, number, [b"no question"])
    told = set[int]()
    while told != set(range(2, 12)) and time.monotonic() < until and server.prompts:
        server.serve_once(0.01)
        for message in decode.receive():
            if message.kind == REFUSED:
                told.add(message.number)
            elif message.kind == BUSY:
                last, *owed = (number for (number,) in OWED.iter_unpack(message.frames[0]))
                told.update(number for number in range(2, last + 1) if number not in owed)
    assert known and told == set(range(2, 12))
    server.close()


def test_a_number_that_is_in_use_is_refused(ends: tuple[Transport, Transport]) -> None:
    prefill, decode = ends
    introduced(prefill, decode)
    mover = LocalMover()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill, mover=mover, patience=600)
    asked = encode_question(Question(ASKED, 0, model().identity, "local"), server.engine.cache)
    for turn in range(6):
        assert decode.send(PREFILL, ASK, 1, asked)
        until = time.monotonic() + 20
        while (not mover.offered or server.prompts) and time.monotonic() < until:
            server.serve_once(0.02)
        for _ in range(3):
            server.serve_once(0.02)
        assert len(mover.offered) == 1, turn
    decode.close()
    server.close()
    assert not mover.offered


def test_an_answer_to_another_question_about_the_same_prompt_is_not_taken(ends: tuple[Transport, Transport]) -> None:
    other = honest_answer(Request(ASKED.tokens, 4, temperature=5.0, seed=2))
    decode, _ = answered_by(ends, lambda number: other)
    assert decode.handed_over == 0


def test_an_interrupt_while_a_question_is_sent_leaves_its_number_to_it(ends: tuple[Transport, Transport]) -> None:
    """What comes late of the interrupted one is not taken for the next."""
    cache, numbers = cache_for(model()), list[int]()
    server = PrefillServer(Engine(model(), cache_for(model())), ends[0])

    class Interrupted(Meddling):
        def send(self, peer: bytes, kind: bytes, number: int, frames: Sequence[Any] = ()) -> bool:
            sent = super().send(peer, kind, number, frames)
            if kind == ASK:
                numbers.append(number)
                if len(numbers) == 1:
                    raise KeyboardInterrupt
            return sent

    with DecodeEngine(Engine(model(), cache), Interrupted(ends[1], lambda message: [message])) as decode:
        assert greeted(decode, server.serve_once)
        with pytest.raises(KeyboardInterrupt):
            decode.add(Request(ASKED.tokens, 4, temperature=5.0, seed=1))
        request = Request(ASKED.tokens, 4, temperature=5.0, seed=2)
        assert served_by(decode, server.serve_once, [request]) == plain(model(), [request])
        assert len(set(numbers)) == 2 and not decode.step()
    server.close()
    nothing_left(cache)


def test_content_that_is_computed_or_waits_is_bounded_on_both_sides(ends: tuple[Transport, Transport]) -> None:
    cache, requests = cache_for(model()), [Request(prompt(n, 150), 4) for n in range(6)]
    server = PrefillServer(Engine(model(), cache_for(model())), ends[0], room=1)
    with DecodeEngine(Engine(model(), cache), ends[1]) as decode:
        assert greeted(decode, server.serve_once)
        assert served_by(decode, server.serve_once, requests) == plain(model(), requests)
        assert 1 <= decode.handed_over < 6 and decode.lost == 0, "one at a time is served whatever it needs"
        one = decode.received // decode.handed_over
        cache.flush()
        server.close()
    nothing_left(cache)
    prefill, other = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    with DecodeEngine(Engine(model(), cache_for(model())), other, room=2 * one) as decode:
        assert greeted(decode, server.serve_once)
        for each in requests:
            decode.add(each)
        assert decode.awaited == 2
        assert all(each.tokens for each in decode.generate(requests[:1]))
    server.close()


@pytest.mark.parametrize(("named", "used"), [("crc32", "crc32"), ("md5", "crc32"), (None, "crc32"), ("xxh3", "xxh3")])
def test_content_has_checksums_that_the_other_side_can_compute(named: str | None, used: str) -> None:
    prefill, decode = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    asked = Question(ASKED, 0, model().identity, checksum=named)  # type: ignore[arg-type]
    assert decode.send(PREFILL, ASK, 1, encode_question(asked, server.engine.cache))
    found: list[PeerMessage] = []
    while not found:
        server.serve_once()
        found = [message for message in decode.receive() if message.kind == ANSWER]
    header = decode_header(found[0].frames[1][:HEADER_BYTES])
    assert isinstance(header, RecordHeader) and header.checksum.algorithm == used
    server.close()


def test_a_closed_engine_takes_nothing_more_and_what_it_awaited_has_ended(ends: tuple[Transport, Transport]) -> None:
    impostor = Impostor(ends[0], lambda number: [])
    decode = DecodeEngine(Engine(model(), cache_for(model())), ends[1])
    assert greeted(decode, impostor.turn)
    pending = decode.add(ASKED)
    assert decode.awaited == 1
    decode.close()
    decode.close()
    assert pending.done
    for call in (decode.step, lambda: decode.add(ASKED), lambda: decode.generate([ASKED]), decode.connect):
        with pytest.raises(ProtocolError, match="is closed"):
            call()
