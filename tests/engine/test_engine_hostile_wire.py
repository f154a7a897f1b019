"""What a prefill and a decode process make of frames that no honest one sends, or sends slowly."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prefixloom_engine import Engine, Request
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from prefixloom_engine.disaggregation.messages import encode_handover, encode_question, greeting
from prefixloom_engine.disaggregation.wire import ANSWER, ASK, FRAME_HEADER, HELLO, REFUSED, Wire, WireClosed
from tests.support.engines import cache_for, model, nothing_left, plain, prompt

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
ASKED = Request(prompt(1, 150), 4)


@pytest.fixture(scope="module")
def honest(request: pytest.FixtureRequest) -> bytes:
    """What an honest prefill process answers."""
    cache = cache_for(model())
    with Engine(model(), cache) as engine:
        (answer,) = engine.generate([Request(ASKED.tokens, 1, hand_over=0)])
    assert answer.handed is not None
    return encode_handover(answer.handed)


@contextmanager
def answering(data: bytes, pause: float = 0.0) -> Iterator[tuple[str, int]]:
    """A prefill process that answers every question with ``data``, a twentieth at a time."""
    over = threading.Event()
    with Engine(model(), cache_for(model())) as engine:
        mine = json.dumps(greeting(engine)).encode()

    def serve() -> None:
        connection, _ = listening.accept()
        wire = Wire(connection)
        while not over.is_set():
            try:
                for kind, number, _ in wire.receive(0.02):
                    if kind == HELLO:
                        wire.send(HELLO, 0, mine)
                    if kind == ASK:
                        frame = FRAME_HEADER.pack(ANSWER, number, len(data)) + data
                        for at in range(0, len(frame), len(frame) // 20):
                            wire._out += frame[at : at + len(frame) // 20]
                            wire._flush()
                            time.sleep(pause)
            except WireClosed:
                break
        wire.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            over.set()
            thread.join()


def changed(data: bytes, **header: Any) -> bytes:
    (length,) = struct.unpack_from("<I", data)
    told = {**json.loads(data[4 : 4 + length]), **header}
    text = json.dumps(told).encode()
    return struct.pack("<I", len(text)) + text + data[4 + length :]


@pytest.mark.parametrize(
    "header",
    [
        {"have": "x"}, {"have": None}, {"have": -1}, {"have": 150}, {"end": 149}, {"end": "x"},
        {"boundary": None}, {"boundary": 100}, {"boundary": 4000}, {"boundary": -5}, {"token": -1}, {"token": 1.5},
        {"token": 10**6}, {"token": True}, {"logprob": None}, {"pages": {}}, {"pages": {"full": [100]}},
        {"content": []}, {"states": []},
    ],
    ids=str,
)  # fmt: skip
def test_what_nobody_honest_hands_over_costs_a_recompute(
    header: dict[str, Any], honest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_for(model())
    with answering(changed(honest, **header)) as address, DecodeEngine(Engine(model(), cache), address) as decode:
        (answer,) = decode.generate([ASKED])
        assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150)
    assert "handed over cannot be read" in caplog.text
    assert [answer.tokens] == plain(model(), [ASKED])
    nothing_left(cache)


def test_an_answer_that_takes_long_to_come_over_is_no_silence(honest: bytes) -> None:
    cache = cache_for(model())
    with (
        answering(honest, 0.05) as address,
        DecodeEngine(Engine(model(), cache), address, patience=0.4) as decode,
    ):
        (answer,) = decode.generate([ASKED])
        assert (decode.handed_over, decode.lost) == (1, 0)
    assert [answer.tokens] == plain(model(), [ASKED])


def test_a_decode_process_that_goes_while_two_answers_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PrefillServer(Engine(model(), cache_for(model())))
    wire = Wire(socket.create_connection(server.address))
    for number in (1, 2):
        wire.send(ASK, number, encode_question(Request(prompt(number, 40), 1), 0, model().identity))
    while len(server._asked) < 2:
        server._accept()
        for other in server._wires:
            for frame in other.receive(0.02):
                server._handle(other, *frame)
    send, refused = Wire.send, []

    def broken(self: Wire, kind: bytes, number: int, data: bytes) -> None:
        if kind == ANSWER:
            refused.append(number)
            raise WireClosed("connection reset by peer")
        send(self, kind, number, data)

    monkeypatch.setattr(Wire, "send", broken)
    while server._asked:
        server.serve_once()
    assert refused == [1]
    wire.close()
    server.close()
    nothing_left(server.engine.cache)


@pytest.mark.parametrize("question", [b'{"tokens": [1, 2, 3], "have": 1e999}', b"[" * 200_000])
def test_a_question_that_cannot_be_read_is_refused(question: bytes) -> None:
    server = PrefillServer(Engine(model(), cache_for(model())))
    wire = Wire(socket.create_connection(server.address))
    wire.send(ASK, 1, question)
    frames: list[tuple[bytes, int, bytes]] = []
    while not frames:
        server.serve_once()
        frames = wire.receive(0.02)
    assert [kind for kind, _, _ in frames] == [REFUSED]
    wire.close()
    server.close()
