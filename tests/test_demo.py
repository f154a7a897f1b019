"""The demo: what it prints, that its verdict is computed and not assumed, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import prefixloom
from interrupting import interruptible
from prefixloom import cli
from prefixloom.cli import demo, main
from prefixloom.sequence import Sequence
from prefixloom.testing.layers import PageStore
from prefixloom.testing.toy import ToyModel

SMALL = ["demo", "--conversations", "4", "--turns", "2"]
Sabotage = Callable[[torch.Tensor], object]


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    monkeypatch.setattr(demo, "LAYERS", demo.LAYERS[:2])
    monkeypatch.setattr(demo, "SIZES", {"vocab_size": 97})


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sabotage], None]:
    """Do something to the first page of each sequence's keys just after it has closed, unseen by anybody."""

    def install(sabotage: Sabotage) -> None:
        close = Sequence.close

        def closed(self: Sequence) -> None:
            slot = self.pages("full")[0]
            buffers = self._cache.pool("full").buffers
            close(self)
            sabotage(buffers["k"][:, slot])

        monkeypatch.setattr(Sequence, "close", closed)

    return install


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
    table = lines.index("turn     sations   tokens   tokens  rate     pages  with cache   without")
    assert [line.split()[:2] for line in lines[table + 1 : table + 4]] == [["1", "4"], ["2", "4"], ["all", "8"]]
    assert lines[-1] == (
        "verdict:                      restored memory is bitwise the same; outputs agree within 1e-10 (sums in "
        "another order)"
    )
    assert any("distribution prefixloom" in line for line in lines[:table]), "it says where the component is from"


def test_a_pipe_gets_plain_lines_that_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys)
    assert out.isascii()
    assert out.replace("\n", "").isprintable()
    assert max(map(len, out.splitlines())) <= 120


def test_a_terminal_gets_a_line_of_progress_that_is_gone_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(SMALL) == 0
    shown = terminal.getvalue().split("\r")
    assert "turn 2 of 2, conversation 4 of 4" in shown
    assert shown[-1] == ""
    assert shown[-2].isspace()
    assert "\r" not in capsys.readouterr().out


def test_json_is_one_object_with_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys)
    assert [row["conversations"] for row in told["rounds"]] == [4, 4]
    assert told["verdict"]["passed"] is True
    assert told["verdict"]["content"] == "bitwise equal"
    assert told["verdict"]["logits"] == "equal within 1e-10"
    assert 0 < told["verdict"]["difference"] < 1e-10
    computed = sum(row["prompt_tokens"] - row["hit_tokens"] for row in told["rounds"])
    assert told["verdict"]["rows"] == computed + 8 * (demo.REPLY - 1), "the answers' logits are compared too"
    assert told["speedup"] > 0
    assert told["prefixloom"] == cli.version()


def test_later_turns_hit_what_earlier_ones_left_and_a_small_pool_evicts(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = as_json(capsys)["rounds"]
    assert first["hit_tokens"] >= 3 * 192, "all but the first find the system prompt"
    assert second["hit_rate"] > first["hit_rate"] > 0
    assert first["evicted_pages"] + second["evicted_pages"] > 0


def test_the_options_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, "--page-size", "32", "--capacity", "1000", "--seed", "3")
    assert told["settings"] == {
        "conversations": 4, "turns": 2, "seed": 3, "page_size": 32, "capacity": {"full": 1024},
    }  # fmt: skip
    assert all(row["hit_tokens"] % 32 == 0 for row in told["rounds"])
    assert sum(row["evicted_pages"] for row in told["rounds"]) == 0


def test_a_seed_repeats_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(seed: str) -> list[dict[str, Any]]:
        rounds = as_json(capsys, "--seed", seed)["rounds"]
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in rounds]

    assert rows("1") == rows("1") != rows("2")


def test_where_nothing_is_restored_the_verdict_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "--conversations", "1", "--turns", "1")
    assert "restored = live:              nothing was restored (0 pages, 0 wrong)" in out
    assert out.splitlines()[-1].endswith("nothing was wrong, but nothing was restored either: try more --turns")


def test_where_a_page_is_longer_than_what_is_shared_a_smaller_page_is_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = output(capsys, "--turns", "1", "--page-size", "256")
    assert "nothing was restored either: try a smaller --page-size, or more --turns" in out.splitlines()[-1]


def test_numbers_agree_with_their_nouns(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "--conversations", "1", "--turns", "1", "--page-size", "256")
    first, tokens, *rest = out.splitlines()
    assert first == "Conversations: 1, of 1 turn, with one system prompt."
    assert tokens == "Tokens: about 244 different ones; each turn sends its history again."
    assert any(line.endswith(", 2 pages of 256 tokens.") for line in rest)
    assert demo.counted(1, "page") == "1 page"


def test_a_cache_that_costs_time_is_called_slower() -> None:
    assert demo.compared(1.0, 2.0) == "2.0 times as fast"
    assert demo.compared(1.0, 1.0) == "1.0 times as fast"
    assert demo.compared(2.0, 1.9) == "slower"


def test_outputs_that_are_the_same_bit_for_bit_are_said_to_be() -> None:
    verdict = demo.Verdict(rows=1, pages=1)
    assert verdict.word == "restored memory and outputs are bitwise the same"
    assert attrs.evolve(verdict, difference=1e-9).word == "NOT EXACT"


# ---------------------------------------------------------------- the verdict


def test_a_lost_page_fails_the_verdict(capsys: pytest.CaptureFixture[str], spoil: Callable[[Sabotage], None]) -> None:
    spoil(lambda page: page.zero_())
    lines = output(capsys, code=1).splitlines()
    assert lines[-1] == "verdict:                      NOT EXACT"
    assert any(line.startswith("with the cache = without it:  DIFFERENT") for line in lines)
    assert any(line.startswith("restored = live:              DIFFERENT") for line in lines)


def test_a_change_too_small_for_the_logits_fails_the_verdict(
    capsys: pytest.CaptureFixture[str], spoil: Callable[[Sabotage], None]
) -> None:
    spoil(lambda page: page.mul_(1 + 1e-14))
    verdict = as_json(capsys, code=1)["verdict"]
    assert verdict["logits"] == "equal within 1e-10"
    assert verdict["content"] == "DIFFERENT"
    assert verdict["wrong_pages"] > 0


def test_logits_that_are_no_numbers_fail_the_verdict(
    capsys: pytest.CaptureFixture[str], spoil: Callable[[Sabotage], None]
) -> None:
    spoil(lambda page: page.fill_(float("nan")))
    verdict = as_json(capsys, code=1)["verdict"]
    assert (verdict["logits"], verdict["difference"]) == ("DIFFERENT", None)


@pytest.mark.parametrize("answers", [False, True])
def test_one_wrong_logit_of_a_prompt_or_of_an_answer_fails_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    compute = ToyModel.compute

    def computed(*args: Any, **options: Any) -> torch.Tensor:
        logits = compute(*args, **options)
        if (len(logits) == 1) is answers:
            logits[0, logits[0].argmin()] -= 1e-9  # what is chosen stays the same
        return logits

    monkeypatch.setattr(ToyModel, "compute", computed)
    assert as_json(capsys, code=1)["verdict"]["difference"] == pytest.approx(1e-9, rel=0.1)


def test_reading_the_wrong_entries_fails_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = PageStore.read
    monkeypatch.setattr(PageStore, "read", lambda self, buffer, start, end: read(self, buffer, start, end).roll(1, 0))
    verdict = as_json(capsys, code=1)["verdict"]
    assert (verdict["logits"], verdict["content"]) == ("DIFFERENT", "bitwise equal")


def test_a_leaked_page_fails_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spans = []

    def leaking(*args: Any, **options: Any) -> Any:
        cache = prefixloom.compose(*args, **options)
        spans.append(cache.pool("full").mint(1))
        return cache

    monkeypatch.setattr(demo, "compose", leaking)
    assert "1 page is still held" in output(capsys, "--capacity", "1000", code=1)


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--turns", "0"], "--turns must be from 1 to 100, got 0"),
        (["--turns", "two"], "--turns takes a whole number, got 'two'"),
        (["--conversations", "1.5"], "--conversations takes a whole number, got '1.5'"),
        (["--seed", "-1"], "--seed must be from 0 to 2147483647, got -1"),
        (["--page-size", "257"], "--page-size must be from 1 to 256, got 257"),
        (["--capacity", "100"], "--capacity 100 is too small: one conversation of 2 turns may need 336 tokens"),
        (["--capacity", "99999999"], "--capacity must be from 1 to 262144, got 99999999"),
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


def test_an_interrupt_ends_it_and_clears_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ToyModel, "decode", interrupt)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(SMALL) == 130
    *_, blank, last = capsys.readouterr().err.split("\r")
    assert (blank.strip(), last) == ("", "prefixloom: interrupted\n")


def test_without_numpy_it_runs_and_nothing_is_warned_of(tmp_path: Path) -> None:
    """A fresh installation has none."""
    tmp_path.joinpath("numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    call = [sys.executable, "-m", "prefixloom", *SMALL]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_number_of_threads_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        output(capsys)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_real_interrupt_in_a_pipe_leaves_no_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-m", "prefixloom", "demo", "--conversations", "1000"]
    with interruptible(call, environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Conversations: 1000")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "prefixloom: interrupted\n")
    assert "verdict" not in out
