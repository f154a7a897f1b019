"""A prefill process and a decode process: what is handed over is enough and no more, and either may die."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from prefixloom import InputError
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.contract.handover import Handover
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from prefixloom_engine.disaggregation.messages import decode_handover, encode_handover, encode_question
from prefixloom_engine.disaggregation.wire import ASK, BUSY, DROP, FRAME_HEADER, Wire
from prefixloom_engine.forward.handover import pages_needed
from tests.support.engines import CAPACITY, cache_for, decoding, mixed, model, nothing_left, plain, prompt, serving

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_answers_are_those_of_one_process(overlap: bool, speculate: int) -> None:
    requests = mixed(16)
    cache = cache_for(model(), CAPACITY)
    with serving(lambda: cache_for(model(), CAPACITY)) as server:
        with decoding(cache, server, overlap=overlap, speculate=speculate) as decode:
            answers = decode.generate(requests)
        assert [answer.tokens for answer in answers] == plain(model(), requests)
        assert decode.handed_over >= 8
        assert decode.engine.counts.arrived > 0
    nothing_left(cache)


def test_with_a_draft_its_memory_comes_along() -> None:
    it = ThreeWay(attrs.evolve(model(mixing=0.1).sizes), dtype="float64", draft=True)
    capacity = {**CAPACITY, "draft": 1200}
    requests = mixed(6)
    cache = cache_for(it, capacity)
    with (
        serving(lambda: cache_for(it, capacity), it) as server,
        DecodeEngine(Engine(it, cache, speculate=3), server.address) as decode,
    ):
        answers = decode.generate(requests)
    assert [answer.tokens for answer in answers] == plain(model(mixing=0.1), requests)
    assert decode.engine.counts.accepted > 0
    assert decode.handed_over > 0
    nothing_left(cache)


@pytest.mark.parametrize("component", ["full", "swa", "mamba"])
def test_whatever_of_it_is_lost_on_the_way_changes_the_answer(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixloom_engine.disaggregation import decode_engine

    def spoiled(data: bytes) -> Handover:
        handed = decode_handover(data)
        for (name, _), content in handed.content.items():
            if name == component:
                content.zero_()
        return handed

    requests = [Request(prompt(3, 150), 12, logprobs=True)]
    told = []
    for spoil in (False, True):
        cache = cache_for(model())
        with serving(lambda: cache_for(model())) as server, decoding(cache, server) as decode:
            if spoil:
                monkeypatch.setattr(decode_engine, "decode_handover", spoiled)
            (answer,) = decode.generate(requests)
        assert decode.handed_over == 1
        told.append(answer)
    assert [told[0].tokens] == plain(model(), requests)
    assert max(abs(a - b) for a, b in zip(told[0].logprobs, told[1].logprobs, strict=True)) > 1e-3


def test_what_goes_over_is_what_the_reaches_need_at_the_end_and_at_the_last_boundary() -> None:
    cache = cache_for(model())
    assert pages_needed(cache, 0, 150) == {"full": list(range(10)), "swa": [6, 7, 8, 9]}, "a window of 40 begins at 111"
    assert pages_needed(cache, 128, 150) == {"full": [8, 9], "swa": [8, 9]}
    with Engine(model(), cache) as engine:
        (whole,) = engine.generate([Request(prompt(1, 150), 1, hand_over=0)])
        (rest,) = engine.generate([Request(prompt(1, 150), 1, hand_over=128)])
    assert whole.handed is not None and rest.handed is not None
    page = 16 * 2 * 2 * 16 * 8  # tokens, k and v, heads, width, bytes: of one layer
    state = sum(buffer[:, 0].numel() * 8 for buffer in cache.pool("mamba").buffers.values())
    assert whole.handed.pages["swa"] == [5, 6, 7, 8, 9], "and the window of the boundary at 128 begins at 89"
    assert whole.handed.size == (10 + 5) * page + 2 * state
    assert rest.handed.size == (2 + 2) * page + state, "who has the boundary gets no more than the end needs"
    assert (whole.handed.boundary, rest.handed.boundary) == (128, 0)
    for handed, token in ((whole.handed, whole.tokens[0]), (rest.handed, rest.tokens[0])):
        back = decode_handover(encode_handover(handed))
        assert attrs.asdict(attrs.evolve(back, content={}, states={})) == attrs.asdict(
            attrs.evolve(handed, content={}, states={}, token=token)
        )
        for mine, theirs in ((handed.content, back.content), (handed.states, back.states)):
            assert mine.keys() == theirs.keys()
            assert all(theirs[name].equal(content) for name, content in mine.items())
    with pytest.raises(InputError, match="damaged on its way"):
        decode_handover(encode_handover(rest.handed) + b"x")


def test_what_came_too_late_to_fit_is_computed_here() -> None:
    """The tokens that the decode process said to have were evicted before the rest came."""
    requests = [Request(prompt(1, 150), 6)]
    cache = cache_for(model())
    with Engine(model(), cache) as engine:
        (handed,) = engine.generate([Request(prompt(1, 150), 1, hand_over=128)])
        cache.flush()
        answer = engine.add(requests[0], handed.handed)
        while engine.step():
            pass
        assert engine.counts.arrived == 0
    assert [answer.tokens] == plain(model(), requests)
    nothing_left(cache)


def one_bit(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("damage", [one_bit, lambda data: data[:-1], lambda data: data + b"x", lambda data: data[1:]])
def test_what_came_and_cannot_be_read_costs_a_recompute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    from prefixloom_engine.disaggregation import decode_engine

    monkeypatch.setattr(decode_engine, "decode_handover", lambda data: decode_handover(damage(data)))
    requests = [Request(prompt(1, 150), 6)]
    cache = cache_for(model())
    with serving(lambda: cache_for(model())) as server, decoding(cache, server) as decode:
        answers = decode.generate(requests)
        assert (decode.handed_over, decode.engine.counts.prefilled) == (0, 150)
    assert [answer.tokens for answer in answers] == plain(model(), requests)
    assert "handed over cannot be read" in caplog.text
    nothing_left(cache)


def test_a_machine_that_is_gone_without_a_word_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        wire = Wire(socket.create_connection(listening.getsockname()))
        assert wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        wire.close()


def test_two_that_keep_other_things_do_not_work_together() -> None:
    other = ThreeWay("tiny")
    with serving(lambda: cache_for(other), other) as server, pytest.raises(InputError, match="from the same config"):
        decoding(cache_for(model()), server).generate([Request(prompt(1, 150), 2)])


def test_two_that_compute_something_else_do_not_work_together() -> None:
    other = ThreeWay("tiny", dtype="float64", seed=1)
    told = pytest.raises(InputError, match=r"computes something else: weights is '.*' there and '.*' here")
    with serving(lambda: cache_for(other), other) as server, told:
        decoding(cache_for(model()), server).generate([Request(prompt(1, 150), 2)])


class Unidentified:
    """A model that says nothing of its identity."""

    def __init__(self, it: ThreeWay) -> None:
        self.config, self.vocabulary, self.stops, self.bind = it.config, it.vocabulary, it.stops, it.bind


def test_content_of_a_model_without_identity_stays_in_its_process() -> None:
    for make in (PrefillServer, lambda engine: DecodeEngine(engine, ("127.0.0.1", 1))):
        engine = Engine(Unidentified(model()), cache_for(model()))
        with pytest.raises(InputError, match="Unidentified does not say its identity"):
            make(engine)
        engine.close()


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_weights_that_change_between_two_prompts_cost_a_recompute(caplog: pytest.LogCaptureFixture, whose: str) -> None:
    theirs, mine = (ThreeWay("tiny", dtype="float64") for _ in range(2))
    changing = theirs if whose == "prefill" else mine
    cache = cache_for(mine)
    with serving(lambda: cache_for(theirs), theirs) as server, decoding(cache, server, mine) as decode:
        for changed in (False, True):
            if changed:
                changing.to_logits.neg_()
            requests = [Request(prompt(7 + changed, 150), 6)]
            (answer,) = decode.generate(requests)
            assert [answer.tokens] == plain(mine, requests)
            assert decode.handed_over == 1
    assert "weights or adapters here are others" in caplog.text
    nothing_left(cache)


def test_no_prefill_process_costs_a_recompute_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    requests = mixed(4)
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), ("127.0.0.1", free)) as decode:
        answers = decode.generate(requests)
    assert [answer.tokens for answer in answers] == plain(model(), requests)
    assert len([record for record in caplog.records if "no prefill process" in record.message]) == 1
    nothing_left(cache)


def test_a_prefill_process_that_is_killed_costs_a_recompute(caplog: pytest.LogCaptureFixture) -> None:
    """At random points; another one takes its place at once."""
    caplog.set_level(logging.WARNING)
    rng = random.Random(1)
    requests = mixed(12)
    expected = plain(model(), requests)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "prefill_process.py")]
    cache = cache_for(model(), CAPACITY)
    lost = handed = 0
    for _ in range(2):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with DecodeEngine(Engine(model(), cache, chunk=64, speculate=2), ("127.0.0.1", port)) as decode:
            cache.flush()
            pending = [decode.add(request) for request in requests]
            when = time.monotonic() + rng.uniform(0.02, 0.3)
            while not all(each.done for each in pending):
                decode.step()
                if time.monotonic() > when and process.poll() is None:
                    process.kill()
            process.kill()
            process.wait()
            process.stdout.close()
        lost, handed = lost + decode.lost, handed + decode.handed_over
        assert [each.answer.tokens for each in pending if each.answer] == expected
        nothing_left(cache)
    assert lost > 0
    assert "the prefill process is gone" in caplog.text


def test_a_prefill_process_that_hangs_costs_a_recompute(caplog: pytest.LogCaptureFixture) -> None:
    """It is not dead, and its connection stands."""
    requests = mixed(4)
    cache = cache_for(model(), CAPACITY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "prefill_process.py")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        with DecodeEngine(Engine(model(), cache), ("127.0.0.1", port), patience=0.3) as decode:
            assert decode._connected()
            process.send_signal(signal.SIGSTOP)
            answers = decode.generate(requests)
        assert decode.lost > 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert [answer.tokens for answer in answers] == plain(model(), requests)
    assert "it has said nothing for 0.3 s" in caplog.text
    nothing_left(cache)


def test_a_prefill_process_that_computes_for_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixloom_engine.disaggregation import prefill_server

    monkeypatch.setattr(prefill_server, "BUSY_SECONDS", 0.0)
    requests = [Request(prompt(1, 150), 2)]
    with serving(lambda: cache_for(model())) as server:
        step = server.engine.step

        def slow() -> bool:
            time.sleep(0.5)
            return step()

        monkeypatch.setattr(server.engine, "step", slow)
        cache = cache_for(model())
        with DecodeEngine(Engine(model(), cache), server.address, patience=1.5) as decode:
            decode.add(Request(prompt(2, 150), 2))
            answers = decode.generate(requests)
        assert (decode.lost, decode.handed_over) == (0, 2)
    assert [answer.tokens for answer in answers] == plain(model(), requests)


def test_a_prompt_that_nobody_wants_any_more_is_not_computed() -> None:
    request = Request(prompt(1, 150), 2)
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16))
    wire = Wire(socket.create_connection(server.address))
    wire.send(ASK, 7, encode_question(request, 0, model().identity))
    while not server._asked:
        server.serve_once()
    wire.send(DROP, 8, b"")  # no such prompt
    wire.send(DROP, 7, b"")
    while server._asked:
        server.serve_once()
    assert server.engine.counts.prefilled < 150
    assert {kind for kind, _, _ in wire.receive()} <= {BUSY}
    wire.close()
    server.close()
    nothing_left(server.engine.cache)


def test_an_aborted_request_is_taken_back_where_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[bytes, int]] = []
    monkeypatch.setattr(Wire, "send", lambda self, kind, number, data, send=Wire.send: (
        sent.append((kind, number)), send(self, kind, number, data)))  # fmt: skip
    with serving(lambda: cache_for(model())) as server, decoding(cache_for(model()), server) as decode:
        pending = decode.add(Request(prompt(1, 150), 2))
        decode.abort(pending)
        assert pending.done
        assert not decode.step()
    assert (DROP, 1) in sent


def test_a_decode_process_that_is_gone_leaves_nothing_behind() -> None:
    with serving(lambda: cache_for(model(), CAPACITY)) as server:
        for after in (0, 1, 4):
            decode = decoding(cache_for(model(), CAPACITY), server)
            for request in mixed(6):
                decode.add(request)
            for _ in range(after):
                decode.step()
            decode.close()
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
            stranger.settimeout(10)
            assert stranger.recv(10) == b"", "what is no frame of ours closes the connection"
        with socket.create_connection(server.address) as stranger:
            for nonsense in (
                b"not json}",
                b"7",
                b'{"have": 0, "tokens": 5}',
                b'{"have": 0, "tokens": [1], "seed": "x"}',
            ):
                stranger.sendall(FRAME_HEADER.pack(b"a", 1, len(nonsense)) + nonsense)
                stranger.settimeout(10)
                kind, _, length = FRAME_HEADER.unpack(stranger.recv(FRAME_HEADER.size, socket.MSG_WAITALL))
                assert (kind, len(stranger.recv(length, socket.MSG_WAITALL))) == (b"x", length), "and others go on"
        with decoding(cache_for(model()), server) as decode:
            (answer,) = decode.generate([Request(prompt(1, 150), 2)])
        assert decode.handed_over == 1
        assert [answer.tokens] == plain(model(), [Request(prompt(1, 150), 2)])
