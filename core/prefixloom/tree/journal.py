"""Journal: what the tree has come to hold and has lost, told by position, for whoever follows a cache.

Lanes record each change of a cell while they make it, and operations say why something goes and what was not kept. A
reader takes what was recorded between two operations, so it is never called from inside of one. Splits change nothing
that is cached, and are not recorded. What a dropped namespace still has under leases counts as lost: nobody finds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import attrs

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.reach import Interval, merged
from ..contract.values import Tier
from ..device.pool import ABSENT, present
from ..keys.elements import KeyMaker
from ..keys.tokens import Tokens
from .radix import Node, Root, descendants, path_key

MOST = 1 << 16
"""The most changes that a journal holds. One that nobody reads begins again, and says that changes are missing."""
BYTES = 64 << 20
"""The most bytes of tokens that these changes have together: each has the path to what has changed."""


class Keeper(Protocol):
    """Who keeps a cell at each node: a lane, as far as a journal knows it."""

    index: int
    name: str
    part: Part
    tier: Tier
    unit: str
    queue: Queue


@attrs.frozen
class Change:
    """Something that is cached now, or no longer, or that was not kept.

    ``kind``       "stored"; "removed"; "refused": it could have been kept here and was not; or "cleared": nothing is
                   cached any more
    ``component``  whose it is, on which ``tier``; of "cleared" both are empty
    ``namespace``  where it is found
    ``tokens``     the path to it, with extra keys; with a lookahead of L, and L tokens more
    ``spans``      the token positions, in whole pages; of a state none. A page is known by its positions, and by the
                   path to the end of the page of the *tree* in which it lies
    ``boundary``   the boundary of a state; None for pages
    ``cause``      why it was removed ("room", "asked", "unneeded", "failed", "dropped", or "expired": it
                   went for room, before all else, since the time had passed until which it was wanted), or why it was
                   refused ("room", "policy", or what a store said); else empty
    ``by``         of "room" and "expired": the label of the sequence that needed it; of "unneeded": the component that
                   it served
    """

    kind: Literal["stored", "removed", "refused", "cleared"]
    component: str = ""
    tier: Tier | Literal["store", ""] = ""
    namespace: str = ""
    tokens: Tokens = attrs.field(default=Tokens(), repr=False)
    spans: tuple[Interval, ...] = ()
    boundary: int | None = None
    cause: str = ""
    by: str = ""


class Recorder:
    """What lanes and operations tell, handed to each of the ``journals`` that follow a cache, and to queues that count
    what each owner keeps.
    """

    __slots__ = ("_by", "_cause", "_is_found", "_is_over", "_keys", "_path", "journals")

    def __init__(self, keys: KeyMaker, is_found: Callable[[Root], bool], is_over: Callable[[Node], bool]) -> None:
        """Begin without journals. ``is_found``: whether matches may find the nodes below a root. ``is_over``: whether
        the time has passed until which a node was wanted.
        """
        self._keys = keys
        self._is_found = is_found
        self._is_over = is_over
        self._cause = self._by = ""
        self._path: tuple[Node, int, Tokens] | None = None  # of the latest change; several lanes often follow it
        self.journals: list[Journal] = []

    @contextmanager
    def because(self, cause: str, by: str = "") -> Iterator[None]:
        """Record this reason for all that is removed in this block."""
        before = self._cause, self._by
        self._cause, self._by = cause, by
        try:
            yield
        finally:
            self._cause, self._by = before

    def changed(self, lane: Keeper, node: Node, before: bytes, after: bytes) -> None:
        """Tell queues and journals that the cell of ``node`` had the slots ``before`` and has ``after``.

        They are those of the last pages of the edge, or a state's; of no cell, they are empty.
        """
        root = node
        while root.parent is not None:
            root = root.parent
        assert isinstance(root, Root)
        lane.queue.count(root.namespace, present(after) - present(before))
        if self.journals and self._is_found(root):
            self._tell(lane, root, node, before, after)

    def _tell(self, lane: Keeper, root: Root, node: Node, before: bytes, after: bytes) -> None:
        cause = "expired" if self._cause == "room" and self._is_over(node) else self._cause
        if self._path is None or self._path[0] is not node or self._path[1] != node.end:
            self._path = node, node.end, self._keys.tokens_in(path_key(node))
        for change in changes_of(root.namespace, lane, node, self._path[2], before, after, cause, self._by):
            self.record(change)

    def refused(
        self, component: str, tier: Tier | Literal["store"], namespace: str, tokens: Tokens, cause: str,
        boundary: int | None = None, spans: tuple[Interval, ...] = (),
    ) -> None:  # fmt: skip
        """Record that a tier could have kept a state at ``boundary``, or pages, on the path ``tokens``."""
        self.record(Change("refused", component, tier, namespace, tokens, spans, boundary, cause))

    def record(self, change: Change) -> None:
        for journal in self.journals:
            journal.add(change)

    def dropped(self, lanes: Iterable[Keeper], root: Root) -> None:
        """Record that no match finds the cells below ``root`` any more."""
        with self.because("dropped"):
            for node in descendants(root):
                for lane in lanes:
                    cell = node.cells[lane.index]
                    if cell is not None:
                        self._tell(lane, root, node, cell.data, b"")

    def cleared(self) -> None:
        """Record that nothing is cached any more."""
        for journal in self.journals:
            journal.clear()


class Journal:
    """The changes of one cache since they were last taken. Made by ``Cache.journal``.

    It holds at most ``most`` changes, with ``BYTES`` of tokens. One more, and it begins again and is ``missing`` some.
    """

    __slots__ = ("_changes", "_close", "_missing", "_most", "_size")

    def __init__(self, most: int, close: Callable[[Journal], None]) -> None:
        self._close = close
        self._most = most
        self._size = 0
        self._changes: list[Change] = []
        self._missing = False

    @property
    def missing(self) -> bool:
        """Whether there were more changes than a journal holds, so that those before the first one here are lost.

        Then ``Cache.contents`` says what is cached.
        """
        return self._missing

    def take(self) -> list[Change]:
        """Return the changes since the last call, in their order."""
        taken, self._changes = self._changes, []
        self._size = 0
        self._missing = False
        return taken

    def close(self) -> None:
        """Record nothing any more. A second close does nothing."""
        self._close(self)

    def add(self, change: Change) -> None:
        """Add a change. For the cache, and no part of the public interface."""
        self._size += len(change.tokens)
        if len(self._changes) >= self._most or self._size > BYTES:
            self.take()
            self._size = len(change.tokens)
            self._missing = True
        self._changes.append(change)

    def clear(self) -> None:
        """Note that nothing is cached any more. For the cache, and no part of the public interface."""
        if self._missing:  # what was missed matters no more
            self.take()
        self.add(Change("cleared"))


def changes_of(
    namespace: str, lane: Keeper, node: Node, path: Tokens, before: bytes, after: bytes, cause: str = "", by: str = ""
) -> list[Change]:
    """Return the changes of one cell, at most one of each kind. A removal has a cause."""
    found = []
    ways: tuple[tuple[Literal["removed", "stored"], bytes, bytes], ...] = (
        ("removed", after, before), ("stored", before, after),
    )  # fmt: skip
    for kind, lost, there in ways:
        is_state = lane.unit == "boundary"
        spans = () if is_state else _spans_of(lane.part.page_tokens, node.end, there, lost)
        if spans or (is_state and present(there) > present(lost)):
            boundary = node.end if is_state else None
            why = (cause, by) if kind == "removed" else ("", "")
            found.append(Change(kind, lane.name, lane.tier, namespace, path, spans, boundary, *why))
    return found


def _spans_of(page: int, end: int, there: bytes, lost: bytes) -> tuple[Interval, ...]:
    """Return the positions of the pages that ``there`` has and ``lost`` lacks. Both end at the same boundary."""
    one, other = array("i", there), array("i", lost)
    shift = len(other) - len(one)
    first = end - len(one) * page
    if not other and ABSENT not in one:
        return ((first, end),) if one else ()
    return merged(
        (first + place * page, first + (place + 1) * page)
        for place, slot in enumerate(one)
        if slot != ABSENT and (place + shift < 0 or other[place + shift] == ABSENT)
    )


def contents(keys: KeyMaker, lanes: Iterable[Keeper], roots: Iterable[Root]) -> list[Change]:
    """Return "stored" changes for all that is cached below ``roots``, those of a node after its parent's."""
    return [
        change
        for root in roots
        for node in descendants(root)
        for lane in lanes
        if (cell := node.cells[lane.index]) is not None
        for change in changes_of(root.namespace, lane, node, keys.tokens_in(path_key(node)), b"", cell.data)
    ]
