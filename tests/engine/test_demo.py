"""The demo: what it prints, that its verdict is computed and not assumed, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefixloom import cli
from prefixloom.cli import main
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom_engine.demo import command, comparison, exactness
from prefixloom_engine.demo import text as text_output
from prefixloom_engine.demo.conversations import Conversations
from prefixloom_engine.demo.progress import Progress
from prefixloom_engine.demo.settings import Settings
from prefixloom_engine.serving.engine import Engine
from prefixloom_engine.threeway import BoundThreeWay
from tests.support.engines import model
from tests.support.interrupting import interruptible

SMALL = ["demo", "--size", "tiny", "--conversations", "2", "--turns", "2"]
TIERED = ("--conversations", "3", "--capacity", "768")
pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are as wide here whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


def printed(*more: str, code: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([*SMALL, *more]) == code
    assert err.getvalue() == ""
    return out.getvalue()


def as_json(*more: str, code: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(printed("--json", *more, code=code))
    return told


# ---------------------------------------------------------------- what it prints


def test_text_has_a_row_for_each_turn_and_ends_with_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    out = printed(*TIERED, "--speculate", "2", "--report", str(path))
    assert out.isascii() and out.replace("\n", "").isprintable()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    table = next(i for i, line in enumerate(lines) if line.startswith("turn "))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["1", "2", "all"]
    assert lines[table].split()[5] == "full/swa/mamba"
    verdict = "verdict:        EXACT: every answer is the same, and what was restored is bitwise what was left"
    assert lines[-2:] == [verdict, f"report:         {path}"]
    assert re.search(r"first token: .* (times as fast|slower); \d+% of", out)
    assert "guesses:" in out and "what has to go rests in the host's memory" in out
    assert text_output.speedup_in_words(2.0) == "2.0 times as fast" and text_output.speedup_in_words(0.9) == "slower"
    text = path.read_text()
    assert "EXACT" in text and not re.search("(src|href|srcset|data)=", text), "one file with its pictures inside"
    times, prompts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(re.findall("turn [12], (with the cache|without)</text>", times)) == 4
    assert len(re.findall("turn [12], talk [1-3]</text>", prompts)) == 6
    for picture in (times, prompts):
        ElementTree.fromstring(picture)


def test_json_tells_what_hit_was_evicted_and_came_back_from_the_host() -> None:
    told = as_json(*TIERED)
    first, second = told["rounds"]
    turns = [*first["turns"], *second["turns"]]
    assert len(turns) == 6 and min(turn["hit_tokens"] for turn in first["turns"][1:]) >= 448, "the system prompt"
    assert second["hit_rate"] > 0.5 and sum(second["evicted"].values()) > 0
    assert 0 < sum(turn["restored_tokens"] for turn in turns) <= sum(turn["hit_tokens"] for turn in turns)
    judged = told["verdict"]
    assert judged["passed"] is True and 0 <= judged["difference"] < 1e-10
    assert (judged["answers"], judged["tokens"], judged["other_tokens"]) == (6, 6 * comparison.REPLY, 0)
    assert judged["pages"] > 100 and judged["states"] > 3
    assert set(judged["moved"]) == {"full", "swa", "mamba"}
    assert told["speedup"] > 0 and told["prefixloom"] == cli.version()
    without = as_json(*TIERED, "--host", "0")
    assert not any(turn["restored_tokens"] for row in without["rounds"] for turn in row["turns"])
    assert told["hit_rate"] > without["hit_rate"] and without["verdict"]["passed"]


def test_options_are_obeyed() -> None:
    told = as_json("--dtype", "float32", "--capacity", "3000", "--seed", "3")
    assert told["settings"]["capacity"]["full"] == 3008
    assert (told["settings"]["dtype"], told["verdict"]["tolerance"]) == ("float32", 1e-3)
    assert sum(sum(row["evicted"].values()) for row in told["rounds"]) == 0


def test_verdict_says_that_nothing_was_restored() -> None:
    out = printed("--conversations", "1", "--turns", "1")
    assert "nothing was wrong, but nothing was restored either: try more --turns" in out.splitlines()[-1]


# ---------------------------------------------------------------- the verdict


def pools(cache: Any, name: str) -> list[Any]:
    return [lane.pool for lane in tier_lanes(cache)] if name == "host" else [cache.pool(name)]


def lost(buffer: torch.Tensor) -> None:
    buffer.zero_()


def slightly_changed(buffer: torch.Tensor) -> None:
    buffer.mul_(1 + 1e-15)


@pytest.mark.parametrize(
    ("where", "sabotage"),
    [("full", lost), ("swa", lost), ("mamba", lost), ("full", slightly_changed), ("host", slightly_changed)],
)
def test_memory_that_is_changed_unseen_fails_the_verdict(
    where: str, sabotage: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each answer that was compared; also a change that is too small for the answers."""
    leave = exactness.ContentLedger.remember

    def left(self: exactness.ContentLedger, tokens: Any) -> None:
        leave(self, tokens)
        for pool in pools(self.cache, where):
            for buffer in pool.buffers.values():
                sabotage(buffer)

    monkeypatch.setattr(exactness.ContentLedger, "remember", left)
    judged = as_json(*(TIERED if where == "host" else ()), code=1)["verdict"]
    assert judged["word"] == "NOT EXACT" and judged["wrong"] > 0
    if sabotage is slightly_changed:
        assert (judged["other_tokens"], judged["difference"] < 1e-10) == (0, True)
    else:
        assert judged["other_tokens"] > 0 or judged["difference"] > 1e-10


def test_one_wrong_logit_fails_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, first = BoundThreeWay.logits, dict[str, int]()

    def nudged(self: BoundThreeWay, *args: Any) -> torch.Tensor:
        out = logits(self, *args)
        if id(self) == first.setdefault("id", id(self)):
            out[..., 0] -= 1e-6
        return out

    monkeypatch.setattr(BoundThreeWay, "logits", nudged)
    assert "DIFFER" in printed(code=1)


def test_verdict_needs_each_of_its_parts() -> None:
    fine = exactness.Exactness(1e-10, answers=1, tokens=1, pages=1, moved={"full": 0.1})
    assert fine.passed
    for spoiled in (
        {"moved": {"full": 0.0}}, {"wrong": 1}, {"held": 1}, {"other_tokens": 1}, {"difference": float("nan")},
    ):  # fmt: skip
        assert not attrs.evolve(fine, **spoiled).passed


def test_leaked_page_fails_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, honest = [], comparison.Comparison.run_round

    def leaking(self: comparison.Comparison, turn: int) -> comparison.Round:
        if not spans:
            spans.append(self.cache.pool("full").mint(1))
        return honest(self, turn)

    monkeypatch.setattr(comparison.Comparison, "run_round", leaking)
    assert "1 page is still held" in printed("--capacity", "1000", code=1)


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--turns", "0"], "--turns must be from 1 to 100, got 0"),
        (["--turns", "two"], "--turns takes a whole number, got 'two'"),
        (["--conversations", "1.5"], "--conversations takes a whole number, got '1.5'"),
        (["--seed", "-1"], "--seed must be from 0 to 2147483647, got -1"),
        (["--capacity", "100"], "--capacity 100 is too small: one conversation of 2 turns may need 768 tokens"),
        (["--capacity", "99999999"], "--capacity must be from 1 to 1048576, got 99999999"),
        (["--size", "huge"], "a size of ThreeWay is one of tiny, small, medium, large"),
        (["--model", "."], "--size is of the built-in model, and --model says which one to take instead"),
        (["--dtype", "int8"], "--dtype must be float32 or float64, got 'int8'"),
        (["--report", "/no/such/folder/out.html"], "--report /no/such/folder/out.html: there is no folder"),
        (["--report", ""], "--report takes the name of a file, and"),
    ],
)
def test_bad_value_is_one_line_and_exit_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"prefixloom: {told}")
    assert captured.err.count("\n") == 1


def test_report_that_cannot_be_written_is_told_after_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    path, threads = tmp_path / "out.html", torch.get_num_threads()
    monkeypatch.setattr(Path, "write_text", full)
    torch.set_num_threads(2)
    try:
        assert main([*SMALL, "--report", str(path)]) == 2
        assert torch.get_num_threads() == 2, "the number of threads is given back"
    finally:
        torch.set_num_threads(threads)
    captured = capsys.readouterr()
    assert "verdict:        EXACT" in captured.out
    assert captured.err == f"prefixloom: --report {path} cannot be written: No space left on device\n"


def test_demo_runs_without_numpy_and_warns_of_nothing(tmp_path: Path) -> None:
    """A fresh installation has none."""
    tmp_path.joinpath("numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    call = [sys.executable, "-m", "prefixloom", *SMALL]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom prefixloom.cli import main\n"
        "try:\n    main(['demo', '--help'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--report FILE" in done.stdout


# ---------------------------------------------------------------- a terminal, and interrupts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_narrow_terminal_gets_folded_lines_and_a_line_of_progress_that_is_gone_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*SMALL, "--speculate", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = range(lines.index("") + 1, lines.index("", lines.index("") + 1))
    assert max(len(lines[i]) for i in table) <= 80, "a table cannot be folded"
    assert max(len(line) for i, line in enumerate(lines) if i not in table) <= 60
    shown = terminal.getvalue().split("\r")
    assert "turn 2 of 2, conversation 2 of 2" in shown
    assert shown[-1] == "" and shown[-2].isspace()
    monkeypatch.setenv("COLUMNS", "20")
    progress = Progress(quiet=False)
    progress.show("turn 1 of 2, conversation 1 of 4")
    progress.clear()
    assert max(map(len, terminal.getvalue().split("\r")[-4:])) < 20


def test_interrupt_that_an_import_swallows_ends_it_behind_the_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = command._model

    def swallowing(settings: Settings) -> Any:
        with contextlib.suppress(BaseException):  # as torch's modules do while they are imported
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


def test_interrupt_ends_it_and_clears_the_progress(
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


def test_interrupt_of_a_process_with_pipes_leaves_no_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-m", "prefixloom", *SMALL, "--conversations", "1000"]
    with interruptible(call, environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Model:")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "prefixloom: interrupted\n")
    assert "verdict" not in out


# ---------------------------------------------------------------- its parts


def talks(seed: int) -> list[list[int]]:
    """All prompts of three conversations of four turns, turn by turn."""
    made = Conversations(3, 4, 2, 100, seed, system=20, user=(3, 5))
    found = []
    for turn in range(4):
        for number in range(3):
            found.append(made.next_prompt(number, turn))
            made.add_reply(number, [7, 8])
    return found


def test_every_third_conversation_branches_off_its_neighbour_half_way_and_at_no_other_turn() -> None:
    told = talks(1)
    assert told == talks(1) != talks(2)
    for at, prompt in enumerate(told):
        assert prompt[:20] == told[0][:20], "all begin with one system prompt"
        turn, number = divmod(at, 3)
        if turn:
            before = [*told[at - 3], 7, 8]
            assert (prompt[: len(before)] == before) == (number != 2 or turn != 2), (number, turn)


class Made(TorchDispatchMode):
    """The bytes of all tensors that are made in memory."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.size += sum(each.nbytes for each in tensors if each.device.type != "meta")
        return made


def test_how_large_pools_are_is_found_without_memory_for_them() -> None:
    it = model()
    with Made() as made:
        found = comparison.pool_capacities(it, 1 << 12, 4)
    assert found == {"full": 1 << 12, "swa": 1 << 12, "mamba": comparison.STATES + 4 + 32}
    assert made.size < 1 << 12
