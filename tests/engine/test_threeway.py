"""The built-in model: what it computes does not depend on how it is cut, and depends on all that is restored."""

from __future__ import annotations

import attrs
import pytest
import torch

from prefixloom import Buffer, Component, CompositionError, InputError, Manifest, Path, compose
from prefixloom.testing.inside.witness import Witness
from prefixloom_engine import Batch, Model, Runner, Span, ThreeWay
from prefixloom_engine.threeway import SIZES
from tests.support.engines import AMPLE, cache_for, forward, model, prompt

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
TOKENS = prompt(3, 400)
WHOLE = [400]


def logits(ends: list[int], dtype: str = "float64", rewind: int = 0) -> torch.Tensor:
    cache = cache_for(model(dtype), max_rewind=rewind)
    with cache.open(TOKENS) as sequence:
        return forward(model(dtype), cache, sequence, ends, singles=rewind > 0)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("step", [64, 128, 320])
def test_a_prompt_cut_on_its_chunks_gives_the_same_bits(step: int, dtype: str) -> None:
    assert logits([*range(step, 400, step), 400], dtype).equal(logits(WHOLE, dtype))


@pytest.mark.parametrize("step", [1, 3, 50, 100])
def test_a_prompt_cut_anywhere_gives_the_same_within_rounding(step: int) -> None:
    assert (logits([*range(step, 400, step), 400]) - logits(WHOLE)).abs().max() < 1e-10


def test_single_tokens_and_small_steps_that_keep_every_state_give_the_same() -> None:
    assert (logits([*range(4, 401, 4)], rewind=3) - logits(WHOLE)).abs().max() < 1e-10


def test_what_is_restored_is_what_was_live_and_gives_the_same_bits() -> None:
    it = model()
    cache = cache_for(it)
    witness = Witness(cache)
    with cache.open(TOKENS) as sequence:
        for end in (64, 128, 192, 256, 320, 384, 400):
            live = forward(it, cache, sequence, [end])
            witness.live(sequence)
            sequence.publish()
    with cache.open(TOKENS, leave=1) as sequence:
        assert sequence.ready == 384
        witness.restored(sequence)
        assert (witness.compared > 24, witness.states, witness.wrong) == (True, 1, 0)
        assert forward(it, cache, sequence, WHOLE).equal(live)


@pytest.mark.parametrize(
    ("component", "buffers"),
    [("full", ("k", "v")), ("swa", ("k", "v")), ("mamba", ("conv",)), ("mamba", ("recurrent",))],
)
def test_logits_move_if_anything_is_lost_of_a_component(component: str, buffers: tuple[str, ...]) -> None:
    it = model()
    cache = cache_for(it)
    with cache.open(TOKENS) as sequence:
        forward(it, cache, sequence, [384])
        sequence.publish()
        right = forward(it, cache, sequence, WHOLE)
    for name in buffers:
        cache.pool(component).buffers[name].zero_()
    with cache.open(TOKENS, leave=1) as sequence:
        assert sequence.ready == 384
        assert (forward(it, cache, sequence, WHOLE) - right).abs().max() > 1e-3


def test_rows_of_unequal_length_do_not_see_each_other() -> None:
    it = model()
    cache = cache_for(it)
    runner = it.bind(cache)
    for pool in ("full", "swa"):
        for buffer in cache.pool(pool).buffers.values():
            buffer.fill_(float("nan"))  # what is in a page before it is written
    lengths = (33, 200, 1, 130)
    sequences = [cache.open(prompt(length, length)) for length in lengths]
    alone = []
    for sequence, length in zip(sequences, lengths, strict=True):
        forward(it, cache, sequence, [length])
        fresh = cache.open([*sequence.tokens.tolist(), 7], namespace="alone")
        alone.append(forward(it, cache, fresh, [length + 1])[-1])
        fresh.abort()
        sequence.append([7])
        sequence.grow(1)
    with cache.step(sequences) as step:
        step.run_ops()
        tables = {part.name: step.table(part.name) for part in cache.composition.parts}
        spans = [Span(length, length + 1) for length in lengths]
        together = runner.forward(Batch(torch.tensor([[7]] * 4), spans, tables))
    assert (together[:, 0] - torch.stack(alone)).abs().max() < 1e-10
    for sequence in sequences:
        sequence.close()


def test_rows_of_different_counts_go_through_different_passes() -> None:
    runner = model().bind(cache_for(model()))
    spans = [Span(3, 4), Span(0, 64), Span(9, 10), Span(64, 128)]
    assert runner.groups(spans) == [[0, 2], [1, 3]]
    assert isinstance(model(), Model)
    assert isinstance(runner, Runner)


def test_a_seed_repeats_the_weights_and_another_does_not() -> None:
    one, same, other = ThreeWay("tiny", seed=1), ThreeWay("tiny", seed=1), ThreeWay("tiny", seed=2)
    assert one.to_logits.equal(same.to_logits)
    assert not one.to_logits.equal(other.to_logits)


def test_the_sizes_are_what_they_are_said_to_be() -> None:
    assert list(SIZES) == ["tiny", "small", "medium", "large"]
    for size, millions in (("tiny", 0.2), ("small", 2.5), ("medium", 16.6)):
        assert ThreeWay(size).parameters / 1e6 == pytest.approx(millions, rel=0.05)


def test_what_it_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="one of tiny, small"):
        ThreeWay("huge")
    with pytest.raises(InputError, match="float32 or float64, got 'int8'"):
        ThreeWay("tiny", dtype="int8")
    with pytest.raises(CompositionError, match=r"not 'convolution'"):
        ThreeWay(attrs.evolve(SIZES["tiny"], layers=("convolution",)))


def test_a_cache_of_another_model_is_refused_before_a_request_comes() -> None:
    with pytest.raises(CompositionError, match=r"component 'mamba' keeps it in torch\.float32"):
        model().bind(cache_for(model("float32")))
    lone = compose(None, plugins=[Component("lone", Manifest([Buffer("k", (2,), "float64")]), Path())], capacity=64)
    with pytest.raises(CompositionError, match="layer 0 keeps conv and recurrent, and exactly one component"):
        model().bind(lone)


def test_a_model_may_lack_a_kind_of_layer() -> None:
    it = ThreeWay(attrs.evolve(SIZES["tiny"], layers=("full_attention",)))
    cache = compose(it.config, capacity=256)
    assert [part.name for part in cache.composition.parts] == ["full"]
    with cache.open(TOKENS[:40]) as sequence:
        assert forward(it, cache, sequence, [40]).shape == (40, 512)
    assert set(AMPLE) == {part.name for part in cache_for(model()).composition.parts}
