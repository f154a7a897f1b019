"""The real cache against the reference values of shared traces, if the folder of ``PREFIXLOOM_TRACES`` has them.

One path, a page for each block, one request after the other, and every last block taken as a whole one: then least
recently used is the reference's ``lru_rev_prefix`` exactly, block by block, since a path's tail is refreshed first.

Our fifo and lfu differ from ``fifo_flat_blk`` and ``lfu_prefix``: the reference counts for each block by itself. A cell of
our tree counts where a lease of it ends, so an inner block is as old, and was used as often, as when it last was an end.
``tests/lab/test_replay.py`` has the same comparison on small traces.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs
import pytest

from prefixloom import Buffer, Component, Manifest, compose
from prefixloom import Path as PathReach
from prefixloom.lab import BlockPrompt, LabRequest, Replay, read_trace

FOLDER = os.environ.get("PREFIXLOOM_TRACES")
pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="PREFIXLOOM_TRACES names no folder of traces"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]


@pytest.mark.parametrize("capacity", [1000, 10_000, 30_000, 50_000])
def test_lru_hits_as_many_blocks_as_the_reference_says(capacity: int) -> None:
    assert FOLDER is not None
    name = "conversation_trace"
    trace = read_trace(Path(FOLDER, f"{name}.jsonl.gz"))
    known = json.loads(Path(FOLDER, "reference_values_dev.json").read_text())[name]["capacity_blocks"][str(capacity)]
    references = 0

    def whole(request: LabRequest) -> LabRequest:
        nonlocal references
        assert isinstance(request.prompt, BlockPrompt)
        ids = request.prompt.ids
        references += len(ids)
        return attrs.evolve(request, prompt=BlockPrompt(ids, trace.block, trace.block * len(ids)), output=0)

    path = Component("path", Manifest([Buffer("kv", (1,), "float32")]), PathReach())
    cache = compose(
        None, plugins=[path], page_size=trace.block, capacity=capacity * trace.block, device="meta", debug=False
    )
    outcome = Replay(cache, chunk=trace.block, leave=0, closely=0).run(map(whole, trace))
    assert outcome.refused == 0
    assert round(outcome.hit / trace.block / references, 4) == known["lru_rev_prefix"][0]
