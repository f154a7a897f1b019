"""Caches with a host tier for tests, content that can be told apart, and an oracle of what is restorable.

The oracle looks at the cells of the tree and at the pure functions of a reach, and at nothing that plans.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import prefixloom.tiers.host_copies
from prefixloom import Component, Optional, TierManifest
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.device.pool import ABSENT
from prefixloom.testing.inside.backdoor import put_transfer_stream, tier_lane
from prefixloom.testing.schedules.simulated import Simulation
from prefixloom.tree.radix import Node
from prefixloom_hicache import HostTier
from tests.support.helpers import cache_of

WRITES = ("through", "back", "selective")


def tiered(*components: Component, host: Any = 4096, write: str = "back", **options: Any) -> Cache:
    """A small cache over a host tier; ``host`` is the tier's capacity."""
    facts = {name: options.pop(name) for name in ("hits", "load_at_least", "layout", "overlap") if name in options}
    manifest = TierManifest(capacity=host, write=write, **facts)  # type: ignore[arg-type]
    if "device_layout" in options:
        options["layout"] = options.pop("device_layout")
    return cache_of(*components, HostTier(manifest), **options)  # type: ignore[arg-type]


def simulated(cache: Cache) -> Simulation:
    """From now on copies run when a test says so: on the streams "down" and "up". There is a "forward" one as well."""
    simulation = Simulation("forward", "down", "up")
    for way in ("down", "up"):
        put_transfer_stream(cache, way, simulation[way])
    return simulation


@contextmanager
def copies_by(do: Callable[..., Any]) -> Iterator[None]:
    """Make copies between tiers by ``do``, which is given the honest ``copy_between`` and its arguments."""
    honest = prefixloom.tiers.host_copies.copy_between
    with mock.patch.object(prefixloom.tiers.host_copies, "copy_between", partial(do, honest)):
        yield


def broken(*_: Any) -> None:
    raise RuntimeError("no copy today")


# ---------------------------------------------------------------- content


def mark(namespace: str, tokens: Many[int]) -> int:
    """What stands for a prefix."""
    return hash((namespace, tuple(tokens))) & 0xFFFFFFFF


def compute(cache: Cache, sequence: Sequence, tokens: Many[int], end: int) -> None:
    """A forward pass up to ``end``: every position gets the mark of its prefix, the state that of ``end``."""
    start = sequence.reserved
    sequence.grow(end - start)
    with cache.step([sequence]) as step:
        step.run_ops()
        for lane in cache.core.shape.lanes:
            data = cache.pool(lane.name).buffers["data"]
            pages = sequence.pages(lane.name)
            if lane.unit == "boundary":
                data[:, pages[0]] = mark(sequence.namespace, tokens[:end])
                continue
            for at in range(start, end):
                page, entry = divmod(at, lane.page)  # type: ignore[attr-defined]
                data[:, pages[page], entry] = mark(sequence.namespace, tokens[: at + 1])


def wrong(cache: Cache, sequence: Sequence, tokens: Many[int]) -> list[str]:
    """What a sequence that was opened over ``tokens`` would read wrongly at its ``ready``; ``run_ops`` has run."""
    found = []
    boundary = sequence.ready
    for lane in cache.core.shape.lanes:
        data = cache.pool(lane.name).buffers["data"]
        pages = sequence.pages(lane.name)
        if lane.unit == "boundary":
            want = mark(sequence.namespace, tokens[:boundary]) if boundary else 0
            if int(data[0, pages[0]].flatten()[0]) != want:
                found.append(f"{lane.name}: another state at {boundary}")
            continue
        needed = {at for low, high in lane.part.reach.needs(boundary) for at in range(low, high)}
        for at in range(boundary):
            page, entry = divmod(at, lane.page)  # type: ignore[attr-defined]
            if pages[page] == ABSENT:
                if at in needed:
                    found.append(f"{lane.name}: {at} is absent")
            elif bool((data[:, pages[page], entry] != mark(sequence.namespace, tokens[: at + 1])).any()):
                found.append(f"{lane.name}: {at} holds something else")
    return found


def serve(cache: Cache, tokens: Many[int], *, restore: bool = True, chunk: int = 10**9, **options: Any) -> int:
    """One request with content, which is checked; what was ready when it began to compute."""
    with cache.open(tokens, leave=1, **options) as sequence:
        if restore:
            sequence.restore()
        ready = sequence.ready
        with cache.step([sequence]) as step:
            step.run_ops()
        assert wrong(cache, sequence, tokens) == []
        while sequence.reserved < len(tokens):
            compute(cache, sequence, tokens, min(len(tokens), sequence.reserved + chunk))
            sequence.publish()
    return ready


# ---------------------------------------------------------------- the oracle


def path_of(cache: Cache, tokens: Many[int], namespace: str = "") -> list[Node]:
    """The nodes that spell a prefix of ``tokens``, the last perhaps beyond it."""
    node: Node | None = cache.core.index.tree.roots.get(namespace)
    key, found, at = array("i", tokens).tobytes(), [], 0
    while node is not None:
        kids = [
            kid
            for kid in node.children
            if kid.key[: 4 * cache.core.shape.page] == key[at : at + 4 * cache.core.shape.page]
        ]
        node = kids[0] if kids and len(key) - at >= 4 * cache.core.shape.page else None
        if node is not None:
            found.append(node)
            at += len(node.key)
    return found


def agreed(cache: Cache, tokens: Many[int], namespace: str = "") -> int:
    spelled = array("i", b"".join(node.key for node in path_of(cache, tokens, namespace)))
    count = 0
    for a, b in zip(spelled, tokens, strict=False):
        if a != b:
            break
        count += 1
    return count // cache.core.shape.page * cache.core.shape.page


def present(cache: Cache, path: Many[Node], i: int, page: int) -> set[int]:
    """Page numbers by position that cells ``i`` hold on ``path``; of states (page 0) the boundaries."""
    found: set[int] = set()
    for node in path:
        cell = node.cells[i]
        if cell is None or not getattr(cell, "pages", 1):
            continue
        if not page:
            found.add(node.end)
            continue
        slots = array("i", cell.data)
        first = node.end // page - len(slots)
        found |= {first + k for k, slot in enumerate(slots) if slot != ABSENT}
    return found


def kept_below(cache: Cache, tokens: Many[int]) -> dict[str, set[int]]:
    """By component that no boundary needs, the pages of the path of ``tokens`` that the device or the host has."""
    path, found = path_of(cache, tokens), {}
    for lane in cache.core.shape.lanes:
        if isinstance(lane.part.reach, Optional):
            places = (lane.index, tier_lane(cache, lane.name).index)
            found[lane.name] = set.union(*(present(cache, path, i, lane.part.page_tokens) for i in places))
    return found


def restorable(cache: Cache, tokens: Many[int], namespace: str = "", tiers: bool = True) -> set[int]:
    """Every boundary at which all components have what they need, on the device or below."""
    path = path_of(cache, tokens, namespace)
    bounds = set(range(0, agreed(cache, tokens, namespace) + 1, cache.core.shape.page))
    for lane in cache.core.shape.lanes:
        page = lane.part.page_tokens
        held = present(cache, path, lane.index, page)
        host = tier_lane(cache, lane.name) if cache.core.below is not None and tiers else None
        if host is not None:
            held |= present(cache, path, host.index, page)
        if not page:
            bounds &= held | {0}
            continue
        needs = lane.part.reach.needs
        bounds = {b for b in bounds if all(set(range(lo // page, -(-hi // page))) <= held for lo, hi in needs(b))}
    return bounds


# ---------------------------------------------------------------- traffic


class Requests:
    """Random prompts that share beginnings, some of them known to have been served."""

    def __init__(self, seed: object) -> None:
        self.rng = random.Random(str(seed))
        self.known: list[list[int]] = [[]]

    def next(self) -> list[int]:
        rng = self.rng
        base = rng.choice(self.known[-8:])
        tokens = base[: rng.choice((len(base), rng.randrange(len(base) + 1)))][:60]
        tokens = [*tokens, *(rng.randrange(3) for _ in range(rng.randrange(1, 24)))]
        self.known.append(tokens)
        return tokens


def content_is_there(cache: Cache) -> bool:
    """Whether anything was written at all: a test of content over zeros proves nothing."""
    return any(bool(torch.any(cache.pool(lane.name).buffers["data"] != 0)) for lane in cache.core.shape.lanes)
