"""The reference engine of prefixloom: real models, served through a composed cache."""

from __future__ import annotations

from .binding import LayerMemory, layer_memories, memory_with
from .engine import AnswerStream, Engine
from .guessing import Guesser, PromptLookup
from .model import Batch, Model, Runner, Span, by_count
from .requests import Answer, Request
from .threeway import ThreeWay

__all__ = [
    "Answer",
    "AnswerStream",
    "Batch",
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
