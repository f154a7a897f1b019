"""Unwritten content: what the tree has already and work in flight has yet to write.

Content is published with the step that writes it, not after it. Until that step is over, whoever reads the content
comes after the step. If the step fails, what it published is taken back (``teardown.fail_work``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from typing import Any, Generic

from typing_extensions import TypeVar

from ..device.flight import Follower, Work
from ..device.pool import Pool
from ..tree.lane import Lane
from ..tree.radix import Node, path_up

Slots = Many[tuple[Lane, set[int]]]
F = TypeVar("F", bound=Follower, default=Any)
"""Who publishes and reads: what a lease covers."""


class Publication(Generic[F]):
    """What one sequence published while a step of its own ran: the slots by lane, and who reads them.

    ``below``: it lies below the device. Who reads the same node on the device has nothing to do with it.
    """

    __slots__ = ("below", "hold", "nodes", "number", "readers", "slots")

    def __init__(self, hold: F, number: int, nodes: list[Node], slots: Slots, below: bool) -> None:
        self.below = below
        self.hold = hold
        self.number = number
        self.nodes = nodes
        self.slots = slots
        self.readers: list[F] = []


class Unwritten(Generic[F]):
    """The publications of one cache whose content has yet to be written, by node and by work."""

    __slots__ = ("_by_work", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Node, list[Publication[F]]] = {}
        self._by_work: dict[Work[F], list[Publication[F]]] = {}

    @property
    def publications(self) -> list[Publication[F]]:
        """All of them."""
        return [publication for some in self._by_work.values() for publication in some]

    # ------------------------------------------------------------ coming and going
    def add_owned(self, hold: F, run: list[Node], owned: Slots) -> None:
        """``hold``'s sequence has published the nodes of ``run``, and its last step is not over.

        ``owned`` are the slots that it owned before. Those that the tree has now must go if the step fails.
        """
        assert hold.work is not None
        slots = []
        for lane, mine in owned:
            held: set[int] = set()
            for node in run:
                held |= mine.intersection(lane.slots_of(lane.cell(node)))
            if held:
                slots.append((lane, held))
        if slots:
            self.add(hold.work, hold, run, slots)

    def add(self, work: Work[F], hold: F, run: list[Node], slots: Slots, below: bool = False) -> None:
        """``work`` has yet to write these slots, which the nodes of ``run`` have already. ``hold`` stands for it.

        Nothing is noted of work that is over: it may have ended while room was made for the publication.
        """
        if work.over:
            return
        publication: Publication[F] = Publication(hold, work.number, run, slots, below)
        self._by_work.setdefault(work, []).append(publication)
        for node in run:
            self.nodes.setdefault(node, []).append(publication)

    def work_over(self, work: Work[F]) -> None:
        """What ``work`` was to write has been written."""
        publications = self._by_work.pop(work, None)
        if publications:
            self._forget_nodes(publications)

    def forget(self, publications: Many[Publication[F]]) -> None:
        """These were taken back."""
        self._forget_nodes(publications)
        for work, some in list(self._by_work.items()):
            self._by_work[work] = [each for each in some if each not in publications]

    def _forget_nodes(self, publications: Many[Publication[F]]) -> None:
        for publication in publications:
            for node in publication.nodes:
                left = [other for other in self.nodes.get(node, ()) if other is not publication]
                if left:
                    self.nodes[node] = left
                else:
                    self.nodes.pop(node, None)

    def divided(self, upper: Node, lower: Node) -> None:
        """A node was split: its upper half has unwritten content as well."""
        publications = self.nodes.get(lower)
        if publications is not None:
            self.nodes[upper] = list(publications)
            for publication in publications:
                publication.nodes.append(upper)

    def reused(self, pool: Pool, data: bytes) -> None:
        """These slots have another owner: whatever fails, they are not taken back from it."""
        for publication in self.publications:
            for lane, slots in publication.slots:
                if lane.pool is pool:
                    slots.difference_update(array("i", data))

    def flushed(self) -> None:
        """Nothing is cached any more. Who was in work that still runs, or read from it, is told if it fails."""
        self.nodes = {}
        for publication in self.publications:
            publication.nodes, publication.slots = [], []

    def writers(self, node: Node) -> list[F]:
        """Who has yet to write what ``node`` has, on the device or below, and who has yet to write what they read."""
        found = dict.fromkeys(publication.hold for publication in self.nodes.get(node, ()))
        publications = self.publications
        writers = list(found)
        for hold in writers:
            for publication in publications:
                if hold in publication.readers and publication.hold not in found:
                    found[publication.hold] = None
                    writers.append(publication.hold)
        return writers

    # ------------------------------------------------------------ reading
    def read(self, hold: F, node: Node) -> None:
        """``hold`` covers ``node`` and what lies above it: it comes after what has yet to write any of that."""
        for each in path_up(node):
            self.read_node(hold, each)

    def read_node(self, hold: F, node: Node, below: bool = False) -> None:
        """``read``, of what ``node`` itself has on the device; or ``below`` it."""
        for publication in self.nodes.get(node, ()):
            if publication.below == below and publication.hold is not hold and hold not in publication.readers:
                publication.readers.append(hold)
                hold.fence = max(hold.fence, publication.number)
