"""What becomes of a model type over a composed cache: it is exact, or it is refused with a sentence.

A prompt is computed in two parts through a composed cache, then another prompt hits, then transformers' own
``generate`` answers in a session. All of it is compared with the model alone, without any cache, in float64.
"""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import torch

from prefixloom import CompositionError
from prefixloom_engine import Span
from prefixloom_engine.hf import session
from prefixloom_engine.hf.refusals import refuse

from .hf_models import Served, distance, prompt
from .hf_tiny import tiny_config, tiny_model

FIRST, WHOLE, MORE, ANSWER = 64, 96, 120, 6
"""The tokens of the first part, of the first prompt, of the prompt that hits, and of an answer. The first is a whole
chunk of every recurrent kernel."""
ROUNDING = 1e-10
SINGLE = 1e-4
"""How far results may be apart if the model's own code computes a part in float32, in which it is then told apart."""
MOVED = 20.0
"""By how much more than the rounding a spoiled memory must move the logits."""


@attrs.frozen
class Outcome:
    """What was measured of one model type.

    ``refused``    the sentence; empty if it was served
    ``error``      how far logits are from those of the uncached run at most
    ``moved``      by component, how far its spoiled memory moves the logits
    ``unwritten``  what the composition keeps and the model's modules never write
    ``same_tokens``  whether the greedy answers are the same
    """

    refused: str = ""
    error: float = 0.0
    moved: dict[str, float] = attrs.field(factory=dict)
    unwritten: tuple[str, ...] = ()
    same_tokens: bool = True

    @property
    def exact(self) -> bool:
        small = self.error <= SINGLE and all(value > MOVED * max(self.error, 1e-12) for value in self.moved.values())
        return not self.refused and small and self.same_tokens and not self.unwritten


def outcome_of(model_type: str, **options: Any) -> Outcome:
    """What becomes of a model type of the installed transformers, with these options of its config."""
    try:
        refuse(tiny_config(model_type, **options))
        return measured(tiny_model(model_type, **options))
    except CompositionError as error:
        return Outcome(refused=str(error))


def measured(model: Any) -> Outcome:
    served = Served(model.config.model_type, model=model)
    first = prompt(1, WHOLE)
    second = first[:FIRST] + prompt(2, MORE - FIRST)
    expected = alone(model, first)
    error = 0.0
    with served.cache.open(first) as sequence:
        error = max(error, distance(served.compute(sequence, first, (FIRST,)), expected[:FIRST]))
        sequence.publish()
        error = max(error, distance(served.compute(sequence, first, (WHOLE,)), expected[FIRST:]))
        unwritten = tuple(never_written(served, sequence))
    expected = alone(model, second)
    with served.cache.open(second, leave=1) as sequence:
        assert sequence.ready == FIRST
        error = max(error, distance(served.compute(sequence, second, (MORE,)), expected[FIRST:]))
        sequence.abort()
    moved = {name: spoiled(served, name, second, expected) for name in served.components}
    same = generated(served, second) == greedy(model, second)
    return Outcome("", error, moved, unwritten, same)


def alone(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logits of a prompt without any cache."""
    takes = inspect.signature(model.forward).parameters
    with torch.no_grad():
        out: torch.Tensor = model(
            torch.tensor([tokens]), **({"use_cache": False} if "use_cache" in takes else {})
        ).logits
    return out[0]


def greedy(model: Any, tokens: list[int]) -> list[int]:
    """The greedy answer without any cache."""
    tokens, ends = list(tokens), model.generation_config.eos_token_id
    for _ in range(ANSWER):
        logits = alone(model, tokens)[-1]
        if ends is not None:
            logits[ends] = -torch.inf  # as ``generate`` does before ``min_new_tokens``
        tokens.append(int(logits.argmax()))
    return tokens[-ANSWER:]


def generated(served: Served, tokens: list[int]) -> list[int]:
    """The greedy answer of transformers' own ``generate`` in a session over the cache."""
    ids = torch.tensor([tokens])
    with session(served.cache, served.hf, ids) as opened:
        assert opened.ready >= FIRST
        out = served.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False,
            use_cache=True, **{served.runner.cache_name: opened.cache},
        )  # fmt: skip
    return [int(token) for token in out[0, len(tokens) :]]


def grouped(model: Any, name: str = "") -> tuple[float, int]:
    """Compute rows with other counts and pasts in the groups of the runner.

    Return how far their logits are from those of the model alone, and how many passes they were. Each further step
    reads what those before it have written. Where nothing was written there are no numbers, which move no shorter row.
    """
    served = Served(name or model.config.model_type, model=model)
    for part in served.cache.composition.parts:
        for content in served.cache.pool(part.name).buffers.values() if part.page_tokens else ():
            content.fill_(float("nan"))
    pasts, *steps = (0, 64, 33, 0, 7), (20, 9, 1, 12, 17), (1, 3, 1, 1, 3), (1, 1, 1, 1, 1)
    texts = [prompt(seed, sum(each)) for seed, each in enumerate(zip(pasts, *steps, strict=True))]
    sequences = [served.cache.open(text) for text in texts]
    for sequence, past, text in zip(sequences, pasts, texts, strict=True):
        if past:
            served.compute(sequence, text, (past,))
    expected = [alone(model, text) for text in texts]
    error, passes = 0.0, 0
    for part in steps:
        spans = [Span(s.committed, s.committed + count) for s, count in zip(sequences, part, strict=True)]
        for group in served.runner.groups(spans):
            new = [texts[row][spans[row].start : spans[row].end] for row in group]
            found = served.step([sequences[row] for row in group], new)
            for row, logits in zip(group, found, strict=True):
                right = expected[row][spans[row].start : spans[row].end]
                error = max(error, distance(logits[-len(right) :], right))
            passes += 1
    for sequence in sequences:
        sequence.abort()
    served.settled()
    return error, passes


def spoiled(served: Served, component: str, tokens: list[int], expected: torch.Tensor) -> float:
    """How far the logits of a hit move if what one component has cached is zeroed. The content is put back."""
    pool = served.cache.pool(component)
    slots = [slot for slot in served.cache.match(tokens, leave=1).pages(component) if slot >= 0]
    kept = {name: content[:, slots].clone() for name, content in pool.buffers.items()}
    for content in pool.buffers.values():
        content[:, slots] = 0
    with served.cache.open(tokens, leave=1) as sequence:
        moved = distance(served.compute(sequence, tokens, (len(tokens),)), expected[FIRST:])
        sequence.abort()
    for name, content in pool.buffers.items():
        content[:, slots] = kept[name]
    return moved


def never_written(served: Served, sequence: Any) -> list[str]:
    """The buffers and layers of the composition into which the model has written nothing but zeros."""
    found = []
    for part in served.cache.composition.parts:
        slots = [slot for slot in sequence.pages(part.name) if slot >= 0]
        for buffer in part.manifest.buffers:
            content = served.cache.pool(part.name).buffers[buffer.name]
            found += [
                f"{part.name}.{buffer.name} of layer {layer}"
                for at, layer in enumerate(buffer.layers)
                if not content[at, slots].any()
            ]
    return found
