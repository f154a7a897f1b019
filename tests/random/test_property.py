"""Random operations against the sets: the part that CI runs. A million: ``python -m tests.random.property``."""

from __future__ import annotations

import pytest

from prefixloom.script import failure, play, shrink
from prefixloom.testing.oracle.writer import ARRIVALS, CHECKPOINTS, TIMES, SetsWriter
from tests.random.property import run, setups
from tests.support.sampling import sampled

OPERATIONS = 400
"""For each composition."""


@pytest.mark.parametrize("name", sampled(setups(), 2))
def test_random_operations_agree_with_the_sets(name: str) -> None:
    counts = run(name, "ci", OPERATIONS)
    assert counts["open"] > 5, counts
    assert counts["publish"] > 5, counts


@pytest.mark.parametrize("name", sampled(setups(), 2, 1))
def test_random_arrivals_agree_with_the_sets(name: str) -> None:
    counts = run(name, "arrivals", OPERATIONS // 2, of=ARRIVALS)
    assert counts["open"] > 5, counts
    assert counts.get("arrive", 0) + counts.get("arrive refused", 0) + counts.get("grow too long", 0) > 3, counts


@pytest.mark.parametrize("name", sampled(setups(), 2, 1))
def test_random_times_agree_with_the_sets(name: str) -> None:
    counts = run(name, "times", OPERATIONS, of=TIMES)
    assert counts["open"] > 3 and counts["expire"] > 0, counts


TRACKING = [name for name, setup in setups().items() if any("checkpoint_every" in facts for *_, facts in setup.parts)]


@pytest.mark.parametrize("name", TRACKING)
def test_random_checkpoints_agree_with_the_sets(name: str) -> None:
    counts = run(name, "tracked", OPERATIONS, of=CHECKPOINTS)
    assert counts["checkpoint"] > 10, counts


@pytest.mark.parametrize("name", list(setups())[::4])
def test_random_operations_agree_with_the_sets_without_debug_mode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A cache that keeps no second books has plain pools and plain operations."""
    monkeypatch.setattr("tests.support.setups.DEBUG", False)
    assert run(name, "plain", OPERATIONS)["open"] > 5


def test_the_scripts_meet_what_they_are_meant_to_meet() -> None:
    """A property test that never evicts, splits, refuses or refills proves nothing."""
    counts: dict[str, int] = {}
    for name in ("path", "path and window", "path, window and point", "everything"):
        for what, times in run(name, "coverage", 500).items():
            counts[what] = counts.get(what, 0) + times
    for what in ("hit", "stale plan", "grow refused", "lost", "drop_namespace", "complete", "rewind", "flush", "split"):
        assert counts.get(what, 0) > 0, (what, counts)


def test_a_script_is_the_same_for_the_same_seed() -> None:
    setup = setups()["path"]
    script = SetsWriter("seed", setup).script(100)
    assert script == SetsWriter("seed", setup).script(100)
    assert script != SetsWriter("other", setup).script(100)


def test_a_failing_script_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setups()["path"]
    script = SetsWriter("seed", setup).script(120)
    assert failure(setup, script) is None
    from prefixloom.tree.path_lane import PathLane

    honest = PathLane.close

    def leaky(self: PathLane, holding: object) -> None:
        holding.table.pop() if holding.table else None  # type: ignore[attr-defined]
        honest(self, holding)  # type: ignore[arg-type]

    monkeypatch.setattr(PathLane, "close", leaky)
    assert failure(setup, script) is not None
    short = shrink(setup, script)
    assert failure(setup, short) is not None
    assert len(short) <= 6, short
    monkeypatch.undo()
    play(setup, short)
