"""Exactness over a host tier: what went down and came back is what a live sequence had, to the bit.

The traffic is that of ``test_exactness``; every request restores what it can, and much is evicted.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch

import prefixloom.tiers.host_copies
from prefixloom import TierManifest
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.contract.manifest import LAYOUTS
from prefixloom.testing.inside.backdoor import transfer_streams
from prefixloom.testing.toy import COMPOSITIONS, composition
from prefixloom_hicache import HostTier
from tests.support.sampling import only, slow
from tests.support.traffic import TOLERANCE, Traffic, composed, distance, model_of, prompt

STEPS = 70
WRITES = ("through", "back", "selective")

pytestmark = pytest.mark.usefixtures("one_thread")


class Tiered(Traffic):
    """Restores whatever it opens; copies beside the scheduling thread are over when content is looked at."""

    def opened(self, sequence: Sequence) -> None:
        ready, told = sequence.ready, self.cache.match(sequence.tokens, namespace=sequence.namespace, leave=1)
        outcome = sequence.restore()
        assert outcome.wanted == told.restorable
        assert outcome.ready == sequence.ready >= ready
        assert outcome.ready == outcome.wanted or "did not fit" in outcome.why
        self.counts["restored"] = self.counts.get("restored", 0) + (outcome.ready > ready)
        settle_copies(self.cache)

    def evict_one(self) -> None:
        super().evict_one()
        self.cache.poll()
        settle_copies(self.cache)


def settle_copies(cache: Cache) -> None:
    for stream in transfer_streams(cache).values():
        stream.record().synchronize()


def with_tier(name: str, page: int, seed: str, **options: Any) -> Cache:
    rng = random.Random(seed)
    tier = HostTier(
        TierManifest(
            capacity=options.pop("host", rng.choice((200, 1000))), write=WRITES[rng.randrange(3)], hits=1,
            layout=rng.choice(LAYOUTS), overlap=rng.random() < 0.5,
        )
    )  # fmt: skip
    return composed(composition(name), page, plugins=[tier], layout=rng.choice(LAYOUTS), **options)


@pytest.mark.parametrize("name", only(COMPOSITIONS, "F", "FS", "FM", "FSM"))
def test_over_random_traffic_what_is_restored_is_exact(name: str) -> None:
    restored = 0
    for page in (1, 4, 16):
        cache = with_tier(name, page, f"{name} {page}", tokens=144, slots=9, debug=page == 4)
        traffic = Tiered(cache, model_of(name), f"tiers {name} {page}")
        traffic.run(STEPS)
        assert traffic.counts["computed"] > 90
        restored += traffic.counts["restored"]
        cache.poll()
        settle_copies(cache)
        for figures in cache.stats().components.values():
            assert (figures.leased, figures.running) == (0, 0)
    assert restored > 1


@pytest.mark.parametrize("layouts", list(product(LAYOUTS, LAYOUTS)), ids=" and ".join)
@pytest.mark.parametrize("page", [slow(1), 4])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_turn_after_everything_went_down_is_the_turn_without_a_cache(name: str, page: int, layouts: Any) -> None:
    tier = HostTier(TierManifest(capacity=4096, layout=layouts[1]))
    cache = composed(composition(name), page, plugins=[tier], layout=layouts[0])
    model, tokens = model_of(name), prompt(random.Random(page), 50)
    with cache.open(tokens, leave=1) as live:
        model.compute(cache, live, upto=48)
    lost = cache.evict({part.name: 10_000 for part in cache.composition.parts})
    assert all(lost.values()), lost
    longer = [*tokens[:48], *prompt(random.Random(page + 100), 10)]
    with cache.open(longer, leave=1) as sequence:
        assert sequence.ready == 0
        assert sequence.restore().ready == 48
        rows = model.compute(cache, sequence)
    assert distance(rows, model.reference(longer)[48:]) < TOLERANCE


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("name", ["F", "FSM"])
def test_a_copy_that_moves_one_element_wrongly_moves_the_logits(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: what a tier spoils is seen."""
    whole = prefixloom.tiers.host_copies.copy_between

    def spoiled(source: Any, src: Any, target: Any, dst: Any) -> None:
        whole(source, src, target, dst)
        if (source.buffers[next(iter(source.buffers))].numel() > 0) and ("host" in target.name) == (way == "down"):
            for buffer in target.buffers.values():
                buffer[:, dst[0]] = torch.roll(buffer[:, dst[0]], 1, -1)

    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", spoiled)
    cache = composed(composition(name), 4, plugins=[HostTier(TierManifest(capacity=4096))])
    model, tokens = model_of(name), prompt(random.Random(7), 50)
    with cache.open(tokens, leave=1) as live:
        model.compute(cache, live, upto=48)
    cache.evict({part.name: 10_000 for part in cache.composition.parts})
    with cache.open([*tokens[:48], 3, 5], leave=1) as sequence:
        assert sequence.restore().ready == 48
        rows = model.compute(cache, sequence)
    assert distance(rows, model.reference([*tokens[:48], 3, 5])[48:]) > 1e-6
