"""The reference engine of prefixloom: it serves real models through a composed cache.

Its rooms, from the top down; each imports only from rooms below it (two on one line know nothing of each other):

====================  ==================================================================================
``demo``              the console command that shows what a cache saves, and checks that it changes nothing
``server``            the engine behind OpenAI's HTTP interface, for many clients
``disaggregation``    one process computes prompts, another decodes
``serving``           the engine and its scheduler: requests in, tokens out
``forward``           what runs on the forward stream: passes of the model, copies, sampling, drafts
``tracing``           a trace of what an engine did, for Perfetto's viewer
``threeway``, ``hf``  models: the built-in one, and those of Hugging Face transformers
``contract``          what the engine, its models and its clients agree on
====================  ==================================================================================

``adapter`` is the entry point through which ``cache.session`` finds ``hf``. Start reading at ``serving/engine.py``.
The names below are imported on first use, so that ``prefixloom --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract.memory import LayerMemory, layer_memories, memory_with
    from .contract.model import Batch, Drafter, Identified, Media, Model, Multimodal, Runner, Span, by_count
    from .contract.observer import Observer, Polled, PrefillChunk, StepFacts
    from .contract.requests import Answer, Request
    from .serving.driving import AnswerStream
    from .serving.engine import Engine
    from .serving.guessing import Guesser, PromptLookup
    from .threeway.model import ThreeWay
    from .tracing.trace import Trace

__all__ = [
    "Answer",
    "AnswerStream",
    "Batch",
    "Drafter",
    "Engine",
    "Guesser",
    "Identified",
    "LayerMemory",
    "Media",
    "Model",
    "Multimodal",
    "Observer",
    "Polled",
    "PrefillChunk",
    "PromptLookup",
    "Request",
    "Runner",
    "Span",
    "StepFacts",
    "ThreeWay",
    "Trace",
    "by_count",
    "layer_memories",
    "memory_with",
]
HOMES = {
    "contract.memory": ("LayerMemory", "layer_memories", "memory_with"),
    "contract.model": ("Batch", "Drafter", "Identified", "Media", "Model", "Multimodal", "Runner", "Span", "by_count"),
    "contract.observer": ("Observer", "Polled", "PrefillChunk", "StepFacts"),
    "contract.requests": ("Answer", "Request"),
    "serving.driving": ("AnswerStream",),
    "serving.engine": ("Engine",),
    "serving.guessing": ("Guesser", "PromptLookup"),
    "threeway.model": ("ThreeWay",),
    "tracing.trace": ("Trace",),
}


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
