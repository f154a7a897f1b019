"""Guessing: tokens that may come next, derived from the text alone. The model checks all of them in one pass.

Every component takes wrong guesses back, so a guess can cost time but never changes an answer. The guesses of a draft
model are made in ``forward.drafting`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefixloom import PluginError

from ..contract.requests import shown


class Guesser(Protocol):
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow ``tokens``; an empty list is fine."""


class CheckedGuesser:
    """Asks another guesser, and raises ``PluginError`` where it raises or where its answer is not what it must be.

    A pass with a guess that is no token of the model would fail for all of its requests.
    """

    def __init__(self, guesser: Guesser, vocabulary: int) -> None:
        self.guesser, self.vocabulary = guesser, vocabulary

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        try:
            guesses = self.guesser.guess(list(tokens), most)  # a copy: the engine goes on with its own
        except Exception as error:
            raise PluginError(f"the guesser {shown(self.guesser)} raised {shown(error)}") from error
        fits = guesses.__class__ is list and len(guesses) <= most
        if not fits or any(each.__class__ is not int or not 0 <= each < self.vocabulary for each in guesses):
            raise PluginError(
                f"the guesser {shown(self.guesser)} answered {shown(guesses)}: it is a list of at most {most} tokens"
            )
        return guesses


class PromptLookup:
    """Guesses what followed the last earlier occurrence of the newest tokens; the longest match wins.

    This works well where answers repeat their prompts: edited code, quoted documents, answers that loop.

    ``longest``, ``shortest``  how many of the newest tokens are searched for
    ``back``                   how many tokens are searched
    """

    def __init__(self, longest: int = 4, shortest: int = 2, back: int = 2048) -> None:
        self.longest, self.shortest, self.back = longest, shortest, back

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
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
