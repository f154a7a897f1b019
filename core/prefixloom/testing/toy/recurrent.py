"""Recurrent layers of the toy model: they keep a state instead of entries, and compute token by token.

A short convolution keeps its last inputs, as many as its kernel is wide. A recurrence keeps its state. A state that is
stored with fewer bits than it is computed with is rounded after every token, so that it does not depend on where a
step ends.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...contract.values import LayerFacts, ModelFacts
from ...errors import CompositionError
from .arithmetic import weights
from .stores import LayerStore


class Convolution:
    """A causal convolution of each channel with its own last inputs. The state is these inputs, the newest included."""

    def __init__(self, generator: torch.Generator, channels: int, width: int) -> None:
        self.shape = (channels, width)
        self.kernel = weights(generator, width, channels).T.contiguous()

    def forward(self, x: Tensor, store: LayerStore) -> Tensor:
        before = store.state("conv", self.shape)[:, 1:]
        windows = torch.cat((before, x.T), dim=1).unfold(1, self.shape[1], 1).permute(1, 0, 2).contiguous()
        store.advance("conv", windows)
        return (windows * self.kernel).sum(-1)


class ShortConvolution:
    """A gated short convolution over the hidden state, as in LFM2. It keeps only a convolution state."""

    buffers = ("conv",)

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        width = facts.hidden_size
        self.to_gates = weights(generator, width, 3 * width)
        self.convolution = Convolution(generator, width, int(facts.raw["conv_L_cache"]))
        self.to_x = weights(generator, width, width)

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        before, after, value = (x @ self.to_gates).chunk(3, dim=-1)
        return (after * self.convolution.forward(before * value, store)) @ self.to_x


class SelectiveScan:
    """A selective state space of the first generation, as in Jamba: exact at every token, its states in float64."""

    buffers = ("conv", "recurrent")

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        raw, width = facts.raw, facts.hidden_size
        inner, size = int(raw["mamba_expand"]) * width, int(raw["mamba_d_state"])
        self.shape = (inner, size)
        self.to_inner = weights(generator, width, 2 * inner)
        self.convolution = Convolution(generator, inner, int(raw["mamba_d_conv"]))
        self.to_step, self.to_in, self.to_out = (weights(generator, inner, columns) for columns in (inner, size, size))
        self.decay = torch.rand(inner, size, generator=generator, dtype=torch.float64).mul(0.3)
        self.to_x = weights(generator, inner, width)

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        value, gate = (x @ self.to_inner).chunk(2, dim=-1)
        value = functional.silu(self.convolution.forward(value, store))
        step = functional.softplus(value @ self.to_step)[:, :, None]
        kept, new = (-step * self.decay).exp(), step * value[:, :, None] * (value @ self.to_in)[:, None, :]
        state = store.state("recurrent", self.shape)
        states = torch.empty(len(x), *self.shape, dtype=torch.float64)
        for token in range(len(x)):
            state = kept[token] * state + new[token]
            states[token] = state
        store.advance("recurrent", states)
        read = (states * (value @ self.to_out)[:, None, :]).sum(-1)
        return (read * functional.silu(gate)) @ self.to_x


class GatedDelta:
    """The gated delta rule, as in Qwen3-Next. Its recurrent state is stored in float32, whatever the model's dtype."""

    buffers = ("conv", "recurrent")

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        raw, width = facts.raw, facts.hidden_size
        self.k_heads, self.v_heads = int(raw["linear_num_key_heads"]), int(raw["linear_num_value_heads"])
        self.k_dim, self.v_dim = int(raw["linear_key_head_dim"]), int(raw["linear_value_head_dim"])
        self.widths = (self.k_heads * self.k_dim, self.k_heads * self.k_dim, self.v_heads * self.v_dim)
        channels = sum(self.widths)
        self.to_channels = weights(generator, width, channels)
        self.to_gates = weights(generator, width, 2 * self.v_heads)
        self.convolution = Convolution(generator, channels, int(raw["linear_conv_kernel_dim"]))
        self.to_x = weights(generator, self.v_heads * self.v_dim, width)

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        mixed = functional.silu(self.convolution.forward(x @ self.to_channels, store))
        q, k, v = torch.split(mixed, list(self.widths), dim=-1)
        group = self.v_heads // self.k_heads
        q, k = (self._unit(part).repeat_interleave(group, dim=1) for part in (q, k))
        v = v.view(len(x), self.v_heads, self.v_dim)
        rate, keep = (x @ self.to_gates).sigmoid().chunk(2, dim=-1)
        keep = keep**0.2  # slow decay: a state still depends on its whole prefix
        state = store.state("recurrent", (self.v_heads, self.k_dim, self.v_dim))
        states = torch.empty(len(x), *state.shape, dtype=torch.float64)
        for token in range(len(x)):
            state = state * keep[token, :, None, None]
            known = (state * k[token, :, :, None]).sum(1)
            state = state + k[token, :, :, None] * (rate[token, :, None] * (v[token] - known))[:, None, :]
            state = state.to(torch.float32).to(torch.float64)
            states[token] = state
        store.advance("recurrent", states)
        return (states * q[:, :, :, None]).sum(2).reshape(len(x), -1) @ self.to_x

    def _unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x.view(len(x), self.k_heads, self.k_dim), dim=-1)


def recurrence(facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> SelectiveScan | GatedDelta:
    """Make the recurrence whose entries the config has."""
    if "linear_num_key_heads" in facts.raw:
        return GatedDelta(facts, layer, generator)
    if "mamba_d_state" in facts.raw:
        return SelectiveScan(facts, layer, generator)
    raise CompositionError(
        f"layer {layer.index} is recurrent, and the toy model computes a selective scan (mamba_d_state, mamba_d_conv, "
        f"mamba_expand) or a gated delta rule (linear_num_key_heads and the like): the config has neither"
    )
