"""Disaggregation: one process computes prompts, another decodes, and what the first computed travels to the second.

- ``decode_engine``   the side that clients ask
- ``prefill_server``  the side that computes prompts
- ``messages``        what both send, as bytes, and the checks of what arrives
- ``wire``            frames over one TCP connection, without blocking

This room drives engines through their public names alone. It must not know how a step is planned, nor what a component
keeps. Read ``decode_engine.py`` first.
"""

from __future__ import annotations

from .decode_engine import DecodeEngine
from .prefill_server import PrefillServer

__all__ = ["DecodeEngine", "PrefillServer"]
