"""A view of a cache's tree as plain data, which the oracle compares with its sets.

The reader compares content while it reads: every slot that the tree holds must have the content of its key.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...keys.elements import numbers_of
from ...script import Failure
from ..inside import backdoor
from ..inside.memory import Memory
from ..inside.names import told_apart
from .sets import Facts, Piece, SetModel


def require(condition: object, message: str, *args: object) -> None:
    """Raise a Failure unless the cache and the sets agree on this condition."""
    if not condition:
        raise Failure("sets", message % args)


@dataclass
class Cached:
    """One node as plain data: its edge [start, end), its parent, and what each component keeps and locks there."""

    start: int
    end: int
    ids: list[int]
    pages: dict[str, dict[int, int]] = field(default_factory=dict)
    up: Cached | None = None
    locked: dict[str, int] = field(default_factory=dict)

    def path(self) -> list[int]:
        """Return the numbers of all prefixes down to the node's end, and of those that are looked ahead at."""
        return self.ids if self.up is None else self.up.path()[: self.start] + self.ids


@dataclass
class View:
    """Everything that the tree holds.

    ``slots``: the slots that a match can find, by component and piece. ``detached``: the slots that no match can find,
    because their namespace was dropped. ``keys``: the prefixes in the tree, one tree page apart.
    """

    slots: dict[str, dict[Piece, int]]
    nodes: dict[int, Cached]
    detached: dict[str, set[int]]
    keys: set[int] = field(default_factory=set)


class Reader:
    """Reads a cache into a ``View``."""

    def __init__(self, cache: Any, model: SetModel, slots: dict[str, Memory]) -> None:
        self.cache = cache
        self.model = model
        self.slots = slots
        self._edges: dict[Any, tuple[list[int], tuple[int, ...]]] = {}
        self._extra: dict[int, Hashable] = {}
        self._flushes = 0

    def read(self, anchors: Sequence[tuple[str, Any]]) -> View:
        """Read the whole tree. ``anchors``: nodes that leases hold, from which dropped namespaces are found."""
        view = View({f.name: {} for f in self.model.facts}, {}, {f.name: set() for f in self.model.facts})
        cache = self.cache
        known = backdoor.extra_numbers(cache)
        if known.keys() != self._extra.keys() or backdoor.flushes(cache) != self._flushes:
            self._extra = {number: (told_apart(key), token, first) for number, (key, token, first) in known.items()}
            self._edges.clear()
            self._flushes = backdoor.flushes(cache)
        roots = backdoor.roots(cache)
        for namespace, root in roots.items():
            self._walk(view, root, namespace, found=True)
        walked = {id(root) for root in roots.values()}
        for namespace, node in anchors:
            while node.parent is not None:
                node = node.parent
            if id(node) not in walked:
                walked.add(id(node))
                self._walk(view, node, namespace, found=False)
        return view

    def _walk(self, view: View, root: Any, namespace: str, found: bool) -> None:
        first_of_all = Cached(0, 0, [0])
        stack: list[tuple[Any, Cached, tuple[int, ...]]] = [(root, first_of_all, ())]
        view.nodes[id(root)] = first_of_all
        while stack:
            node, above, last = stack.pop()
            for kid in node.children:
                ids, kid_last = self._edge(namespace, above.ids[-1], last, kid.key)
                first = above.ids[-1 - self.model.lookahead :] if above.end else [0]
                cached = Cached(above.end, kid.end, first + ids, up=above)
                view.nodes[id(kid)] = cached
                self._cells(view, kid, cached, found)
                if found:
                    view.keys.update(cached.ids[self.model.page + self.model.lookahead :: self.model.page])
                stack.append((kid, cached, kid_last))

    def _edge(
        self, namespace: str, prefix: int, last: tuple[int, ...], key: bytes
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the prefix numbers along an edge after ``prefix``. ``last``: the tokens already looked ahead at."""
        memo = (prefix, namespace, last, key)
        if memo in self._edges:
            return self._edges[memo]
        width = self.model.lookahead + 1
        numbers = numbers_of(key)
        ids: list[int] = []
        for at in range(0, len(numbers), width):
            element = tuple(numbers[at : at + width])
            require(not last or element[: width - 1] == last, "an element %s does not follow %s", element, last)
            for number in element if not ids and prefix == 0 else element[-1:]:
                token = self._extra[number] if number < 0 else number
                prefix = self.model.names.child(prefix, namespace, token)
                ids.append(prefix)
            last = element[1:]
        self._edges[memo] = ids, last
        return ids, last

    def _cells(self, view: View, node: Any, cached: Cached, found: bool) -> None:
        for lane, f in zip(backdoor.lanes(self.cache), self.model.facts, strict=True):
            cell = backdoor.cell(node, lane)
            pages = cached.pages[f.name] = {}
            if cell is None:
                continue
            cached.locked[f.name] = cell.locks
            for index, slot in cell_pages(f, node.end, cell.data):
                pages[index] = slot
                self.check_content(f, slot, index, cached)
                if found:
                    view.slots[f.name][self.model.piece(f, Shifted(cached.ids, cached.start), index)] = slot
                else:
                    view.detached[f.name].add(slot)
        require(
            any(cached.pages.values()) or node.kids is not None or node.leases,
            "node [%s, %s) is bare",
            cached.start,
            cached.end,
        )

    def check_content(self, f: Facts, slot: int, index: int, cached: Cached) -> None:
        ids = Shifted(cached.ids, cached.start)
        got = self.slots[f.name].numbers(slot)
        if f.boundary:
            require(index == cached.end, "%s: a state of %s stands at %s", f.name, index, cached.end)
            wanted = [ids[index]]
        else:
            wanted = contents(f, ids, index)
        said = "%s: the tree's page %s (slot %s) holds %s, its key says %s"
        require(self.slots[f.name].agree(got, wanted), said, f.name, index, slot, got, wanted)


class Shifted:
    """A list of prefix numbers whose first element belongs to the length ``start``."""

    def __init__(self, ids: list[int], start: int) -> None:
        self.ids = ids
        self.start = start

    def __getitem__(self, length: int) -> int:
        return self.ids[length - self.start]


def contents(f: Facts, ids: Any, index: int, entries: int | None = None) -> list[int]:
    """Return what a forward pass writes into the first ``entries`` entries of a page (default: all)."""
    first = index * f.page + f.lookahead
    count = f.page // f.group if entries is None else entries
    return [ids[first + (entry + 1) * f.group] for entry in range(count)]


def cell_pages(f: Facts, end: int, data: Any) -> Iterator[tuple[int, int]]:
    """Yield (index, slot) of everything that a cell holds."""
    if f.boundary:
        yield end, array("i", data)[0]
        return
    ids = array("i", data)
    first = end // f.page - len(ids)
    for offset, slot in enumerate(ids):
        if slot != -1:
            yield first + offset, slot


def free_slots(cache: Any, f: Facts) -> set[int]:
    free = list(cache.pool(f.name).free_ids())
    require(len(set(free)) == len(free), "%s: a slot is on the free list twice", f.name)
    return set(free)
