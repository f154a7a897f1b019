"""What stands beside a tiny model: a draft model for EAGLE, and LoRA adapters. Both are random and strong.

Run in an engine's environment: ``python -m tests.engines.companions draft|adapter-one|adapter-two FOLDER``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from tests.engines.models import ATTENTION, COMMON

LAYERS, RANK = 4, 8
"""Layers of the tiny Llama, and the rank of an adapter."""
HIDDEN, HEAD = COMMON["hidden_size"], ATTENTION["head_dim"]
QUERIES, KEYS = ATTENTION["num_attention_heads"] * HEAD, ATTENTION["num_key_value_heads"] * HEAD
PROJECTIONS = {
    "q_proj": (HIDDEN, QUERIES),
    "k_proj": (HIDDEN, KEYS),
    "v_proj": (HIDDEN, KEYS),
    "o_proj": (QUERIES, HIDDEN),
}
"""The matrices of attention: what they take, and what they give."""
SOME = 0.5
"""How much of what a draft model says comes from elsewhere than the next token."""


def matrix(generator: Any, inputs: int, outputs: int, gain: float = 1.0) -> Any:
    import torch

    return torch.randn(outputs, inputs, generator=generator) * gain / math.sqrt(inputs)


def adapter(folder: Path, seed: int) -> None:
    """Save an adapter of all projections of attention, in the form of the library peft.

    What it adds to a projection is as large as the projection itself.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in PROJECTIONS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = matrix(generator, inputs, RANK)
            weights[f"{prefix}.lora_B.weight"] = matrix(generator, RANK, outputs)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
              "bias": "none", "target_modules": list(PROJECTIONS), "base_model_name_or_path": "llama"}  # fmt: skip
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def draft(folder: Path, seed: int) -> None:
    """Save one layer of a Llama over the model's hidden state and the next token's embedding, as EAGLE has it.

    Embeddings and the head are the model's own. Most of what it says comes from the next token's embedding, as it is in
    the model itself, so that some of its drafts are taken. The rest is its memory, so that it shows when that is wrong.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    inner = COMMON["intermediate_size"]
    both = torch.cat([torch.eye(HIDDEN), matrix(generator, HIDDEN, HIDDEN, SOME)], dim=1)
    weights = {"fc.weight": both, "fc.bias": torch.zeros(HIDDEN)}
    for name, (inputs, outputs) in PROJECTIONS.items():
        gain = SOME if name == "o_proj" else 1.0
        weights[f"layers.0.self_attn.{name}.weight"] = matrix(generator, inputs, outputs, gain)
    layer = {"gate_proj": (HIDDEN, inner, 1.0), "up_proj": (HIDDEN, inner, 1.0), "down_proj": (inner, HIDDEN, SOME)}
    for name, (inputs, outputs, gain) in layer.items():
        weights[f"layers.0.mlp.{name}.weight"] = matrix(generator, inputs, outputs, gain)
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**COMMON, **ATTENTION, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle"],
              "num_hidden_layers": 1, "dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-6}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def save(name: str, folder: Path, seed: int = 20261125) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if name == "draft":
        draft(folder, seed)
    else:
        adapter(folder, seed + len(name) + ord(name[-1]))


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
