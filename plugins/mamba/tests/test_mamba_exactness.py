"""The component of recurrent layers is exact: conv and recurrent states of any dtype are restored as they were.

Two kinds of recurrence: a selective scan, exact at every token, and a gated delta rule whose state rests in float32 and
is exact at multiples of its kernel's chunk.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import DELTA_RULE, ToyModel, toy_config
from tests.support.traffic import TOLERANCE, composed, distance, prompt

SCAN = toy_config(["linear_attention", "linear_attention"])
DELTA = toy_config(["linear_attention", "full_attention"], **DELTA_RULE)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_buffers_of_two_dtypes_are_restored_bitwise_on_the_grid() -> None:
    """Conv in float64, recurrent in float32, boundaries at multiples of 64."""
    model, cache, rng = ToyModel(DELTA), composed(DELTA, 16), random.Random(1)
    assert {str(b.dtype) for b in cache.pool("mamba").buffers.values()} == {"torch.float64", "torch.float32"}
    assert cache.composition.page == 64
    witness, tokens = Witness(cache), prompt(rng, 200)
    branch = tokens[:140] + prompt(rng, 50)
    for asked, expected in ((tokens, 0), (tokens, 192), (branch, 128), (branch, 128)):
        with cache.open(asked, leave=1) as sequence:
            assert sequence.ready == expected
            assert witness.restored(sequence) == 0
            rows = []
            for end in [*range(expected + 64, len(asked), 64), len(asked)]:
                rows.append(model.compute(cache, sequence, upto=end))
                witness.live(sequence)
                sequence.publish()
            assert torch.equal(torch.cat(rows), model.reference(asked, chunk=64)[expected:])
    assert witness.states == 3


@pytest.mark.parametrize("buffer", ["conv", "recurrent"])
@pytest.mark.parametrize("config", [SCAN, DELTA], ids=["scan", "delta"])
def test_a_state_restored_without_one_of_its_buffers_moves_the_logits(config: dict[str, Any], buffer: str) -> None:
    model, cache, tokens = ToyModel(config), composed(config, 16), prompt(random.Random(2), 70)
    with cache.open(tokens) as sequence:
        model.compute(cache, sequence, upto=64)
    expected = model.reference(tokens)[64:]
    with cache.open(tokens, leave=1) as sequence:
        assert sequence.ready == 64
        with cache.step([sequence]) as step:
            step.run_ops()
        cache.pool("mamba").buffers[buffer][:, sequence.pages("mamba")[0]] = 0
        assert distance(model.compute(cache, sequence), expected) > 1e-4


@pytest.mark.parametrize(("step", "back"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_a_rewind_goes_on_from_the_state_after_the_token_it_is_taken_back_to(step: int, back: int) -> None:
    model, tokens = ToyModel(SCAN), prompt(random.Random(3), 20 + step)
    cache = composed(SCAN, 4, max_rewind=3)
    with cache.open(tokens) as sequence:
        model.compute(cache, sequence, upto=20)
        model.compute(cache, sequence)
        kept = len(tokens) - back
        sequence.rewind(back)
        sequence.append([5, 6, 7])
        rows = model.compute(cache, sequence, chunk=1)
        expected = model.reference([*tokens[:kept], 5, 6, 7])
        assert distance(rows, expected[kept:]) < TOLERANCE
        sequence.rewind(0)
    assert cache.peek([*tokens[:kept], 5, 6, 7, 1]) == ((kept + 3) if (kept + 3) % 4 == 0 else 0)


def test_a_checkpoint_that_the_end_ran_past_is_the_state_of_its_own_boundary() -> None:
    model, tokens = ToyModel(SCAN), prompt(random.Random(4), 30)
    cache = composed(SCAN, 4, changes={"mamba": {"checkpoint_every": 8}})
    with cache.open(tokens) as sequence:
        rows = torch.cat([model.compute(cache, sequence, upto=end) for end in range(2, 31, 2)])
    assert distance(rows, model.reference(tokens)) < TOLERANCE
    with cache.open([*tokens, 9], leave=1) as sequence:
        assert sequence.ready == 24
        assert distance(model.compute(cache, sequence), model.reference([*tokens, 9])[24:]) < TOLERANCE


def test_a_checkpoint_that_was_taken_back_is_not_published_for_other_tokens() -> None:
    model, tokens = ToyModel(SCAN), prompt(random.Random(5), 24)
    cache = composed(SCAN, 4, changes={"mamba": {"checkpoint_every": 8}}, max_rewind=3)
    with cache.open(tokens) as sequence:
        model.compute(cache, sequence, upto=20)
        model.compute(cache, sequence)  # and a checkpoint is kept at 24
        sequence.rewind(2)
        sequence.append([5, 6, 7, 8])
        model.compute(cache, sequence)  # over 24, where no step ends
    asked = [*tokens[:22], 5, 6, 7, 8, 9]
    with cache.open(asked, leave=1) as sequence:
        rows = model.compute(cache, sequence)
        assert distance(rows, model.reference(asked)[sequence.ready :]) < TOLERANCE
