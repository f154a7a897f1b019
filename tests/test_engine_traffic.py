"""A part of the random traffic; more of it is ``python tests/engine_traffic.py``."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from engine_traffic import Traffic
from prefixloom_engine import Engine

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
SEEDS = range(1, 13)


def test_whatever_fails_between_the_tiers_answers_stay_right(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        traffic = Traffic(seed)
        assert not traffic.run(), (seed, traffic.setting)
        counts += traffic.counts
    assert counts["failures"] > 20
    assert counts["runs that fetched"] > 1
    assert counts["answers"] > 200


def test_an_engine_that_does_not_look_at_what_failed_is_caught(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of steps that read what a copy was to bring are taken as they come."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Engine, "_start_over", lambda self, flight: None)
    found: list[str] = []
    for seed in SEEDS:
        try:
            found += Traffic(seed).run()
        except Exception as error:  # the cache may say so before an answer does
            found.append(repr(error))
        if found:
            return
    raise AssertionError("nobody noticed")
