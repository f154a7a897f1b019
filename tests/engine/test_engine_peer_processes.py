"""Processes that are stopped, killed, or have thousands of descriptors open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefixloom_engine import Engine, Request
from prefixloom_engine.disaggregation import PrefillServer
from tests.support.engines import cache_for, connected, mixed, model, nothing_left, plain, prompt, serving
from tests.support.places import ROOT
from tests.support.processes import spoken

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def test_a_prefill_process_that_is_stopped_costs_a_recompute_and_is_asked_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not dead, and its connection stands."""
    requests = mixed(4)
    right = plain(model(), requests)
    cache = cache_for(model())
    with (
        spoken("prefill_process") as (prefill, address),
        connected(Engine(model(), cache), address, patience=0.3) as decode,
    ):
        prefill.send_signal(signal.SIGSTOP)
        answers = decode.generate(requests)
        assert [answer.tokens for answer in answers] == right
        assert decode.lost > 0
        assert "it has said nothing for 0.3 s" in caplog.text
        lost = decode.lost
        cache.flush()
        assert [answer.tokens for answer in decode.generate(requests)] == right
        assert decode.lost == lost, "who says nothing is not asked again"
        prefill.send_signal(signal.SIGCONT)
        assert decode.connect(30)
        cache.flush()
        before = decode.handed_over
        assert [answer.tokens for answer in decode.generate(requests)] == right
        assert decode.handed_over > before
    nothing_left(cache)


def test_a_decode_process_that_is_killed_loses_its_prompts() -> None:
    server = PrefillServer(Engine(model(), cache_for(model()), chunk=16))
    begun = time.monotonic()
    with process_asking(server) as asking:
        while server.prompts < 4 and time.monotonic() < begun + 60:
            server.serve_once(0.01)
        assert server.prompts == 4
        asking.kill()
        asking.wait()
        while server.prompts and time.monotonic() < begun + 60:
            server.serve_once()
    assert server.prompts == 0
    assert server.engine.counts.prefilled < 4 * 1900
    server.close()
    nothing_left(server.engine.cache)


@contextmanager
def process_asking(server: PrefillServer) -> Iterator[subprocess.Popen[str]]:
    """A process that asks this server, which has to be driven meanwhile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.support.asking_process", server.address]
    made = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield made  # type: ignore[misc]
    finally:
        made.kill()
        made.wait()


def test_five_thousand_descriptors_are_no_matter() -> None:
    with spoken("descriptors") as (_, told):
        assert told == "1 5000"


def test_another_prefill_process_at_the_same_address_takes_over() -> None:
    """Nothing that belongs to a connection is needed after a restart."""
    cache = cache_for(model())
    with serving(lambda: cache_for(model())) as first:
        address = first.address
        decode = connected(Engine(model(), cache), address)
        (answer,) = decode.generate([Request(prompt(1, 150), 2)])
    with serving(lambda: cache_for(model()), over=address):
        assert decode.connect(30)
        cache.flush()
        until = time.monotonic() + 30
        while decode.handed_over < 2 and time.monotonic() < until:
            (again,) = decode.generate([Request(prompt(1, 150), 2)])
            assert again.tokens == answer.tokens
            cache.flush()
            time.sleep(0.05)
        assert decode.handed_over == 2
        decode.close()
    nothing_left(cache)
