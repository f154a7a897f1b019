"""States: their shapes, read from a model config by one reader for each family of recurrent layers.

Shapes and dtypes are those of the cache layers of transformers 5.23: a conv state is as wide as the kernel, and most
recurrent states are float32 whatever dtype the model computes in. A reader returns None for a config of another family.
This module knows no component and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from prefixloom import CompositionError, ModelFacts

LINEAR = "linear_attention"
CONVOLUTION = "conv"
DELTA_CHUNK = 64
"""The tokens of a chunk in the kernels of delta rules. No config contains this number."""


@attrs.frozen
class StateLayout:
    """The shapes and dtypes of what one layer keeps at a boundary, and the grid on which it is exact."""

    conv: tuple[int, int] | None
    recurrent: tuple[int, ...] | None
    dtype: str
    state_dtype: str
    grid: int

    def options(self) -> dict[str, Any]:
        return attrs.asdict(self, recurse=False)


def read_state(facts: ModelFacts, is_conv: bool) -> StateLayout:
    """Return the state layout of a model's recurrent layers, or of its short convolutions."""
    for reader in (_short_convolution,) if is_conv else FAMILIES:
        state = reader(facts)
        if state is not None:
            return state
    raise CompositionError(
        f"the config of model type {facts.model_type!r} does not tell the shape of its recurrent state in any way that "
        f"is known here. Write a Profile that says conv=(channels, kernel width), recurrent=(shape) and grid"
    )


def caveats_of(facts: ModelFacts) -> tuple[str, ...]:
    """Return what transformers 5.23 is known to compute wrongly when it continues from a restored state."""
    if _selective_scan(facts) is not None:
        return (
            f"model type {facts.model_type!r}: transformers' Mamba-1 scan starts from zero when more than one token "
            f"continues from a state, so a resumed prefill is wrong there. Resume one token at a time, or use kernels "
            f"that take an initial state",
        )
    if facts.model_type in ("zamba2", "nemotron_h"):
        return (
            f"model type {facts.model_type!r}: transformers does not clamp the time step when single tokens continue "
            f"from a state, so decoding differs from prefill there",
        )
    return ()


class _Numbers:
    """The numbers of a config: a call with several names returns the first positive number under one of them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def __call__(self, *names: str) -> int | None:
        for name in names:
            value = self._raw.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None


def _delta_rule(facts: ModelFacts) -> StateLayout | None:
    """Lay out gated delta nets: Qwen3-Next, Qwen3.5, Olmo hybrid. One convolution over queries, keys and values."""
    number = _Numbers(facts.raw)
    k_heads, v_heads = number("linear_num_key_heads"), number("linear_num_value_heads")
    k_dim, v_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
    kernel = number("linear_conv_kernel_dim")
    if not (k_heads and v_heads and k_dim and v_dim and kernel):
        return None
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return StateLayout((channels, kernel), (v_heads, k_dim, v_dim), facts.dtype, "float32", DELTA_CHUNK)


def _kimi_delta(facts: ModelFacts) -> StateLayout | None:
    """Lay out Kimi delta attention: queries, keys and values of one width; its published configs nest the numbers."""
    nested = facts.raw.get("linear_attn_config")
    number, inner = _Numbers(facts.raw), _Numbers(nested if isinstance(nested, Mapping) else {})
    heads = number("linear_num_heads") or inner("num_heads")
    dim = number("linear_head_dim") or inner("head_dim")
    kernel = number("linear_conv_kernel_dim") or inner("short_conv_kernel_size")
    if not (heads and dim and kernel):
        return None
    return StateLayout((3 * heads * dim, kernel), (heads, dim, dim), facts.dtype, "float32", DELTA_CHUNK)


def _state_space(facts: ModelFacts) -> StateLayout | None:
    """Lay out second generation state spaces, computed in chunks: Mamba-2, Bamba, Granite, Falcon-H1, Nemotron-H."""
    number = _Numbers(facts.raw)
    heads = number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size, groups = number("mamba_d_state", "ssm_state_size", "state_size"), number(*GROUPS)
    kernel, chunk = number("mamba_d_conv", "conv_kernel"), number("mamba_chunk_size", "chunk_size")
    if not (heads and size and groups and kernel and chunk):
        return None
    dim = number("mamba_d_head", "mamba_head_dim", "mamba_headdim") or (
        number("head_dim") if not facts.num_attention_heads else None
    )
    inner = number("mamba_d_ssm") or (heads * dim if dim else (number(*EXPAND) or 2) * facts.hidden_size)
    channels = inner + 2 * groups * size
    return StateLayout((channels, kernel), (heads, dim or inner // heads, size), facts.dtype, "float32", chunk)


def _selective_scan(facts: ModelFacts) -> StateLayout | None:
    """Lay out first generation state spaces, computed token by token: Mamba, Falcon Mamba, Jamba, Zamba."""
    raw, number = facts.raw, _Numbers(facts.raw)
    ranked = any(raw.get(key) is not None for key in ("mamba_dt_rank", "time_step_rank"))
    later = number("mamba_n_heads", "mamba_num_heads", "num_heads")  # the second generation's
    heads = number("n_mamba_heads")
    size, kernel = number("mamba_d_state", "state_size"), number("mamba_d_conv", "conv_kernel")
    expand = number(*EXPAND)
    if not (ranked and size and kernel and expand) or later:
        return None
    alone = None if facts.num_attention_heads else number("intermediate_size")  # beside attention it is the MLP's
    inner = alone or expand * facts.hidden_size
    state_dtype = "float64" if facts.dtype == "float64" else "float32"
    recurrent = (heads, inner // heads, size) if heads else (inner, size)
    return StateLayout((inner, kernel), recurrent, facts.dtype, state_dtype, 1)


def _lightning(facts: ModelFacts) -> StateLayout | None:
    """Lay out lightning attention, computed in blocks, its state in the dtype of the model: MiniMax."""
    if not any(facts.raw.get(key) is not None for key in ("linear_attn_alpha_factor", "attn_type_list")):
        return None
    heads, dim = facts.num_attention_heads, facts.head_dim
    return StateLayout(None, (heads, dim, dim), facts.dtype, facts.dtype, _Numbers(facts.raw)("block_size") or 256)


def _compressed_convolution(facts: ModelFacts) -> StateLayout | None:
    """Lay out compressed convolutional attention, ZAYA: two convolutions' inputs, and the values' delayed half."""
    number = _Numbers(facts.raw)
    first, second = number("cca_time0"), number("cca_time1")
    if not (first and second):
        return None
    channels = (facts.num_attention_heads + facts.num_key_value_heads) * facts.head_dim
    delayed = facts.num_key_value_heads * facts.head_dim // 2
    return StateLayout((channels, first + second - 2), (delayed,), facts.dtype, facts.dtype, 1)


def _short_convolution(facts: ModelFacts) -> StateLayout | None:
    """Lay out short convolutions over the hidden state, exact at every token: LFM2, LFM3."""
    kernel = _Numbers(facts.raw)("conv_L_cache")
    return StateLayout((facts.hidden_size, kernel), None, facts.dtype, "float32", 1) if kernel else None


GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
EXPAND = ("mamba_expand", "expand")
FAMILIES: tuple[Callable[[ModelFacts], StateLayout | None], ...] = (
    _delta_rule, _kimi_delta, _state_space, _selective_scan, _lightning, _compressed_convolution,
)  # fmt: skip
