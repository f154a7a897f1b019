"""Recurrent layers for prefixloom: states of linear attention, state spaces and short convolutions."""

from __future__ import annotations

from .plugin import MambaComponent

__all__ = ["MambaComponent"]
