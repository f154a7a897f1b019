"""Leases: the only way to protect cached data.

A lease is made by the core at one boundary, covers for each component what resuming there needs, and is released once,
without naming a node or a boundary. Its records undo exactly what it took; node splits keep them true. Nothing here
knows what a component keeps.

Graves: what is left of dropped namespaces, until the leases that still cover it end.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..contract.values import AnchorView, Receipt, Touch
from ..device.handles import Handle
from ..errors import ProtocolError
from ..tree.radix import unlink

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..device.flight import Flight, Work
    from ..device.streams import Stream
    from ..tree.lane import Lane
    from ..tree.radix import Node

Pairs = Many[tuple[Any, Any]]

H = TypeVar("H", bound="Hold")


class Hold(Handle):
    """What one lease covers, and of a running sequence what it holds besides. The core's; ``Lease`` is the public face.

    ``_records`` and ``held`` are by lane: what it covers of each component, and what its sequence holds of it (empty
    if it has none, or has handed all over). The cache finds the latter here when it tells who holds what.
    """

    __slots__ = (
        "__weakref__", "_cache", "_flushes", "_node", "_receipts", "_records", "_where", "failed", "fence", "held",
        "label", "row", "work",
    )  # fmt: skip

    _where: str  # in debug mode
    work: Work | None  # the last step that its sequence was in, if that went to a stream
    label: str
    held: list[Any]

    def __init__(
        self, cache: Cache, node: Node, records: list[Any], receipts: list[Receipt | None] | None, held: list[Any],
        label: str,
    ) -> None:  # fmt: skip
        self._cache: Cache | None = cache
        self._node = node
        self._records = records
        self._receipts = receipts
        self._flushes = cache._flushes
        self.held = held
        self.label = label
        self.fence = 0  # whatever uses what it covers or holds comes after the steps up to this one
        self.row = -1  # its place in page tables that kernels read
        self.work = self.failed = None

    failed: BaseException | None

    def claim(self, flight: Flight) -> None:
        """Slots have just been taken for this lease's sequence: it comes after the steps that may still touch them."""
        if flight.claimed:
            self.fence = max(self.fence, flight.claimed)
            flight.claimed = 0

    def pairs(self, cache: Cache) -> Pairs:
        """(lane, holding) of each component that its sequence holds, those with page cells first."""
        return [(lane, self.held[lane.index]) for lane in cache._in_order] if self.held else ()

    @property
    def boundary(self) -> int:
        """The boundary that it is anchored at, in tokens."""
        return self._node.end

    @property
    def stream(self) -> Stream | None:
        """Where the last step that its sequence was in went."""
        return None if self.work is None else self.work.stream

    @property
    def active(self) -> bool:
        return self._cache is not None and self._flushes == self._cache._flushes


class Lease(Hold):
    """Covers a boundary until it is released. A context manager; opaque; single use."""

    __slots__ = ()

    def release(self) -> None:
        """Uncover everything. A second release is refused."""
        cache = self._cache
        if cache is None:
            if self.failed is not None:
                raise ProtocolError(
                    f"{self!r} ended when a step or copy failed that wrote what it covers"
                ) from self.failed
            raise ProtocolError("this lease was released already")
        cache._enter()
        cache._release(self)
        cache._leave("release")

    def __enter__(self) -> Lease:
        if self._cache is None:
            raise ProtocolError("this lease was released already")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._cache is not None:
            self.release()

    def __del__(self) -> None:
        cache = self._cache
        if cache is not None and self._flushes == cache._flushes:
            cache._dropped.append(self)

    def __repr__(self) -> str:
        return f"<Lease at {self._node.end}{'' if self.active else ', released'}>"


def acquire(cache: Cache, node: Node, namespace: str, kind: type[H]) -> H:
    """A lease at the end of ``node``. If a hook raises, nothing was covered yet."""
    receipts = None
    if cache._lock_hooks:
        receipts = ask_receipts(cache, namespace, node.end)
        records = _acquire_wider(cache, node, receipts)
    else:
        records = [*cache._nothing]
        try:
            for lane in cache._lanes:
                record = lane.acquire(node)
                records[lane.index] = record
        except BaseException:  # a reach that is plain Python may raise
            uncover(cache, records)
            raise
    lease = kind(cache, node, records, receipts, [], "")
    node.leases += 1
    if cache._flight.nodes:
        cache._flight.read(lease, node)
    if cache._debug is not None:
        cache._debug.leased(lease)
    return lease


def inert(cache: Cache) -> Hold:
    """Stands for work that is nobody's: it has a fence, and covers nothing."""
    hold = Hold(cache, cache._empty_root, [], None, [], "")
    hold._cache = None
    return hold


def ask_receipts(cache: Cache, namespace: str, boundary: int) -> list[Receipt | None]:
    """What the plugins want covered at ``boundary``; asked first, so that a failure changes nothing."""
    anchor = AnchorView(namespace, boundary)
    receipts: list[Receipt | None] = []
    for lane in cache._lanes:
        hook = lane.hooks.acquire_component_lock
        receipts.append(
            None if hook is None else cache._ask(lane, "acquire_component_lock", Receipt, hook, anchor, "device")
        )
    return receipts


def _acquire_wider(cache: Cache, node: Node, receipts: list[Receipt | None]) -> list[Any]:
    return [
        lane.acquire(node) if receipt is None else lane.acquire_wider(node, receipt.positions)
        for lane, receipt in zip(cache._lanes, receipts, strict=True)
    ]


def uncover(cache: Cache, records: list[Any]) -> None:
    """What ``records`` cover, of those lanes that have one."""
    for lane, record in zip(cache._lanes, records, strict=True):
        if record is not None:
            lane.release(record)


def release(cache: Cache, lease: Hold) -> None:
    """Undo what ``lease`` covers; a boundary that nothing keeps any more is unlinked."""
    lease._cache = None
    if cache._debug is not None:
        cache._debug.released(lease)
    if lease._flushes != cache._flushes:
        return
    if lease.row >= 0:
        cache._tables.leave(lease)
    records = lease._records
    receipts = lease._receipts
    for lane in cache._lanes:
        record = records[lane.index]
        if record is not None:
            if receipts is None and lane.hooks.release_component_lock is None:
                lane.release(record)
            else:
                _release_touching(cache, lane, record, receipts[lane.index] if receipts else None)
    node = lease._node
    node.leases -= 1
    if node.kids is None and not node.leases and cache._tree.prune(node):
        cache._epoch += 1
    if cache._graves:
        sweep(cache)


def swap(cache: Cache, lease: Hold, other: Hold) -> None:
    """``lease`` covers from now on what ``other`` covered; what it covered before is released."""
    lease._node, other._node = other._node, lease._node
    lease._records, other._records = other._records, lease._records
    lease._receipts, other._receipts = other._receipts, lease._receipts
    lease.fence = max(lease.fence, other.fence)
    release(cache, other)


def release_part(cache: Cache, lease: Hold, lane: Lane) -> None:
    """Uncover what one component has; the rest of the lease stays."""
    record = lease._records[lane.index]
    if record is not None:
        lease._records[lane.index] = None
        lane.release(record)


def _release_touching(cache: Cache, lane: Lane, record: Any, receipt: Receipt | None) -> None:
    hook = lane.hooks.release_component_lock
    touch = None
    if hook is not None:
        mine = receipt if receipt is not None else Receipt()
        touch = cache._ask_softly(lane, "release_component_lock", Touch, hook, mine)
    lane.release(record, recent=touch is None or touch.positions is None or bool(touch.positions))


def advance(cache: Cache, lease: Hold, node: Node, receipts: list[Receipt | None] | None) -> None:
    """The lease moves down to ``node``: the new boundary is covered before the old one is uncovered."""
    if node is lease._node:
        return
    if receipts is None:
        records = lease._records
        for lane in cache._lanes:
            moved = lane.advance(records[lane.index], node)
            records[lane.index] = moved
    else:
        _advance_wider(cache, lease, node, receipts)
    lease._receipts = receipts
    step_down(cache, lease, node)


def step_down(cache: Cache, lease: Hold, node: Node) -> None:
    """The lease, all of whose records have moved, is anchored at ``node``."""
    old = lease._node
    node.leases += 1
    lease._node = node
    old.leases -= 1
    if old.kids is None and not old.leases and cache._tree.prune(old):
        cache._epoch += 1


def _advance_wider(cache: Cache, lease: Hold, node: Node, receipts: list[Receipt | None]) -> None:
    """Where plugins want more covered."""
    records = lease._records
    for lane, receipt in zip(cache._lanes, receipts, strict=True):
        old = records[lane.index]
        if receipt is None or lane.unit == "boundary":
            records[lane.index] = lane.advance(old, node)
        else:
            records[lane.index] = lane.acquire_wider(node, receipt.positions)
            if old is not None:
                lane.release(old)


def ended(cache: Cache, hold: Hold) -> None:
    """A running sequence is none any more."""
    cache._live.pop(hold, None)
    replaced(cache, hold)


def replaced(cache: Cache, hold: Hold) -> None:
    """What a running sequence held so far is not its own any more: none of it can be asked back."""
    for lane in cache._sparing:
        lane.sparing.pop(hold, None)


def conclude(cache: Cache, lease: Hold, run: list[Node]) -> None:
    """A sequence ends at the last node of ``run``: each component hands over, uncovers and gives back in one go."""
    _leave(cache, lease)
    records, held = lease._records, lease.held
    for lane in cache._in_order:
        lane.conclude(run, held[lane.index], records[lane.index])
    _left(cache, lease, run[-1])


def conclude_some(cache: Cache, lease: Hold, run: list[Node], pairs: Pairs, kept: Pairs) -> None:
    """``conclude``, where the components of ``kept`` hand nothing over."""
    _leave(cache, lease)
    records = lease._records
    for lane, holding in pairs:
        lane.conclude(run, holding, records[lane.index])
    for lane, holding in kept:
        lane.finish(records[lane.index], run[-1])
        lane.close(holding)
    _left(cache, lease, run[-1])


def _leave(cache: Cache, lease: Hold) -> None:
    lease._cache = None
    cache._live.pop(lease, None)
    for lane in cache._sparing:
        lane.sparing.pop(lease, None)
    if cache._debug is not None:
        cache._debug.released(lease)
    if lease.row >= 0:
        cache._tables.leave(lease)


def _left(cache: Cache, lease: Hold, node: Node) -> None:
    lease._node.leases -= 1  # it is not bare: ``node`` lies below it
    if node.cells[0] is None and cache._tree.prune(node):
        cache._epoch += 1
    if cache._graves:
        sweep(cache)


def bury(cache: Cache, namespace: str) -> int:
    """Nothing is found of a namespace any more, nor of what a store still brings; the cells that are still covered."""
    if cache._tier is not None and cache._tier.shelf is not None:
        cache._tier.shelf.forget(namespace)
    root = cache._tree.roots.pop(namespace, None)
    if root is None:
        return 0
    cache._graves.append(root)
    return sweep(cache)


def sweep(cache: Cache) -> int:
    """Free what leases no longer cover of dropped namespaces; the number of cells that are still covered."""
    kept = 0
    for root in list(cache._graves):
        kept += _clear(cache, root)
        if root.kids is None and not root.leases:
            cache._graves.remove(root)
            unlink(root)
    cache._epoch += 1
    return kept


def _clear(cache: Cache, root: Node) -> int:
    """Free all below ``root`` that nothing covers, deepest first, without recursion; how many cells stayed."""
    order: list[Node] = []
    stack = root.children
    while stack:
        node = stack.pop()
        order.append(node)
        stack += node.children
    kept = 0
    for node in reversed(order):
        for lane in cache._all_lanes:
            cell = node.cells[lane.index]
            if cell is None:
                continue
            if lane.uncovered(cell):
                if cell.next is not None:
                    lane.queue.remove(cell)
                lane.free_cell(cell)
            else:
                kept += 1
        cache._tree.prune(node)
    return kept
