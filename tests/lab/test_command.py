"""The command ``replay``: tables, JSON, several policies, what it refuses, recordings, and the bar on a terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from prefixloom.cli import main
from prefixloom.lab import RecordedCalls, Replay, Setup, read_trace, record
from prefixloom.lab.commands.arguments import ProgressBar

PROFILE = """
page_size = 16
[[components]]
kind = "full"
options = {layers = [0], kv_heads = 1, k_dim = 4, v_dim = 4, dtype = "float32"}
[[components]]
kind = "mamba"
options = {conv = [4, 4], recurrent = [4, 4]}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A trace of conversations, and a profile."""
    lines = []
    for at in range(30):
        talk, turn = at % 5, at // 5 + 1
        ids = [0, *(100 * talk + each for each in range(1, 2 * turn + 1))]
        line = {"timestamp": 1000 * at, "input_length": 64 * len(ids) - 9, "output_length": 20, "hash_ids": ids}
        lines.append(json.dumps(line) + "\n")
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    (tmp_path / "model.toml").write_text(PROFILE)
    return str(tmp_path / "trace.jsonl"), str(tmp_path / "model.toml")


def test_a_replay_prints_what_was_measured(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    trace, model = files
    assert main(["replay", trace, "--model", model, "--capacity", "4000", "--max-running", "4"]) == 0
    told = capsys.readouterr()
    assert "30 requests of trace.jsonl" in told.out
    assert "x the ideal" in told.out
    assert "no state deeper" in told.out
    assert told.err == ""  # no bar where there is no terminal


def test_several_policies_are_compared_and_json_has_all_figures(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, model = files
    size = ["--capacity", "full=2000,mamba=20", "--in-turn"]
    assert main(["replay", trace, "--model", model, *size, "--policy", "lru", "lfu"]) == 0
    table = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    assert [row.split()[0] for row in table] == ["policy", "lru", "lfu", "no"]
    assert "memory  x ideal     hit  gap closed" in table[0] and " 0.0% " in table[1]
    page = tmp_path / "page.html"
    both = []
    for jobs in ("1", "2"):  # processes measure what one does
        more = ["--jobs", jobs, "--json", "--report", str(page)]
        assert main(["replay", trace, "--model", model, *size, "--policy", "lru", "lfu", *more]) == 0
        both.append(json.loads(re.sub(r'"cpu": [\d.e-]+', '"cpu": 0', capsys.readouterr().out)))
    told, apart = both
    assert told == apart
    text = page.read_text()
    assert all(f"<td>{each}</td>" in text for each in ("lru", "lfu", "0.0%")) and text.count("<svg") == 2
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", text)  # it is read without a network
    assert all(f"{each['hit_rate']:.2%}" in row for each, row in zip(told["replays"], table[1:], strict=False))
    (bound,) = told["bounds"]
    assert f"{bound['hit_rate']:.2%}" in table[3] and bound["bytes"] == told["replays"][0]["bytes"]
    assert all(each["hit_rate"] <= bound["hit_rate"] < 1 for each in told["replays"])
    assert main(["replay", trace, "--model", model, *size, "--policy", "lru", "lfu", "--no-bound"]) == 0
    assert "gap closed" not in capsys.readouterr().out
    assert main(["replay", trace, "--model", model, *size, "--limit", "9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "bounds" not in told  # nothing is compared
    (replay,) = told["replays"]
    assert (replay["requests"], replay["policy"], replay["complete"]) == (9, "lru", True)
    assert replay["components"]["mamba"]["capacity"] == 20


def test_a_plan_is_printed_and_drawn(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    more = ["--traffic", "prompt=256,output=16,shared=0.3,users=4,requests=12", "--report", str(page)]
    assert main(["plan", "--model", files[1], "--memory", "1MiB", *more]) == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if "stopped by" in line]
    assert heads == [["memory", "hit", "x", "ideal", "stopped", "by", "retracted", "refused"]] * 3
    assert page.read_text().count("<table>") == 4


def test_memory_is_divided_for_what_is_said_of_the_requests(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The longer the prompts, the fewer states, and the more pages."""
    pools = []
    for more in (["--divide", "prompt=64,output=16,shared=0"], ["--divide", "trace"], []):
        size = ["--memory", "1MiB", "--max-running", "2"]
        assert main(["replay", files[0], "--model", files[1], *size, *more, "--json"]) == 0
        (replay,) = json.loads(capsys.readouterr().out)["replays"]
        pools.append([replay["components"][name]["capacity"] for name in ("full", "mamba")])
    pages, states = zip(*pools, strict=True)
    assert pages[0] < pages[1] < pages[2] and states[0] > states[1] > states[2], pools


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "--memory SIZE or --capacity TOKENS"),
        (["--capacity", "many"], "--capacity is a number of tokens, or NAME=NUMBER"),
        (["--capacity", "4000", "--policy", "best"], "best"),
        (["--capacity", "4000", "--limit", "0"], "limit is a whole number from 1 up"),
        (["--capacity", "4000", "--prefill", "0"], "a service computes prefill tokens"),
        (["--capacity", "4000", "--divide", "trace"], "--divide says what --memory is divided for"),
        (["--memory", "1MiB", "--divide", "length=3"], "prompt, output, shared; got 'length'"),
        (["--capacity", "4000", "--rerun"], "line 1"),
        (
            ["--capacity", "4000", "5000", "--rerun", "--limit", "3"],
            "made again, --limit and more than one size cannot",
        ),
    ],
)
def test_what_is_wrong_is_told_and_ends_with_2(
    more: list[str], expected: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", files[0], "--model", files[1], *more]) == 2
    assert expected in capsys.readouterr().err


def test_a_line_that_is_wrong_far_down_ends_with_2_after_what_was_measured(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with open(files[0], "a") as file:
        file.write("{\n")
    assert main(["replay", files[0], "--model", files[1], "--capacity", "4000", "--in-turn"]) == 2
    told = capsys.readouterr()
    assert "30 requests" in told.out
    assert "line 31: a JSON object is expected" in told.err


def test_ctrl_c_ends_with_130_after_what_was_measured(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: ProgressBar, requests: int, now: float) -> None:
        if requests == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "told", interrupted)
    assert main(["replay", files[0], "--model", files[1], "--capacity", "4000"]) == 130
    told = capsys.readouterr().out
    assert "12 requests" in told
    assert "interrupted" in told


def test_a_recording_is_made_again_with_the_pools_that_it_names(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = Setup(files[1], capacity={"full": 1600, "mamba": 12}, service=None)
    calls = str(tmp_path / "calls.gz")
    with record(setup.compose(), calls) as recorded:
        Replay(recorded).run(read_trace(files[0]))
    assert main(["replay", calls, "--model", files[1], "--rerun"]) == 0
    assert ", 0 came out otherwise" in capsys.readouterr().out
    assert main(["replay", calls, "--model", files[1], "--rerun", "--capacity", "full=3200,mamba=12"]) == 2
    assert "pools" in capsys.readouterr().err
    assert main(["replay", calls, "--model", files[1], "--shrink", str(tmp_path / "small")]) == 0
    assert "of 30 requests fail nowhere" in capsys.readouterr().out
    assert len(RecordedCalls.read(calls).requests) == 30
    assert main(["replay", calls, "--model", files[1], "--capacity", "4000"]) == 0
    assert "30 requests of calls.gz" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_shows_how_far_it_is_and_goes(files: tuple[str, str]) -> None:
    trace, screen = read_trace(files[0], limit=30), Terminal()
    bar = ProgressBar(trace, "lru", screen)
    bar.told(15, 1.0)
    assert "lru [###############...............]  50%  15 requests" in screen.getvalue()
    bar.clear()
    assert screen.getvalue().endswith("\r")
