"""Unwritten content: what the tree has already and work in flight has yet to write.

Content is published with the step that writes it, not after it. Until that step is over, whoever reads the content
comes after the step. If the step fails, what it published is taken back (``teardown.fail_work``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any, Generic

from typing_extensions import TypeVar

from ..device.flight import Follower, Work
from ..device.pool import Pool
from ..tree.cells import Cells
from ..tree.radix import Node, path_up

Slots = Many[tuple[Cells, set[int]]]
F = TypeVar("F", bound=Follower, default=Any)
"""Who publishes and reads: what a lease covers."""


class Publication(Generic[F]):
    """What ``hold`` published while ``work`` has yet to write it: the slots by lane, and who reads them.

    ``below``: it lies below the device. Who reads the same node on the device has nothing to do with it.
    """

    __slots__ = ("below", "hold", "nodes", "readers", "slots", "work")

    def __init__(self, work: Work[F], hold: F, nodes: list[Node], slots: Slots, below: bool) -> None:
        self.work = work
        self.hold = hold
        self.nodes = nodes
        self.slots = slots
        self.below = below
        self.readers: list[F] = []


class Unwritten(Generic[F]):
    """The publications of one cache whose content has yet to be written, all of them and by node."""

    __slots__ = ("nodes", "publications")

    def __init__(self) -> None:
        self.nodes: dict[Node, list[Publication[F]]] = {}
        self.publications: dict[Publication[F], None] = {}

    # ------------------------------------------------------------ changes
    def add_owned(self, hold: F, run: list[Node], owned: Slots) -> None:
        """Add what ``hold``'s sequence has published at the nodes of ``run``, whose last step is not over.

        ``owned`` are the slots that it owned before. Those that the tree has now must go if the step fails.
        """
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
        """Add slots that ``work`` has yet to write and the nodes of ``run`` have already. ``hold`` stands for it.

        Nothing is noted of work that is over: it may have ended while room was made for the publication.
        """
        if work.over:
            return
        publication = Publication(work, hold, run, slots, below)
        self.publications[publication] = None
        for node in run:
            self.nodes.setdefault(node, []).append(publication)

    def work_over(self, work: Work[F]) -> None:
        """Forget what ``work`` was to write: it has been written."""
        if self.publications:
            self.forget([each for each in self.publications if each.work is work])

    def forget(self, publications: Many[Publication[F]]) -> None:
        """Forget publications that were written, or taken back."""
        for publication in publications:
            del self.publications[publication]
            for node in publication.nodes:
                self.nodes[node].remove(publication)
                if not self.nodes[node]:
                    del self.nodes[node]

    def divided(self, upper: Node, lower: Node) -> None:
        """Note that a node was split: its upper half has unwritten content as well."""
        publications = self.nodes.get(lower)
        if publications is not None:
            self.nodes[upper] = list(publications)
            for publication in publications:
                publication.nodes.append(upper)

    def reused(self, pool: Pool, data: bytes) -> None:
        """Note that these slots have another owner: whatever fails, they are not taken back from it."""
        for publication in self.publications:
            for lane, slots in publication.slots:
                if lane.pool is pool:
                    slots.difference_update(array("i", data))

    def flushed(self) -> None:
        """Forget nodes and slots. Keep publications, so that their readers are told if running work fails."""
        self.nodes = {}
        for publication in self.publications:
            publication.nodes, publication.slots = [], []

    # ------------------------------------------------------------ who depends on whom
    def read(self, hold: F, node: Node) -> None:
        """Order ``hold``, which covers ``node`` and all above, behind the work that has yet to write their content."""
        for each in path_up(node):
            self.read_node(hold, each)

    def read_node(self, hold: F, node: Node, below: bool = False) -> None:
        """Do as ``read`` for what ``node`` itself has on the device; or ``below`` it."""
        for publication in self.nodes.get(node, ()):
            if publication.below == below and publication.hold is not hold and hold not in publication.readers:
                publication.readers.append(hold)
                hold.fence = max(hold.fence, publication.work.number)

    def writers(self, node: Node) -> list[F]:
        """Return who has yet to write what ``node`` has, on the device or below, and who writes what these read."""
        writers = list(dict.fromkeys(publication.hold for publication in self.nodes.get(node, ())))
        for hold in writers:  # it grows
            for publication in self.publications:
                if hold in publication.readers and publication.hold not in writers:
                    writers.append(publication.hold)
        return writers

    def built_on(self, holds: Iterable[F]) -> tuple[list[F], list[Publication[F]]]:
        """Return ``holds`` with all that read what these publish, one after another, and what they all publish."""
        found, publications = list(dict.fromkeys(holds)), []
        for hold in found:  # it grows
            for publication in self.publications:
                if publication.hold is hold:
                    publications.append(publication)
                    found += [reader for reader in publication.readers if reader not in found]
        return found, publications
