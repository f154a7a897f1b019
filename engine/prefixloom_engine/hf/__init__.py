"""Hugging Face models over a composed cache (extra ``hf``): transformers' code as it is, its memory in pools."""

from __future__ import annotations

from prefixloom import CompositionError

try:
    from transformers.cache_utils import (  # noqa: F401
        DynamicIndexedLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
    )
except ImportError as error:
    raise CompositionError(
        f"prefixloom_engine.hf needs transformers 5.23 or newer: {error}. Install it with: pip install 'prefixloom[hf]'"
    ) from error

from .folder import load
from .model import HFModel
from .session import Session, session

__all__ = ["HFModel", "Session", "load", "session"]
