"""Lesson 3 with a prefill and a decode process: tails that arrive, speculation, and no slot lost in either.

A short part of it here; the whole, 10,240 sequences for each page size, takes minutes and is run with
``PREFIXLOOM_SOAK=whole``, or by ``python -m tests.lessons.two_processes``.
"""

from __future__ import annotations

import os

import pytest

from tests.lessons.two_processes import WHOLE, soak
from tests.support.sampling import slow

COUNT = WHOLE if os.environ.get("PREFIXLOOM_SOAK") == "whole" else 240


@pytest.mark.parametrize("page", [slow(1), 4, slow(16)])
def test_what_goes_from_process_to_process_is_right_and_nothing_is_lost_in_either(page: int) -> None:
    told = soak(COUNT, page)
    decode = told.decode
    assert decode["arrived"] > COUNT // 2
    assert decode["tails"] > COUNT // 5, "windows of which only the tail had slots"
    assert decode["rewound"] > COUNT // 2
    assert decode["cancelled"] > COUNT // 100
    assert decode["hits"] > COUNT // 30
    assert decode["refused"] < COUNT // 5
    assert told.prefill.hits > COUNT // 30
    assert told.compared > 100 * COUNT
    assert told.prefill.compared > 50 * COUNT
    assert min(told.evicted["full"], told.evicted["window"], told.prefill.evicted["full"]) > COUNT // 4, (
        "slots recycled"
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", r"the prefill process failed: (?s:.*)ArithmeticError: on purpose"),
        ("dies", "the prefill process failed"),
        ("lies", "full: 1 entries are somebody else's"),
    ],
)
def test_a_prefill_process_that_fails_is_told_of_and_not_waited_for(fault: str, told: str) -> None:
    """Negative controls: the content is compared, and a dead peer ends the soak."""
    with pytest.raises(AssertionError, match=told):
        soak(40, 4, fault=fault)
