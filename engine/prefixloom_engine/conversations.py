"""Synthetic multi-turn conversations: one system prompt for all, every turn extends the last, some branch off others.

Tokens are random numbers from a seed. Nothing here knows a cache or a model.
"""

from __future__ import annotations

import random

SYSTEM = 512
"""Tokens of the system prompt."""
SAID = (40, 100)
"""Fewest and most tokens that a user says in a turn."""


class Conversations:
    """``count`` conversations of up to ``turns`` turns; each answer has ``reply`` tokens, the prompt of all ``system``,
    and a user says between the two of ``said``."""

    def __init__(
        self,
        count: int,
        turns: int,
        reply: int,
        vocabulary: int,
        seed: int,
        *,
        system: int = SYSTEM,
        said: tuple[int, int] = SAID,
    ) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary
        self.turns = turns
        self._system, self._said = system, said
        self.longest = system + turns * (said[1] + reply)
        self.total = system + count * turns * (sum(said) // 2 + reply)
        """About as many different tokens as all conversations have in the end: what they share is counted once."""
        shared = self._tokens(system)
        self._histories = [list(shared) for _ in range(count)]

    def order(self) -> list[int]:
        """In which order the conversations speak in a turn."""
        numbers = list(range(len(self._histories)))
        self._rng.shuffle(numbers)
        return numbers

    def ask(self, number: int, turn: int) -> list[int]:
        """The next prompt of a conversation: all that was said, and what the user says now.

        Half-way, every third conversation drops its own past and goes on from somewhere within its neighbour's.
        """
        if number % 3 == 2 and turn == max(1, self.turns // 2):
            other = self._histories[number - 1]
            self._histories[number] = other[: self._rng.randrange(self._system, len(other) + 1)]
        self._histories[number] += self._tokens(self._rng.randint(*self._said))
        return list(self._histories[number])

    def answered(self, number: int, reply: list[int]) -> None:
        self._histories[number] += reply

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]
