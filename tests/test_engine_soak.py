"""A part of the soak; the whole is ``python tests/soak.py``."""

from __future__ import annotations

import logging

import pytest

from soak import Soak

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def test_mixed_traffic_leaves_nothing_and_answers_stay_right(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    soak = Soak(seed=2, failing=0.01, host="back")
    soak.run(250)
    assert soak.check(25) == 0
    told = soak.told()
    assert told.get("error", 0) <= 12, told  # one pass in a hundred and one copy in five fail
    for what in ("branched", "begun anew", "length", "stop", "aborted", "engine accepted", "engine failed",
                 "engine retracted", "engine restored", "copies that failed", "full evicted", "swa evicted",
                 "mamba evicted"):  # fmt: skip
        assert told[what] > 0, (what, told)


def test_a_wrong_answer_would_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    soak = Soak(seed=2)
    soak.run(10)
    for answer in soak.done:
        answer.tokens[-1] ^= 1
    assert soak.check(3) == 3
