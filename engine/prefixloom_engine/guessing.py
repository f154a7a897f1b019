"""Guessing: tokens that may come next, to be checked by the model in one pass.

What is guessed wrong is taken back in every component, so guesses can only cost time. Guessers here know tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Guesser(Protocol):
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow ``tokens``; none is a fine answer."""


class PromptLookup:
    """What followed the last time that the newest tokens stood here: the longest such match wins.

    Good where answers repeat prompts: code that is edited, documents that are quoted, answers that run in circles.
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
                    return _continued(text, at + size, most)
        return []


def _continued(text: list[int], at: int, most: int) -> list[int]:
    """What followed at ``at``; where that is the end, the circle goes on."""
    out: list[int] = []
    circle = text[at:]
    while len(out) < most:
        out += circle
    return out[:most]
