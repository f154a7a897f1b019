"""The conversations that chat workloads serve: who asks when, and with which tokens. Always the same ones."""

from __future__ import annotations

import random
from functools import cache

Turn = tuple[list[int], list[int]]
"""The prompt, which is the whole history; and the prompt with its answer."""


@cache
def conversations(count: int, turns: int) -> tuple[list[Turn], int]:
    """Return the turns of ``count`` conversations in random order, and the tokens of all conversations together.

    All conversations begin with the same system prompt of 512 tokens.
    """
    chance = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1, 150_000) for _ in range(count)]

    system = tokens(512)
    histories = [list(system) for _ in range(count)]
    order = [which for which in range(count) for _ in range(turns)]
    chance.shuffle(order)
    found: list[Turn] = []
    total = len(system)
    for which in order:
        asked, answered = chance.randrange(64, 512), chance.randrange(64, 512)
        prompt = histories[which] + tokens(asked)
        histories[which] = prompt + tokens(answered)
        found.append((prompt, histories[which]))
        total += asked + answered
    return found, total
