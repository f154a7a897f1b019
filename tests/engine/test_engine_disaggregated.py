"""Prefill processes and a decode process: what is handed over is enough and no more, and which of them is asked."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

from prefixloom import InputError
from prefixloom_engine import Answer, Engine, Polled, Request, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer, in_process_pair, prefill_peer
from prefixloom_engine.disaggregation.records import ContentKeys, ExpectedContent, expect_content, pack_content
from prefixloom_engine.disaggregation.transport import DROP, REFUSED
from prefixloom_engine.forward.handover import pages_needed
from tests.support.engines import CAPACITY, cache_for, decoding, mixed, model, nothing_left, plain, prompt, serving
from tests.support.transports import FakeTime, Impostor, greeted, impostors, two

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def request(number: int, length: int = 150, prefill: str = "", count: int = 4) -> Request:
    return Request(prompt(number, length), count, prefill=prefill)


def ended(decode: DecodeEngine, *answers: Answer) -> Sequence[list[int]]:
    while not all(each.done for each in answers):
        decode.step()
    assert [each.error for each in answers if each.error is not None] == []
    return [each.tokens for each in answers]


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(("overlap", "speculate"), [(True, 3), (False, 0)])
def test_answers_are_those_of_one_process(overlap: bool, speculate: int) -> None:
    """The prefill process has a thread of its own."""
    requests, cache = mixed(16), cache_for(model(), CAPACITY)
    with serving(lambda: cache_for(model(), CAPACITY)) as server:
        with decoding(cache, server, overlap=overlap, speculate=speculate) as decode:
            answers = decode.generate(requests)
        assert [answer.tokens for answer in answers] == plain(model(), requests)
        assert decode.handed_over >= 8
        assert decode.engine.counts.arrived > 0
    nothing_left(cache)


def test_answer_has_all_that_its_request_asks_for() -> None:
    tokens = prompt(1, 200)
    requests = [
        Request(tokens, 4), Request(tokens, 4, logprobs=True), Request(tokens, 4, logprobs=True, top_logprobs=3),
        Request(tokens, 1, hand_over=0),
    ]  # fmt: skip
    for asked in requests:
        with Engine(model(), cache_for(model())) as engine:
            (right,) = engine.generate([asked])
        with two() as both:
            (answer,) = both.answer(asked)
        assert answer.tokens == right.tokens
        assert answer.logprobs == pytest.approx(right.logprobs)
        assert [[t for t, _ in each] for each in answer.alternatives] == [
            [t for t, _ in each] for each in right.alternatives
        ]
        assert (answer.handed is None) == (right.handed is None)


def test_prompts_that_a_refused_call_has_begun_end_with_it() -> None:
    with two() as both:
        with pytest.raises(InputError, match="has the token 512"):
            both.decode.generate([Request(prompt(1, 10), 90), Request(prompt(2, 150), 90), Request([512], 1)])
        assert both.decode.load == (0, 0)


def test_memory_of_a_draft_is_handed_over() -> None:
    it = ThreeWay(model(mixing=0.1).sizes, dtype="float64", draft=True)
    with two(it=it, make=lambda it: cache_for(it, {**CAPACITY, "draft": 1200}), engine={"speculate": 3}) as both:
        assert both.tokens(*mixed(6)) == plain(model(mixing=0.1), mixed(6))
        assert both.decode.engine.counts.accepted > 0 and both.decode.handed_over > 0


@pytest.mark.parametrize("component", ["full", "swa", "mamba"])
def test_answer_changes_if_content_of_a_component_is_lost(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack, asked = ExpectedContent.unpack, Request(prompt(3, 150), 12, logprobs=True)

    def spoiled(self: ExpectedContent, content: memoryview) -> Any:
        found, states = unpack(self, content)
        for (name, _), tensor in found.items():
            if name == component:
                tensor.zero_()
        return found, states

    told = []
    for spoil in (unpack, spoiled):
        monkeypatch.setattr(ExpectedContent, "unpack", spoil)
        with two() as both:
            told += both.answer(asked)
            assert both.decode.handed_over == 1
    assert [told[0].tokens] == plain(model(), [asked])
    assert max(abs(a - b) for a, b in zip(told[0].logprobs, told[1].logprobs, strict=True)) > 1e-3


def test_handover_has_what_the_reaches_need_at_the_end_and_at_the_last_boundary() -> None:
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


def test_content_that_comes_too_late_to_fit_is_computed_here() -> None:
    """The tokens that the decode process said to have were evicted before the rest came."""
    cache, asked = cache_for(model()), Request(prompt(1, 150), 6)
    with Engine(model(), cache) as engine:
        (handed,) = engine.generate([Request(prompt(1, 150), 1, hand_over=128)])
        cache.flush()
        answer = engine.add(asked, handed.handed)
        while engine.step():
            pass
        assert engine.counts.arrived == 0
    assert [answer.tokens] == plain(model(), [asked])
    nothing_left(cache)


def test_answer_says_how_much_of_its_prompt_nobody_had_to_compute() -> None:
    with two() as both:
        told = []
        for _ in range(2):
            told += both.answer(request(1))
            both.decode.cache.flush()
    assert [(answer.hit, answer.prefill_hit, answer.cached) for answer in told] == [(0, 0, 0), (0, 128, 128)]


# ---------------------------------------------------------------- what both must agree on


@pytest.mark.parametrize(
    ("theirs", "told"),
    [({}, "from the same config"),
     ({"dtype": "float64", "seed": 1}, r"computes something else: weights is '.*' there and '.*' here")],
)  # fmt: skip
def test_two_that_keep_or_compute_something_else_do_not_work_together(theirs: Any, told: str) -> None:
    with two(theirs=ThreeWay("tiny", **theirs), agree=False) as both, pytest.raises(InputError, match=told):
        greeted(both.decode, both.server.serve_once)


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_two_work_together_as_soon_as_they_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    monkeypatch.setattr(prefill_peer, "GREET_SECONDS", 0.0)
    theirs, mine = (ThreeWay("tiny", dtype="float64") for _ in range(2))
    changed, changing = (mine, theirs) if whose == "prefill" else (theirs, mine)
    changed.to_logits.neg_()
    with two(it=mine, theirs=theirs, agree=False) as both:
        with pytest.raises(InputError, match="computes something else"):
            greeted(both.decode, both.server.serve_once)
        assert both.tokens(request(0)) == plain(mine, [request(0)])
        assert both.decode.handed_over == 0
        changing.to_logits.neg_()
        both.until(lambda: set(both.decode.peers.values()) == {"agreed"})
        assert both.tokens(request(1), request(2)) == plain(mine, [request(1), request(2)])
        assert both.decode.handed_over == 2
    assert caplog.text.count("it is not asked") == 1


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
    with two(it=mine, theirs=theirs) as both:
        assert both.tokens(request(7)) == plain(mine, [request(7)])
        (theirs if whose == "prefill" else mine).to_logits.neg_()
        assert both.tokens(request(8)) == plain(mine, [request(8)])
        assert both.decode.handed_over == 1
    assert "weights or adapters here are others" in caplog.text


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_weights_that_change_while_a_prompt_waits_cost_a_recompute(whose: str) -> None:
    """The second prompt waits: in the prefill process for its turn, or here with all of its content."""
    theirs, mine = (ThreeWay("tiny", dtype="float64") for _ in range(2))
    rows = {whose: {"max_running": 1}}
    with two(
        it=mine, theirs=theirs, prefill={"chunk": 16, **rows.get("prefill", {})}, engine=rows.get("decode", {})
    ) as it:
        pending = [it.decode.add(request(21, count=30)), it.decode.add(request(22))]
        waits = it.server.engine if whose == "prefill" else it.decode.engine
        while waits.load != (1, 1):
            it.server.serve_once()
            if whose == "decode":
                it.decode.step()
        for changing in (theirs, mine) if whose == "decode" else (theirs,):
            changing.to_logits.neg_()
        it.until(lambda: all(each.done for each in pending))
        assert [pending[1].tokens] == plain(mine, [request(22)])


# ---------------------------------------------------------------- who is asked


def test_absent_prefill_process_costs_a_recompute_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), f"tcp://127.0.0.1:{free}") as decode:
        answers = decode.generate(mixed(4))
    assert [answer.tokens for answer in answers] == plain(model(), mixed(4))
    assert caplog.text.count("no prefill process can be asked") == 1
    nothing_left(cache)


def test_prompt_is_asked_of_the_process_that_its_request_names_or_that_owes_the_fewest_tokens() -> None:
    with impostors("a", "b") as (decode, others):
        for number, name in enumerate("bbab"):
            decode.add(request(number, prefill=name))
        assert [len(each.asked()) for each in others] == [1, 3]
    with impostors("a", "b", "c") as (decode, others):
        for number in range(3):
            decode.add(request(number))
        assert [len(each.asked()) for each in others] == [1, 1, 1], "in turns"
        decode.add(request(4, 900, prefill="a"))
        decode.add(request(5, 590, prefill="b"))
        for number in range(6, 9):
            decode.add(request(number, 200, prefill="nobody has this name"))
        assert [len(each.asked()) for each in others] == [2, 2, 4]
        decode.add(request(10, 200))
        assert [len(each.asked()) for each in others] == [2, 3, 4]


def test_prompts_that_a_process_owes_when_it_goes_are_asked_of_the_others_and_then_computed_here() -> None:
    requests = [request(number) for number in range(4)]
    with impostors("a", "b") as (decode, others):
        answers = [decode.add(each) for each in requests]
        assert [len(each.asked()) for each in others] == [2, 2]
        others[0].end.close()
        decode.step()
        assert len(others[1].asked()) == 4 and decode.awaited == 4
        assert (decode.lost, decode.computed_here, dict(decode.peers)) == (2, 0, {"a": "away", "b": "agreed"})
        others[1].end.close()
        assert ended(decode, *answers) == plain(model(), requests)
        told = {figure.name: dict(figure.samples) for figure in decode.figures()}
        assert told["prefixloom:prefill_lost"] == {(): 6.0} and told["prefixloom:prefill_computed_here"] == {(): 4.0}
        assert told["prefixloom:prefill_peers"][("state", "away"),] == 2.0 and "prefixloom:pages" in told


def test_process_that_has_refused_a_prompt_is_not_asked_for_it_again() -> None:
    with impostors("a", "b") as (decode, others):
        answer = decode.add(request(1, prefill="a"))
        for other in others:
            (number,) = other.asked()
            other.waiting.append((b"decode", number, (REFUSED, [b"too much"])))
            other.turn()
            decode.step()
        assert decode.awaited == 0
        assert ended(decode, answer) == plain(model(), [request(1)])
        assert [len(each.asked()) for each in others] == [1, 1] and decode.computed_here == 1


def test_fault_of_one_process_leaves_the_others_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent, and one computes something else."""
    clock = FakeTime()
    monkeypatch.setattr(prefill_peer, "time", clock)
    pairs = {name: in_process_pair(name) for name in ("silent", "other", "well")}
    silent, other = Impostor(pairs["silent"][0]), ThreeWay("tiny", dtype="float64", seed=1)
    servers = [
        PrefillServer(Engine(it, cache_for(it)), pairs[name][0]) for name, it in (("other", other), ("well", model()))
    ]
    cache, requests = cache_for(model()), [request(number) for number in range(6)]
    with DecodeEngine(Engine(model(), cache), [end for _, end in pairs.values()], patience=60) as decode:
        while dict(decode.peers) != {"silent": "agreed", "other": "other", "well": "agreed"}:
            silent.turn()
            for each in (*servers, decode):
                each.step()
        answers = [decode.add(each) for each in requests]
        assert len(silent.asked()) == 3
        while not all(each.done for each in answers):
            clock.now += 1
            for each in (*servers, decode):
                each.step()
        assert [each.tokens for each in answers] == plain(model(), requests)
        assert decode.peers["silent"] == "silent"
        assert (decode.handed_over, decode.lost, decode.computed_here) == (6, 3, 0)
    for server in servers:
        server.close()
    nothing_left(cache)


def test_peers_are_replaced_and_prompts_of_those_that_go_are_asked_of_the_others() -> None:
    cache, requests = cache_for(model()), [request(number) for number in range(4)]
    with ExitStack() as stack:
        servers = [PrefillServer(Engine(model(), cache_for(model(), debug=False))) for _ in range(3)]
        for server in servers:
            stack.callback(server.close)
        first, second, third = (each.address for each in servers)
        decode = stack.enter_context(DecodeEngine(Engine(model(), cache), []))
        assert ended(decode, decode.add(requests[0])) == plain(model(), requests[:1])
        assert (decode.computed_here, dict(decode.peers)) == (1, {})
        decode.set_peers([first, second])
        assert greeted(decode, lambda: [server.serve_once() for server in servers])
        answers = [decode.add(each) for each in requests[1:3]]
        decode.set_peers([second, third])
        assert list(decode.peers) == [second, third] and decode.awaited == 2
        while not all(each.done for each in answers):
            for server in servers[1:]:
                server.serve_once()
            decode.step()
        assert [each.tokens for each in answers] == plain(model(), requests[1:3])
        assert (decode.handed_over, decode.computed_here) == (2, 1)
        with pytest.raises(InputError, match="an address is tcp://HOST:PORT"):
            decode.set_peers([third, "nowhere"])
        assert list(decode.peers) == [second, third], "all or none"
    nothing_left(cache)


@pytest.mark.parametrize("seed", range(2))
def test_any_pairing_of_processes_of_which_some_go_answers_as_one_engine(seed: int) -> None:
    """Three prefill and two decode processes in one thread, whose requests name any or none of the first."""
    rng, requests = random.Random(seed), mixed(24)
    caches = [cache_for(model(), CAPACITY) for _ in range(2)]
    servers = [PrefillServer(Engine(model(), cache_for(model(), CAPACITY), chunk=64)) for _ in range(3)]
    addresses = [each.address for each in servers]
    decodes = [DecodeEngine(Engine(model(), cache), addresses) for cache in caches]
    everybody: list[Any] = [*servers, *decodes]

    def turn() -> None:
        for each in everybody:
            each.step()

    while any(set(decode.peers.values()) != {"agreed"} for decode in decodes):
        turn()
    answers = []
    for number, each in enumerate(requests):
        named = attrs.evolve(each, prefill=rng.choice(["", *addresses]))
        answers.append(rng.choice(decodes).add(named))
        for _ in range(rng.randrange(4)):
            turn()
        if number in (8, 16):
            victim = servers[number // 8 - 1]
            everybody.remove(victim)
            victim.close()
    while not all(each.done for each in answers):
        turn()
    assert [each.tokens for each in answers] == plain(model(), requests)
    assert all(decode.handed_over > 0 for decode in decodes)
    for each in everybody:
        each.close()
    for cache in [*caches, *(server.engine.cache for server in servers)]:
        nothing_left(cache)


# ---------------------------------------------------------------- as an engine


def test_request_whose_prompt_is_awaited_can_be_ended_and_its_stream_dropped() -> None:
    with impostors("a") as (decode, (other,)):
        aborted, finished = decode.add(request(1)), decode.add(request(2))
        stream = decode.stream(request(3))
        assert (decode.load, decode.awaited) == ((0, 3), 3)
        decode.abort(aborted)
        decode.finish(finished)
        answer = stream.answer
        del stream
        decode.step()
        assert [each.reason for each in (aborted, finished, answer)] == ["aborted", "stop", "aborted"]
        assert other.asked(DROP) == [1, 2, 3] and decode.load == (0, 0)
        decode.abort(aborted)
        assert aborted.reason == "aborted" and not decode.step()


def test_stream_of_a_decode_engine_is_that_of_one_engine() -> None:
    class Turning(DecodeEngine):
        def step(self) -> bool:
            server.serve_once()
            return super().step()

    prefill, end = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    with Turning(Engine(model(), cache_for(model())), end) as decode:
        assert greeted(decode, server.serve_once)
        assert list(decode.stream(request(1, count=9))) == plain(model(), [request(1, count=9)])[0]
        assert decode.handed_over == 1
    server.close()


def test_prefill_process_answers_requests_of_its_own_and_when_it_retires_refuses_those_of_others() -> None:
    with two(prefill={"chunk": 16}) as both:
        decode, server = both.decode, both.server
        mine = server.add(request(1))
        assert server.serve_once(), "nobody else wants anything, and there is something to do"
        first = decode.add(request(2))
        while server.prompts < 1:
            server.step()
        server.retire()
        second = decode.add(request(3))
        both.until(lambda: mine.done and first.done and second.done)
        expected = plain(model(), [request(1), request(2), request(3)])
        assert [mine.tokens, first.tokens, second.tokens] == expected
        assert (decode.handed_over, decode.computed_here, decode.lost) == (1, 1, 0)
        assert (server.served, server.refused, server.load) == (1, 1, (0, 0))


def test_prefill_process_that_has_nothing_to_do_goes_on_telling_its_observers() -> None:
    """A publisher of events hands on then what it could not before."""
    told: list[int] = []
    engine = Engine(model(), cache_for(model()), observers=[Polled(lambda: told.append(1))])
    server = PrefillServer(engine, in_process_pair()[0])
    for _ in range(4):
        server.step()
    assert len(told) >= 3
    server.close()
