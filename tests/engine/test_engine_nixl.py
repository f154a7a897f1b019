"""Content that NIXL moves, between processes that are stopped and killed."""

from __future__ import annotations

import random
import time
from importlib.util import find_spec

import pytest

from prefixloom import InputError
from prefixloom_engine.disaggregation.nixl_mover import MemoryBlock, NixlMover
from tests.support.processes import spoken


def test_parts_of_a_block_do_not_overlap_and_are_given_again() -> None:
    block = MemoryBlock(100)
    assert [block.take(size) for size in (40, 40, 30, 20)] == [0, 40, None, 80]
    assert (block.take(1), block.take(0)) == (None, None)
    block.give(40)
    block.give(7)
    assert [block.take(size) for size in (41, 10, 30, 1)] == [None, 40, 50, None]


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_content_arrives_whole_and_unchanged() -> None:
    ours, theirs = NixlMover(1 << 16), NixlMover(1 << 16)
    try:
        for size in (1, 1000, 5):  # each part begins where the last one ended
            offered = ours.offer(size)
            assert offered is not None and len(offered.memory) == size
            offered.memory[:] = content = random.Random(size).randbytes(size)
            landing, came = theirs.fetch(offered.ticket, size), None
            until = time.monotonic() + 20
            while came is None and time.monotonic() < until:
                came = landing.poll()
            assert came is not None and bytes(came) == content
    finally:
        for mover in (theirs, ours):
            mover.close()


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_moves_content_and_a_process_that_is_stopped_or_killed_costs_a_recompute() -> None:
    with spoken("nixl_decode") as (process, _):
        assert process.stdout is not None
        assert process.stdout.read().strip().splitlines()[-1] == "all is well"


@pytest.mark.skipif(find_spec("nixl") is not None, reason="nixl is installed")
def test_without_nixl_it_is_said_what_to_install() -> None:
    with pytest.raises(InputError, match="pip install"):
        NixlMover()
