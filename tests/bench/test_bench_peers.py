"""``python -m bench --peers``: our drivers run every row, a missing peer is named, and the bar is the fastest peer.

The peers themselves are not installed where tests run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.engines import stand_ins
from bench.engines.driver import Driver
from bench.peers import rows, tables
from bench.peers.compare import judged, merged
from bench.peers.sides import OURS, load
from tests.support.sampling import only

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "bench", "--peers", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("comps", only(["F", "FS", "FM", "FSM"], "FSM"))
@pytest.mark.parametrize("side", OURS)
def test_each_of_our_sides_goes_through_every_row(side: str, comps: str) -> None:
    groups = {**rows.GROUPS, "evict": rows._evict, "leaves": rows._leaves}  # in this process, not in a child
    found = {}
    for work in groups.values():
        found |= work(lambda room, states: load(side)(comps, 16, room, states, 1024), rows.TINY)
    assert len(found) == 22
    assert all(math.isfinite(each) and each >= 0 for samples in found.values() for each in samples)
    assert all(found.values())


def test_our_sides_have_the_same_hits_and_leave_nothing_protected() -> None:
    hits = {}
    for side in OURS:
        made: list[Any] = []

        def make(room: int, states: int, side: str = side, made: list[Any] = made) -> Any:
            made.append(load(side)("FSM", 16, room, states, 64))
            return made[-1]

        (hits[side],) = rows.chat(make, rows.TINY)["tokens that hit in the chat, thousands"]
        stats = made[0].cache.stats()
        assert stats.sequences == 0
        for name, figures in stats.components.items():
            assert figures.leased == figures.running == 0, name
            assert figures.evicted > 0, name  # there was pressure
        assert stats.tier is None or set(stats.tier.cached.values()) == {0}, "the idle tier was used"
    assert hits["prefixloom"] == hits["stranger's"] == hits["in steps"] > 0
    assert hits["tier idle"] > 0  # above a tier, useless data is kept for a while: hits differ by some tokens


def test_a_driver_must_implement_every_method() -> None:
    whole = {name: lambda *_: None for name in Driver.__abstractmethods__}
    assert type("Whole", (Driver,), whole)("F", 16, 64, 4, 16).page == 16
    for name in whole:
        with pytest.raises(TypeError, match=name):
            type("Lacking", (Driver,), {other: each for other, each in whole.items() if other != name})("F", 1, 1, 1, 1)


@pytest.mark.slow
def test_a_peer_is_compared_and_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    peers = [f"tests.support.fake_peer:{name}" for name in ("Works", "Absent", "Fails", "Ends")]
    if gone := importlib.util.find_spec("vllm") is None:
        peers.append("vLLM")
    sizes = ("--tiny", "--comps", "F", "--pages", "16", "--rounds", "2", "--rows", "chat,deep,evict", "--json")
    ran = run("prefixloom", *peers, *sizes)
    assert ran.returncode == 0, ran.stderr
    comparison = json.loads(ran.stdout)
    (result,) = comparison["results"]
    rows = {row["row"]: row for row in result["rows"]}
    assert rows["chat turn, encoded keys, us"]["against"].startswith("tests.support.fake_peer:")
    assert "tests.support.fake_peer:Fails" not in rows["lock and unlock there, us"]["sides"]
    for row in rows.values():
        assert {"prefixloom", "tests.support.fake_peer:Works"} <= row["sides"].keys(), row["row"]
    skipped = comparison["skipped"]
    assert (
        skipped.pop("F/16, tests.support.fake_peer:Absent") == "no module named absent. Install it: pip install absent"
    )
    assert skipped.pop("F/16, tests.support.fake_peer:Fails, deep") == "ValueError: no lock today"
    assert "ended with 2" in skipped.pop("F/16, tests.support.fake_peer:Ends, deep")
    assert "the child ended with 3" in skipped.pop("F/16, tests.support.fake_peer:Ends, evict")
    if gone:
        assert "pip install --no-deps vllm" in skipped.pop("F/16, vLLM")
    assert skipped == {}
    readings = [len(figures) for figures in comparison["machine"].values()]
    assert readings == [6, 6]  # one before each round of each group, and one after the last round

    saved = tmp_path / "comparison.json"
    saved.write_text(ran.stdout)
    text = run("--read", str(saved)).stdout
    assert "### F, pages of 16" in text and "| chat turn, encoded keys, us |" in text
    assert "skipped: F/16, tests.support.fake_peer:Fails, deep: ValueError: no lock today" in text
    assert text.count("Speed of the machine between the rounds: loop iteration ") == 1
    document = tmp_path / "comparison.md"
    document.write_text("before\n<!-- python -m bench --peers --markdown -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):
        assert run("--read", str(saved), "--markdown", str(document)).returncode == 0
    before, _, rest = document.read_text().partition("<!-- python -m bench --peers --markdown -->\n")
    assert (before, rest) == ("before\n", f"\n{text.rstrip()}\n\n<!-- end -->\nafter\n")
    document.write_text("no marks\n")
    assert "has no line" in run("--read", str(saved), "--markdown", str(document)).stderr


def test_the_bar_is_the_fastest_peer_that_does_the_same_work() -> None:
    row = judged(
        "evict 10 leaves of 20k, us", {"prefixloom": [4.0, 5.0], "SGLang Rust": [8.0, 20.0], "vLLM": [1.0, 1.0]}
    )
    assert row["against"] == "SGLang Rust"
    assert list(row["not the same work"]) == ["vLLM"]
    assert row["ahead"]["prefixloom"] == {"median": 3.0, "least": 2.0, "most": 4.0}  # round by round
    assert row["met"] == {"prefixloom": True}
    by_side = {"prefixloom": [4.0] * 3, "tier idle": [3.0] * 3, "SGLang Rust": [10, 13, 10], "vLLM": [9, 13, 9]}
    row = judged("chat turn, encoded keys, us", by_side)
    assert (row["against"], row["bar"]) == ("vLLM", 3.0)
    assert row["met"] == {"prefixloom": False, "tier idle": True}


def test_a_child_returns_its_rows_or_the_reason_why_not() -> None:
    in_child = rows.in_child
    assert in_child(lambda: {"a row": [1.0, 2.0]}) == {"a row": [1.0, 2.0]}
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: {"a row": [1 / 0]})
    with pytest.raises(RuntimeError, match="the child ended"):
        in_child(lambda: os._exit(3))


def test_rows_that_must_be_flat_and_hits_have_their_own_bars() -> None:
    row = judged("the last quarter of chunks over the first, times", {"prefixloom": [1.2], "tier idle": [1.4]})
    assert row["met"] == {"prefixloom": True, "tier idle": False}
    row = judged("tokens that hit in the chat, thousands", {"prefixloom": [100.0], "a": [100.5], "b": [90.0]})
    assert row["met"] == {"prefixloom, a": True, "prefixloom, b": False}
    row = judged("worst open in the chat, us", {"prefixloom": [90.0, 30.0], "a": [60.0, 300.0]})
    assert row["sides"]["prefixloom"]["median"] == 30.0  # other programs can only add time
    assert row["ahead"]["prefixloom"]["median"] == 2.0
    assert "met" not in row


def test_rows_that_were_measured_again_replace_the_earlier_ones() -> None:
    def comparison(page: int, **found: int) -> dict[str, Any]:
        results = [{"comps": "F", "page": page, "rows": [{"row": name, "n": n} for name, n in found.items()]}]
        looks = {"memory access": [float(page)]}
        return {"results": results, "skipped": {f"F/{page}, a": "why"}, "machine": looks}

    both = merged([comparison(16, a=1, b=2), comparison(1, a=3), comparison(16, b=4)])
    assert [(result["page"], [row["n"] for row in result["rows"]]) for result in both["results"]] == [
        (16, [1, 4]),
        (1, [3]),
    ]
    assert both["skipped"] == {"F/16, a": "why", "F/1, a": "why"}
    assert both["machine"] == {"memory access": [16.0, 1.0, 16.0]}


def test_tables_mark_missed_bars_and_rows_with_different_work() -> None:
    found = [
        judged("chat turn, encoded keys, us", {"prefixloom": [10.0], "tier idle": [11.0], "vLLM": [25.0]}),
        judged("lock and unlock there, us", {"prefixloom": [10.0], "a": [20.0], "vLLM": [1.0]}),
    ]
    comparison = {"results": [{"comps": "FSM", "page": 16, "rows": found}], "skipped": {"FSM/16, b": "not there"}}
    lines = tables.markdown(comparison | {"machine": {"memory access": [30.0, 20.0, 90.0]}}).splitlines()
    assert {
        "| chat turn, encoded keys, us | 10.0 | 25.0 |  | 2.50 | **3**, not tier idle |",
        "| lock and unlock there, us | 10.0 | 1.00\\* | 20.0 | 2.00 | 1 |",
        "| chat turn, encoded keys, us | **2.50** |",
        "| chat turn, encoded keys, us | 1.10 |",
        "- skipped: FSM/16, b: not there",
    } <= set(lines)
    assert any(line.startswith("- \\* vLLM, lock and unlock there, us: vLLM has no locks") for line in lines)
    assert lines[-1] == "Speed of the machine between the rounds: memory access 30 ns (20-90)."


def test_tables_can_be_made_of_our_own_sides_alone() -> None:
    ours = {"prefixloom": [10.0], "in steps": [12.0]}
    found = [judged(name, ours) for name in ("chat turn, encoded keys, us", "tokens that hit in the chat, thousands")]
    lines = tables.markdown(
        {"results": [{"comps": "FSM", "page": 16, "rows": found}], "skipped": {}, "machine": {}}
    ).splitlines()
    assert "| chat turn, encoded keys, us | 1.20 |" in lines
    assert any("tokens that hit in the chat, thousands" in line for line in lines)


def test_stand_ins_can_be_imported_and_raise_after_they_are_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stand_ins.stand_in("gpu_kernels")
    kernels: Any = importlib.import_module("gpu_kernels.language.extra")
    try:

        @kernels.jit
        def plain() -> int:
            return 1

        @kernels.tuned(configs=[kernels.Config(8)])
        def tuned() -> int:
            return 2

        class Sub(kernels.Base):  # type: ignore[misc]
            value: kernels.dtype | None = None

        assert (plain(), tuned(), Sub().value) == (1, 2, None)
        stand_ins.sealed(True)
        with pytest.raises(NotImplementedError, match=r"gpu_kernels.language.extra.copy is a stand-in"):
            kernels.copy(1)
    finally:
        for name in [name for name in sys.modules if name.startswith("gpu_kernels")]:
            del sys.modules[name]
