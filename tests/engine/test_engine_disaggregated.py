"""A prefill process and a decode process: what is handed over is enough and no more, and either may die."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from prefixloom import InputError
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer, in_process_pair, prefill_peer
from prefixloom_engine.disaggregation.records import ContentKeys, ExpectedContent, expect_content, pack_content
from prefixloom_engine.forward.handover import pages_needed
from tests.support.engines import (
    CAPACITY,
    cache_for,
    connected,
    decoding,
    mixed,
    model,
    nothing_left,
    plain,
    prompt,
    serving,
)
from tests.support.transports import greeted, served_by

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


def test_an_answer_has_all_that_its_request_asks_for() -> None:
    tokens = prompt(1, 200)
    requests = [
        Request(tokens, 4), Request(tokens, 4, logprobs=True), Request(tokens, 4, logprobs=True, top_logprobs=3),
        Request(tokens, 1, hand_over=0),
    ]  # fmt: skip
    for request in requests:
        with Engine(model(), cache_for(model())) as engine:
            (right,) = engine.generate([request])
        with serving(lambda: cache_for(model())) as server, decoding(cache_for(model()), server) as decode:
            (answer,) = decode.generate([request])
        assert answer.tokens == right.tokens
        assert answer.logprobs == pytest.approx(right.logprobs)
        assert [[token for token, _ in each] for each in answer.alternatives] == [
            [token for token, _ in each] for each in right.alternatives
        ]
        assert (answer.handed is None) == (right.handed is None)


def test_what_a_refused_call_has_begun_ends_with_it() -> None:
    cache = cache_for(model())
    with serving(lambda: cache_for(model())) as server, decoding(cache, server) as decode:
        with pytest.raises(InputError, match="has the token 512"):
            decode.generate([Request(prompt(1, 10), 90), Request(prompt(2, 150), 90), Request([512], 1)])
        assert decode.engine.load == (0, 0) and not decode.step()
    nothing_left(cache)


def test_with_a_draft_its_memory_comes_along() -> None:
    it = ThreeWay(attrs.evolve(model(mixing=0.1).sizes), dtype="float64", draft=True)
    capacity = {**CAPACITY, "draft": 1200}
    requests = mixed(6)
    cache = cache_for(it, capacity)
    with (
        serving(lambda: cache_for(it, capacity), it) as server,
        connected(Engine(it, cache, speculate=3), server.address) as decode,
    ):
        answers = decode.generate(requests)
    assert [answer.tokens for answer in answers] == plain(model(mixing=0.1), requests)
    assert decode.engine.counts.accepted > 0
    assert decode.handed_over > 0
    nothing_left(cache)


@pytest.mark.parametrize("component", ["full", "swa", "mamba"])
def test_whatever_of_it_is_lost_on_the_way_changes_the_answer(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = ExpectedContent.unpack

    def spoiled(self: ExpectedContent, content: memoryview) -> Any:
        found, states = unpack(self, content)
        for (name, _), tensor in found.items():
            if name == component:
                tensor.zero_()
        return found, states

    requests = [Request(prompt(3, 150), 12, logprobs=True)]
    told = []
    for spoil in (False, True):
        cache = cache_for(model())
        with serving(lambda: cache_for(model())) as server, decoding(cache, server) as decode:
            if spoil:
                monkeypatch.setattr(ExpectedContent, "unpack", spoiled)
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
        assert handed.token == token
        keys = ContentKeys(cache, model().identity, "", prompt(1, 150))
        packed = memoryview(bytearray(handed.size))
        headers = pack_content(handed, keys, packed, "crc32")
        expected = expect_content(memoryview(headers), handed.have, handed.boundary, handed.end, keys)
        expected.check(packed)
        assert expected.pages == handed.pages
        for mine, theirs in zip((handed.content, handed.states), expected.unpack(packed), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(theirs[name].equal(content) for name, content in mine.items())
        with pytest.raises(InputError, match="is of another prompt"):
            other = attrs.evolve(keys, tokens=prompt(2, 150))
            expect_content(memoryview(headers), handed.have, handed.boundary, handed.end, other)


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


def test_two_that_keep_other_things_do_not_work_together() -> None:
    other = ThreeWay("tiny")
    with serving(lambda: cache_for(other), other) as server, pytest.raises(InputError, match="from the same config"):
        decoding(cache_for(model()), server).generate([Request(prompt(1, 150), 2)])


def test_two_that_compute_something_else_do_not_work_together() -> None:
    other = ThreeWay("tiny", dtype="float64", seed=1)
    told = pytest.raises(InputError, match=r"computes something else: weights is '.*' there and '.*' here")
    with serving(lambda: cache_for(other), other) as server, told:
        decoding(cache_for(model()), server).generate([Request(prompt(1, 150), 2)])


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_two_work_together_as_soon_as_they_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    monkeypatch.setattr(prefill_peer, "GREET_SECONDS", 0.05)
    theirs, mine = (ThreeWay("tiny", dtype="float64") for _ in range(2))
    changed, changing = (mine, theirs) if whose == "prefill" else (theirs, mine)
    changed.to_logits.neg_()
    prefill_end, decode_end = in_process_pair()
    server = PrefillServer(Engine(theirs, cache_for(theirs)), prefill_end)
    with DecodeEngine(Engine(mine, cache_for(mine)), decode_end) as decode:
        with pytest.raises(InputError, match="computes something else"):
            greeted(decode, server.serve_once)
        requests = [Request(prompt(n, 150), 2) for n in range(3)]
        assert served_by(decode, server.serve_once, requests[:1]) == plain(mine, requests[:1])
        for _ in range(20):
            server.serve_once(0.01)
            decode.step()
        assert decode.handed_over == 0
        changing.to_logits.neg_()
        for _ in range(20):
            server.serve_once(0.01)
            decode.step()
        assert served_by(decode, server.serve_once, requests[1:]) == plain(mine, requests[1:])
        assert decode.handed_over == 2
    server.close()
    assert len([each for each in caplog.records if "it is not asked" in each.message]) == 1


class Unidentified:
    """A model that says nothing of its identity."""

    def __init__(self, it: ThreeWay) -> None:
        self.config, self.vocabulary, self.stops, self.bind = it.config, it.vocabulary, it.stops, it.bind


def test_content_of_a_model_without_identity_stays_in_its_process() -> None:
    for make in (PrefillServer, lambda engine: DecodeEngine(engine, "tcp://127.0.0.1:1")):
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


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_weights_that_change_while_a_prompt_waits_cost_a_recompute(whose: str) -> None:
    """The second prompt waits: in the prefill process for its turn, or here with all of its content."""
    theirs, mine = (ThreeWay("tiny", dtype="float64") for _ in range(2))
    requests = [Request(prompt(21, 150), 30), Request(prompt(22, 150), 6)]
    rows = {"prefill": 16, "decode": 16, whose: 1}
    prefill_end, decode_end = in_process_pair()
    server = PrefillServer(Engine(theirs, cache_for(theirs), chunk=16, max_running=rows["prefill"]), prefill_end)
    cache = cache_for(mine)
    with DecodeEngine(Engine(mine, cache, max_running=rows["decode"]), decode_end) as decode:
        assert greeted(decode, server.serve_once)
        pending = [decode.add(each) for each in requests]
        waits = server.engine if whose == "prefill" else decode.engine
        until = time.monotonic() + 30
        while waits.load != (1, 1) and time.monotonic() < until:
            server.serve_once()
            if whose == "decode":
                decode.step()
        for changing in (theirs, mine) if whose == "decode" else (theirs,):
            changing.to_logits.neg_()
        while not all(each.done for each in pending):
            server.serve_once()
            decode.step()
        assert [pending[1].tokens] == plain(mine, requests[1:])
    server.close()
    for each in (cache, server.engine.cache):
        nothing_left(each)


def test_no_prefill_process_costs_a_recompute_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    requests = mixed(4)
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), f"tcp://127.0.0.1:{free}") as decode:
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
        address = process.stdout.readline().strip()
        with connected(Engine(model(), cache, chunk=64, speculate=2), address) as decode:
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
        assert [each.tokens for each in pending] == expected
        nothing_left(cache)
    assert lost > 0
    assert "is gone (its connection has ended)" in caplog.text
