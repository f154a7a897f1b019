"""The traffic of ``overlap_tiers``, briefly. All of it: ``python -m tests.random.overlap_tiers --steps 10000``."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from tests.random.overlap_tiers import WRITES, Tiered
from tests.support.sampling import slow

STEPS = 70
"""For each of nine. With ``-m slow`` it is 220: 1,980 in all."""
CASES = tuple(zip(("F", "FS", "M", "FM", "FSM", "FSC", "FM", "M", "FS"), 3 * WRITES, strict=True))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [STEPS, slow(220)])
def test_random_traffic_with_copies_between_tiers_reads_what_its_tokens_say(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    counts: Counter[str] = Counter()
    for comps, write in CASES:
        traffic = Tiered(comps, 2, write, lame=0.02)
        traffic.run(steps)
        counts += traffic.counts
    for what in (
        "step", "hit", "publish", "close", "abort", "rewind", "read again", "failing step", "lost with a step",
        "restored", "failed copy",
    ):  # fmt: skip
        assert counts[what] > 0, (what, counts)


def test_a_copy_that_leaves_out_its_last_slot_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    honest = Tiered.copy

    def short(self: Tiered, source: Any, src: Any, target: Any, dst: Any) -> None:
        honest(self, source, src[:-1], target, dst[:-1])

    monkeypatch.setattr(Tiered, "copy", short)
    with pytest.raises(AssertionError, match=r"hold something else|the state at"):
        Tiered("FM", 2, "back", failing=0.0, lame=0.0).run(STEPS)
