"""The law of a tier below the device: what comes back from it is what was live."""

from __future__ import annotations

from ..kit.case import ComponentCase
from ..kit.outcomes import SERVING, below, judge


def law_what_comes_back_from_a_tier_is_what_was_live(case: ComponentCase) -> None:
    """What the device lost, and a tier below it brings back, is what was computed from the sequence's own tokens.

    Clauses: T3, D3, P4, P5, M9.
    """
    judge(case, below(case), *SERVING)
