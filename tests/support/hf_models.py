"""Tiny models of transformers with strong random weights, and a driver that runs them through a cache as engines do.

Every architecture is transformers' own code. Float64, and weights of ``normal_(0, 0.2)``: with the usual tiny ones a
wrong state moves nothing that a test could see.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import prefixloom
from prefixloom.compose.registry import Registry
from prefixloom_engine import Batch, Span
from prefixloom_engine.hf import HFModel

REGISTRY = Registry([EntryPoint(kind, f"prefixloom_{kind}.plugin", "prefixloom") for kind in ("full", "swa", "mamba")])
VOCABULARY = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENTS = {
    "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
WINDOW = 24
"""More than a page of 16, so that a window has pages to lose."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"sliding_window": WINDOW, **EXPERTS},
    "gemma3_text": {
        "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "query_pre_attn_scalar": 8
    },
    "lfm3": {"conv_L_cache": 7, "sliding_window": WINDOW, "layer_types": ["conv", FULL, "conv", SLIDING]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 16, "shared_intermediate_size": 32, **EXPERTS,
    },
    "qwen3_5_text": {"layer_types": [LINEAR, FULL] * 2, **DELTA},
    "deepseek_v3": LATENTS,
    "olmo_hybrid": {"layer_types": [LINEAR, SLIDING, LINEAR, FULL], "sliding_window": WINDOW, **DELTA},
}  # fmt: skip
"""The matrix. The last is made of the three kinds of parts that transformers has for it, and is no released model."""
MATRIX = tuple(CONFIGS)
CONFIGS |= {
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "olmo3": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2},
    "cohere2": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2},
    "llama4_text": {
        "attention_chunk_size": 32, "layer_types": ["chunked_attention", FULL] * 2, "intermediate_size_mlp": 48,
        **EXPERTS,
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", FULL] * 2},
    "qwen3_next": {"layer_types": [LINEAR, FULL] * 2, **DELTA, **ROUTED},
    "bamba": {
        "attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "falcon_h1": {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
        "mamba_d_ssm": 64,
    },
    "minimax": {"layer_types": [FULL, LINEAR] * 2, "block_size": 16, **EXPERTS},
    "mamba2": {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2,
        "num_attention_heads": None, "num_key_value_heads": None,
    },
    "kimi_linear": {
        **LATENTS, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "linear_num_heads": 4, "linear_head_dim": 8,
        "num_experts": 4,
    },
    "deepseek_v32": {**LATENTS, "index_topk": 16, "index_head_dim": 8, "index_n_heads": 16},  # few heads tie
}  # fmt: skip
"""And others, for which nothing was written."""
OTHERS = tuple(name for name in CONFIGS if name not in MATRIX)


ROUNDING = 1e-10
"""How far two computations of the same may be apart that put other rows together; measured: up to 1e-15."""
OWN = {"qwen3_5_text": 1e-4, "qwen3_next": 1e-4, "olmo_hybrid": 1e-5}
OWN |= dict.fromkeys(("granitemoehybrid", "bamba", "falcon_h1", "mamba2", "kimi_linear", "deepseek_v3"), 1e-6)
OWN |= {"deepseek_v32": 1e-6, "gemma2": 1e-5, "llama4_text": 1e-7}
"""Of models with a recurrence, a router, an indexer, a softmax or a rotation in float32. Measured: qwen 8e-6 and the
others up to 1.5e-7 at cuts off the kernels' grid, gemma2 9e-7 and llama4 1.1e-9 beside longer rows, where a processor's
vectors end elsewhere. At cuts on the grid all are exact to the bit on the machine where this was written.
"""


def figure(name: str) -> float:
    return OWN.get(name, ROUNDING)


def config_of(name: str) -> Any:
    given = {key: value for key, value in {**COMMON, **CONFIGS[name]}.items() if value is not None}
    return AutoConfig.for_model(name, **given)


@functools.cache
def model_of(name: str, dtype: str = "float64") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=getattr(torch, dtype))
    if getattr(model.config, "num_experts_per_tok", None):
        model.set_experts_implementation("eager")  # the grouped one has no kernel for float64
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    if name == "olmo_hybrid":
        model.register_forward_pre_hook(_masks_of_three_kinds, with_kwargs=True)
    return model.eval()


def own_cache(model: Any) -> Any:
    """transformers' own."""
    if model.config.model_type == "minimax":
        return MiniMaxCache()
    return DynamicCache(config=model.config)


def _masks_of_three_kinds(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What a caller of olmo_hybrid has to do where one of its layers has a window: it makes no mask for that itself."""
    ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    masks = create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty((*ids.shape, 0), dtype=model.dtype),
        attention_mask=kwargs.get("attention_mask"),
        past_key_values=kwargs.get("past_key_values"),
        position_ids=kwargs.get("position_ids"),
    )
    return args, {**kwargs, "attention_mask": masks}


def prompt(seed: int, count: int) -> list[int]:
    """Ids that are none of the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


class Served:
    """A model over a cache of its own."""

    def __init__(self, name: str, *, dtype: str = "float64", model: Any = None, **options: Any) -> None:
        self.name = name
        self.model = model or model_of(name, dtype)
        self.hf = HFModel(self.model)
        options = {"capacity": 2048, "max_running": 6, "page_size": 16, "debug": True, "registry": REGISTRY, **options}
        self.cache = prefixloom.compose(self.hf.config, **options)
        self.cache.identity = self.hf.identity
        self.runner = self.hf.bind(self.cache)
        self.page = self.cache.composition.page
        self.components = [part.name for part in self.cache.composition.parts]
        self.states = [part.name for part in self.cache.composition.parts if not part.page_tokens]

    def compute(self, sequence: Any, tokens: Sequence[int], cuts: Iterable[int]) -> torch.Tensor:
        """Run ``tokens`` from what is committed on, in passes that end at ``cuts``; the logits of every one of them."""
        rows = [self.step([sequence], [tokens[sequence.committed : cut]])[0] for cut in cuts]
        return torch.cat(rows)

    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """One pass over rows; the logits of all columns, (rows, columns, vocabulary)."""
        count = max(map(len, tokens))
        ids = torch.tensor([[0] * (count - len(each)) + list(each) for each in tokens])
        spans = [Span(s.committed, s.committed + len(t)) for s, t in zip(sequences, tokens, strict=True)]
        for sequence, span in zip(sequences, spans, strict=True):
            sequence.grow(span.end - sequence.reserved)
        with self.cache.step(list(sequences)) as step:
            step.run_ops()
            tables = {name: step.table(name) for name in self.components}
            depth = self.cache.composition.max_rewind
            singles = {name: step.rewind_table(name) for name in self.states} if depth else {}
            batch = Batch(ids, spans, tables, singles, wanted=count)
            return self.runner.forward(batch)

    def published(self, tokens: Sequence[int], cuts: Iterable[int]) -> None:
        """Compute up to the last of ``cuts`` and publish at each."""
        with self.cache.open(tokens) as sequence:
            for cut in cuts:
                self.compute(sequence, tokens, (cut,))
                sequence.publish()
            sequence.abort()

    def plain(self, tokens: Sequence[int], cuts: Iterable[int]) -> torch.Tensor:
        """The same passes without prefixloom: transformers' own cache."""
        past, start, rows = own_cache(self.model), 0, []
        with torch.no_grad():
            for cut in cuts:
                ids = torch.tensor([tokens[start:cut]])
                more = {self.runner.cache_name: past}
                if self.name != "mamba2":
                    more["position_ids"] = torch.arange(start, cut)[None]
                rows.append(self.model(ids, use_cache=True, **more).logits[0])
                start = cut
        return torch.cat(rows)

    def settled(self) -> None:
        """Nothing is owned by nobody."""
        told = self.cache.stats()
        assert told.sequences == 0
        for figures in told.components.values():
            assert (figures.leased, figures.running) == (0, 0)
            assert figures.free + figures.cached == figures.capacity
