"""Rotary embeddings whose frequencies depend on how long the sequence is.

Up to a limit they are as in any other model. Past it, two kinds differ. ``longrope`` (Phi-3 and Phi-4 with 128k) has a
second set of frequencies for all positions of a sequence that is longer, so what is cached of a short sequence and of a
long one is not the same: there are two regimes. ``dynamic`` has other frequencies for every length, so nothing that was
computed at one length can be resumed at another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from prefixloom import InputError

LONG = "long"
"""What an identity says of the positions of a sequence in the second regime."""


@attrs.frozen
class LengthDependentRope:
    """``limit``: the longest sequence of the first regime. ``second``: whether there is another one past it."""

    limit: int
    second: bool

    def regime(self, length: int) -> str:
        """Return the regime of a sequence that begins with a prompt of so many tokens."""
        if length > self.limit and not self.second:
            raise InputError(
                f"a prompt of {length} tokens cannot be served: past {self.limit} tokens, this model's rotary "
                f"embedding ('dynamic') has other frequencies for every length, so that nothing can be resumed"
            )
        return LONG if length > self.limit else ""

    def check(self, regime: str, end: int) -> None:
        """Refuse a pass that ends at ``end`` and would be computed in another regime than its sequence."""
        if regime == LONG and end <= self.limit:
            raise InputError(
                f"the first pass of a long prompt must end past {self.limit} tokens, and this one ends at {end}: up to "
                f"there, this model's rotary embedding has other frequencies. Give the model the whole prompt"
            )
        if regime != LONG and end > self.limit:
            raise InputError(
                f"the sequence grows past {self.limit} tokens, from where this model's rotary embedding has other "
                f"frequencies for all positions: what is cached does not fit any more. Begin again with all tokens"
            )


def length_dependent(config: Any) -> LengthDependentRope | None:
    """Return how the rotary embedding of a text model depends on the length; None if it does not."""
    limits: dict[str, set[int]] = {"longrope": set(), "dynamic": set()}
    for each in rope_sets(config):
        if each.get("rope_type") == "longrope":
            limits["longrope"].add(int(each["original_max_position_embeddings"]))
        elif each.get("rope_type") == "dynamic":
            limits["dynamic"].add(int(config.max_position_embeddings) - 1)  # transformers resets what is below only
    every = limits["longrope"] | limits["dynamic"]
    return LengthDependentRope(min(every), len(every) == 1 and not limits["dynamic"]) if every else None


def rope_sets(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotary embeddings of a text model: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return []
    return [parameters] if "rope_type" in parameters else [each for each in parameters.values() if each]
