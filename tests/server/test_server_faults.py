"""The engine fails, and answers are given up: whoever waits is told, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from prefixloom import compose
from prefixloom_engine import Engine, Request
from prefixloom_engine.server import worker
from prefixloom_engine.server.protocol import ApiError
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.server.worker import MOST_FAILURES, EngineWorker, News, PendingAnswer
from prefixloom_engine.threeway.text import ByteDetokenizer, ByteTokenizer
from tests.support.servers import CAPACITY, eventually, serving, text_model

BODY = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}


class Panic(BaseException):
    """What no ``except Exception`` catches."""


def before_each_step(do: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what prepares an engine: it does something before each of its steps."""

    def prepare(engine: Any) -> None:
        step = engine.step
        engine.step = lambda: (do(engine), step())[1]

    return prepare


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_an_engine_that_is_given_up_tells_everybody(error: type[BaseException]) -> None:
    broken = threading.Event()

    def fail(_: Any) -> None:
        if broken.is_set():
            raise error("broken")

    with serving(prepare=before_each_step(fail), most=2) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            broken.set()
            *_, last = filter(None, lines)
        assert "the engine has failed" in last
        refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
        assert client.get("/health").status_code == 503


def test_a_server_whose_cache_was_interrupted_amid_a_publication_says_so_and_serves_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(*_: Any) -> Any:
        raise MemoryError

    with serving(most=2) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": 4}).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr("prefixloom.operations.publish.nodes_for", lacking)
            failed = client.post("/v1/completions", json={"prompt": "y" * 400, "max_tokens": 4})
        assert (failed.status_code, "the cache is broken" in failed.text) == (500, True)
        refused = client.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": 4})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
        health = client.get("/health")
        assert health.status_code == 503 and "the cache is broken: MemoryError in " in health.json()["status"]


def test_an_engine_whose_steps_fail_a_few_times_goes_on() -> None:
    left = [MOST_FAILURES - 1]

    def fail(_: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("not yet")

    with serving(prepare=before_each_step(fail)) as server, server.client() as client:
        answered = client.post("/v1/completions", json={**BODY, "max_tokens": 3})
        assert answered.status_code == 200 and left[0] < 0, answered.text


def test_a_step_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held, go_on = threading.Event(), threading.Event()

    def wait(engine: Any) -> None:
        if any(engine.load):
            held.set()
            assert go_on.wait(60)

    with serving(prepare=before_each_step(wait)) as server, server.client() as client:
        stream = {**BODY, "max_tokens": 3, "stream": True}
        with client.stream("POST", "/v1/completions", json=stream) as answer:
            assert held.wait(30)
            monkeypatch.setattr(worker, "SILENT_SECONDS", 0.0)
            told = client.get("/health")
            assert (told.status_code, told.json()["status"]) == (503, "degraded")
            assert "a step has run for" in told.json()["engine"]
            monkeypatch.undo()
            go_on.set()
            assert "[DONE]" in answer.read().decode()
        assert client.get("/health").json() == {"status": "ok"}


class Confused(ByteTokenizer):
    """Fails where an answer has become long."""

    def detokenizer(self) -> ByteDetokenizer:
        class Failing(ByteDetokenizer):
            left = 20

            def push(self, token: int) -> str:
                self.left -= 1
                return "x" * (8 // self.left)

        return Failing()


def test_a_stream_in_which_something_fails_says_so() -> None:
    texts = TextProcesses(Confused)
    with closing(texts), serving(texts=texts) as server, server.client() as client:
        for choices in (1, 2):
            told = client.post("/v1/completions", json={**BODY, "stream": True, "n": choices}).text
            assert "something went wrong" in told.split("\n\n")[-2]
            whole = client.post("/v1/completions", json={**BODY, "n": choices})
            assert (whole.status_code, whole.headers["connection"]) == (
                500,
                "close",
            )  # as uvicorn does, whatever it says
        assert client.get("/health").status_code == 200
        eventually(lambda: server.server.worker.load == 0)


def test_nothing_is_new_of_an_answer_that_is_over() -> None:
    """An answer that takes too long may go on for a step; its reader is slow, and still learns that it is over."""

    async def read() -> News:
        ticket = PendingAnswer(Request((1,)))
        ticket.put(News([], [], [], "error", ApiError(504, "too long"), 0))
        ticket.put(News([7], [], [], "", None, 0))
        return await ticket.next()

    news = asyncio.run(read())
    assert isinstance(news.error, ApiError) and news.tokens == []


def test_whoever_waits_for_an_aborted_answer_is_told() -> None:
    def make() -> Engine:
        return Engine(text_model(), compose(text_model().config, capacity=CAPACITY))

    async def read() -> str:
        worker = EngineWorker(make, 4, lambda error: None)
        worker.start()
        try:
            (ticket,) = await worker.add(Request((1,), 1500, stops=()))
            await ticket.next()
            worker.abort(ticket)
            while True:
                news = await asyncio.wait_for(ticket.next(), 5)
                if news.reason:
                    return news.reason
        finally:
            await worker.stop(0)

    assert asyncio.run(read()) == "aborted"
