"""Makers of small components of every reach, of small caches, and of short traffic, for the unit tests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefixloom import Buffer, Chunk, Component, Manifest, Optional, Path, Point, Reach, Sinks, Tail, Window, compose
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence as Running
from prefixloom.contract.manifest import TierManifest
from prefixloom.contract.queues import ListQueue
from prefixloom.contract.reach import Interval
from prefixloom.device.pool import ABSENT
from prefixloom.device.streams import Stream
from prefixloom.tree.radix import Node

PAGE = 4


class Blocks(Reach):
    """Plain Python, with no closed form: the last whole block of ``c`` positions before n and what is unfinished."""

    def __init__(self, c: int) -> None:
        self.c = c

    def needs(self, n: int) -> tuple[Interval, ...]:
        low = max(0, (n - 1) // self.c * self.c)
        return ((low, n),) if low < n else ()

    def until(self, p: int) -> float:
        return p // self.c * self.c + self.c


class Holes(Reach):
    """Plain Python with several intervals and no ``until``: the first two positions, and every eighth's pair."""

    def needs(self, n: int) -> tuple[Interval, ...]:
        return tuple((lo, min(lo + 2, n)) for lo in range(0, n, 8))


class Keeping(ListQueue):
    """A queue that keeps all that it was ever given, whatever has become of it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Any] = []

    def add(self, cell: Any) -> None:
        self.known.append(cell)
        super().add(cell)


def free_at_once(self: Any, data: bytes) -> None:
    """In the place of ``Pool.give``: nothing waits for the steps that may still touch it."""
    if self.fence.stamp:
        self.retiring += len(data) // 4
        self._free_again(data)
    else:
        self._add_free(data)


def part(name: str, reach: Reach, kind: type[Component] = Component, **facts: Any) -> Component:
    """A component with one small buffer; ``kind`` may override hooks."""
    return kind(name, Manifest([Buffer("data", (2,), "int64")], **facts), reach)


def every_reach() -> dict[str, Reach]:
    """One reach of every kind, small enough that a page of 4 and prompts of 100 exercise them."""
    return {
        "path": Path(),
        "window": Window(10),
        "point": Point(),
        "chunk": Chunk(16),
        "tail": Tail(12, 5),
        "sinks": Sinks(6),
        "union": Sinks(6) | Window(10),
        "shifted": Window(6).shift(5),
        "blocks": Blocks(8),
        "holes": Holes(),
        "optional": Optional(),
    }


def cache_of(
    *components: Component, page: int = PAGE, tokens: int = 256, slots: int = 8, debug: bool = True, **options: Any
) -> Cache:
    """A small cache of these components, always with the second set of books unless a test says why not."""
    data = [c for c in components if not isinstance(c.manifest, TierManifest)]
    capacity = {c.name: slots if c.reach.unit == "boundary" else tokens for c in data}
    capacity |= options.pop("capacity", {})
    return compose(None, plugins=components, page_size=page, capacity=capacity, debug=debug, **options)


def path_cache(**options: Any) -> Cache:
    return cache_of(part("path", Path()), **options)


def run(sequence: Running, count: int) -> None:
    """Reserve ``count`` tokens and compute them in one step."""
    sequence.grow(count)
    with Cache(sequence.core, tuple).step([sequence]) as step:
        step.run_ops()


def finish(sequence: Running) -> None:
    """Compute all that is named and not computed yet."""
    run(sequence, sequence.named - sequence.reserved)


def serve(cache: Cache, tokens: Any, *, chunk: int | None = None, **options: Any) -> int:
    """One whole request, published every ``chunk`` tokens and at its end; what it hit."""
    with cache.open(tokens, **options) as sequence:
        hit = sequence.ready
        while chunk and sequence.named - sequence.reserved > chunk:
            run(sequence, chunk - sequence.reserved % chunk)
            sequence.publish()
        finish(sequence)
    return hit


def serve_tightly(cache: Cache, tokens: Any) -> None:
    """One whole request in one pass, which gives back early what it may."""
    with cache.open(tokens) as sequence:
        finish(sequence)
        cache.reclaim()


def settle(cache: Cache) -> None:
    """The cache's books are right, what runs reads only what is protected, and nothing is owned by nobody."""
    cache.poll()
    assert unprotected(cache) == []
    if not cache.core.live:
        for name, stats in cache.stats().components.items():
            assert stats.running == 0, f"{name}: {stats.running} pages are owned by nobody"
            assert stats.leased == 0 or cache.core.watcher is None or cache.core.watcher.leases, (
                f"{name}: covered by no lease"
            )


def owners(cache: Cache, sequences: Sequence[Running]) -> None:
    """Every slot is owned once: by the free list, by a sequence, or by the tree. No debug mode: counted here."""
    for lane in cache.core.shape.lanes:
        found = list(lane.pool.free_ids())
        for sequence in sequences:
            holding: Any = sequence.running.holding(lane.name)[1]
            own = holding.table[holding.owned :] if lane.unit == "page" else holding.slots()
            found += [slot for slot in own if slot != ABSENT]
        stack: list[Any] = list(cache.core.index.tree.roots.values()) + list(cache.core.index.dropped_roots)
        while stack:
            node = stack.pop()
            stack += node.children
            cell = node.cells[lane.index]
            if cell is not None and node.parent is not None:
                found += lane.slots_of(cell)
        assert sorted(found) == list(range(lane.pool.capacity)), f"{lane.name}: slots lost, or owned twice"


def unprotected(cache: Cache) -> list[tuple[str, int]]:
    """(component, slot) that a running sequence reads, and that eviction could take."""
    bad: list[tuple[str, int]] = []
    for lane in cache.core.shape.lanes:
        safe: set[int] = set()
        for node in nodes(cache):
            cell = node.cells[lane.index]
            if cell is not None and cell.locks:
                safe.update(lane.slots_of(cell))
        for hold in cache.core.live:
            for other, holding in hold.pairs:
                if other is lane and lane.unit == "page":
                    borrowed: array[int] = holding.table[: holding.owned]
                    bad += [(lane.name, slot) for slot in borrowed if slot != ABSENT and slot not in safe]
    return bad


def nodes(cache: Cache) -> list[Node]:
    """Every node under a root and above a sequence."""
    found: dict[int, Node] = {}
    stack = list(cache.core.index.tree.roots.values())
    for hold in cache.core.live:
        node = hold.node
        while node.parent is not None:
            node = node.parent
        stack.append(node)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack += node.children
    return list(found.values())


def locks(cache: Cache) -> dict[tuple[str, int, int], int]:
    """Lock counts by (component, start, end): comparable before and after."""
    return {
        (lane.name, node.start, node.end): cell.locks
        for lane in cache.core.shape.lanes
        for node in nodes(cache)
        if (cell := node.cells[lane.index]) is not None
    }


def edges(cache: Cache, namespace: str = "") -> list[tuple[int, int]]:
    """The edges of a namespace's tree, in order."""
    root = cache.core.index.tree.roots.get(namespace)
    stack = [] if root is None else root.children
    out = []
    while stack:
        node = stack.pop()
        out.append((node.start, node.end))
        stack += node.children
    return sorted(out)


def held(cache: Cache, tokens: Sequence[int] | Iterable[int], **options: Any) -> int:
    """What a prompt one longer than ``tokens`` would hit."""
    return cache.peek([*tokens, 999_999], **options)


def enqueue(stream: Stream, *sequences: Running, work: Callable[[], object] = lambda: None) -> None:
    """One step whose layers are ``work``."""
    with Cache(sequences[0].core, tuple).step(list(sequences)) as step:
        step.run_ops(stream)
        stream.run(work)
