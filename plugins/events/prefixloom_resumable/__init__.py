"""The pages of a cache that lead to where a request can resume, followed from the cache's journal.

| module | for |
|---|---|
| ``paths`` | what a page of a path is, and its digest |
| ``pages`` | which pages are cached, at which of them requests can resume, and what has changed of both |

Whoever publishes events tells pages by this: ``prefixloom_events`` itself, and the adapters of SGLang and vLLM with
their engine's events. It needs nothing but prefixloom. First read ``pages``.
"""

from __future__ import annotations

from .pages import Differences, KeptPart, PageNode, ResumablePages, runs
from .paths import TOKEN_BYTES, ExtraKey, page_digest, pages_of

__all__ = [
    "TOKEN_BYTES",
    "Differences",
    "ExtraKey",
    "KeptPart",
    "PageNode",
    "ResumablePages",
    "page_digest",
    "pages_of",
    "runs",
]
