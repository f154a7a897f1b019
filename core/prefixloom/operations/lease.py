"""Leases: the only way to protect cached data.

A lease is made at one boundary, covers for each component what resuming there needs, and is released once. The release
undoes exactly what was covered, also if nodes were split meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any

from ..contract.identity import means
from ..contract.values import AnchorView, Receipt, Touch
from ..device.handles import dropped_without_release
from ..errors import PrefixloomError, ProtocolError
from ..keys.tokens import Span, clipped
from ..tree.lane import Lane
from ..tree.radix import Node, descendants, path_key, unlink
from .state import Core, Hold


class Lease(Hold):
    """Covers a boundary until it is released. A context manager; opaque; single use."""

    __slots__ = ()

    def pages(self, component: str) -> array[int]:
        """Return page numbers by position, -1 where absent; of a boundary component, the slot of its state."""
        core = self._usable()
        if not self.active:
            raise ProtocolError(f"{self!r} was made before the cache was flushed")
        core.check_whole()
        lane = core.shape.lane(component)
        if self.covers[lane.index] is None and lane.unit == "boundary" and self.node.end:
            raise ProtocolError(f"{self!r} does not cover the state of {component!r} any more")
        return array("i", lane.row(self.node, self.node.end) if self.node.end else b"")

    def uncover_states(self) -> None:
        """Cover pages alone from now on: whoever resumes here has copied the states, and reads the pages only."""
        core = self._usable()
        with core:
            if self.active:
                for lane in core.shape.state_lanes:
                    release_part(self, lane)

    def release(self) -> None:
        """Uncover everything. A second release is refused. Of a broken cache the lease just ends."""
        core = self._usable()
        if core.changing:
            self.core = None
            return
        with core:
            release(core, self)

    def _usable(self) -> Core:
        core = self.core
        if core is None:
            if self.failed is not None:
                raise ProtocolError(
                    f"{self!r} ended when a step or copy failed that wrote what it covers"
                ) from self.failed
            raise ProtocolError("this lease was released already")
        return core

    def __enter__(self) -> Lease:
        if self.core is None:
            raise ProtocolError("this lease was released already")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.core is not None:
            self.release()

    def __del__(self) -> None:
        if not hasattr(self, "failed"):  # an interrupt came while it was made
            return
        core = self.core
        if core is not None and self.flushes == core.index.flushes:
            what = dropped_without_release(getattr(self, "made_at", None))
            core.dropped.add(self, what, lambda: release(core, self))

    def __repr__(self) -> str:
        return f"<Lease at {self.node.end}{'' if self.active else ', released'}>"


# ---------------------------------------------------------------- taking


def acquire(core: Core, node: Node, namespace: str) -> Lease:
    """Make a lease at the end of ``node``. If a hook or a reach raises, nothing is covered."""
    receipts = core.shape.no_records
    if core.shape.has_lock_hooks:
        receipts = ask_receipts(core, namespace, node.end, core.keys.extra_in(path_key(node), 0))
    lease = Lease(core, node, cover(core, node, receipts, core.shape.lanes), receipts)
    node.protect()
    if core.unwritten.nodes:
        core.unwritten.read(lease, node)
    if core.watcher is not None:
        core.watcher.leased(lease)
    return lease


def cover(core: Core, node: Node, receipts: Many[Receipt | None], lanes: Iterable[Lane]) -> list[Any]:
    """Cover what resuming at the end of ``node`` needs of each of ``lanes``, or nothing, if a reach raises."""
    covers = [*core.shape.no_records]
    try:
        for lane in lanes:
            covers[lane.index] = lane.acquire(node, receipts[lane.index])
    except PrefixloomError:
        for lane in lanes:
            if covers[lane.index] is not None:
                lane.release(covers[lane.index])
        raise
    return covers


def standing_for_copies(core: Core) -> Hold:
    """Return a hold that stands for work of no sequence: it has a fence, and covers nothing."""
    hold = Hold(core, core.index.empty_root, [], core.shape.no_records)
    hold.core = None
    return hold


def ask_receipts(core: Core, namespace: str, boundary: int, extra: Iterable[Span]) -> list[Receipt | None]:
    """Return what the plugins want covered at ``boundary``. Call it first, so that a failure changes nothing.

    ``extra`` are the extra keys there are, of which the plugins see what lies before the boundary.
    """
    view = AnchorView(namespace, boundary, clipped(extra, 0, boundary))
    return [core.plugins.ask(lane, "acquire_component_lock", Receipt, view, "device") for lane in core.shape.lanes]


def move_anchor(core: Core, hold: Hold, node: Node) -> None:
    """Anchor ``hold``, all of whose covers have moved to ``node``, there."""
    old = hold.node
    if node is not old:
        node.protect()
        hold.node = node
        core.index.unprotect(old)


def swap(core: Core, hold: Hold, other: Hold) -> None:
    """Let ``hold`` cover what ``other`` covered, and release what it covered before."""
    hold.node, other.node = other.node, hold.node
    hold.covers, other.covers = other.covers, hold.covers
    hold.receipts, other.receipts = other.receipts, hold.receipts
    hold.fence = max(hold.fence, other.fence)
    release(core, other)


# ---------------------------------------------------------------- giving back


def release(core: Core, hold: Hold) -> None:
    """Undo what ``hold`` covers. A boundary that nothing keeps any more is unlinked."""
    hold.core = None
    if core.watcher is not None:
        core.watcher.released(hold)
    if hold.flushes != core.index.flushes:
        return
    receipts = hold.receipts
    for lane, covered in zip(core.shape.lanes, hold.covers, strict=False):  # a publication may have ended the lease
        if covered is not None:
            recent = True
            if lane.hooks.release_component_lock is not None:
                receipt = receipts[lane.index] or Receipt()
                touch = core.plugins.ask_softly(lane, "release_component_lock", Touch, receipt)
                recent = touch is None or touch.positions is None or bool(touch.positions)
            lane.release(covered, recent)
    core.index.unprotect(hold.node)
    if core.index.dropped_roots:
        sweep(core)


def release_part(hold: Hold, lane: Lane) -> None:
    """Uncover what ``hold`` covers of one component; the rest of the lease stays."""
    covered = hold.covers[lane.index]
    if covered is not None:
        hold.covers[lane.index] = None
        lane.release(covered)


# ---------------------------------------------------------------- dropped namespaces


def drop_namespace(core: Core, namespace: str) -> int:
    """Let nothing of a namespace be found any more, nor what a store still brings. Return the cells still covered.

    A plain name means the namespace of that name under every identity.
    """
    if core.below is not None:
        core.below.namespace_dropped(namespace)
    meant = [each for each in core.index.tree.roots if means(namespace, each)]
    for each in meant:
        if core.recorder.journals:
            core.recorder.dropped(core.shape.all_lanes, core.index.tree.roots[each])
        core.index.drop_root(each)
    return sweep(core) if meant else 0


def sweep(core: Core) -> int:
    """Free what no lease covers any more of dropped namespaces. Return the number of cells that are still covered."""
    index = core.index
    kept = 0
    for root in [*index.dropped_roots]:
        for node in reversed([*descendants(root)]):  # the deepest first
            for lane in core.shape.all_lanes:
                cell = lane.cell(node)
                if cell is not None and lane.uncovered(cell):
                    lane.drop_cell(cell)
                elif cell is not None:
                    kept += 1
            index.prune(node)
        if root.idle:
            index.dropped_roots.remove(root)
            unlink(root)
    index.lose()
    return kept
