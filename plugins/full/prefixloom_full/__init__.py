"""Full attention for prefixloom: keys and values of every token of the path, or multi-head latents in their place."""

from __future__ import annotations

from .plugin import FullComponent

__all__ = ["FullComponent"]
