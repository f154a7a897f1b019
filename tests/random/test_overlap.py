"""The scheduler ahead of two worker threads, in part. Other seeds and more: ``python -m tests.random.overlap``."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.random.overlap import Traffic
from tests.support.sampling import slow

STEPS = 200
"""For each of seven compositions. With ``-m slow`` it is 1,430: 10,010 in all."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [STEPS, slow(1430)])
def test_random_traffic_on_two_threads_reads_what_its_tokens_say(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    counts: Counter[str] = Counter()
    for comps in ("F", "FS", "M", "FM", "FSM", "FSC", "C"):
        traffic = Traffic(comps, seed=2)
        traffic.run(steps)
        counts += traffic.counts
    for what in (
        "step", "hit", "publish", "close", "abort", "rewind", "read again", "failing step", "lost with a step",
        "dropped step", "abort after plan", "alone",
    ):  # fmt: skip
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
