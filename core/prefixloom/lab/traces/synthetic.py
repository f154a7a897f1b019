"""Synthetic traffic: a trace of conversations, made from a ``Traffic`` where nobody has recorded one.

Users talk at the same time. Each turn's prompt is a beginning that all share, what was said so far, and something new.
A conversation that is over is followed by another one. Equal seeds make equal traces, and a trace can be read again.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

import attrs

from ...compose.sizing import Traffic
from ...errors import InputError
from .requests import BlockPrompt, LabRequest

TEXT_BLOCK = 16
"""A conversation's text is named in blocks of so many tokens."""
SPOKEN = 40.0
"""An answer takes a second for so many tokens."""


@attrs.frozen
class SyntheticTrace:
    """Requests of ``users`` who talk at the same time, ``requests`` of them in all.

    ``traffic``  tokens of a prompt, on average over the turns of a conversation, of an answer, and the shared part
    ``turns``    turns of a conversation, on average; fewer where the answers alone would come to longer prompts
    ``think``    seconds between an answer and the next prompt, on average
    ``name``     how the trace is called in outcomes
    """

    traffic: Traffic
    users: int = 100
    requests: int = 2000
    turns: float = 6.0
    think: float = 30.0
    seed: int = 0
    name: str = "synthetic traffic"

    def __attrs_post_init__(self) -> None:
        for name, low in (("users", 1), ("requests", 1), ("turns", 1), ("think", 0)):
            if not low <= getattr(self, name) < float("inf"):
                raise InputError(
                    f"synthetic traffic: {name} is a number of at least {low}, got {getattr(self, name)!r}"
                )

    def __iter__(self) -> Iterator[LabRequest]:
        chance, traffic = random.Random(self.seed), self.traffic
        common = traffic.common // TEXT_BLOCK
        own = max(1, traffic.prompt // TEXT_BLOCK - common)
        answer = -(-traffic.output // TEXT_BLOCK)
        turns = min(self.turns, (own + answer) / (1 + answer))
        step = (own - (turns - 1) * answer) / turns  # so that the mean over all requests is ``own``
        shared = list(range(1, common + 1))
        unused = common + 1
        talks: list[tuple[float, int, int, list[int]]] = []
        for user in range(self.users):  # each in the midst of a conversation
            before = 0
            while chance.random() > 1 / turns:
                before += max(1, round(step)) + answer
            said = list(range(unused, unused + before))
            unused += before
            heapq.heappush(talks, (chance.random() * self.think, user, user, said))
        for number in range(self.requests):
            at, _, user, said = heapq.heappop(talks)
            new = max(1, round(step * chance.uniform(0.5, 1.5)))
            prompt = said + list(range(unused, unused + new))
            unused += new
            ids = shared + prompt
            replied = list(range(unused, unused + answer))
            unused += answer
            length = len(ids) * TEXT_BLOCK
            whole = BlockPrompt(ids + replied, TEXT_BLOCK, length + answer * TEXT_BLOCK)
            yield LabRequest(
                at, BlockPrompt(ids, TEXT_BLOCK, length), answer * TEXT_BLOCK, whole, session=str(user), line=number + 1
            )
            over = chance.random() < 1 / turns
            pause = answer * TEXT_BLOCK / SPOKEN + (chance.expovariate(1 / self.think) if self.think else 0.0)
            turn = self.users + number  # of equal times, the one who has waited longest
            heapq.heappush(talks, (at + pause, turn, user, [] if over else prompt + replied))
