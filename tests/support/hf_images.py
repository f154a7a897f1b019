"""Tiny models of transformers that take images, prompts with random images, and runs of both without any cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPImageProcessorPil, LlavaProcessor

from .hf_models import COMMON, DELTA, FULL, LINEAR, ROUTED, SLIDING, WINDOW
from .hf_texts import byte_tokenizer

IMAGE, VIDEO, BEGIN, END = 90, 91, 92, 93
"""Ids: the place of an image, of a video, and what stands before and behind."""
PIXELS, PATCH = 16, 4
CLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": PIXELS,
    "patch_size": PATCH,
}  # fmt: skip
VISUAL = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": PATCH}
OUT = {**VISUAL, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
QWEN = {"video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
TURNED = {**COMMON, "rope_parameters": ROPE}
LLAMA = {"model_type": "llama", **COMMON}
WINDOWS = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **COMMON, **WINDOWS}, "vision_feature_layer": -1,
        "vision_config": {"model_type": "siglip_vision_model", **CLIP}, "downsample_factor": 2,
    },
    "cohere2_vision": {
        "text_config": {"model_type": "cohere2", **COMMON, **WINDOWS}, "downsample_factor": 2,
        "vision_config": {"model_type": "siglip_vision_model", **CLIP},
    },
    "gemma3": {
        "text_config": {**COMMON, **WINDOWS, "query_pre_attn_scalar": 8}, "vision_config": CLIP,
        "mm_tokens_per_image": 16,
    },
    "glm4v": {
        "text_config": TURNED, "video_token_id": VIDEO, "image_start_token_id": BEGIN, "image_end_token_id": END,
        "vision_config": {"depth": 2, "image_size": PIXELS, **OUT},
    },
    "idefics3": {"text_config": LLAMA, "vision_config": CLIP, "scale_factor": 2},
    "internvl": {
        "text_config": {"model_type": "qwen2", **COMMON}, "downsample_ratio": 0.5,
        "vision_config": {**CLIP, "image_size": [PIXELS] * 2, "patch_size": [PATCH] * 2},
    },
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", **COMMON, "conv_L_cache": 3, "layer_types": ["conv", FULL] * 2},
        "vision_config": {**CLIP, "model_type": "siglip2_vision_model", "num_patches": 16}, "downsample_factor": 2,
        "projector_hidden_size": 32,
    },
    "llava": {
        "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **CLIP}, "vision_feature_layer": -1,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **COMMON, "sliding_window": None}, "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", **CLIP, "image_size": 64, "head_dim": 8}, "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "text_config": TURNED, **QWEN,
        "vision_config": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, **VISUAL},
    },
    "qwen2_5_vl": {
        "text_config": TURNED, **QWEN,
        "vision_config": {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1], **OUT},
    },
    "qwen3_vl": {
        "text_config": TURNED, **QWEN,
        "vision_config": {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], **OUT},
    },
    "qwen3_5": {
        "text_config": {**TURNED, "layer_types": [LINEAR, FULL] * 2, **DELTA}, **QWEN,
        "vision_config": {"depth": 2, "num_position_embeddings": 64, **OUT},
    },
    "qwen3_5_moe": {
        "text_config": {**TURNED, "layer_types": [LINEAR, FULL] * 2, **DELTA, **ROUTED}, **QWEN,
        "vision_config": {"depth": 2, "num_position_embeddings": 64, **OUT},
    },
    "qwen3_vl_moe": {
        "text_config": {**TURNED, **ROUTED}, **QWEN,
        "vision_config": {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], **OUT},
    },
    "smolvlm": {"text_config": LLAMA, "vision_config": CLIP, "scale_factor": 2},
}  # fmt: skip
GRIDS = ("glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TILED = ("idefics3", "smolvlm")
TOKENS = {"aya_vision": 4, "cohere2_vision": 4, "gemma3": 16, "internvl": 4, "llava": 16}
"""The places of one image, where all images have equally many."""


@functools.cache
def model_with_images(name: str, window: int = WINDOW) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, image_token_id=IMAGE, **CONFIGS[name])
    if window != WINDOW:
        config.get_text_config().sliding_window = window
    config.image_token_id = IMAGE
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    if name.endswith("_moe"):
        model.set_experts_implementation("eager")  # the grouped one has no kernel for float64
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model.eval()


Piece = Sequence[int] | tuple[list[int], dict[str, Tensor]]


def picture(name: str, seed: int, height: int = 2, width: int = 2) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens of one random image and what a processor makes of it; the size counts where the model takes sizes."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name in GRIDS:
        grid = torch.tensor([[1, 2 * height, 2 * width]])
        pixels = noise(4 * height * width, 3 * 2 * PATCH**2)
        return [BEGIN, *[IMAGE] * (height * width), END], {"pixel_values": pixels, "image_grid_thw": grid}
    if name in TILED:
        tiles = {"pixel_values": noise(1, 2, 3, PIXELS, PIXELS)}
        tiles["pixel_attention_mask"] = torch.ones(1, 2, PIXELS, PIXELS, dtype=torch.bool)
        return [BEGIN, *[IMAGE] * 4, END, *[IMAGE] * 4, END], tiles
    if name == "lfm2_vl":
        shapes, most = torch.tensor([[2 * height, 2 * width]]), 6 * 4
        pixels = torch.zeros(1, most, 3 * PATCH**2, dtype=torch.float64)
        pixels[:, : 4 * height * width] = noise(1, 4 * height * width, 3 * PATCH**2)
        mask = (torch.arange(most) < 4 * height * width).long()[None]
        found = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
        return [BEGIN, *[IMAGE] * (height * width), END], found
    if name == "mistral3":
        step = 2 * PATCH
        pixels = torch.zeros(1, 3, 4 * step, 4 * step, dtype=torch.float64)
        pixels[:, :, : height * step, : width * step] = noise(1, 3, height * step, width * step)
        sizes = torch.tensor([[height * step, width * step]])
        return [*([IMAGE] * width + [BEGIN]) * height, END], {"pixel_values": pixels, "image_sizes": sizes}
    return [BEGIN, *[IMAGE] * TOKENS[name], END], {"pixel_values": noise(1, 3, PIXELS, PIXELS)}


def inputs_of(name: str, *pieces: Piece) -> dict[str, Tensor]:
    """What a processor returns for a prompt of texts and images."""
    tokens: list[int] = []
    found: dict[str, Tensor] = {}
    for piece in pieces:
        own, tensors = piece if isinstance(piece, tuple) else (piece, {})
        tokens += own
        for key, tensor in tensors.items():
            along = 1 if name in TILED else 0
            found[key] = torch.cat([found[key], tensor], dim=along) if key in found else tensor
    ids = torch.tensor([tokens])
    marks = {"gemma3": "token_type_ids", **dict.fromkeys(GRIDS, "mm_token_type_ids")}
    if name in marks:
        found[marks[name]] = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **found}


def beside_ids(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a request carries: all but the ids."""
    return {name: value for name, value in inputs.items() if name != "input_ids"}


def alone(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of a prompt without any cache."""
    with torch.no_grad():
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits[0]


def answered(model: Any, inputs: dict[str, Tensor], count: int = 6, cache: Any = None) -> list[int]:
    """A greedy answer of transformers' own ``generate``."""
    out = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "<assistant>"
)


def llava_folder(path: Path) -> Path:
    """Save a llava of random weights whose tokens are bytes, with the processor of its images, to ``path``."""
    tokenizer = byte_tokenizer(eos_token="<|end|>", additional_special_tokens=["<image>"])
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": PIXELS}, crop_size=PIXELS),
        tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(path)  # fmt: skip
    torch.manual_seed(0)
    facts = CONFIGS["llava"]
    config = AutoConfig.for_model(
        "llava", **{**facts, "text_config": {**facts["text_config"], "vocab_size": len(tokenizer)}},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    model.save_pretrained(path)
    return path
