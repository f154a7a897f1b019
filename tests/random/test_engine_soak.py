"""A part of the soak; the whole is ``python -m tests.random.soak``."""

from __future__ import annotations

import logging

import pytest

from tests.random.soak import Soak
from tests.support.sampling import slow

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.mark.parametrize("requests", [50, slow(250)])
def test_mixed_traffic_leaves_nothing_and_answers_stay_right(requests: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    soak = Soak(seed=2, failing=0.01, host="back")
    soak.run(requests)
    assert soak.check(requests // 10) == 0
    told = soak.told()
    assert told.get("error", 0) <= 12, told  # one pass in a hundred and one copy in five fail
    if requests < 250:
        return  # too few to have met everything
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
