"""Exactness: the demo's check that the cache changed nothing.

It compares three things: the tokens of every answer with the cache and without, their log-probabilities, and, bit for
bit, what the cache restores with what was in the pools when an answer ended. A control then zeroes what is restored,
component by component, and must see the answer change; so the comparisons could have failed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, MatchPlan, Tokens, encode

from ..contract.requests import Answer, Request
from ..serving.engine import Engine

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
"""By dtype: how far a log-probability of the built-in model may differ, since sums are taken in another order."""
TOLERANCE_OF_OTHER_MODELS = 1e-3
"""The same for other models, in which states and routers stay in float32 whatever the dtype."""
"""How many bytes a token has in an encoded key."""
ContentName = tuple[str, bytes]
"""A component, and the digest of all tokens up to the end of a page or state."""


@attrs.define
class Exactness:
    """What was compared, and what differed.

    ``tolerance``                  how far a log-probability may differ
    ``answers``, ``tokens``        how many were compared, and ``other_tokens`` how many of the tokens differ
    ``difference``                 the largest difference of any log-probability
    ``pages``, ``states``          how many restored ones were compared, and ``wrong`` how many of them differ
    ``held``                       pages and states that are still held in the end
    ``moved``                      by component: how far the control moved a log-probability; infinite where it changed
                                   the token
    """

    tolerance: float
    answers: int = 0
    tokens: int = 0
    other_tokens: int = 0
    difference: float = 0.0
    pages: int = 0
    states: int = 0
    wrong: int = 0
    held: int = 0
    moved: dict[str, float] = attrs.field(factory=dict)

    def compare_answers(self, with_cache: Answer, without: Answer) -> None:
        self.answers += 1
        self.tokens += len(without.tokens)
        self.other_tokens += len(without.tokens)
        for ours, theirs, token, right in zip(
            with_cache.logprobs, without.logprobs, with_cache.tokens, without.tokens, strict=True
        ):
            if token != right:
                break  # the tokens after it continue another text
            self.other_tokens -= 1
            difference = abs(ours - theirs)
            if not difference <= self.difference:  # also true for NaN
                self.difference = difference

    @property
    def same_answers(self) -> bool:
        return not self.other_tokens and self.difference <= self.tolerance

    @property
    def restored(self) -> int:
        return self.pages + self.states

    @property
    def passed(self) -> bool:
        controls = all(moved > self.tolerance for moved in self.moved.values())
        return self.same_answers and not self.wrong and not self.held and controls

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "NOT EXACT"
        if not self.restored:
            return "nothing was wrong, but nothing was restored either"
        return "EXACT: every answer is the same, and what was restored is bitwise what was left"


class ContentLedger:
    """Remembers the content of the pools when an answer ends, and compares what a later prompt would restore with it.

    A page is named by its component and by all tokens up to its end, a state by those up to its boundary. Two requests
    may compute the same content and round differently; the tree keeps one of them, so the restored content must equal
    one of those that were remembered.
    """

    def __init__(self, cache: Cache, exactness: Exactness) -> None:
        self.cache = cache
        self._exactness = exactness
        self._remembered: dict[ContentName, list[Tensor]] = {}

    def remember(self, tokens: Sequence[int]) -> None:
        """Remember all that is cached of a text, at whichever of its boundaries a prompt may resume."""
        key, page = encode(tokens), self.cache.composition.page
        ends = range(page, len(tokens) + 1, page)
        self._visit(key, [self.cache.match(encode(tokens[:end])) for end in ends], self._add)

    def compare(self, prompt: Sequence[int]) -> None:
        """Compare what a prompt would resume from."""
        key = encode(prompt)
        self._visit(key, [self.cache.match(key, leave=1)], self._judge)

    def _visit(
        self, key: Tokens, plans: Sequence[MatchPlan], visitor: Callable[[bool, ContentName, Tensor], None]
    ) -> None:
        """Call ``visitor(is_state, name, content)`` for each page and state that these plans would restore."""
        for part in self.cache.composition.parts:
            buffers = self.cache.pool(part.name).buffers.values()
            for end, slot in sorted({each for plan in plans for each in restored_slots(part, plan)}):
                name = (part.name, hashlib.blake2b(key.part(0, end), digest_size=16).digest())
                content = torch.cat([buffer[:, slot].flatten().view(torch.uint8) for buffer in buffers])
                visitor(not part.page_tokens, name, content)

    def _add(self, is_state: bool, name: ContentName, content: Tensor) -> None:
        known = self._remembered.setdefault(name, [])
        if not any(content.equal(each) for each in known):
            known.append(content)

    def _judge(self, is_state: bool, name: ContentName, content: Tensor) -> None:
        if is_state:
            self._exactness.states += 1
        else:
            self._exactness.pages += 1
        self._exactness.wrong += not any(content.equal(each) for each in self._remembered.get(name, ()))


def restored_slots(part: Any, plan: MatchPlan) -> list[tuple[int, int]]:
    """Return the (end, page or slot) of all content that a component has for resuming where the plan says."""
    if not part.page_tokens:
        return [(plan.ready, slot) for slot in plan.pages(part.name)]
    return [((at + 1) * part.page_tokens, slot) for at, slot in enumerate(plan.pages(part.name)) if slot >= 0]


def lose_each_component(engine: Engine, prompt: Sequence[int]) -> dict[str, float]:
    """Zero what is restored of each component in turn, and measure how far the answer moves: the control.

    The content is put back afterwards. But what was computed from zeros stays in the cache, so this must come last.
    """
    cache = engine.cache
    request = Request(prompt, 1, logprobs=True)
    moved = {}
    right = _generate_one(engine, request)
    for part in cache.composition.parts:
        plan = cache.match(encode(prompt), leave=1)
        slots = [slot for _, slot in restored_slots(part, plan)]
        if not slots:
            continue
        buffers = cache.pool(part.name).buffers.values()
        kept = [buffer[:, slots].clone() for buffer in buffers]
        for buffer in buffers:
            buffer[:, slots] = 0
        spoiled = _generate_one(engine, request)
        same = spoiled.tokens == right.tokens
        moved[part.name] = abs(spoiled.logprobs[0] - right.logprobs[0]) if same else math.inf
        for buffer, content in zip(buffers, kept, strict=True):
            buffer[:, slots] = content
    return moved


def _generate_one(engine: Engine, request: Request) -> Answer:
    (answer,) = engine.generate([request])
    return answer
