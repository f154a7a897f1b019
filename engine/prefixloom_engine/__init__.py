"""The reference engine of prefixloom: real models, served through a composed cache."""

from __future__ import annotations

from .binding import LayerMemory, layer_memories, memory_with
from .model import Batch, Model, Runner, Span, by_count

__all__ = ["Batch", "LayerMemory", "Model", "Runner", "Span", "by_count", "layer_memories", "memory_with"]
