"""transformers' models over pools: every architecture whose layer kinds are known, and no line for any of them.

What leaves the pools is, to the bit, what transformers' own cache would have handed over.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

import prefixloom
from prefixloom import CompositionError
from prefixloom_engine import Batch, Model, Runner, Span
from prefixloom_engine.hf import HFModel
from prefixloom_engine.hf.layers import pooled_layer
from prefixloom_engine.hf.rows import Rows
from tests.support.hf_models import (
    COMMON,
    CONFIGS,
    FULL,
    LINEAR,
    MATRIX,
    OTHERS,
    REGISTRY,
    WINDOW,
    Served,
    config_of,
    distance,
    figure,
    model_of,
    prompt,
)

EVERY = pytest.mark.parametrize("name", CONFIGS)
OTHER = pytest.mark.parametrize("name", OTHERS)
pytestmark = pytest.mark.usefixtures("one_thread")
CUTS = (40, 96, 97, 98, 150)


@EVERY
def test_pools_hand_over_what_transformers_own_cache_would_to_the_bit(name: str) -> None:
    served, tokens = Served(name), prompt(1, CUTS[-1])
    with served.cache.open(tokens) as sequence:
        assert torch.equal(served.compute(sequence, tokens, CUTS), served.plain(tokens, CUTS))
    served.settled()


@EVERY
def test_layers_are_those_of_transformers_with_another_memory(name: str) -> None:
    served = Served(name)
    own = DynamicCache(config=served.model.config).layers
    for layer, template in zip(served.runner.pooled.layers, own, strict=True):
        assert isinstance(layer, type(template))
        assert type(layer) is not type(template)
    assert isinstance(served.hf, Model) and isinstance(served.runner, Runner)


@OTHER
def test_what_nobody_wrote_a_line_for_hits_and_is_exact(name: str) -> None:
    served, tokens = Served(name), prompt(3, 150)
    served.published(tokens, (64, 128))
    for cut in (128, 64):
        asked = tokens[:cut] + prompt(4, 40)
        with served.cache.open(asked, leave=1) as sequence:
            assert sequence.ready == cut
            found = served.compute(sequence, asked, (cut + 20, cut + 21, cut + 40))
        expected = served.plain(asked, tuple(sorted({64, cut, cut + 20, cut + 21, cut + 40})))[cut:]
        assert torch.equal(found, expected)
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
            calls = (
                ("update", (keys, values)),
                ("update_conv_state", (conv,)),
                ("update_recurrent_state", (recurrent,)),
            )
            assert layer.get_mask_sizes(count) == own[0].get_mask_sizes(count)
            for name, given in calls:
                more = {"conv_kernel_size": 4} if name == "update_conv_state" else {}
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


# ---------------------------------------------------------------- several rows


@EVERY
def test_rows_of_different_lengths_decode_together(name: str) -> None:
    """And a page that holds no number moves none of those that are shorter."""
    served, lengths = Served(name), (5, 33, 70, 129)
    prompts = [prompt(seed, length + 4) for seed, length in enumerate(lengths)]
    for part in served.cache.composition.parts:
        if part.page_tokens:
            for content in served.cache.pool(part.name).buffers.values():
                content.fill_(float("nan"))
    sequences = [served.cache.open(tokens) for tokens in prompts]
    for sequence, tokens, length in zip(sequences, prompts, lengths, strict=True):
        served.compute(sequence, tokens, (length,))
    together = [
        served.step(sequences, [[tokens[length + at]] for tokens, length in zip(prompts, lengths, strict=True)])
        for at in range(4)
    ]
    found = torch.cat(together, dim=1)
    for row, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        expected = served.plain(tokens, (length, *range(length + 1, length + 5)))[length:]
        assert distance(found[row], expected) < figure(name), row
    for sequence in sequences:
        sequence.abort()
    served.settled()


@EVERY
def test_rows_that_have_a_past_go_through_several_tokens_together(name: str) -> None:
    served, lengths = Served(name), (64, 128)
    prompts = [prompt(seed, length + 16) for seed, length in enumerate(lengths)]
    sequences = [served.cache.open(tokens) for tokens in prompts]
    for sequence, tokens, length in zip(sequences, prompts, lengths, strict=True):
        served.compute(sequence, tokens, (length,))
    found = served.step(sequences, [tokens[-16:] for tokens in prompts])
    for row, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        expected = served.plain(tokens, (length, length + 16))[length:]
        assert distance(found[row], expected) < figure(name), row
    for sequence in sequences:
        sequence.abort()


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
            batch = Batch(torch.tensor([tokens]), [Span(0, 20)], tables, wanted=wanted)
            found = served.runner.forward(batch)
    assert found.shape == (1, wanted, served.hf.vocabulary)
    assert not wanted or distance(found[0], served.plain(tokens, (20,))[20 - wanted :]) < figure("gpt_oss")


# ---------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_gate_is_asked_before_a_layer_touches_its_memory(name: str, rows: int) -> None:
    """What a lower tier loads into a layer may come as late as at its gate."""
    served, tokens = Served(name), prompt(6, TOKENS := 129)
    served.published(tokens, (128,))
    late: dict[tuple[str, int], Any] = {}
    asked: list[int] = []
    layers = {
        (part.name, layer): row
        for part in served.cache.composition.parts
        for row, layer in enumerate(part.manifest.buffers[0].layers)
    }

    def gate(layer: int) -> None:
        asked.append(layer)
        for component, contents in late.pop(layer, {}).items():
            for buffer, content in contents.items():
                served.cache.pool(component).buffers[buffer][layers[component, layer]] = content

    sequences = [served.cache.open(tokens, leave=1) for _ in range(rows)]
    for sequence in sequences:
        sequence.grow(1)
    with served.cache.step(sequences) as step:
        step.run_ops()
        for (component, layer), row in layers.items():  # it has not come yet: there is anything instead
            for buffer, content in served.cache.pool(component).buffers.items():
                late.setdefault(layer, {}).setdefault(component, {})[buffer] = content[row].clone()
                content[row] = 7.0
        tables = {name: step.table(name) for name in served.components}
        spans = [Span(128, TOKENS)] * rows
        found = served.runner.forward(Batch(torch.tensor([tokens[-1:]] * rows), spans, tables, gate=gate))
    assert list(dict.fromkeys(asked)) == [0, 1, 2, 3] and not late
    assert distance(found[0], served.plain(tokens, (128, 129))[128:]) < figure(name)
    for sequence in sequences:
        sequence.abort()


# ---------------------------------------------------------------- what cannot be bound


def refused(model: Any, config: Any, told: str, **options: Any) -> None:
    cache = prefixloom.compose(config, capacity=512, registry=REGISTRY, **options)
    with pytest.raises(CompositionError, match=told):
        HFModel(model).bind(cache)


def changed(name: str, **values: Any) -> Any:
    config = HFModel(model_of(name)).config
    for key, value in values.items():
        setattr(config, key, value)
    return config


def test_a_cache_of_another_window_is_refused() -> None:
    told = rf"layer 0 attends to the last {WINDOW} tokens, and component 'swa' keeps Window\(w=16\)"
    refused(model_of("gpt_oss"), changed("gpt_oss", sliding_window=16), told)


def test_a_cache_that_keeps_more_than_a_window_serves_as_well() -> None:
    cache = prefixloom.compose(changed("mistral", layer_types=["full_attention"] * 4), capacity=512, registry=REGISTRY)
    assert HFModel(model_of("mistral")).bind(cache)


def test_a_cache_that_lacks_a_layer_is_refused_with_the_remedy() -> None:
    told = "layer 2 needs a component with the buffers k and v; or latent and rope.*HFModel\\(model\\).config"
    refused(model_of("llama"), changed("llama", num_hidden_layers=2, layer_types=None), told)


def test_a_cache_of_another_dtype_is_refused_at_the_first_entry() -> None:
    served = Served("llama")
    config = changed("llama", dtype="float32")
    served.cache = prefixloom.compose(config, capacity=512, registry=REGISTRY)
    served.runner = served.hf.bind(served.cache)
    tokens = prompt(1, 10)
    with (
        pytest.raises(CompositionError, match=r"writes 'k' as 2 x 8 in torch.float64, and .* keeps 2 x 8 in .*float32"),
        served.cache.open(tokens) as sequence,
    ):
        served.compute(sequence, tokens, (10,))


def test_a_state_of_another_dtype_is_refused_at_the_first_one() -> None:
    served = Served("qwen3_5_text")
    for part in served.cache.composition.parts:
        if part.name == "mamba":
            pool = served.cache.pool("mamba")
            pool.buffers["recurrent"] = pool.buffers["recurrent"].double()
    served.runner, tokens = served.hf.bind(served.cache), prompt(1, 10)
    told = r"layer 0 has a recurrent state of \(4, 8, 8\) in torch.float32, and .* keeps \(4, 8, 8\) in torch.float64"
    with pytest.raises(CompositionError, match=told), served.cache.open(tokens) as sequence:
        served.compute(sequence, tokens, (10,))


def test_a_state_of_another_shape_is_refused() -> None:
    served = Served("qwen3_5_text")
    pool = served.cache.pool("mamba")
    pool.buffers["recurrent"] = pool.buffers["recurrent"][..., :4].contiguous()
    served.runner, tokens = served.hf.bind(served.cache), prompt(1, 10)
    told = r"layer 0 has a recurrent state of \(4, 8, 8\) in torch.float32, and .* keeps \(4, 8, 4\) in torch.float32"
    with pytest.raises(CompositionError, match=told), served.cache.open(tokens) as sequence:
        served.compute(sequence, tokens, (10,))


def test_a_cache_on_another_device_is_refused() -> None:
    refused(
        model_of("llama"), HFModel(model_of("llama")).config, "the model is on cpu and the cache on meta", device="meta"
    )


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
    try:
        with (
            pytest.raises(CompositionError, match=r"layers 1 ran without the cache .* Is it a causal language model"),
            served.cache.open(tokens) as sequence,
        ):
            served.step([sequence], [tokens])
    finally:
        forget.remove()
    served.settled()


def test_a_model_that_looks_ahead_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(BertConfig(vocab_size=97, **sizes)).eval()
    with pytest.raises(CompositionError, match=r"'bert' is an encoder with is_decoder=False.*Use a causal model"):
        HFModel(model)


def test_a_model_in_training_or_no_model_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    with pytest.raises(CompositionError, match=r"training mode.*model.eval\(\)"):
        HFModel(model.train())
    with pytest.raises(CompositionError, match=r"takes a causal language model of transformers .*, got LlamaModel"):
        HFModel(model.model.eval())
    with pytest.raises(CompositionError, match="got dict"):
        HFModel({})


def test_the_config_that_is_composed_has_the_dtype_of_the_weights() -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.float32).eval().to(torch.bfloat16)
    cache = prefixloom.compose(HFModel(model).config, capacity=64, registry=REGISTRY)
    assert {buffer.dtype for part in cache.composition.parts for buffer in part.manifest.buffers} == {"bfloat16"}


def test_stops_and_vocabulary_are_the_models_own() -> None:
    hf = HFModel(model_of("llama"))
    assert (hf.stops, hf.vocabulary) == (frozenset({2}), 97)


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
