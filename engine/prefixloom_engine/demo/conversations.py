"""Synthetic conversations: all begin with one system prompt, each turn extends the last, and some branch off others.

The tokens are random numbers from a seed. Nothing here knows a cache or a model.
"""

from __future__ import annotations

import random

SYSTEM_TOKENS = 512
"""The length of the system prompt."""
USER_TOKENS = (40, 100)
"""The shortest and the longest text that a user adds in a turn."""


class Conversations:
    """``count`` conversations of up to ``turns`` turns, with answers of ``reply`` tokens.

    ``system``   the length of the system prompt
    ``user``     the shortest and the longest text of a user
    ``longest``  how many tokens one conversation can have in the end
    ``total``    about how many different tokens all conversations have in the end, shared ones counted once
    """

    def __init__(
        self,
        count: int,
        turns: int,
        reply: int,
        vocabulary: int,
        seed: int,
        *,
        system: int = SYSTEM_TOKENS,
        user: tuple[int, int] = USER_TOKENS,
    ) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary
        self.turns = turns
        self._system, self._user = system, user
        self.longest = system + turns * (user[1] + reply)
        self.total = system + count * turns * (sum(user) // 2 + reply)
        shared = self._tokens(system)
        self._histories = [list(shared) for _ in range(count)]

    def order(self) -> list[int]:
        """Return the numbers of the conversations in the order in which they speak in a turn; random each time."""
        numbers = list(range(len(self._histories)))
        self._rng.shuffle(numbers)
        return numbers

    def next_prompt(self, number: int, turn: int) -> list[int]:
        """Extend a conversation by what its user says, and return the whole of it.

        Halfway through, every third conversation drops its own history and branches off its neighbour's.
        """
        if number % 3 == 2 and turn == max(1, self.turns // 2):
            other = self._histories[number - 1]
            self._histories[number] = other[: self._rng.randrange(self._system, len(other) + 1)]
        self._histories[number] += self._tokens(self._rng.randint(*self._user))
        return list(self._histories[number])

    def add_reply(self, number: int, reply: list[int]) -> None:
        self._histories[number] += reply

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]
