"""Scans: whether a model's recurrent layers can go on from a state with several tokens at once."""

from __future__ import annotations

from typing import Any


def scans_from_zero(model: Any) -> bool:
    """Whether transformers starts a scan of this model from zero whenever more than one token continues from a state.

    That is so in its code of selective scans (Mamba's first generation), whose decay is a matrix of channels and
    states; it is right from zero on, and for single tokens. Every later recurrence has one decay for each head.
    """
    decays = (getattr(module, "A_log", None) for module in model.modules())
    return any(decay is not None and sum(size > 1 for size in decay.shape) > 1 for decay in decays)
