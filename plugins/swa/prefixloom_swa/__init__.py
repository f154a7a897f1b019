"""Attention over a window for prefixloom: keys and values of which only the last ones are needed."""

from __future__ import annotations

from .plugin import SwaComponent

__all__ = ["SwaComponent"]
