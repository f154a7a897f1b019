"""The engine on a GPU: its passes on a stream, copies to and from pinned memory on others, and answers as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixloom import TierManifest
from prefixloom_hicache import HostTier
from tests.support.engines import CAPACITY, cache_for, mixed, model, plain, served

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
HOST = {"full": 4096, "swa": 4096, "mamba": 64}


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"speculate": 3}], ids=["ahead", "in turn", "guesses"])
@pytest.mark.parametrize("below", [False, True], ids=["device alone", "host tier"])
def test_answers_through_a_small_cache_are_those_of_none(options: dict[str, Any], below: bool) -> None:
    it = model(device="cuda")
    tier = [HostTier(TierManifest(capacity=HOST, write="back"))] if below else []
    cache = cache_for(it, CAPACITY, plugins=tier)
    guessed = {"speculate": options["speculate"]} if "speculate" in options else {}
    requests = [*mixed(10, **guessed), *mixed(10, **guessed)]
    settings = {name: value for name, value in options.items() if name != "speculate"}
    answers, _ = served(it, requests, cache, **settings)
    assert answers == plain(it, requests)
    stats = cache.stats()
    assert stats.hit_tokens > 500 and any(part.evicted for part in stats.components.values())
