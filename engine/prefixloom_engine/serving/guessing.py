"""Guessing: tokens that may come next, derived from the text alone. The model checks all of them in one pass.

Every component takes wrong guesses back, so a guess can cost time but never changes an answer. The guesses of a draft
model are made in ``forward.drafting`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Guesser(Protocol):
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow ``tokens``; an empty list is fine."""


class PromptLookup:
    """Guesses what followed the last earlier occurrence of the newest tokens; the longest match wins.

    This works well where answers repeat their prompts: edited code, quoted documents, answers that loop.

    ``longest``, ``shortest``  how many of the newest tokens are searched for
    ``back``                   how many tokens are searched
    """

    def __init__(self, longest: int = 4, shortest: int = 2, back: int = 2048) -> None:
        self.longest, self.shortest, self.back = longest, shortest, back

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        if most <= 0:
            return []
        text = list(tokens[-self.back :])
        for size in range(self.longest, self.shortest - 1, -1):
            if len(text) <= size:
                continue
            tail = text[-size:]
            for at in range(len(text) - size - 1, -1, -1):
                if text[at] == tail[0] and text[at : at + size] == tail:
                    return _continuation(text, at + size, most)
        return []


def _continuation(text: list[int], at: int, most: int) -> list[int]:
    """Return ``most`` tokens from ``at`` on; where the text is shorter, repeat the part from ``at`` to its end."""
    out: list[int] = []
    cycle = text[at:]
    while len(out) < most:
        out += cycle
    return out[:most]
