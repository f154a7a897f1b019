"""transformers' models over pools: no line for any architecture, and no bit of what they compute is another.

Float64 throughout. What leaves the pools is compared to the bit with transformers' own cache in the same passes, and
what is restored with what was live. Where other rows go together the figure is ``hf_models.figure``. Negative controls
show what one zeroed page or state of one layer moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import (
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

import prefixloom
from prefixloom import CompositionError, TierManifest
from prefixloom.contract.manifest import LAYOUTS, Layout
from prefixloom.testing.inside.witness import Witness
from prefixloom_engine import Batch, Model, Runner, Span
from prefixloom_engine.hf import HFModel
from prefixloom_engine.hf.layers import pooled_layer
from prefixloom_engine.hf.rows import Rows
from prefixloom_hicache import HostTier
from tests.support.hf_models import (
    COMMON,
    CONFIGS,
    FULL,
    LINEAR,
    MATRIX,
    REGISTRY,
    WINDOW,
    Served,
    distance,
    figure,
    model_of,
    prompt,
)
from tests.support.hf_outcome import grouped

EVERY = pytest.mark.parametrize("name", CONFIGS)
EACH = pytest.mark.parametrize("name", MATRIX)
pytestmark = pytest.mark.usefixtures("one_thread")
MOVED = 1e-4
"""What a zeroed piece moves at least; measured: 3.5e-4 and more."""
CUTS = (40, 96, 97, 98, 150)
TOKENS = 160


# ---------------------------------------------------------------- to the bit


@EVERY
def test_pools_hand_over_what_transformers_own_cache_would_to_the_bit(name: str) -> None:
    served, tokens = Served(name), prompt(1, CUTS[-1])
    own = DynamicCache(config=served.model.config).layers
    for layer, template in zip(served.runner.pooled.layers, own, strict=True):
        assert isinstance(layer, type(template)) and type(layer) is not type(template)
    assert isinstance(served.hf, Model) and isinstance(served.runner, Runner)
    with served.cache.open(tokens) as sequence:
        assert torch.equal(served.compute(sequence, tokens, CUTS), served.plain(tokens, CUTS))
    served.settled()


@EVERY
def test_passes_and_single_tokens_after_a_hit_are_those_without_a_cache_to_the_bit(name: str) -> None:
    served, tokens = Served(name), prompt(3, TOKENS)
    served.published(tokens, (64, 128))
    for cut in (128, 64):
        asked = tokens[:cut] + prompt(4, 40)
        with served.cache.open(asked, leave=1) as sequence:
            assert sequence.ready == cut
            found = served.compute(sequence, asked, (cut + 20, cut + 21, cut + 40))
        expected = served.plain(asked, tuple(sorted({64, cut, cut + 20, cut + 21, cut + 40})))[cut:]
        assert torch.equal(found, expected)
        assert distance(found, served.plain(asked, (len(asked),))[cut:]) < figure(name)
    for component in served.components:
        assert served.cache.evict({component: 3})[component] >= 1
        with served.cache.open(tokens, leave=1) as sequence:
            start = sequence.ready
            cuts = [cut for cut in (64, 128, TOKENS) if cut > start]
            found = served.compute(sequence, tokens, cuts)
            assert torch.equal(found, served.plain(tokens, sorted({start, *cuts} - {0}))[start:])
            sequence.abort()
    served.settled()


@EACH
def test_what_is_restored_is_what_was_live_bit_for_bit_and_a_witness_sees_what_changed(name: str) -> None:
    served, tokens = Served(name), prompt(1, TOKENS)
    witness = Witness(served.cache)
    with served.cache.open(tokens) as live:
        for cut in (64, 128, TOKENS):
            served.compute(live, tokens, (cut,))
            witness.live(live)
            live.publish()
    for asked in (tokens, tokens[:128] + prompt(2, 40), tokens[:64] + prompt(3, 40)):
        with served.cache.open(asked, leave=1) as restored:
            assert restored.ready >= 64
            assert witness.restored(restored) == 0
            served.compute(restored, asked, (len(asked),))
            witness.live(restored)
    assert witness.compared > 8 // len(served.components)
    assert witness.states > 2 or not served.states
    for component in served.components:
        slot = served.cache.match(tokens, leave=1).pages(component)[-1]
        for content in served.cache.pool(component).buffers.values():
            content[0, slot] += 1e-15
    with served.cache.open(tokens, leave=1) as restored:
        assert witness.restored(restored) >= len(served.components)
    served.settled()


@EACH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_back_from_the_host_is_what_was_live_bit_for_bit(name: str, layout: Layout) -> None:
    """All of it, and each component alone while the others are still on the device."""
    tokens = prompt(1, TOKENS)
    expected = Served(name).plain(tokens, (64, 128, TOKENS))[128:]
    everything = Served(name).components
    for lost in (everything, *([component] for component in everything)):
        tier = HostTier(TierManifest(memory="8MiB", write="through", layout=layout))
        served = Served(name, plugins=[tier], layout=layout)
        witness = Witness(served.cache)
        with served.cache.open(tokens) as live:
            for cut in (64, 128):
                served.compute(live, tokens, (cut,))
                witness.live(live)
                live.publish()
            live.abort()
        served.cache.poll()
        served.cache.evict(dict.fromkeys(lost, 10_000))
        with served.cache.open(tokens, leave=1) as restored:
            assert restored.ready == 0
            assert restored.restore().ready == restored.ready == 128
            assert witness.restored(restored) == 0
            assert torch.equal(served.compute(restored, tokens, (TOKENS,)), expected)
        assert witness.compared >= 8 and (witness.states or not served.states)
        served.settled()


def test_a_chunk_whose_beginning_is_gone_is_read_as_nothing() -> None:
    """Chunked attention is handed more than it may see; what is not kept of that must not be what lies there now."""
    served, tokens = Served("llama4_text"), prompt(5, 140)
    served.published(tokens, (128,))
    served.cache.evict({"swa": 7})
    for content in served.cache.pool("swa").buffers.values():
        content[:, 0] = float("nan")
    with served.cache.open(tokens, leave=1) as sequence:
        assert -1 in sequence.pages("swa")[:8]
        found = served.compute(sequence, tokens, (130, 140))
    assert torch.equal(found, served.plain(tokens, (128, 130, 140))[128:])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_state_beside_a_window_does_what_transformers_layer_does(rows: int) -> None:
    """The one class of layers that no architecture of these tests has: its calls, with made-up content."""
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
    config = {**COMMON, **mamba, "mamba_d_conv": 4, "layer_types": ["hybrid_sliding"] * 4, "sliding_window": WINDOW}
    cache = prefixloom.compose({**config, "dtype": "float64"}, capacity=512, max_running=4, registry=REGISTRY)
    layer: Any = pooled_layer(LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=WINDOW), cache, 2)
    own = [LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=WINDOW) for _ in range(rows)]
    made = torch.Generator().manual_seed(1)
    sequences = [cache.open(prompt(row, 60)) for row in range(rows)]
    for count in (30, 5, 1, 1):
        for sequence in sequences:
            sequence.grow(count)
        spans = [Span(sequence.committed, sequence.committed + count) for sequence in sequences]
        with cache.step(sequences) as step:
            step.run_ops()
            tables = {part.name: step.table(part.name) for part in cache.composition.parts}
            going = Rows(Batch(torch.zeros(rows, count, dtype=torch.long), spans, tables))
            layer.pages.begin(going)
            layer.states.begin(going)
            layer.states.enter()
            keys, values = torch.randn(2, rows, 2, count, 8, generator=made, dtype=torch.float64)
            conv = torch.randn(rows, 80, count, generator=made, dtype=torch.float64)
            recurrent = torch.randn(rows, 4, 16, 8, generator=made)
            assert layer.get_mask_sizes(count) == own[0].get_mask_sizes(count)
            for name, given, more in (
                ("update", (keys, values), {}),
                ("update_conv_state", (conv,), {"conv_kernel_size": 4}),
                ("update_recurrent_state", (recurrent,), {}),
            ):
                found = getattr(layer, name)(*given, **more)
                for row, theirs in enumerate(own):
                    right = getattr(theirs, name)(*(each[row : row + 1] for each in given), **more)
                    pairs = zip(found, right, strict=True) if name == "update" else [(found, right)]
                    assert all(torch.equal(ours[row : row + 1], expected) for ours, expected in pairs), name
            assert layer.get_seq_length() == own[0].get_seq_length()
            layer.pages.end()
            layer.states.end()
    for sequence in sequences:
        sequence.abort()


def test_minimax_whose_first_layer_is_recurrent_is_right_over_pools() -> None:
    """As released models are. transformers' own cache counts no past there, and hides it from attention."""
    tokens = prompt(1, 100)
    config = AutoConfig.for_model("minimax", **{**COMMON, **CONFIGS["minimax"], "layer_types": [LINEAR, FULL] * 2})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    served = Served("minimax", model=model.eval())
    whole = served.plain(tokens, (100,))
    for cuts in ((64, 100), (10, 100), (64, *range(65, 101))):
        with served.cache.open(tokens) as sequence:
            assert distance(served.compute(sequence, tokens, cuts), whole) < figure("minimax"), cuts
            sequence.abort()
    served.settled()


# ---------------------------------------------------------------- rows, layers, and what is taken back


@EVERY
def test_rows_of_other_lengths_and_counts_are_exact_in_the_groups_in_which_they_are_computed(name: str) -> None:
    error, _ = grouped(model_of(name), name)
    assert error < max(figure(name), 1e-9)


def test_rows_that_start_from_nothing_go_apart_and_so_do_other_counts() -> None:
    """In a model with states; without, they join where that costs less than another pass."""
    spans = [Span(0, 4), Span(16, 20), Span(5, 6), Span(0, 4), Span(0, 1), Span(40, 44)]
    assert Served("lfm2").runner.groups(spans) == [[0, 3], [1, 5], [2], [4]]
    assert Served("llama").runner.groups(spans) == [[0, 3, 1, 5, 2, 4]]


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_as_many_logits_as_are_wanted(wanted: int) -> None:
    served, tokens = Served("gpt_oss"), prompt(1, 20)
    with served.cache.open(tokens) as sequence:
        sequence.grow(20)
        with served.cache.step([sequence]) as step:
            step.run_ops()
            tables = {name: step.table(name) for name in served.components}
            found = served.runner.forward(Batch(torch.tensor([tokens]), [Span(0, 20)], tables, wanted=wanted))
    assert found.shape == (1, wanted, served.hf.vocabulary)
    assert not wanted or distance(found[0], served.plain(tokens, (20,))[20 - wanted :]) < figure("gpt_oss")


@EACH
@pytest.mark.parametrize("rows", [1, 2])
def test_the_gate_is_asked_before_a_layer_touches_its_memory(name: str, rows: int) -> None:
    """What a lower tier loads into a layer may come as late as at its gate."""
    served, tokens = Served(name), prompt(6, 129)
    served.published(tokens, (128,))
    late: dict[int, list[tuple[Any, Any]]] = {}
    asked: list[int] = []

    def gate(layer: int) -> None:
        asked.append(layer)
        for memory, content in late.pop(layer, []):
            memory.copy_(content)

    sequences = [served.cache.open(tokens, leave=1) for _ in range(rows)]
    for sequence in sequences:
        sequence.grow(1)
    with served.cache.step(sequences) as step:
        step.run_ops()
        for part in served.cache.composition.parts:
            for row, layer in enumerate(part.manifest.buffers[0].layers):
                for content in served.cache.pool(part.name).buffers.values():
                    late.setdefault(layer, []).append((content[row], content[row].clone()))
                    content[row] = 7.0  # it has not come yet: there is anything instead
        tables = {each: step.table(each) for each in served.components}
        batch = Batch(torch.tensor([tokens[-1:]] * rows), [Span(128, 129)] * rows, tables, gate=gate)
        found = served.runner.forward(batch)
    assert list(dict.fromkeys(asked)) == [0, 1, 2, 3] and not late
    assert distance(found[0], served.plain(tokens, (128, 129))[128:]) < figure(name)
    for sequence in sequences:
        sequence.abort()


@EACH
def test_a_rewind_is_exact_in_every_component(name: str) -> None:
    """A speculated run of four, of which two are kept; then others follow. The control goes on from a wrong state."""
    served, tokens = Served(name, max_rewind=3, max_running=4), prompt(10, 132)
    for wrong in (False, True) if served.states else (False,):  # pages are there whatever is taken back
        with served.cache.open(tokens) as sequence:
            served.compute(sequence, tokens, (128, 132))
            for state in served.states:
                steps = sequence.rewind_slots(state)
                if wrong:
                    served.cache.pool(state).copy((steps[0],), (steps[1],))
            sequence.rewind(2)
            kept = [*tokens[:130], 5, 6, 7]
            sequence.append(kept[130:])
            found = served.compute(sequence, kept, (131, 132, 133))
            moved = distance(found, served.plain(kept, (128, 129, 130, 131, 132, 133))[130:])
            assert moved > MOVED if wrong else moved < figure(name)
            sequence.abort()
    served.settled()


@EACH
def test_one_zeroed_page_or_state_of_one_layer_moves_the_logits(name: str) -> None:
    """And with all of them back nothing does."""
    served, tokens = Served(name), prompt(1, TOKENS)
    served.published(tokens, (128,))
    expected = served.plain(tokens, (128, TOKENS))[128:]

    def moved() -> float:
        with served.cache.open(tokens, leave=1) as sequence:
            found = served.compute(sequence, tokens, (TOKENS,))
            sequence.abort()
        return distance(found, expected)

    for part in served.cache.composition.parts:
        slot = served.cache.match(tokens, leave=1).pages(part.name)[-1]
        for buffer in part.manifest.buffers:
            for row in range(len(buffer.layers)):
                content = served.cache.pool(part.name).buffers[buffer.name][row, slot]
                kept = content.clone()
                content.zero_()
                assert moved() > MOVED, (part.name, buffer.name, row)
                content.copy_(kept)
    assert moved() == 0


# ---------------------------------------------------------------- what cannot be bound


def changed(name: str, **values: Any) -> Any:
    config = HFModel(model_of(name)).config
    for key, value in values.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("name", "values", "options", "told"),
    [
        ("gpt_oss", {"sliding_window": 16}, {}, rf"attends to the last {WINDOW} tokens, and .* keeps Window\(w=16\)"),
        (
            "llama", {"num_hidden_layers": 2, "layer_types": None}, {},
            r"layer 2 needs a component with the buffers k and v; or latent and rope.*HFModel\(model\).config",
        ),
        ("llama", {}, {"device": "meta"}, "the model is on cpu and the cache on meta"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, {}, None),
    ],
    ids=["another window", "a layer lacks", "another device", "more than a window is no error"],
)  # fmt: skip
def test_a_cache_that_a_model_cannot_use_is_refused(
    name: str, values: dict[str, Any], options: dict[str, Any], told: str | None
) -> None:
    cache = prefixloom.compose(changed(name, **values), capacity=512, registry=REGISTRY, **options)
    if told is None:
        assert HFModel(model_of(name)).bind(cache)
        return
    with pytest.raises(CompositionError, match=told):
        HFModel(model_of(name)).bind(cache)


def entries_of_another_dtype(served: Served) -> None:
    served.cache = prefixloom.compose(changed("llama", dtype="float32"), capacity=512, registry=REGISTRY)


def state_of_another_dtype(served: Served) -> None:
    buffers = served.cache.pool("mamba").buffers
    buffers["recurrent"] = buffers["recurrent"].double()


def state_of_another_shape(served: Served) -> None:
    buffers = served.cache.pool("mamba").buffers
    buffers["recurrent"] = buffers["recurrent"][..., :4].contiguous()


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("llama", entries_of_another_dtype, r"writes 'k' as 2 x 8 in torch.float64, and .* keeps 2 x 8 in .*float32"),
        ("qwen3_5_text", state_of_another_dtype, r"state of \(4, 8, 8\) in torch.float32, and .* in torch.float64"),
        ("qwen3_5_text", state_of_another_shape, r"state of \(4, 8, 8\) in .*, and .* keeps \(4, 8, 4\) in"),
    ],
)
def test_memory_of_another_form_is_refused_at_the_first_entry(
    name: str, change: Callable[[Served], None], told: str
) -> None:
    served, tokens = Served(name), prompt(1, 10)
    change(served)
    served.runner = served.hf.bind(served.cache)
    with pytest.raises(CompositionError, match=told), served.cache.open(tokens) as sequence:
        served.compute(sequence, tokens, (10,))


def test_a_layer_that_keeps_its_memory_in_another_way_is_refused_by_its_name() -> None:
    class Strange(DynamicSlidingWindowLayer):
        pass

    with pytest.raises(CompositionError, match=r"layer 3 remembers in transformers' Strange, .* Known: DynamicLayer, "):
        pooled_layer(Strange(WINDOW), Served("mistral").cache, 3)
    with pytest.raises(CompositionError, match="layer 0 has 2 conv states, and there is a place for one"):
        pooled_layer(LinearAttentionLayer(number_of_states=2), Served("lfm2").cache, 0)


def test_a_model_that_ignores_its_cache_is_found_out() -> None:
    """It would compute well, and what follows would know nothing of it."""
    served, tokens = Served("llama"), prompt(1, 10)
    attention = served.model.model.layers[1].self_attn
    forget = attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "past_key_values": None}), with_kwargs=True
    )
    told = pytest.raises(CompositionError, match=r"layers 1 ran without the cache .* Is it a causal language model")
    try:
        with told, served.cache.open(tokens) as sequence:
            served.step([sequence], [tokens])
    finally:
        forget.remove()
    served.settled()


def test_a_model_says_its_stops_its_vocabulary_and_the_dtype_of_its_weights() -> None:
    hf = HFModel(model_of("llama"))
    assert (hf.stops, hf.vocabulary) == (frozenset({2}), 97)
    model = AutoModelForCausalLM.from_config(changed("llama"), dtype=torch.float32).eval().to(torch.bfloat16)
    cache = prefixloom.compose(HFModel(model).config, capacity=64, registry=REGISTRY)
    assert {buffer.dtype for part in cache.composition.parts for buffer in part.manifest.buffers} == {"bfloat16"}
