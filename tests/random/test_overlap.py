"""The scheduler ahead of two worker threads, in part. Other seeds and more: ``python -m tests.random.overlap``."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from tests.random.overlap import WRITES, Tiered, Traffic
from tests.support.sampling import slow

MET = (
    "step", "hit", "publish", "close", "abort", "rewind", "read again", "failing step", "lost with a step",
)  # fmt: skip
STEPS = 150
"""For each composition. With ``-m slow`` it is 1,430: 10,010 in all."""
TIERED = tuple(zip(("F", "FS", "M", "FM", "FSM", "FSC", "FM", "M", "FS"), 3 * WRITES, strict=True))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [STEPS, slow(1430)])
def test_random_traffic_on_two_threads_reads_what_its_tokens_say(steps: int) -> None:
    counts: Counter[str] = Counter()
    for comps in ("F", "FS", "M", "FM", "FSM", "FSC", "C"):
        traffic = Traffic(comps, seed=2)
        traffic.run(steps)
        counts += traffic.counts
    for what in (*MET, "dropped step", "abort after plan", "alone"):
        assert counts[what] > 0, (what, counts)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [50, slow(220)])
def test_random_traffic_with_copies_between_tiers_reads_what_its_tokens_say(steps: int) -> None:
    counts: Counter[str] = Counter()
    for comps, write in TIERED:
        traffic = Tiered(comps, 2, write, lame=0.02)
        traffic.run(steps)
        counts += traffic.counts
    for what in (*MET, "restored", "failed copy"):
        assert counts[what] > 0, (what, counts)


def test_wrong_content_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traffic that could not fail would prove nothing: one page is written with another token's hash."""
    from tests.random.overlap import folded

    traffic = Traffic("F", seed=2, failing=0.0)
    honest = Traffic.attend

    def wrong(self: Traffic, request: object, hashes: list[int], *args: object) -> None:
        honest(self, request, hashes[:-1] + folded([1], "a", [1])[-1:], *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Traffic, "attend", wrong)
    with pytest.raises(AssertionError, match="hold something else"):
        traffic.run(STEPS)


def test_a_copy_that_leaves_out_its_last_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Tiered.copy

    def short(self: Tiered, source: Any, src: Any, target: Any, dst: Any) -> None:
        honest(self, source, src[:-1], target, dst[:-1])

    monkeypatch.setattr(Tiered, "copy", short)
    with pytest.raises(AssertionError, match=r"hold something else|the state at"):
        Tiered("FM", 2, "back", failing=0.0, lame=0.0).run(70)
