"""The demo: what it prints, that its verdict is computed and not assumed, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import re
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
from prefixloom_engine.demo import comparison, exactness
from prefixloom_engine.demo import text as text_output
from prefixloom_engine.demo.conversations import Conversations
from prefixloom_engine.threeway import BoundThreeWay
from tests.support.engines import model

SMALL = ["demo", "--size", "tiny", "--conversations", "2", "--turns", "2"]
Sabotage = Callable[[torch.Tensor], object]
pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are as wide here whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


def output(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> str:
    assert main([*SMALL, *more]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def as_json(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(output(capsys, "--json", *more, code=code))
    return told


# ---------------------------------------------------------------- what it prints


def test_each_turn_has_a_row_and_the_verdict_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys).splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("turn "))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["1", "2", "all"]
    assert lines[-1] == (
        "verdict:        EXACT: every answer is the same, and what was restored is bitwise what was left"
    )
    assert any(re.search(r"first token: .* times as fast; \d+% of", line) for line in lines)
    assert lines[table].split()[5] == "full/swa/mamba"


def test_a_pipe_gets_plain_lines_that_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "--conversations", "4", "--speculate", "2")
    assert out.isascii()
    assert out.replace("\n", "").isprintable()
    assert max(map(len, out.splitlines())) <= 100
    assert "guesses:" in out


def test_json_is_one_object_with_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, "--conversations", "4")
    assert [len(row["turns"]) for row in told["rounds"]] == [4, 4]
    judged = told["verdict"]
    assert judged["passed"] is True
    assert (judged["answers"], judged["tokens"], judged["other_tokens"]) == (8, 8 * comparison.REPLY, 0)
    assert 0 <= judged["difference"] < 1e-10
    assert judged["pages"] > 100 and judged["states"] > 3
    assert set(judged["moved"]) == {"full", "swa", "mamba"}
    assert told["speedup"] > 0
    assert told["prefixloom"] == cli.version()


def test_later_turns_hit_what_earlier_ones_left_and_a_small_pool_evicts(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = as_json(capsys, "--conversations", "6", "--turns", "2", "--capacity", "900")["rounds"]
    hits = [turn["hit_tokens"] for turn in first["turns"]]
    assert min(hits[1:]) >= 448, "all but the first find the system prompt"
    assert second["hit_rate"] > 0.5
    assert sum(second["evicted"].values()) > 0


def test_what_the_device_lost_comes_back_from_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--conversations", "4", "--turns", "2", "--capacity", "800")
    told = as_json(capsys, *more)
    turns = [turn for row in told["rounds"] for turn in row["turns"]]
    back = sum(turn["restored_tokens"] for turn in turns)
    assert back > 0
    assert all(turn["restored_tokens"] <= turn["hit_tokens"] for turn in turns)
    without = as_json(capsys, *more, "--host", "0")
    assert sum(turn["restored_tokens"] for row in without["rounds"] for turn in row["turns"]) == 0
    assert told["hit_rate"] > without["hit_rate"]
    assert told["verdict"]["passed"] and without["verdict"]["passed"]
    out = output(capsys, *more)
    assert f"{back:,} tokens in" in out
    rests = "what has to go rests in the host's memory"
    assert rests in out and rests not in output(capsys, *more, "--host", "0")


def test_a_spoiled_host_fails_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    leave = exactness.ContentLedger.remember

    def left(self: exactness.ContentLedger, tokens: Any) -> None:
        leave(self, tokens)
        for lane in tier_lanes(self.cache):
            for buffer in lane.pool.buffers.values():
                buffer.mul_(1 + 1e-15)

    monkeypatch.setattr(exactness.ContentLedger, "remember", left)
    judged = as_json(capsys, "--conversations", "4", "--turns", "2", "--capacity", "800", code=1)["verdict"]
    assert (judged["other_tokens"], judged["difference"] < 1e-10) == (0, True)
    assert judged["wrong"] > 0


def test_the_options_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, "--dtype", "float32", "--capacity", "3000", "--seed", "3")
    assert told["settings"]["capacity"]["full"] == 3008
    assert (told["settings"]["dtype"], told["verdict"]["tolerance"]) == ("float32", 1e-3)
    assert sum(sum(row["evicted"].values()) for row in told["rounds"]) == 0


def test_a_seed_repeats_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    def hits(seed: str) -> list[Any]:
        rounds = as_json(capsys, "--seed", seed)["rounds"]
        return [(turn["prompt_tokens"], turn["hit_tokens"]) for row in rounds for turn in row["turns"]]

    assert hits("1") == hits("1") != hits("2")


def test_where_nothing_is_restored_the_verdict_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "--conversations", "1", "--turns", "1")
    assert "nothing was wrong, but nothing was restored either: try more --turns" in out.splitlines()[-1]


def test_a_cache_that_costs_time_is_called_slower() -> None:
    assert text_output.speedup_in_words(2.0) == "2.0 times as fast"
    assert text_output.speedup_in_words(0.9) == "slower"
    assert text_output.counted(1, "page") == "1 page"


def test_report_is_one_file_with_its_pictures_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    assert f"report:         {path}" in output(capsys, "--report", str(path))
    text = path.read_text()
    assert "EXACT" in text and not re.search(r"""(src|href|srcset|data)=""", text)
    times, prompts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(re.findall("turn [12], (with the cache|without)</text>", times)) == 4
    assert len(re.findall("turn [12], talk [12]</text>", prompts)) == 4
    for picture in (times, prompts):
        ElementTree.fromstring(picture)


# ---------------------------------------------------------------- the verdict


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Sabotage], None]:
    """Do something to a component's memory after each answer that was compared, unseen by anybody."""

    def install(component: str, sabotage: Sabotage) -> None:
        leave = exactness.ContentLedger.remember

        def left(self: exactness.ContentLedger, tokens: Any) -> None:
            leave(self, tokens)
            for buffer in self.cache.pool(component).buffers.values():
                sabotage(buffer)

        monkeypatch.setattr(exactness.ContentLedger, "remember", left)

    return install


@pytest.mark.parametrize("component", ["full", "swa", "mamba"])
def test_lost_memory_fails_the_verdict(
    component: str, capsys: pytest.CaptureFixture[str], spoil: Callable[[str, Sabotage], None]
) -> None:
    spoil(component, lambda buffer: buffer.zero_())
    lines = output(capsys, code=1).splitlines()
    assert lines[-1] == "verdict:        NOT EXACT"
    assert any(line.startswith("answers:") and "DIFFER" in line for line in lines)


def test_a_change_too_small_for_the_answers_fails_the_verdict(
    capsys: pytest.CaptureFixture[str], spoil: Callable[[str, Sabotage], None]
) -> None:
    spoil("full", lambda buffer: buffer.mul_(1 + 1e-15))
    judged = as_json(capsys, code=1)["verdict"]
    assert (judged["other_tokens"], judged["difference"] < 1e-10) == (0, True)
    assert judged["wrong"] > 0


def test_one_wrong_logit_fails_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logits = BoundThreeWay.logits

    def nudged(self: BoundThreeWay, *args: Any) -> torch.Tensor:
        out = logits(self, *args)
        if id(self) == first.setdefault("id", id(self)):
            out[..., 0] -= 1e-6
        return out

    first: dict[str, int] = {}
    monkeypatch.setattr(BoundThreeWay, "logits", nudged)
    assert as_json(capsys, code=1)["verdict"]["difference"] > 1e-10


def test_a_control_that_moves_nothing_fails_the_verdict() -> None:
    fine = exactness.Exactness(1e-10, answers=1, tokens=1, pages=1, moved={"full": 0.1})
    assert fine.passed
    for spoiled in (
        {"moved": {"full": 0.0}}, {"wrong": 1}, {"held": 1}, {"other_tokens": 1}, {"difference": float("nan")},
    ):  # fmt: skip
        assert not attrs.evolve(fine, **spoiled).passed


def test_a_leaked_page_fails_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spans = []
    honest = comparison.Comparison.run_round

    def leaking(self: comparison.Comparison, turn: int) -> comparison.Round:
        if not spans:
            spans.append(self.cache.pool("full").mint(1))
        return honest(self, turn)

    monkeypatch.setattr(comparison.Comparison, "run_round", leaking)
    assert "1 page is still held" in output(capsys, "--capacity", "1000", code=1)


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
def test_a_bad_value_is_one_line_and_exit_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"prefixloom: {told}")
    assert captured.err.count("\n") == 1


def test_a_report_that_cannot_be_written_is_told_after_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    path = tmp_path / "out.html"
    monkeypatch.setattr(Path, "write_text", full)
    assert main([*SMALL, "--report", str(path)]) == 2
    captured = capsys.readouterr()
    assert "verdict:        EXACT" in captured.out
    assert captured.err == f"prefixloom: --report {path} cannot be written: No space left on device\n"


def test_without_numpy_it_runs_and_nothing_is_warned_of(tmp_path: Path) -> None:
    """A fresh installation has none."""
    tmp_path.joinpath("numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    call = [sys.executable, "-m", "prefixloom", *SMALL]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom prefixloom.cli import main\n"
        "try:\n    main(['demo', '--help'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--report FILE" in done.stdout


def test_the_number_of_threads_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        output(capsys)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_every_third_conversation_branches_off_its_neighbour_half_way_and_at_no_other_turn() -> None:
    conversations = Conversations(3, 4, 2, 100, 1, system=20, user=(3, 5))
    before: dict[int, list[int]] = {}
    for turn in range(4):
        for number in range(3):
            prompt = conversations.next_prompt(number, turn)
            goes_on = prompt[: len(before.get(number, ()))] == before.get(number, [])
            assert goes_on == (number != 2 or turn != 2), (number, turn)
            conversations.add_reply(number, [7, 8])
            before[number] = [*prompt, 7, 8]
    assert prompt[:20] == before[0][:20], "all begin with one system prompt"


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
