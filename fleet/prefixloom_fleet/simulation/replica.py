"""SimulatedReplica: one replica of a fleet, which is the lab's driver over a cache, with a shared store behind it.

The driver is advanced event by event. It tells its owner how far it is with a prompt, and when a request is over. It
knows no router and no other replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefixloom import Cache
from prefixloom.lab import Replay, Service, Setup
from prefixloom.lab.replay import Active

from .shared_store import SharedStore


class Watching(Protocol):
    """Who is told what becomes of requests."""

    def computed(self, active: Active) -> None:
        """Hear that a chunk of its prompt was computed or read, up to ``active.launched``."""

    def over(self, active: Active, answered: bool) -> None:
        """Hear that it is answered, or refused since the pools are too small for it."""

    def links(self, active: Active) -> Sequence[int]:
        """Return the links of the prompt's pages."""


class SimulatedReplica(Replay):
    """A replica. A request that can resume deeper from the store reads from there, if that is sooner than computing."""

    def __init__(
        self, setup: Setup, cache: Cache, service: Service, watching: Watching, store: SharedStore | None, trace: str
    ) -> None:
        super().__init__(
            cache, service=service, chunk=setup.chunk, outputs=setup.outputs, closely=setup.closely, trace=trace
        )
        self._watching, self._store = watching, store
        self._prefill = service.prefill
        self._wanted: dict[int, int] = {}
        """By number of a request, up to where it reads from the store."""
        self._reading: float | None = None
        """How long the chunk takes that was read just now."""

    def _end(self, active: Active) -> None:
        super()._end(active)
        self._watching.over(active, True)

    def _refuse(self, active: Active) -> None:
        super()._refuse(active)
        self._watching.over(active, False)

    # ------------------------------------------------------------ the store
    def _open(self, active: Active) -> bool:
        is_first = active.hit < 0
        if not super()._open(active):
            return False
        if self._store is not None:
            self._wanted.pop(active.number, None)
            wanted = self._worth_reading(active, self._store)
            if wanted > active.launched:
                self._wanted[active.number] = wanted
                if is_first:
                    active.restored += wanted - active.launched
        return True

    def _worth_reading(self, active: Active, store: SharedStore) -> int:
        """Return the deepest boundary in the store if reading is sooner than computing, else where the request is."""
        page, start = self._page, active.launched
        most = (active.request.prompt.count - self._leave) // page
        links = self._watching.links(active)[:most]
        pages = store.deepest(links, start // page, self._now)
        end = pages * page
        if end <= start or store.seconds(start // page, pages, self._now) >= (end - start) / self._prefill:
            return start
        return end

    def _compute(self, active: Active) -> None:
        wanted = self._wanted.get(active.number, 0)
        if active.launched < wanted:
            self._read(active, wanted)
        else:
            start = active.launched
            super()._compute(active)
            if self._store is not None:
                self._write(active, start, self._store)
        self._watching.computed(active)

    def _read(self, active: Active, wanted: int) -> None:
        """Take a boundary from the store. The cache then has what it would have if it had computed up to there."""
        start, sequence, store = active.launched, active.sequence, self._store
        assert store is not None
        while active.launched < wanted:
            end = min(active.launched + self._chunk, wanted)
            sequence.grow(end - active.launched)
            self._step(sequence)
            active.launched = end
        sequence.publish()
        links, page = self._watching.links(active), self._page
        self._reading = store.take(links, start // page, wanted // page, self._now)
        del self._wanted[active.number]

    def _write(self, active: Active, start: int, store: SharedStore) -> None:
        """Write the content computed from ``start`` on. With states, one can resume only at the end of a chunk."""
        page, links = self._page, self._watching.links(active)
        end = min(active.launched // page, len(links))
        if self._stateful:
            ends = [end] if active.launched == end * page > start else []
        else:
            ends = list(range(start // page + 1, end + 1))
        if ends:
            done = self._now + self._seconds(active, start)
            store.write(links, start // page, ends, done)

    def _seconds(self, active: Active, start: int) -> float:
        if self._reading is None:
            return super()._seconds(active, start)
        seconds, self._reading = self._reading, None
        return seconds
