"""The engine beside transformers' own ``generate`` and ``generate_batch``: the same models, prompts and answers.

The models have random weights. In every round there are new prompts, each side answers them in turn, and all answers
must be the same. Figures are CPU time of the whole process: that of the other side over that of the engine.

- *decode*: 8 requests; the time between the first tokens and the last. ``generate`` gets them as one batch. The prompts
  are equally long, or ragged, and then ``generate`` pads them on the left.
- *prompts*: 16 prompts of 240 tokens with answers of 8; the time until all are answered. ``generate`` gets them as one
  batch. *Shared*: the first 224 tokens of all are the same. *Lengths*: all lengths are different, from 16 to 227.
- ``generate_batch`` is transformers' continuous batching, with pages of 16 tokens. Starting it is not measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from bench.runner.figures import Rows
from prefixloom import compose
from prefixloom_engine import Engine, Request
from prefixloom_engine.hf import HFModel

CONV, LINEAR, FULL, SLIDING = "conv", "linear_attention", "full_attention", "sliding_attention"
ALL = {"head_dim": 64, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SMALL = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, **ALL}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 1408, "num_key_value_heads": 2},
    "gemma3_text": {
        **SMALL, "intermediate_size": 1280, "num_key_value_heads": 2, "sliding_window": 128, "query_pre_attn_scalar": 64
    },
    "lfm3": {
        **ALL, "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 1792, "num_hidden_layers": 10,
        "num_attention_heads": 12, "num_key_value_heads": 4, "conv_L_cache": 4, "sliding_window": 128,
        "layer_types": [CONV, FULL, CONV, SLIDING, CONV] * 2,
    },
    "qwen3_5_text": {
        **ALL, "vocab_size": 16384, "hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 12,
        "num_attention_heads": 10, "num_key_value_heads": 2, "linear_num_key_heads": 5, "linear_num_value_heads": 10,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 3,
    },
}  # fmt: skip
"""Of 27, 25, 75 and 74 million parameters."""
USUAL = {"decode": ("lfm3", "qwen3_5_text"), "prompts": ("llama", "gemma3_text")}
"""The models of each part, unless others are named."""
BATCHED_BY_TRANSFORMERS = ("llama", "gemma3_text")
"""The models that ``generate_batch`` takes; it refuses those with states."""
LENGTH, SHARED, DECODED, ANSWERED = 240, 224, 64, 8
Prompts = list[list[int]]
Side = Callable[[Prompts], "tuple[float, Prompts]"]
"""Answers prompts: the CPU seconds of what is measured, and the answers."""


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name])).eval()


def drawn(lengths: Sequence[int], shared: int, seed: int) -> Prompts:
    """Return prompts of these lengths, whose first ``shared`` tokens are the same."""
    rng = random.Random(seed)
    beginning = [rng.randrange(3, 8192) for _ in range(shared)]
    return [beginning + [rng.randrange(3, 8192) for _ in range(length - shared)] for length in lengths]


# ---------------------------------------------------------------- the sides


class PlainGenerate:
    """``generate`` on one batch. ``from_first``: the time begins when the first tokens are there."""

    def __init__(self, model: Any, tokens: int, from_first: bool) -> None:
        self.model, self.tokens, self.from_first = model, tokens, from_first
        self.clock: list[float] = []

    def __call__(self, prompts: Prompts) -> tuple[float, Prompts]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.clock = [] if self.from_first else [time.process_time()]
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=self.tokens, do_sample=False, stopping_criteria=[self.tell]
        )
        return self.clock[-1] - self.clock[0], out[:, longest:].tolist()

    def tell(self, ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        self.clock.append(time.process_time())
        return torch.zeros(len(ids), dtype=torch.bool)


class ThroughEngine:
    """The engine as it is without options, and its cache flushed between the rounds."""

    def __init__(self, model: Any, tokens: int, from_first: bool) -> None:
        served = HFModel(model)
        self.cache = compose(served.config, capacity=32768, max_running=16, debug=False)
        self.engine = Engine(served, self.cache)
        self.tokens, self.from_first = tokens, from_first

    def __call__(self, prompts: Prompts) -> tuple[float, Prompts]:
        self.cache.flush()
        requests = [Request(prompt, self.tokens, stops=()) for prompt in prompts]
        started = time.process_time()
        answers = [self.engine.add(request) for request in requests]
        share = 1.0
        if self.from_first:
            while not all(answer.tokens for answer in answers):
                self.engine.step()
            self.engine.drain()
            started = time.process_time()
            left = sum(self.tokens - len(answer.tokens) for answer in answers)
            share = left / (len(answers) * (self.tokens - 1))
        while not all(answer.done for answer in answers):
            self.engine.step()
        return (time.process_time() - started) / share, [answer.tokens for answer in answers]


class ContinuousBatching:
    """``generate_batch``, on a model of its own, since it changes the model's attention."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.generation = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1, use_cache=True
        )
        self.batching = ContinuousBatchingConfig(page_size=16, num_blocks=1024, max_batch_tokens=512)

    def __call__(self, prompts: Prompts) -> tuple[float, Prompts]:
        with self.model.continuous_batching_context_manager(
            generation_config=self.generation, continuous_batching_config=self.batching, warmup=False
        ) as manager:
            while manager.batch_processor is None and manager.is_running():
                time.sleep(0.01)
            started = time.process_time()
            names = manager.add_requests(prompts, max_new_tokens=self.tokens)
            answers: dict[str, list[int]] = {}
            while len(answers) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching has ended")
            seconds = time.process_time() - started
        return seconds, [answers[name] for name in names]


# ---------------------------------------------------------------- the figures


def measured(row: str, sides: dict[str, Side], lengths: Sequence[int], shared: int, times: int) -> Rows:
    """Let all sides answer the same in turn. The first round is not measured."""
    spent: dict[str, list[float]] = {label: [] for label in sides}
    for number in range(times + 1):
        prompts = drawn(lengths, shared, number)
        order = list(sides.items())
        answers: dict[str, Prompts] = {}
        for label, side in order if number % 2 else order[::-1]:
            seconds, answers[label] = side(prompts)
            spent[label] += [seconds] * (number > 0)
        for label, found in answers.items():
            if found != answers["engine"]:
                raise AssertionError(f"{label} answered otherwise than the engine")
    ours = spent.pop("engine")
    rows = {f"{row}: engine, ms": [1000 * seconds for seconds in ours]}
    for label, each in spent.items():
        rows[f"{row}: {label} over engine"] = [theirs / mine for theirs, mine in zip(each, ours, strict=True)]
    return rows


def decode(name: str, times: int) -> Rows:
    model = model_of(name)
    sides: dict[str, Side] = {
        "engine": ThroughEngine(model, DECODED, True), "generate": PlainGenerate(model, DECODED, True)
    }  # fmt: skip
    return measured(f"decode, {name}, equal", sides, [LENGTH] * 8, 0, times) | measured(
        f"decode, {name}, ragged", sides, range(72, LENGTH + 1, 24), 0, times
    )


def prompts(name: str, times: int) -> Rows:
    model = model_of(name)
    sides: dict[str, Side] = {
        "engine": ThroughEngine(model, ANSWERED, False), "generate": PlainGenerate(model, ANSWERED, False)
    }  # fmt: skip
    if name in BATCHED_BY_TRANSFORMERS:
        sides["generate_batch"] = ContinuousBatching(model_of(name), ANSWERED)
    kinds = {
        "distinct": ([LENGTH] * 16, 0),
        "shared": ([LENGTH] * 16, SHARED),
        "lengths": ([16 + 14 * row + row % 2 for row in range(16)], 0),
    }
    found: Rows = {}
    for kind, (lengths, shared) in kinds.items():
        found |= measured(f"prompts, {name}, {kind}", sides, lengths, shared, times)
    return found


def plain_batches(parts: str = "decode,prompts", models: str = "", times: int = 7, threads: int = 1) -> Rows:
    """Return the engine's time, and that of others over it. ``models``: those of each part, unless named."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    found: Rows = {}
    for part in parts.split(","):
        for name in models.split(",") if models else USUAL[part]:
            found |= (decode if part == "decode" else prompts)(name, times)
    return found
