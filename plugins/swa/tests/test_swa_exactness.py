"""The window component is exact, whatever the window is to the page: a toy model's logits are those without a cache."""

from __future__ import annotations

import random

import pytest
import torch

from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import ToyModel, toy_config
from tests.support.sampling import slow
from tests.support.traffic import TOLERANCE, composed, distance, prompt

WINDOWS = pytest.mark.parametrize("window", [1, 2, 5, 9, 16, 17, 500])
PAGES = pytest.mark.parametrize("page", [slow(1), 4, slow(16)])


pytestmark = pytest.mark.usefixtures("one_thread")


@PAGES
@WINDOWS
@pytest.mark.parametrize("tight", [False, True])
def test_any_window_over_any_page_is_resumed_to_the_same_bits(window: int, page: int, tight: bool) -> None:
    """Chunks of a page. ``tight``: running sequences give windows back as soon as they may."""
    config = toy_config(["sliding_attention", "sliding_attention"], sliding_window=window)
    model, cache, rng = ToyModel(config), composed(config, page), random.Random(window)
    witness = Witness(cache)
    tokens = prompt(rng, 56)
    requests = ((tokens, 0), ([*tokens, 3], 56), ([*tokens[:37], 96, *prompt(rng, 20)], 37 if tokens[37] != 96 else 38))
    for asked, agreed in requests:
        expected = model.reference(asked, chunk=page)
        with cache.open(asked, leave=1) as sequence:
            assert witness.restored(sequence) == 0
            start, rows = sequence.ready, []
            assert start == agreed // page * page or tight
            for end in [*range((start // page + 1) * page, len(asked), page), len(asked)]:
                rows.append(model.compute(cache, sequence, upto=end))
                witness.live(sequence)
                if tight:
                    cache.reclaim()
                if rng.random() < 0.3:
                    sequence.publish()
            assert torch.equal(torch.cat(rows), expected[start:])


@pytest.mark.parametrize("window", [2, 5, 17])
def test_the_oldest_position_of_a_window_counts_and_the_one_before_does_not(window: int) -> None:
    """HF's convention: a window of w counts the query, so that w - 1 positions before the first new token are read."""
    config = toy_config(["sliding_attention"], sliding_window=window)
    model, cache, tokens = ToyModel(config), composed(config, 1), prompt(random.Random(window), 40)
    expected = model.reference(tokens)[39:]
    for at, counts in ((40 - window, True), (39 - window, False)):
        with cache.open(tokens) as sequence:
            model.compute(cache, sequence, upto=39)
            for buffer in cache.pool("swa").buffers.values():
                buffer[:, sequence.pages("swa")[at]] = 0.5
            moved = distance(model.compute(cache, sequence), expected)
            assert moved > 1e-4 if counts else moved < TOLERANCE
            sequence.abort()


@PAGES
@pytest.mark.parametrize("keep", ["all", "last"])
def test_what_of_the_windows_is_kept_changes_no_bit(keep: str, page: int) -> None:
    config = toy_config(["sliding_attention", "full_attention"], sliding_window=9)
    model, rng = ToyModel(config), random.Random(page)
    cache = composed(config, page, tokens=192, changes={"swa": {"keep_windows": keep}})
    known, hits = [prompt(rng, 48)], 0
    for _ in range(12):
        base = rng.choice(known[-3:])
        tokens = (base[: rng.randrange(len(base) + 1)] + prompt(rng, rng.randrange(1, 24)))[:80]
        known.append(tokens)
        run = model.run(cache, tokens, chunk=page)
        hits += run.ready > 0
        assert torch.equal(run.logits, model.reference(tokens, chunk=page)[run.ready :])
        if rng.random() < 0.3:
            cache.evict({rng.choice(("swa", "full")): 3})
    assert hits > 1 or keep == "last"
