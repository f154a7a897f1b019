"""A part of the random traffic; more of it is ``python -m tests.random.engine_traffic``."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from prefixloom_engine import Engine
from tests.random.engine_traffic import Traffic
from tests.support.sampling import slow

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
SEEDS = range(1, 13)


@pytest.mark.parametrize("seeds", [3, slow(len(SEEDS))])
def test_whatever_fails_between_the_tiers_answers_stay_right(seeds: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in SEEDS[:seeds]:
        traffic = Traffic(seed)
        assert not traffic.run(), (seed, traffic.setting)
        counts += traffic.counts
    assert counts["failures"] > seeds
    assert counts["answers"] > 15 * seeds
    assert counts["runs that fetched"] > 1 or seeds < len(SEEDS)


def test_an_engine_that_does_not_look_at_what_failed_is_caught(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of steps that read what a copy was to bring are taken as they come."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Engine, "_restart_failed", lambda self, flight: None)
    found: list[str] = []
    for seed in SEEDS:
        try:
            found += Traffic(seed).run()
        except Exception as error:  # the cache may say so before an answer does
            found.append(repr(error))
        if found:
            return
    raise AssertionError("nobody noticed")
