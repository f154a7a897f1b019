"""The demo in a terminal: narrow or not, and interrupted at any time."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import pytest

from prefixloom.cli import main
from prefixloom_engine.demo import command, comparison, exactness
from prefixloom_engine.demo.progress import Progress
from prefixloom_engine.demo.settings import Settings
from prefixloom_engine.serving.engine import Engine
from tests.support.interrupting import interruptible

SMALL = ["demo", "--size", "tiny", "--conversations", "2", "--turns", "2"]
pytestmark = pytest.mark.usefixtures("installed", "one_thread")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_line_of_progress_that_is_gone_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(SMALL) == 0
    shown = terminal.getvalue().split("\r")
    assert "turn 2 of 2, conversation 2 of 2" in shown
    assert shown[-1] == ""
    assert shown[-2].isspace()
    assert "\r" not in capsys.readouterr().out


def test_an_interrupt_that_an_import_swallows_ends_it_behind_the_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = command._model

    def swallowing(settings: Settings) -> Any:
        with suppress(BaseException):  # as torch's modules do while they are imported
            signal.raise_signal(signal.SIGINT)
        return known(settings)

    monkeypatch.setattr(command, "_model", swallowing)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
    try:
        assert main(SMALL) == 130
    finally:
        handler = signal.signal(signal.SIGINT, inherited)
    assert capsys.readouterr().err == "prefixloom: interrupted\n"
    assert handler is signal.default_int_handler


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_lines_fit_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*SMALL, "--conversations", "4", "--speculate", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("guesses:") for line in lines)
    table = range(lines.index("") + 1, lines.index("", lines.index("") + 1))
    assert max(len(lines[i]) for i in table) <= 80, "a table cannot be folded"
    assert max(len(line) for i, line in enumerate(lines) if i not in table) <= columns
    monkeypatch.setenv("COLUMNS", "20")
    progress = Progress(quiet=False)
    progress.show("turn 1 of 2, conversation 1 of 4")
    progress.clear()
    assert max(map(len, terminal.getvalue().split("\r")[-4:])) < 20


def test_an_interrupt_ends_it_and_clears_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_collect", interrupt)
    monkeypatch.setattr(exactness.ContentLedger, "compare", interrupt)
    monkeypatch.setattr(comparison.Comparison, "_answer", lambda *_: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(SMALL) == 130
    *_, blank, last = capsys.readouterr().err.split("\r")
    assert (blank.strip(), last) == ("", "prefixloom: interrupted\n")


def test_a_real_interrupt_in_a_pipe_leaves_no_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-m", "prefixloom", *SMALL, "--conversations", "1000"]
    with interruptible(call, environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Model:")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "prefixloom: interrupted\n")
    assert "verdict" not in out
