"""What is in flight: steps that were handed to a stream and are not over.

Each has a number. A *fence* is such a number: whoever carries it comes after all steps up to it, on the same stream by
itself, from another one by waiting for their events. Slots that were given back meanwhile carry one (``pool``), and so
does whoever reads what a running step has yet to write: content is published with its step, not after it. If that step
fails, what it published is taken back, and with it whatever was built on that.

Nothing here waits for a device: an event is asked whether it is done, by ``poll`` and by who is short of slots.

Gates: a step's layers wait for a load layer by layer, so that the first ones run while the last are still copied.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError
from ..operations.lease import ended, release
from .pool import Fence, Pool

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..operations.lease import Hold
    from ..tree.lane import Lane
    from ..tree.radix import Node
    from .streams import Event, Stream

log = logging.getLogger("prefixloom")


class Work:
    """One step in flight: its layers run, or are still being enqueued (``event`` is None).

    ``holds`` are its sequences' leases; ``published`` what these handed to the tree since. ``gates`` of a load by
    groups of layers: (the last layer of a group, the event after its copies), in order. Made by ``Flight.begin``.
    """

    __slots__ = ("event", "failed", "gates", "holds", "name", "number", "over", "published", "since", "stream")

    number: int
    over: bool
    failed: bool
    event: Event | None
    stream: Stream | None
    published: Many[Published]
    holds: Many[Hold]
    gates: Many[tuple[int, Event]]
    name: str
    since: int


class Published:
    """What one sequence published while a step of its own ran: the slots by lane, and who reads them.

    ``below``: it lies below the device. Who reads the node there has nothing to do with it.
    """

    __slots__ = ("below", "hold", "nodes", "number", "readers", "slots")

    def __init__(
        self, hold: Hold, number: int, nodes: list[Node], slots: list[tuple[Lane, set[int]]], below: bool
    ) -> None:
        self.below = below
        self.hold = hold
        self.number = number
        self.nodes = nodes
        self.slots = slots
        self.readers: list[Hold] = []


class Flight(Fence):
    """The steps in flight of one cache, oldest first."""

    __slots__ = ("_cache", "_launched", "alone", "nodes", "over", "works")

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self._cache = cache
        self._launched = 0
        self.over = 0
        self.works: list[Work] = []
        self.nodes: dict[Node, list[Published]] = {}
        """Nodes with content that a step in flight has yet to write."""
        self.alone: dict[Hold, tuple[Stream, int]] = {}
        """Of sequences whose layers are being enqueued outside of steps: where, and since when."""

    # ------------------------------------------------------------ steps
    def begin(self) -> Work:
        """A step's layers are about to be enqueued."""
        work = Work()
        work.number = self._launched = self.stamp = self._launched + 1
        work.over = work.failed = False
        work.event = work.stream = None
        work.published = work.gates = ()
        self.works.append(work)
        return work

    def order(self, own: Work, stream: Stream, fence: int, who: object, gates: Gates | None = None) -> None:
        """What is enqueued on ``stream`` from now on, which is ``own``, comes after the steps up to ``fence``.

        With ``gates`` it comes after a load that has any layer by layer, as the gates are passed.
        """
        for work in self.unfinished(fence, own):
            if work.event is None:
                raise ProtocolError(f"{who!r} comes after step {work.number}, whose block is open: end that first")
            if gates is not None and work.gates:
                gates.add(work)
            elif work.stream is not stream:
                stream.wait(work.event)

    def end(self, work: Work, stream: Stream, sequences: Iterable[Sequence], who: object) -> None:
        """All of ``work`` has been enqueued, by ``who`` for ``sequences``."""
        if stream.inline:
            works = self.works
            if len(works) == 1:  # it alone was in flight
                work.over = True
                works.pop()
                self.over = work.number
                self.stamp = 0
                if self.retiring:
                    self._free_retired()
                return
        self._end_beside(work, stream, sequences, who)

    def _end_beside(self, work: Work, stream: Stream, sequences: Iterable[Sequence], who: object) -> None:
        """``end``, where other steps are in flight, or the stream runs on its own."""
        if stream.inline and not any(self.unfinished(sequence._lease.fence, work) for sequence in sequences):
            work.over = True
            self._settle()
            return
        self.follow(work, stream, [sequence._lease for sequence in sequences], who)

    def follow(self, work: Work, stream: Stream, holds: list[Hold], who: object) -> None:
        """All of ``work`` has been enqueued on ``stream``: it is over when that has come so far."""
        work.event = stream.record()
        work.stream = stream
        work.name = repr(who)
        work.holds = holds
        for hold in holds:
            hold.work = work
            hold.fence = max(hold.fence, work.number)  # it may have come to use what began after this step
        if stream.inline:  # it is over as well, but what it came after may yet be told to have failed
            self.poll(between_operations=False)

    def unfinished(self, fence: int, own: Work | None = None) -> list[Work]:
        """The steps up to ``fence`` that are not known to be over, but for ``own``."""
        return [work for work in self.works if work.number <= fence and not work.over and work is not own]

    @property
    def running(self) -> bool:
        """Whether any step was handed to a stream and is not known to be over."""
        return any(work.event is not None and not work.over for work in self.works)

    def poll(self, between_operations: bool = True) -> None:
        """See which steps are over. Never waits.

        A failure ends sequences, so it is seen between operations only, and not by one that is short of slots.
        """
        # the newest is asked first: what it came after is over as well if it is, whenever that is asked
        done = [w for w in reversed(self.works) if not w.over and w.event is not None and w.event.done]
        for work in reversed(done):
            assert work.stream is not None
            assert work.event is not None
            error = work.stream.failure(work.since, work.event.tick)
            if error is not None and not between_operations:
                break  # nor are those over that may have read what it wrote
            work.over = True
            if error is not None:
                self._fail(work, error)
        self._settle()

    def _settle(self) -> None:
        works = self.works
        while works and works[0].over:
            work = works.pop(0)
            self.over = work.number
            if work.published:
                self._forget(work.published)
            work.holds = work.published = ()  # they know the work, too
        if not works:
            self.stamp = 0
        if self.retiring:
            self._free_retired()

    def _free_retired(self) -> None:
        waiting = 0
        for lane in self._cache._all_lanes:
            for pool in lane.pools:
                pool.settle(self.over)
                waiting += pool.retiring
        self.retiring = waiting > 0

    def _forget(self, what: Many[Published]) -> None:
        for published in what:
            for node in published.nodes:
                left = [other for other in self.nodes.get(node, ()) if other is not published]
                if left:
                    self.nodes[node] = left
                else:
                    self.nodes.pop(node, None)

    # ------------------------------------------------------------ publication
    def publishing(self, hold: Hold, run: list[Node], own: Many[tuple[Lane, set[int]]]) -> None:
        """``hold``'s sequence has published the nodes of ``run``, and its last step is not over.

        ``own`` are the slots that it owned before: those that the tree has now are what must go if the step fails.
        """
        work = hold.work
        assert work is not None
        slots = []
        for lane, mine in own:
            held: set[int] = set()
            for node in run:
                held |= mine.intersection(lane.slots_of(node.cells[lane.index]))
            if held:
                slots.append((lane, held))
        if slots:
            self.carry(work, hold, run, slots)

    def carry(
        self, work: Work, hold: Hold, run: list[Node], slots: list[tuple[Lane, set[int]]], below: bool = False
    ) -> None:
        """``work`` has yet to write these slots, which the nodes of ``run`` have already. ``hold`` stands for it.

        ``below``: they are slots of a tier below the device.
        """
        published = Published(hold, work.number, run, slots, below)
        work.published = [*work.published, published]
        for node in run:
            self.nodes.setdefault(node, []).append(published)

    def divided(self, upper: Node, lower: Node) -> None:
        """A node with content in flight was split."""
        published = self.nodes.get(lower)
        if published is not None:
            self.nodes[upper] = list(published)
            for each in published:
                each.nodes.append(upper)

    def read(self, hold: Hold, node: Node) -> None:
        """``hold`` covers ``node`` and what lies above it: if any of that is yet to be written, it comes after that."""
        while node.parent is not None:
            self.copies(hold, node)
            node = node.parent

    def copies(self, hold: Hold, node: Node, below: bool = False) -> None:
        """``read``, of what ``node`` itself has on the device; or ``below`` it."""
        for published in self.nodes.get(node, ()):
            if published.below == below and published.hold is not hold and hold not in published.readers:
                published.readers.append(hold)
                hold.fence = max(hold.fence, published.number)

    def reused(self, pool: Pool, data: bytes) -> None:
        for work in self.works:
            for published in work.published:
                for lane, slots in published.slots:
                    if lane.pool is pool:
                        slots.difference_update(array("i", data))

    def end_alone(self, hold: Hold) -> None:
        """All layers that its sequence had outside of steps have been enqueued: if there are any they are in flight."""
        found = self.alone.pop(hold, None)
        if found is not None:
            stream, since = found
            work = self.begin()
            work.since = since
            self.follow(work, stream, [hold], f"the layers of {hold.label or 'a sequence'}")

    def flushed(self) -> None:
        """Nothing is cached or held any more. What runs still runs; who was in it or read it is told if it fails."""
        self.nodes = {}
        for work in self.works:
            for published in work.published:
                published.nodes, published.slots = [], []

    # ------------------------------------------------------------ failure
    def _fail(self, work: Work, error: BaseException) -> None:
        """The step did not do what was committed: its sequences end, what they published goes, and who read that."""
        cache = self._cache
        work.failed = True
        lost: dict[Hold, None] = dict.fromkeys(work.holds)
        everything = [published for other in self.works for published in other.published]
        doomed: list[Published] = []
        grown = True
        while grown:
            grown = False
            for published in everything:
                if published.hold in lost and published not in doomed:
                    doomed.append(published)
                    lost.update(dict.fromkeys(published.readers))
                    grown = True
        log.warning(
            "%s failed with %r: %d sequences and leases end with it, and what they published since is taken back",
            work.name, error, sum(hold.active for hold in lost),
        )  # fmt: skip
        for hold in lost:
            abandon(cache, hold, error)
        nodes = {node for published in doomed for node in published.nodes}
        below = list(nodes)
        for node in below:  # what hangs there goes with it, also if it was written long ago
            below += node.children
        for node in sorted(nodes, key=lambda node: -node.end):
            for published in doomed:
                if node in published.nodes:
                    for lane, slots in published.slots:
                        lane.retract(node, slots)
        for node in below:
            cache._tree.prune(node)
        self._forget(doomed)
        for other in self.works:
            other.published = [published for published in other.published if published not in doomed]
        cache._epoch += 1


def abandon(cache: Cache, hold: Hold, error: BaseException) -> None:
    """End a lease, or a running sequence with all that it holds, because of ``error``."""
    hold.failed = error
    if not hold.active:
        return
    cache._flight.end_alone(hold)
    ended(cache, hold)
    for lane, holding in hold.pairs(cache):
        lane.close(holding)
    release(cache, hold)


def own_slots(pairs: Many[tuple[Any, Any]]) -> list[tuple[Lane, set[int]]]:
    """What a running sequence owns, by lane."""
    return [(lane, set(lane.own_slots(holding))) for lane, holding in pairs]


class Gates:
    """Of one step: the loads that its stream has not waited for as a whole. ``passed``: up to which layer it has.

    ``missed`` says, once the step has ended, what a layer may have read too early.
    """

    __slots__ = ("_stream", "_works", "missed", "passed")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._works: list[Work] = []
        self.passed = -1
        self.missed = ""

    def add(self, work: Work) -> None:
        if work not in self._works:
            self._works.append(work)

    def open(self, layer: int) -> None:
        """What is enqueued from now on comes after what the loads bring up to ``layer``."""
        for work in self._works:
            for last, event in work.gates:
                if last > self.passed:  # else it has been waited for
                    self._stream.wait(event)
                if last >= layer:
                    break
        self.passed = max(self.passed, layer)

    def check(self) -> None:
        """After the end of the step: refuse that a layer may have read too early."""
        if self.missed:
            raise ProtocolError(self.missed)

    def finish(self) -> None:
        """What comes after the step comes after all of the loads."""
        last = max((work.gates[-1][0] for work in self._works), default=-1)
        if self.passed < last:
            self.missed = (
                f"this step was to pass a gate before each layer, and got to layer {self.passed} of {last}: call "
                f"step.gate(layer) before every layer, or run_ops() without gated"
            )
        self.open(last)
