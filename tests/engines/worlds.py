"""What keeps the requests of a run apart: salts and extra keys, or LoRA adapters. Each way makes some worlds.

Requests of two worlds share no memory, though their tokens may be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SALTS = ({}, {"extra_key": "tenant"}, {"cache_salt": "pepper"}, {"extra_key": "tenant", "cache_salt": "pepper"})
"""By world what SGLang's requests carry."""
ADAPTERS = (None, "one", "two")
"""By world the name of the adapter."""
WAYS = {"none": 1, "salts": len(SALTS), "adapters": len(ADAPTERS)}
"""How many worlds each way makes."""


def strayed(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The requests of which more tokens were cached than a request of the same world had sent in this wave or before.

    So these tokens came from another world.
    """
    worlds: dict[int, list[tuple[str, int, list[int]]]] = {}
    for each in answers:
        sent = worlds.setdefault(each["world"], [])
        sent.append((each["name"], each["wave"], [*each["prompt"], *each["tokens"]]))
    found = []
    for each in answers:
        own = max(
            (
                agreeing(each["prompt"], text)
                for name, wave, text in worlds[each["world"]]
                if wave <= each["wave"] and name != each["name"]
            ),
            default=0,
        )
        if (each["cached"] or 0) > own:
            found.append(each["name"])
    return found


def agreeing(one: Sequence[int], two: Sequence[int]) -> int:
    """Return how many tokens agree from the beginning on."""
    for at, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return at
    return min(len(one), len(two))
