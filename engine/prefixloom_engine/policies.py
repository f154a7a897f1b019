"""In which order waiting requests are admitted.

A policy is a function of the waiting jobs and the cache; it reads matches, which are pure, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from prefixloom import Cache

from .requests import Job

Order = Callable[[Sequence[Job], Cache], list[Job]]
LOOKED_AT = 128
"""Waiting requests whose matches are looked up at a time, first come first: a long queue costs no more than this."""


def fcfs(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """First come, first served."""
    return sorted(waiting, key=lambda job: job.number)


def priority(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """The highest priority first; among equals who came first."""
    return sorted(waiting, key=lambda job: (-job.request.priority, job.number))


def lpm(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """Longest prefix first: whoever leaves the fewest tokens cold. A request that hits nothing may wait long."""
    first = fcfs(waiting, cache)
    near, far = first[:LOOKED_AT], first[LOOKED_AT:]
    hits = {id(job): cached(job, cache) for job in near}
    return sorted(near, key=lambda job: (-hits[id(job)], job.number)) + far


def cached(job: Job, cache: Cache) -> int:
    """Tokens of it that need not be computed: they are on the device, or can be brought back to it."""
    if cache.composition.tier is None:
        return cache.peek(job.key, namespace=job.request.namespace, leave=1)
    return cache.match(job.key, namespace=job.request.namespace, leave=1).restorable


@attrs.define
class _Branch:
    """A page of the trie of what waiting requests would hit. ``weight``: requests at and below it."""

    weight: int = 0
    here: list[Job] = attrs.field(factory=list)
    below: dict[tuple[int, ...], _Branch] = attrs.field(factory=dict)


def dfs_weight(waiting: Sequence[Job], cache: Cache) -> list[Job]:
    """Depth first through the cached prefixes, the branch with the most waiting requests first.

    Requests below one branch come together, so that what they share is used before it has to go.
    """
    first = fcfs(waiting, cache)
    near, far = first[:LOOKED_AT], first[LOOKED_AT:]
    page = cache.composition.page
    roots: dict[str, _Branch] = {}
    for job in near:
        branch = roots.setdefault(job.request.namespace, _Branch())
        branch.weight += 1
        for at in range(0, cached(job, cache) // page * page, page):
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
