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
from prefixloom_engine import Answer, Engine
from prefixloom_engine.contract.observer import Observer
from prefixloom_engine.serving.interrupts import defer_interrupts
from tests.support.engines import CAPACITY, cache_for, mixed, model, nothing_left, plain
from tests.support.helpers import owners
from tests.support.sampling import slow

OURS = tuple(str(Path(each.__file__).parent) for each in (prefixloom, prefixloom_engine))


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """A background job may have inherited that the signal is ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, inherited) is signal.default_int_handler


class Pressed:
    """Ctrl-C at that line of the core or the engine, counted from where tracing begins."""

    def __init__(self, line: int, again: int = 0) -> None:
        """``again``: once more, so many lines later."""
        self.left, self.again = line, again

    def __enter__(self) -> Pressed:
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self.trace if frame.f_code.co_filename.startswith((*OURS, "<")) else None

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self.left -= event == "line"
        if event == "line" and self.left in (0, -self.again):
            signal.raise_signal(signal.SIGINT)
        return self.trace


Stage = Callable[[Engine, Answer], object]


def generated(engine: Engine, answer: Answer) -> None:
    engine.generate(mixed(4)[2:])


def streamed(engine: Engine, answer: Answer) -> None:
    for _ in zip(range(3), engine.stream(mixed(4)[2]), strict=False):
        pass


STAGES: dict[str, Stage] = {
    "generate": generated,
    "stream": streamed,
    "add": lambda engine, answer: engine.add(mixed(4)[3]),
    "abort": lambda engine, answer: engine.abort(answer),
    "drain": lambda engine, answer: engine.drain(),
    "close": lambda engine, answer: engine.close(),
}
IN_A_FINALIZER = "ignore:Exception ignored in. <function AnswerStream.close:pytest.PytestUnraisableExceptionWarning"
"""A stream that is dropped ends in its finalizer. Python can only tell of an interrupt that comes there."""


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings(IN_A_FINALIZER)
@pytest.mark.parametrize(("stage", "overlap"), [(stage, at % 2 == 0) for at, stage in enumerate(STAGES)])
@pytest.mark.parametrize("many", [3, slow(40)])
def test_books_are_right_and_others_go_on_wherever_an_interrupt_comes(stage: str, overlap: bool, many: int) -> None:
    """Pressed once, at about so many lines from the first to the last of one call, while other requests run."""
    requests = mixed(4)
    expected = plain(model(), requests)
    cache = cache_for(model(), CAPACITY)

    def ran(line: int) -> int:
        """The lines that there were."""
        with Engine(model(), cache, chunk=64, overlap=overlap) as engine:
            answers = [engine.add(each) for each in requests[:2]]
            for _ in range(4):
                engine.step()
            told = False
            with Pressed(line) as pressed:
                try:
                    STAGES[stage](engine, answers[0])
                except KeyboardInterrupt:
                    told = True
            asked = [answer for answer in engine._scheduler.jobs if answer not in answers]
            assert asked == [] or stage in ("add", "stream"), "somebody is answered whom nobody waits for"
            while stage != "close" and engine.step():
                pass
            assert all(answer.reason == "aborted" for answer in asked) or stage == "add", "and so is who dropped it"
            engine.close()
            for answer, right in zip(answers, expected, strict=False):
                assert answer.tokens == right[: None if answer.reason == "length" else len(answer.tokens)]
        nothing_left(cache)
        owners(cache, [])
        assert told or pressed.left > 0 or line < 0, "it was lost"
        return line - pressed.left

    lines = ran(-1)
    points = sorted({1, 3, lines - 1, lines, *range(5, lines, max(1, lines // many))})
    assert lines > 5
    for line in points:
        if line > 0:
            ran(line)


def test_a_request_that_is_interrupted_while_it_is_queued_does_not_stay() -> None:
    class Pressing(Observer):
        def queued(self, number: int, answer: Answer) -> None:
            signal.raise_signal(signal.SIGINT)

    with Engine(model(), cache_for(model()), observers=[Pressing()]) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.add(mixed(1)[0])
        assert engine.load == (0, 0) and not engine.step()


def test_it_is_raised_behind_the_block_and_a_second_one_at_once() -> None:
    ran = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        ran.append(1)
    assert ran == [1]
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ran.append(2)
    assert ran == [1]
    with defer_interrupts():
        ran.append(3)
    with pytest.raises(LookupError), defer_interrupts():
        raise LookupError
    assert ran == [1, 3]


def test_one_that_comes_with_an_error_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as told, defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise LookupError
    assert isinstance(told.value.__context__, LookupError)


def test_pressed_again_and_again_the_handler_is_pythons_afterwards() -> None:
    """Also where the second one comes while the block is entered or left."""
    for first in range(1, 12):
        for second in (1, 2, 3, 5):
            with Pressed(first, second):
                try:
                    with defer_interrupts():
                        pass
                except KeyboardInterrupt:
                    pass
            sys.settrace(None)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (first, second)


def test_a_handler_that_the_block_installs_stays() -> None:
    with defer_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_who_has_a_handler_keeps_it() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_needs_no_handler() -> None:
    ran: list[BaseException | None] = []

    def work() -> None:
        try:
            with defer_interrupts():
                raise KeyError
        except KeyError as error:
            ran.append(error.__context__)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [None], "and what is raised there knows nothing of signals"
