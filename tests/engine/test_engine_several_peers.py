"""A decode engine with several prefill processes: which one computes a prompt, and what the fault of one costs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import attrs
import pytest

from prefixloom import InputError
from prefixloom_engine import Answer, Engine, Polled, Request, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer, in_process_pair
from prefixloom_engine.disaggregation.transport import ASK, DROP, REFUSED
from tests.support.engines import CAPACITY, cache_for, mixed, model, nothing_left, plain, prompt
from tests.support.transports import Impostor, greeted

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def request(number: int, length: int = 150, prefill: str = "", count: int = 4) -> Request:
    return Request(prompt(number, length), count, prefill=prefill)


@contextmanager
def impostors(*names: str, **options: float) -> Iterator[tuple[DecodeEngine, list[Impostor]]]:
    """A decode engine, and prefill processes that greet and never answer. Nothing is left in the end."""
    pairs = [in_process_pair(name) for name in names]
    others = [Impostor(prefill, lambda number: []) for prefill, _ in pairs]
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), [end for _, end in pairs], **options) as decode:  # type: ignore[arg-type]
        assert greeted(decode, lambda: [each.turn() for each in others])
        yield decode, others
    nothing_left(cache)


def asked(other: Impostor, kind: bytes = ASK) -> list[int]:
    """The numbers of the questions that have come to a prefill process."""
    other.turn()
    return [number for each, number in other.seen if each == kind]


def ended(decode: DecodeEngine, *answers: Answer, seconds: float = 30.0) -> Sequence[list[int]]:
    until = time.monotonic() + seconds
    while not all(each.done for each in answers) and time.monotonic() < until:
        decode.step()
    assert [each.error for each in answers if each.error is not None or not each.done] == []
    return [each.tokens for each in answers]


def test_a_prompt_goes_to_the_process_that_its_request_names() -> None:
    with impostors("a", "b") as (decode, others):
        for number, name in enumerate("bbab"):
            decode.add(request(number, prefill=name))
        assert [len(asked(each)) for each in others] == [1, 3]


def test_without_a_name_it_goes_where_the_fewest_tokens_are_owed_and_in_turns() -> None:
    with impostors("a", "b", "c") as (decode, others):
        for number in range(3):
            decode.add(request(number))
        assert [len(asked(each)) for each in others] == [1, 1, 1]
        decode.add(request(4, 900, prefill="a"))
        decode.add(request(5, 590, prefill="b"))
        for number in range(6, 9):
            decode.add(request(number, 200, prefill="nobody has this name"))
        assert [len(asked(each)) for each in others] == [2, 2, 4]
        decode.add(request(10, 200))
        assert [len(asked(each)) for each in others] == [2, 3, 4]


def test_what_a_process_that_goes_has_owed_is_asked_of_the_others_and_then_computed_here() -> None:
    requests = [request(number) for number in range(4)]
    with impostors("a", "b") as (decode, others):
        answers = [decode.add(each) for each in requests]
        assert [len(asked(each)) for each in others] == [2, 2]
        others[0].end.close()
        decode.step()
        assert len(asked(others[1])) == 4 and decode.awaited == 4
        assert (decode.lost, decode.computed_here, dict(decode.peers)) == (2, 0, {"a": "away", "b": "agreed"})
        others[1].end.close()
        assert ended(decode, *answers) == plain(model(), requests)
        assert (decode.lost, decode.computed_here, decode.handed_over) == (6, 4, 0)


def test_who_has_refused_a_prompt_is_not_asked_for_it_again() -> None:
    with impostors("a", "b") as (decode, others):
        answer = decode.add(request(1, prefill="a"))
        for other in others:
            (number,) = asked(other)
            other.waiting.append((b"decode", number, (REFUSED, [b"too much"])))
            other.turn()
            decode.step()
        assert decode.awaited == 0
        assert ended(decode, answer) == plain(model(), [request(1)])
        assert [len(asked(each)) for each in others] == [1, 1] and decode.computed_here == 1


def test_the_fault_of_one_leaves_the_others_in_use() -> None:
    """One is silent, and one computes something else."""
    pairs = {name: in_process_pair(name) for name in ("silent", "other", "well")}
    silent = Impostor(pairs["silent"][0], lambda number: [])
    other = ThreeWay("tiny", dtype="float64", seed=1)
    server = PrefillServer(Engine(other, cache_for(other)), pairs["other"][0])
    well = PrefillServer(Engine(model(), cache_for(model())), pairs["well"][0])
    cache, requests = cache_for(model()), [request(number) for number in range(6)]
    with DecodeEngine(Engine(model(), cache), [end for _, end in pairs.values()], patience=0.2) as decode:

        def turn() -> None:
            server.serve_once()
            well.serve_once()
            decode.step()

        while dict(decode.peers) != {"silent": "agreed", "other": "other", "well": "agreed"}:
            silent.turn()
            turn()
        answers = [decode.add(each) for each in requests]
        assert len(asked(silent)) == 3
        until = time.monotonic() + 30
        while not all(each.done for each in answers) and time.monotonic() < until:
            turn()
        assert [each.tokens for each in answers] == plain(model(), requests)
        assert decode.peers["silent"] == "silent"
        assert (decode.handed_over, decode.lost, decode.computed_here) == (6, 3, 0)
    for each in (server, well):
        each.close()
        nothing_left(each.engine.cache)
    nothing_left(cache)


def test_a_prompt_is_awaited_for_so_long_of_all_together() -> None:
    with impostors("a", "b", longest=0.4) as (decode, others):
        begun = time.monotonic()
        answer = decode.add(request(1))
        time.sleep(0.3)
        others[0].end.close()
        others[1].turn()
        assert ended(decode, answer) == plain(model(), [request(1)])
        assert time.monotonic() < begun + 5
        assert decode.computed_here == 1


# ---------------------------------------------------------------- who comes and goes


def test_peers_are_replaced_and_what_those_owe_that_go_is_asked_of_the_others() -> None:
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
        until = time.monotonic() + 30
        while set(decode.peers.values()) != {"agreed"} and time.monotonic() < until:
            for server in servers:
                server.serve_once()
            decode.step()
        answers = [decode.add(each) for each in requests[1:3]]
        decode.set_peers([second, third])
        assert list(decode.peers) == [second, third] and decode.awaited == 2
        while not all(each.done for each in answers) and time.monotonic() < until:
            for server in servers[1:]:
                server.serve_once()
            decode.step()
        assert [each.tokens for each in answers] == plain(model(), requests[1:3])
        assert (decode.handed_over, decode.computed_here) == (2, 1)
        with pytest.raises(InputError, match="an address is tcp://HOST:PORT"):
            decode.set_peers([third, "nowhere"])
        assert list(decode.peers) == [second, third], "all or none"
    nothing_left(cache)


# ---------------------------------------------------------------- as an engine


def test_a_request_whose_prompt_is_awaited_can_be_ended_and_its_stream_dropped() -> None:
    with impostors("a") as (decode, others):
        aborted, finished = decode.add(request(1)), decode.add(request(2))
        stream = decode.stream(request(3))
        assert (decode.load, decode.awaited) == ((0, 3), 3)
        decode.abort(aborted)
        decode.finish(finished)
        answer = stream.answer
        del stream
        decode.step()
        assert [each.reason for each in (aborted, finished, answer)] == ["aborted", "stop", "aborted"]
        assert asked(others[0], DROP) == [1, 2, 3] and decode.load == (0, 0)
        decode.abort(aborted)
        assert aborted.reason == "aborted" and not decode.step()


def test_a_stream_is_that_of_one_engine() -> None:
    prefill, end = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    cache = cache_for(model())

    class Turning(DecodeEngine):
        def step(self) -> bool:
            server.serve_once()
            return super().step()

    with Turning(Engine(model(), cache), end) as decode:
        assert greeted(decode, server.serve_once)
        assert list(decode.stream(request(1, count=9))) == plain(model(), [request(1, count=9)])[0]
        assert decode.handed_over == 1
    server.close()
    nothing_left(cache)


def test_figures_say_what_became_of_prompts() -> None:
    with impostors("a", "b") as (decode, others):
        answers = [decode.add(request(number)) for number in range(3)]
        for other in others:
            other.end.close()
        ended(decode, *answers)
        told = {figure.name: dict(figure.samples) for figure in decode.figures()}
        assert told["prefixloom:prefill_lost"] == told["prefixloom:prefill_computed_here"] == {(): 3.0}
        assert told["prefixloom:prefill_peers"][("state", "away"),] == 2.0
        assert "prefixloom:pages" in told


def test_an_answer_says_how_much_of_its_prompt_nobody_had_to_compute() -> None:
    prefill, end = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), end) as decode:
        assert greeted(decode, server.step)
        told = []
        for flush in (False, True):
            if flush:
                cache.flush()
            answer = decode.add(request(1))
            until = time.monotonic() + 30
            while not answer.done and time.monotonic() < until:
                server.step()
                decode.step()
            told.append((answer.hit, answer.prefill_hit, answer.cached))
        assert told == [(0, 0, 0), (0, 128, 128)]
    server.close()
    nothing_left(cache)


# ---------------------------------------------------------------- a prefill process with requests of its own


def test_a_prefill_process_answers_requests_of_its_own_beside_those_of_others() -> None:
    prefill, end = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model())), prefill)
    cache = cache_for(model())
    with DecodeEngine(Engine(model(), cache), end) as decode:
        assert greeted(decode, server.step)
        mine = server.add(request(1))
        assert server.serve_once(), "nobody else wants anything, and there is something to do"
        theirs = decode.add(request(2))
        until = time.monotonic() + 30
        while not (mine.done and theirs.done) and time.monotonic() < until:
            assert server.step()
            decode.step()
        assert [mine.tokens, theirs.tokens] == plain(model(), [request(1), request(2)])
        assert (decode.handed_over, server.served, server.load) == (1, 1, (0, 0))
    server.close()
    nothing_left(cache)


def test_a_prefill_process_that_has_nothing_to_do_goes_on_telling_its_observers() -> None:
    """A publisher of events hands on then what it could not before."""
    told: list[int] = []
    prefill, _ = in_process_pair()
    engine = Engine(model(), cache_for(model()), observers=[Polled(lambda: told.append(1))])
    server = PrefillServer(engine, prefill)
    for _ in range(4):
        server.step()
    assert len(told) >= 3
    server.close()


def test_one_that_retires_sends_what_it_owes_and_refuses_more() -> None:
    prefill, end = in_process_pair()
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16), prefill)
    cache, requests = cache_for(model()), [request(1), request(2)]
    with DecodeEngine(Engine(model(), cache), end) as decode:
        assert greeted(decode, server.step)
        first = decode.add(requests[0])
        while not any(server.load):
            server.step()
        server.retire()
        second = decode.add(requests[1])
        until = time.monotonic() + 30
        while not (first.done and second.done) and time.monotonic() < until:
            server.step()
            decode.step()
        assert [first.tokens, second.tokens] == plain(model(), requests)
        assert (decode.handed_over, decode.computed_here, decode.lost) == (1, 1, 0)
        assert (server.refused, server.load) == (1, (0, 0))
    server.close()
    nothing_left(cache)


@pytest.mark.parametrize("seed", range(3))
def test_any_pairing_of_processes_of_which_some_go_answers_as_one_engine(seed: int) -> None:
    """Three prefill and two decode processes in one thread, whose requests name any or none of the first."""
    rng = random.Random(seed)
    requests = mixed(24)
    right = plain(model(), requests)
    caches = [cache_for(model(), CAPACITY) for _ in range(2)]
    servers = [PrefillServer(Engine(model(), cache_for(model(), CAPACITY), chunk=64)) for _ in range(3)]
    addresses = [each.address for each in servers]
    decodes = [DecodeEngine(Engine(model(), cache), addresses) for cache in caches]
    everybody = [*servers, *decodes]
    until = time.monotonic() + 120

    def turn() -> None:
        for each in everybody:
            each.step()

    while any(set(decode.peers.values()) != {"agreed"} for decode in decodes):
        assert time.monotonic() < until
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
        assert time.monotonic() < until
        turn()
    assert [each.tokens for each in answers] == right
    assert all(decode.handed_over > 0 for decode in decodes)
    for each in everybody:
        each.close()
    for cache in [*caches, *(server.engine.cache for server in servers)]:
        nothing_left(cache)
