"""SGLang's scheduler calls over our cache or over its own, where SGLang is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.engines.sglang import SGLangCache
from bench.engines.sglang_loop import Device
from bench.engines.sglang_variants import OurCacheInSGLang
from prefixloom.testing.foreign.contract import PassPart, PassResult

WINDOW = 6


def scheduler(letters: str = "F", page: int = 1, *, tokens: int = 400, own: bool = False, **parameters: Any) -> Any:
    """SGLang's scheduler calls over our cache, or over SGLang's own."""
    base = SGLangCache if own else OurCacheInSGLang
    kind = type("Scheduler", (base,), {"parameters": parameters})
    return kind(Device(), letters, page, tokens, 60, WINDOW)


def serve(scheduler: Any, prompt: Sequence[int], new: int = 1, *, extra_key: str = "", chunk: int = 1 << 20) -> int:
    """Serve one request from its beginning to its end. Returns how many of its tokens hit."""
    handed: list[tuple[Any, PassPart]] = []
    scheduler.begin()
    request, hit = scheduler.open(list(prompt), extra_key, min(chunk, len(prompt)))
    sampled = 0
    while True:
        handed.clear()
        scheduler.launch(handed.extend)
        ((running, part),) = handed
        ended = part.end >= len(prompt)
        sampled += ended
        last = sampled == new
        scheduler.commit([PassResult(running, part, 1000 + sampled if ended else None, last)])
        if last:
            return int(hit)
        scheduler.begin()
        scheduler.extend(request, min(chunk, max(1, len(prompt) - part.end)))
