"""Seen prefixes: what a cache of infinite memory would hit, request by request.

Such a cache keeps every boundary of every prompt, with all that resuming there needs, from the moment in which the
prompt arrives. What it has to compute is the ideal that a replay is measured by.
"""

from __future__ import annotations

from .traces.requests import LabRequest, Prompt


class SeenPrefixes:
    """All prefixes of the requests so far, as numbers. ``page``: the hit of a request is a multiple of it."""

    __slots__ = ("_links", "_page")

    def __init__(self, page: int) -> None:
        self._page = page
        self._links: set[int] = set()

    def __len__(self) -> int:
        return len(self._links)

    def take(self, request: LabRequest, leave: int = 1, answers: bool = True) -> int:
        """Return the tokens of a request that would hit, if ``leave`` are computed at least. It is seen from now on.

        ``answers``: whether its answer is cached as well.
        """
        shared = self._add(request.prompt, request.namespace)
        if answers and request.whole is not None:
            self._add(request.whole, request.namespace)
        most = min(shared, request.prompt.count - leave)
        return max(0, most) // self._page * self._page

    def _add(self, prompt: Prompt, namespace: str) -> int:
        """Return the tokens of ``prompt`` that were seen before."""
        unit, links = prompt.chain(namespace, self._page)
        seen = self._links
        known = 0
        for link in links:
            if link not in seen:
                break
            known += 1
        seen.update(links[known:])
        return known * unit
