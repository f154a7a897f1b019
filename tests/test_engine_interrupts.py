"""Ctrl-C at any moment: the engine is right after it, and so is its cache."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import prefixloom
import prefixloom_engine
from engines import CAPACITY, cache_for, mixed, model, nothing_left, plain
from helpers import owners
from prefixloom_engine import Engine
from prefixloom_engine.interrupts import held

OURS = tuple(str(Path(each.__file__).parent) for each in (prefixloom, prefixloom_engine))


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """A background job may have inherited that the signal is ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, inherited) is signal.default_int_handler


class Pressed:
    """Ctrl-C at that line of the core or the engine, counted from where tracing begins."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> Pressed:
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self.trace if frame.f_code.co_filename.startswith((*OURS, "<")) else None

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self.left -= event == "line"
        if self.left == 0 and event == "line":
            signal.raise_signal(signal.SIGINT)
        return self.trace


@pytest.mark.parametrize("overlap", [False, True])
def test_wherever_it_comes_the_books_are_right_and_others_go_on(overlap: bool) -> None:
    requests = mixed(4)
    expected = plain(model(), requests)
    cache = cache_for(model(), CAPACITY)
    pressed = 0
    for line in range(40, 9000, 331):
        with Engine(model(), cache, chunk=64, overlap=overlap) as engine:
            answers = [engine.add(each) for each in requests[:2]]
            with Pressed(line):
                try:
                    engine.generate(requests[2:])
                except KeyboardInterrupt:
                    pressed += 1
            while engine.step():
                pass
            assert [answer.tokens for answer in answers] == expected[:2]
        nothing_left(cache)
        owners(cache, [])
        if line % 3 == 0:
            cache.evict(dict.fromkeys(cache.stats().components, 64))
    assert pressed > 10


def test_it_is_raised_behind_the_block_and_a_second_one_at_once() -> None:
    ran = []
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        ran.append(1)
    assert ran == [1]
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ran.append(2)
    assert ran == [1]
    with held():
        ran.append(3)
    with pytest.raises(LookupError), held():
        raise LookupError
    assert ran == [1, 3]


def test_one_that_comes_with_an_error_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as told, held():
        signal.raise_signal(signal.SIGINT)
        raise LookupError
    assert isinstance(told.value.__context__, LookupError)


def test_who_has_a_handler_keeps_it() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with held():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_needs_no_handler() -> None:
    ran = []

    def work() -> None:
        with held():
            ran.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [1]
