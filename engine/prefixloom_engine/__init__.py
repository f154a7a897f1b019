"""The reference engine of prefixloom: real models, served through a composed cache.

Names are looked up when they are used, so that a command's help does not have to wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import LayerMemory, layer_memories, memory_with
    from .drafting import Drafter
    from .engine import AnswerStream, Engine
    from .guessing import Guesser, PromptLookup
    from .model import Batch, Model, Runner, Span, by_count
    from .requests import Answer, Request
    from .threeway import ThreeWay

__all__ = [
    "Answer",
    "AnswerStream",
    "Batch",
    "Drafter",
    "Engine",
    "Guesser",
    "LayerMemory",
    "Model",
    "PromptLookup",
    "Request",
    "Runner",
    "Span",
    "ThreeWay",
    "by_count",
    "layer_memories",
    "memory_with",
]
HOMES = {
    "binding": ("LayerMemory", "layer_memories", "memory_with"),
    "drafting": ("Drafter",),
    "engine": ("AnswerStream", "Engine"),
    "guessing": ("Guesser", "PromptLookup"),
    "model": ("Batch", "Model", "Runner", "Span", "by_count"),
    "requests": ("Answer", "Request"),
    "threeway": ("ThreeWay",),
}


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
