"""Admission: in which order waiting requests are admitted, and whether the pools have the pages for them.

Nothing here changes the cache: an order reads matches, and a ``PageBudget`` reads reaches and statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from prefixloom import Cache, InputError, SequenceNeeds

from ..forward.jobs import Job

Order = Callable[[Sequence[Job], Cache], list[Job]]
"""A policy: it returns the waiting jobs in the order of admission."""
MATCHED_AT_ONCE = 128
"""A policy looks up the matches of this many waiting jobs, the earliest first, so that a long queue costs no more."""


# ---------------------------------------------------------------- the order


def fcfs(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """Order requests as they came: first come, first served."""
    return sorted(waiting, key=lambda job: job.number)


def priority(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """Order requests by priority, the highest first; among equals, first come, first served."""
    return sorted(waiting, key=lambda job: (-job.request.priority, job.number))


def lpm(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """Order requests by cached prefix, the longest first. A request that hits nothing may wait long."""
    first = fcfs(waiting, cache)
    near, far = first[:MATCHED_AT_ONCE], first[MATCHED_AT_ONCE:]
    hits = {id(job): cached_tokens(job, cache) for job in near}
    return sorted(near, key=lambda job: (-hits[id(job)], job.number)) + far


def cached_tokens(job: Job, cache: Cache) -> int:
    """Return how many tokens need not be computed: they are on the device, or a tier below can restore them."""
    if cache.composition.tier is None:
        return cache.peek(job.key, namespace=job.namespace, leave=1, extra=job.extra)
    return cache.match(job.key, namespace=job.namespace, leave=1, extra=job.extra).restorable


@attrs.define
class _Branch:
    """A page in the trie of the prefixes that waiting jobs would hit. ``weight``: how many jobs end at or below it."""

    weight: int = 0
    here: list[Job] = attrs.field(factory=list)
    below: dict[tuple[int, ...], _Branch] = attrs.field(factory=dict)


def dfs_weight(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """Order requests depth first through the cached prefixes, the branch with the most waiting jobs first.

    Jobs below one branch are admitted together, so that they use what they share before it is evicted.
    """
    first = fcfs(waiting, cache)
    near, far = first[:MATCHED_AT_ONCE], first[MATCHED_AT_ONCE:]
    page = cache.composition.page
    roots: dict[str, _Branch] = {}
    for job in near:
        branch = roots.setdefault(job.namespace, _Branch())
        branch.weight += 1
        for at in range(0, cached_tokens(job, cache) // page * page, page):
            branch = branch.below.setdefault(tuple(job.tokens[at : at + page]), _Branch())
            branch.weight += 1
        branch.here.append(job)
    out: list[Job] = []
    stack = sorted(roots.values(), key=lambda root: root.weight)
    while stack:
        branch = stack.pop()
        out += branch.here
        stack += sorted(branch.below.values(), key=lambda below: below.weight)
    return out + far


POLICIES: Mapping[str, Order] = {"fcfs": fcfs, "lpm": lpm, "dfs-weight": dfs_weight, "priority": priority}


# ---------------------------------------------------------------- pages


class PageBudget:
    """Counts the pages that requests need of every pool, from the reaches of the components alone.

    Whichever pool is short decides whether a request is admitted. A request that could never run is refused at once.

    ``chunk``: how many tokens one step of prefill computes. ``needs``: what one request holds.
    """

    def __init__(self, cache: Cache, chunk: int) -> None:
        self._cache = cache
        self._parts = [part for part in cache.composition.parts if part.page_tokens]
        self.needs = SequenceNeeds.of(cache.composition, chunk)

    def check(self, length: int, name: str) -> None:
        """Refuse a request of ``length`` tokens that could not run even alone.

        ``length`` leaves out the last token of the answer, since its entries are never computed.
        """
        held = self.needs.slots(length)
        for part in self._parts:
            if held[part.name] > part.capacity:
                size = part.page_tokens
                raise InputError(
                    f"{name} may come to {length} tokens, prompt and answer together, and needs {held[part.name]} "
                    f"pages of component {part.name!r}, whose pool has {part.capacity} ({part.capacity * size} "
                    f"tokens). Shorten it, or compose the cache with a larger capacity"
                )

    def pages_outstanding(self, job: Job) -> dict[str, int]:
        """Return by component how many pages a running job still takes until its prefill ends and a token decodes."""
        total, end = max(job.prefill_end, job.launched) + 1, job.launched
        held = self.needs.slots(total)
        return {
            part.name: min(-(-total // part.page_tokens) - -(-end // part.page_tokens), held[part.name])
            for part in self._parts
        }

    def capacities(self) -> dict[str, int]:
        return {part.name: part.capacity for part in self._parts}

    def pages_to_the_end(self, jobs: Iterable[Job]) -> dict[str, int]:
        """Return by component how many pages these jobs have together when their answers are as long as they may be."""
        used = dict.fromkeys(self.capacities(), 0)
        for job in jobs:
            held = self.needs.slots(len(job.request.tokens) + job.request.max_tokens)
            for name in used:
                used[name] += held[name]
        return used

    def pages_available(self) -> Mapping[str, int]:
        """Return by component how many pages are free or can be evicted now."""
        figures = self._cache.stats().components
        return {
            part.name: figures[part.name].free + figures[part.name].cached - figures[part.name].leased
            for part in self._parts
        }

    def suffices(self, jobs: list[Job]) -> bool:
        """Return whether all of these running jobs can finish their prefill side by side."""
        left = dict(self.pages_available())
        for job in jobs:
            for name, pages in self.pages_outstanding(job).items():
                left[name] -= pages
        return all(pages >= 0 for pages in left.values())
