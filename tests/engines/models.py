"""Tiny models of the kinds that engines serve, saved as checkpoints, with weights so strong that wrong memory shows.

An engine's own dummy weights are so weak that the answer hardly depends on what attention reads. Here every matrix
keeps the size of what passes through it, so each token of the context moves the logits.

Run in an engine's environment: ``python -m tests.engines.models NAME FOLDER``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 8192,
              "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
BESIDE_STATES = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256}
"""vLLM makes blocks of tokens as large as a state, so tokens must be large for blocks to be of few tokens."""
WINDOW = 64


def llama() -> Any:
    """Full attention in each layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(**COMMON, **ATTENTION, num_hidden_layers=4)


def gemma3() -> Any:
    """Windows of 64 tokens in two layers of three, full attention in the third."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM, Gemma3TextConfig(
        **COMMON, **ATTENTION, num_hidden_layers=6, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=32
    )


def cohere2() -> Any:
    """Windows in three layers of four. Its config says to SGLang that its windows have a pool of their own.

    Of the models with windows that SGLang serves on a CPU, this is the one for which it has such a pool.
    """
    from transformers import Cohere2Config, Cohere2ForCausalLM

    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = {**COMMON, **ATTENTION, "tie_word_embeddings": True}
    config = Cohere2Config(**sizes, num_hidden_layers=8, sliding_window=WINDOW, layer_types=kinds, logit_scale=1.0)
    config.is_hybrid_swa = True
    config.hybrid_layer_pattern = [int(each == "sliding_attention") for each in kinds]
    return Cohere2ForCausalLM, config


def gpt_oss() -> Any:
    """Windows and full attention in turns, with sinks and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM, GptOssConfig(
        **COMMON, **ATTENTION, num_hidden_layers=4, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    )


def qwen3_next() -> Any:
    """Gated delta-net states in three layers of four, full attention in the fourth."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **COMMON, **BESIDE_STATES, num_hidden_layers=4, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=128, linear_value_head_dim=128, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, mlp_only_layers=[],
    )  # fmt: skip
    config.full_attention_interval = 4  # SGLang reads this in place of the kinds of layers
    return Qwen3NextForCausalLM, config


def qwen3_next_slow() -> Any:
    """Return the same with states that remember some fifty tokens, where those of ``qwen3_next`` forget at once."""
    return qwen3_next()


def qwen3_5() -> Any:
    """Gated delta-net states in three layers of four, dense."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM, Qwen3_5TextConfig(
        **COMMON, **BESIDE_STATES, num_hidden_layers=4, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip


def mamba2() -> Any:
    """Mamba 2 states alone."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    rest = {k: v for k, v in COMMON.items() if k not in ("intermediate_size", "max_position_embeddings")}
    return Mamba2ForCausalLM, Mamba2Config(**rest, num_hidden_layers=4, num_heads=8, head_dim=32, state_size=32,
                                           n_groups=1, expand=2, chunk_size=32)  # fmt: skip


def bamba() -> Any:
    """Mamba 2 states, and full attention in one layer of four."""
    from transformers import BambaConfig, BambaForCausalLM

    return BambaForCausalLM, BambaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, attn_layer_indices=[2],
        mamba_n_heads=8, mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=32, mamba_expand=2,
    )  # fmt: skip


def falcon_h1() -> Any:
    """Mamba 2 states beside full attention in each layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM, FalconH1Config(
        **COMMON, **ATTENTION, num_hidden_layers=4, mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32,
        mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=32, mamba_expand=2,
    )  # fmt: skip


def granite_hybrid() -> Any:
    """Mamba 2 states in three layers of four, full attention in the fourth."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=256, layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=8, mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=32, mamba_expand=2,
    )  # fmt: skip


def lfm2() -> Any:
    """States of short convolutions in two layers of three, full attention in the third."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM, Lfm2Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=6, conv_dim=128, block_dim=128,
        layer_types=["conv", "conv", "full_attention"] * 2, conv_L_cache=3, block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip


def jamba() -> Any:
    """Mamba 1 states, and full attention in one layer of four."""
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM, JambaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, attn_layer_period=4,
        attn_layer_offset=2, num_experts=1, num_experts_per_tok=1, use_mamba_kernels=False, mamba_dt_rank=16,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama, "gemma3": gemma3, "cohere2": cohere2, "gpt_oss": gpt_oss, "qwen3_next": qwen3_next,
    "qwen3_next_slow": qwen3_next_slow,
    "qwen3_5": qwen3_5, "mamba2": mamba2, "bamba": bamba, "falcon_h1": falcon_h1, "jamba": jamba,
    "granite_hybrid": granite_hybrid, "lfm2": lfm2,
}  # fmt: skip


SLOW = {"qwen3_next_slow": 0.02}
"""How much of a state is forgotten with each token, about."""


def embedding_size(model: Any) -> float:
    """The size of an embedding's entries: so small that the layers' outputs are not small beside the last token's own.

    Otherwise a model repeats one token, whatever its memory says.
    """
    if model.config.tie_word_embeddings:
        return 0.25
    return 1 / float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))


def strengthen(model: Any, seed: int) -> None:
    """Draw every matrix anew, so that a vector keeps its length through it and the logits spread over some units."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or "conv1d" in name:
                continue
            gain = 1.0
            if "embed" in name:
                fan_in, gain = 1, embedding_size(model)
            else:
                fan_in = weight.shape[-1]
                if "lm_head" in name:
                    gain = 2.0
                elif name.endswith(("q_proj.weight", "k_proj.weight")):
                    gain = 1.5  # sharper attention: one token's memory weighs more
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain / math.sqrt(fan_in))


def slow_down(model: Any, rate: float) -> None:
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(math.log(rate))


def save(name: str, folder: Path, seed: int = 20261125) -> None:
    import torch

    torch.manual_seed(seed)
    kind, config = MODELS[name]()
    config.dtype = torch.float32
    model = kind(config).to(torch.float32)
    strengthen(model, seed)
    if name in SLOW:
        slow_down(model, SLOW[name])
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"], written


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
