"""The pages of a cache that lead to where a request can resume, and what an engine announces of them.

| module | for |
|---|---|
| ``runs`` | pages that follow each other, and bits for what is known of them |
| ``boundaries`` | at the end of which pages requests can resume |
| ``pages`` | which pages are cached and lead to a boundary, and what has changed of both |
| ``announcements`` | changes for whoever makes an engine's events, with errors kept from the engine |

Whoever publishes events announces pages by this: ``prefixloom_events`` itself, and the adapters of SGLang and vLLM with
their engine's events. It needs nothing but prefixloom. First read ``pages``.
"""

from __future__ import annotations

from .announcements import Announcements
from .boundaries import Holder
from .pages import Differences, PageRange, ResumablePages
from .runs import Before, Run, ones, stretches

__all__ = [
    "Announcements",
    "Before",
    "Differences",
    "Holder",
    "PageRange",
    "ResumablePages",
    "Run",
    "ones",
    "stretches",
]
