"""Room: what a request needs of every pool, from the reaches of the components alone.

A path needs a page for all that a sequence has; a window what its reach says of the end, and what one step adds. So a
request is admitted by the pool that is short, whichever that is, and one that could never run is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefixloom import Cache, InputError

from .requests import Job


class Room:
    """Counts pages of one cache. ``chunk``: tokens of one step of prefill."""

    def __init__(self, cache: Cache, chunk: int) -> None:
        self._cache = cache
        self._chunk = chunk
        self._parts = [part for part in cache.composition.parts if part.page_tokens]

    def held(self, length: int) -> dict[str, int]:
        """Pages of each component that a sequence of so many tokens holds at most while it runs."""
        found = {}
        for part in self._parts:
            size = part.page_tokens
            kept = sum(-(-end // size) - start // size for start, end in part.reach.needs(length))
            step = -(-(self._chunk + self._cache.composition.max_rewind) // size) + 1
            found[part.name] = min(-(-length // size), kept + step)
        return found

    def check(self, length: int, name: str) -> None:
        """Refuse what could not run even if it were alone. The last token of an answer is not computed."""
        held = self.held(length)
        for part in self._parts:
            if held[part.name] > part.capacity:
                size = part.page_tokens
                raise InputError(
                    f"{name} may come to {length} tokens, prompt and answer together, and needs {held[part.name]} "
                    f"pages of component {part.name!r}, whose pool has {part.capacity} ({part.capacity * size} "
                    f"tokens). Shorten it, or compose the cache with a larger capacity"
                )

    def outstanding(self, job: Job) -> dict[str, int]:
        """Pages that a running job still takes to finish its prefill, and one more to decode into."""
        total, end = max(job.total, job.end) + 1, job.end
        held = self.held(total)
        return {
            part.name: min(-(-total // part.page_tokens) - -(-end // part.page_tokens), held[part.name])
            for part in self._parts
        }

    def available(self) -> Mapping[str, int]:
        """Pages that are free or could be evicted now, by component."""
        figures = self._cache.stats().components
        return {
            part.name: figures[part.name].free + figures[part.name].cached - figures[part.name].leased
            for part in self._parts
        }

    def enough(self, jobs: list[Job]) -> bool:
        """Whether all of these running jobs can finish their prefill side by side."""
        left = dict(self.available())
        for job in jobs:
            for name, pages in self.outstanding(job).items():
                left[name] -= pages
        return all(pages >= 0 for pages in left.values())
