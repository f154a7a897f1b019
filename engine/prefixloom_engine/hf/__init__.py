"""Hugging Face models over a composed cache (extra ``hf``): transformers' code unchanged, its memory in pools.

- ``model``, ``runner``  a transformers model as the engine's ``Model`` and ``Runner``
- ``loading``            a model from a folder on disk
- ``session``            one conversation computed by transformers' own ``generate``
- ``cache``, ``layers``  the cache object that transformers' code calls, and its layers
- ``pages``, ``states``  what one layer keeps in pages, or in state slots
- ``images``             what tells the images of a prompt apart, and what the model is given of them
- ``rows``               where the rows of one pass have their entries
- ``rope``               rotary embeddings that depend on the length, and their regimes
- ``identity``           what a model's content depends on beside tokens
- ``refusals``           architectures that are not served, with the reasons

This room must not know requests or schedules. Read ``runner.py`` first.
"""

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

from .loading import load
from .model import HFModel
from .session import Session, session

__all__ = ["HFModel", "Session", "load", "session"]
