"""A watch over a cache under the schedule explorer: it records what the cache's work touches, and checks it.

Pools and page tables report to the explorer every slot and row that a piece of work touches *when it runs*. The slots
must be among those that the cache reported to its race detector when it enqueued the work. This finds work that decides
too late what to touch, for example by reading a slot number only when it runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from typing import Any

from ...cache.cache import Cache
from ...device import tables
from ...device.pool import DebugPool, Pool
from ...errors import InvariantError
from ..inside import backdoor
from .explore import ExploredStream, ScheduleRun, touch
from .interleaving import Thing


class WatchedPool(DebugPool):
    """A pool that reports which slots are read and written at the moment of the access."""

    __slots__ = ()

    def copy(self, src: Many[int], dst: Many[int]) -> None:
        touch(self.things(src), self.things(dst))
        super().copy(src, dst)

    def select(self, choices: Many[Many[int]], selector: Any, dst: Many[int]) -> None:
        touch(self.things([slot for row in choices for slot in row]), self.things(dst))
        super().select(choices, selector, dst)

    def clear(self, dst: Many[int]) -> None:
        touch((), self.things(dst))
        super().clear(dst)

    def things(self, slots: Many[int]) -> list[Thing]:
        return [("slot", self.name, slot) for slot in slots]


class Watch:
    """A watch over one cache in debug mode, on the streams of one schedule."""

    def __init__(self, cache: Cache, run: ScheduleRun) -> None:
        self._cache = cache
        self._run = run
        self._told: list[tuple[ExploredStream, int, str, set[Thing]]] = []
        for pool in backdoor.pools(cache):
            pool.__class__ = WatchedPool
        run.quiet.add(backdoor.empty_work())
        backdoor.watch_accesses(cache, self._accessed)
        for name, told in (("put", self._put), ("gather", self._gather)):
            honest = getattr(tables, name)
            setattr(tables, name, self._wrapped(honest, told))
            run.afterwards(lambda name=name, honest=honest: setattr(tables, name, honest))  # type: ignore[misc]

    def _accessed(self, stream: Any, what: str, pool: Pool, reads: Many[int], writes: Many[int], source: Pool) -> None:
        if isinstance(stream, ExploredStream):
            stream.labels[stream.tick] = what
            things: set[Thing] = {("slot", source.name, slot) for slot in reads}
            things |= {("slot", pool.name, slot) for slot in writes}
            self._told.append((stream, stream.tick, what, things))

    def check(self) -> None:
        """Check that each piece of work touched only the slots that were reported when it was enqueued."""
        for stream, tick, what, things in self._told:
            if tick not in stream.ran:  # the work ran while the scenario was set up
                continue
            ran = self._run.trace[stream.ran[tick]]
            more = {thing for thing in ran.reads | ran.writes if isinstance(thing, tuple) and thing[0] == "slot"}
            if not more <= things:
                raise InvariantError(
                    f"{what!r} touched {sorted(map(str, more - things))}, and had told {sorted(map(str, things))}"
                )

    # ------------------------------------------------------------ page tables
    @staticmethod
    def _wrapped(honest: Any, told: Any) -> Any:
        def watched(*args: Any) -> None:
            told(*args)
            honest(*args)

        return watched

    def _put(self, tensor: Any, at: array[int], values: array[int]) -> None:
        columns = tensor.shape[1]
        touch((), self._rows(tensor, {place // columns for place in at}))

    def _gather(self, tensor: Any, rows: list[int], out: Any) -> None:
        touch(self._rows(tensor, {row for row in rows if row >= 0}), ())

    def _rows(self, tensor: Any, rows: set[int]) -> list[Thing]:
        for name, tensors in backdoor.page_table_tensors(self._cache).items():
            if any(one.data_ptr() == tensor.data_ptr() for one in tensors):
                return [("row", name, row) for row in rows]
        return [("row", "of a table that was flushed", row) for row in rows]
