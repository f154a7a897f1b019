"""Service: how long requests take, in virtual time. It decides which requests run at the same time.

One engine computes prompts one after the other, in chunks, and decodes all running requests beside that. A request is
admitted when the prompts before it are computed, a place is free, and the pools have room. So a cache sees requests
open while others hold memory, as in an engine.
"""

from __future__ import annotations

import attrs

from ..errors import InputError

SLOWEST = 0.001


@attrs.frozen
class Service:
    """The speed and the width of an engine.

    ``prefill``      tokens of prompts that it computes in a second
    ``decode``       tokens that each running request decodes in a second
    ``max_running``  requests that run at once
    ``chunk``        the most tokens of a prompt that one step computes
    """

    prefill: float = 50_000.0
    decode: float = 40.0
    max_running: int = 64
    chunk: int = 2048

    def __attrs_post_init__(self) -> None:
        for name in ("prefill", "decode"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not SLOWEST <= value < float("inf"):
                raise InputError(f"a service computes {name} tokens in a second, {SLOWEST} at least; got {value!r}")
        for name in ("max_running", "chunk"):
            value = getattr(self, name)
            if value.__class__ is not int or value < 1:
                raise InputError(f"a service's {name} is a whole number from 1 up, got {value!r}")
