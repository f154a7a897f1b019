"""Processes that are stopped, killed, or have thousands of descriptors open."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from prefixloom_engine import Engine, Request
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from tests.support.engines import cache_for, connected, mixed, model, nothing_left, plain, prompt
from tests.support.processes import spoken
from tests.support.transports import greeted, pair, served_by, two

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def test_prefill_process_that_is_stopped_or_killed_costs_a_recompute(caplog: pytest.LogCaptureFixture) -> None:
    """While it is stopped its connection stands. It is asked again when it goes on, and not before."""
    requests, cache = mixed(4), cache_for(model())
    right = plain(model(), requests)
    with (
        spoken("prefill_process") as (prefill, address),
        connected(Engine(model(), cache), address, patience=0.3) as decode,
    ):

        def answer() -> tuple[int, int]:
            """How many prompts came and were lost meanwhile."""
            cache.flush()
            before = decode.handed_over, decode.lost
            assert [each.tokens for each in decode.generate(requests)] == right
            return decode.handed_over - before[0], decode.lost - before[1]

        prefill.send_signal(signal.SIGSTOP)
        assert answer()[1] > 0
        assert "it has said nothing for 0.3 s" in caplog.text
        assert answer() == (0, 0)
        prefill.send_signal(signal.SIGCONT)
        assert any(decode.connect(30) and answer()[0] for _ in range(20)), "a slow machine is silent for as long, too"
        cache.flush()
        pending = [decode.add(each) for each in requests]
        prefill.kill()
        while not all(each.done for each in pending):
            decode.step()
        assert [each.tokens for each in pending] == right
        assert "is gone (its connection has ended)" in caplog.text
    nothing_left(cache)


def test_prompts_of_a_decode_process_that_is_killed_are_not_computed() -> None:
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16))
    with spoken("asking_process", server.address) as (asking, _):
        while server.prompts < 4:
            server.serve_once(0.01)
        asking.kill()
        asking.wait()
        while server.prompts:
            server.serve_once()
    assert server.engine.counts.prefilled < 4 * 1900
    server.close()
    nothing_left(server.engine.cache)


def test_transport_works_beside_five_thousand_descriptors(tmp_path: Path) -> None:
    asked, before = Request(prompt(1, 150), 4), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, before[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(5000)]
    try:
        with pair("zmq", tmp_path) as ends, two(ends) as both:
            assert both.tokens(asked) == plain(model(), [asked])
            assert both.decode.handed_over == 1
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_prefill_process_at_the_address_of_one_that_has_ended_takes_over() -> None:
    """Nothing that belongs to a connection is needed after a restart."""
    asked, cache, address = Request(prompt(1, 150), 2), cache_for(model()), "tcp://127.0.0.1:0"
    with DecodeEngine(Engine(model(), cache), []) as decode:
        for count in (1, 2):
            server = PrefillServer(Engine(model(), cache_for(model())), address)
            address = server.address
            decode.set_peers([address])
            assert greeted(decode, server.serve_once)
            assert served_by(decode, server.serve_once, [asked]) == plain(model(), [asked])
            assert decode.handed_over == count
            cache.flush()
            server.close()
            while decode.peers == {address: "agreed"}:
                decode.step()
    nothing_left(cache)
