"""Seeded traffic of conversations with branches: shared system prompts, turns that build on answers, forks.

A turn's prompt is the text so far and new tokens of the user. The text so far holds the engine's own earlier answers,
so wrong memory in one turn moves all later ones. Turns come in waves: each conversation of a wave sends one turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tests.engines.models import VOCABULARY

FIRST_TOKEN = 8
"""The tokens below are left to the engine (beginning, end, padding)."""


@attrs.define
class Conversation:
    """One branch of a conversation: its text so far."""

    name: str
    text: list[int]
    turns_left: int
    world: int
    """Conversations of two worlds share no memory, though their texts may begin alike."""


@attrs.frozen
class Turn:
    """One request. ``prompt`` is complete; ``conversation`` takes the answer."""

    name: str
    wave: int
    prompt: tuple[int, ...]
    answer_length: int
    conversation: Conversation


@attrs.define
class Traffic:
    """Makes waves of turns until ``requests`` of them were sent."""

    requests: int
    seed: int
    wave: int = 8
    """The most turns at a time."""
    worlds: int = 1
    """How many worlds there are. Forks and first prompts give the same texts to several of them."""
    systems: int = 3
    longest: int = 900
    """A conversation that would be longer ends, and another one begins."""
    open_ones: list[Conversation] = attrs.field(factory=list, init=False)
    """The conversations that may go on."""

    def waves(self) -> Iterator[list[Turn]]:
        """Yield waves. The caller appends prompt and answer by ``answered`` before it asks for the next."""
        rng = random.Random(self.seed)
        systems = [self._tokens(rng, rng.choice((64, 97, 160))) for _ in range(self.systems)]
        self.open_ones = open_ones = []
        sent = begun = waves = 0
        while sent < self.requests:
            while len(open_ones) < 2 * self.wave:
                if open_ones and rng.random() < 0.3:
                    origin = rng.choice(open_ones)
                    fork = rng.randrange(len(origin.text) // 2, len(origin.text) + 1)
                    text = origin.text[:fork]
                else:
                    text = list(rng.choice(systems))
                open_ones.append(Conversation(f"c{begun}", text, rng.randint(2, 6), begun % self.worlds))
                begun += 1
            size = min(rng.randint(1, self.wave), self.requests - sent)
            turns = []
            for conversation in rng.sample(open_ones, size):
                conversation.text.extend(self._tokens(rng, rng.choice((5, 17, 33, 64, 90))))
                name = f"{conversation.name}.{conversation.turns_left}"
                length = rng.choice((4, 8, 16, 24))
                turns.append(Turn(name, waves, tuple(conversation.text), length, conversation))
                conversation.turns_left -= 1
            sent += size
            waves += 1
            yield turns
            open_ones[:] = [each for each in open_ones if each.turns_left and len(each.text) < self.longest]

    @staticmethod
    def answered(turn: Turn, answer: list[int]) -> None:
        turn.conversation.text.extend(answer)

    @staticmethod
    def _tokens(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def sizes(traffic: Traffic) -> tuple[int, int]:
    """Return the memory that the traffic needs, and its longest request, in tokens.

    What is needed is what open conversations hold at most, shared beginnings counted once: with less, something is
    evicted that another turn would have hit. The lengths of answers are known before the answers are.
    """
    most, longest, fresh = 0, 0, VOCABULARY
    for turns in traffic.waves():
        for turn in turns:
            longest = max(longest, len(turn.prompt) + turn.answer_length)
            Traffic.answered(turn, list(range(fresh, fresh + turn.answer_length)))
            fresh += turn.answer_length
        most = max(most, sum(distinct(texts) for texts in by_world(traffic.open_ones).values()))
    return most, longest


def by_world(conversations: Sequence[Conversation]) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}
    for each in conversations:
        found.setdefault(each.world, []).append(each.text)
    return found


def distinct(texts: Sequence[Sequence[int]]) -> int:
    """Return the tokens of these texts, shared beginnings counted once."""
    root: dict[int, Any] = {}
    count = 0
    for text in texts:
        node = root
        for token in text:
            if token not in node:
                node[token] = {}
                count += 1
            node = node[token]
    return count
