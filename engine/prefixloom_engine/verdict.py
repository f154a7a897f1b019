"""The verdict of the demo: whether the cache changed anything. Nothing is taken on trust.

Three things are compared: the tokens of every answer, with the cache and without; how likely each was; and what the
cache gives back, bit for bit, with what was there when it was left. A control then spoils what is restored, component
by component, and sees the answer move, so that the first two could have failed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, MatchPlan, encode

from .engine import Engine
from .requests import Answer, Request

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
"""How far a log-probability may differ, since sums come in another order."""
OTHERS = 1e-3
"""The same of models that others wrote, whose states and routers stay in float32 whatever they compute in."""
TOKEN_BYTES = 4
Name = tuple[str, bytes]


@attrs.define
class Verdict:
    """What was compared. ``difference``: the largest of any log-probability; ``moved``: the same of the controls,
    infinite where the very token was another."""

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

    def see(self, with_cache: Answer, without: Answer) -> None:
        self.answers += 1
        self.tokens += len(without.tokens)
        self.other_tokens += len(without.tokens)
        for ours, theirs, token, right in zip(
            with_cache.logprobs, without.logprobs, with_cache.tokens, without.tokens, strict=True
        ):
            if token != right:
                break  # what follows answers something else
            self.other_tokens -= 1
            difference = abs(ours - theirs)
            if not difference <= self.difference:  # so that one that is no number stays
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
    def word(self) -> str:
        if not self.passed:
            return "NOT EXACT"
        if not self.restored:
            return "nothing was wrong, but nothing was restored either"
        return "EXACT: every answer is the same, and what was restored is bitwise what was left"


class Ledger:
    """Remembers what lay in the cache when an answer was complete, and compares what a prompt would get of it.

    A page is known by its component and by all tokens up to its end, a state by those up to its boundary. Where two
    requests computed the same, the tree keeps one, and rounding may differ: one of those that were left it must be.
    """

    def __init__(self, cache: Cache, verdict: Verdict) -> None:
        self._cache, self._verdict = cache, verdict
        self._left: dict[Name, list[Tensor]] = {}

    def leave(self, tokens: Sequence[int]) -> None:
        """All that lies there for a text, whichever of its boundaries a prompt may come back to."""
        key, page = encode(tokens), self._cache.composition.page
        ends = range(page, len(tokens) + 1, page)
        self._look(key, [self._cache.match(encode(tokens[:end])) for end in ends], self._remember)

    def compare(self, prompt: Sequence[int]) -> None:
        """What a prompt would resume from."""
        key = encode(prompt)
        self._look(key, [self._cache.match(key, leave=1)], self._judge)

    def _look(self, key: bytes, plans: Sequence[MatchPlan], tell: Callable[[bool, Name, Tensor], None]) -> None:
        for part in self._cache.composition.parts:
            buffers = self._cache.pool(part.name).buffers.values()
            for end, slot in sorted({each for plan in plans for each in slots_of(part, plan)}):
                name = (part.name, hashlib.blake2b(key[: end * TOKEN_BYTES], digest_size=16).digest())
                content = torch.cat([buffer[:, slot].flatten().view(torch.uint8) for buffer in buffers])
                tell(not part.page_tokens, name, content)

    def _remember(self, state: bool, name: Name, content: Tensor) -> None:
        known = self._left.setdefault(name, [])
        if not any(content.equal(each) for each in known):
            known.append(content)

    def _judge(self, state: bool, name: Name, content: Tensor) -> None:
        if state:
            self._verdict.states += 1
        else:
            self._verdict.pages += 1
        self._verdict.wrong += not any(content.equal(each) for each in self._left.get(name, ()))


def slots_of(part: Any, plan: MatchPlan) -> list[tuple[int, int]]:
    """(where it ends, page or slot) of all that a component has for resuming where the plan says."""
    if not plan.ready:
        return []
    if not part.page_tokens:
        return [(plan.ready, slot) for slot in plan.pages(part.name)]
    return [((at + 1) * part.page_tokens, slot) for at, slot in enumerate(plan.pages(part.name)) if slot >= 0]


def control(engine: Engine, prompt: Sequence[int]) -> dict[str, float]:
    """How far the answer moves when what is restored of a component is lost, for each that has any.

    What was spoiled is put back; but what was computed from it stays in the cache, so that this comes last.
    """
    cache = engine.cache
    request = Request(prompt, 1, logprobs=True)
    moved = {}
    right = _first(engine, request)
    for part in cache.composition.parts:
        plan = cache.match(encode(prompt), leave=1)
        slots = [slot for _, slot in slots_of(part, plan)]
        if not slots:
            continue
        buffers = cache.pool(part.name).buffers.values()
        kept = [buffer[:, slots].clone() for buffer in buffers]
        for buffer in buffers:
            buffer[:, slots] = 0
        spoiled = _first(engine, request)
        same = spoiled.tokens == right.tokens
        moved[part.name] = abs(spoiled.logprobs[0] - right.logprobs[0]) if same else math.inf
        for buffer, content in zip(buffers, kept, strict=True):
            buffer[:, slots] = content
    return moved


def _first(engine: Engine, request: Request) -> Answer:
    (answer,) = engine.generate([request])
    return answer
