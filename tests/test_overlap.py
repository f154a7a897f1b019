"""The scheduler ahead of two worker threads: 10,000 steps. Other seeds and more: ``python tests/overlap.py``."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from overlap import Traffic

STEPS = 1430
"""For each of seven compositions: 10,010 in all."""


def test_random_traffic_on_two_threads_reads_what_its_tokens_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    counts: Counter[str] = Counter()
    for comps in ("F", "FS", "M", "FM", "FSM", "FSC", "C"):
        traffic = Traffic(comps, seed=2)
        traffic.run(STEPS)
        counts += traffic.counts
    for what in (
        "step", "hit", "publish", "close", "abort", "rewind", "read again", "failing step", "lost with a step",
        "dropped step", "abort after plan", "alone",
    ):  # fmt: skip
        assert counts[what] > 0, (what, counts)


def test_wrong_content_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traffic that could not fail would prove nothing: one page is written with another token's hash."""
    from overlap import folded

    traffic = Traffic("F", seed=2, failing=0.0)
    honest = Traffic.attend

    def wrong(self: Traffic, request: object, hashes: list[int], *args: object) -> None:
        honest(self, request, hashes[:-1] + folded([1], "a", [1])[-1:], *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Traffic, "attend", wrong)
    with pytest.raises(AssertionError, match="hold something else"):
        traffic.run(STEPS)
