"""Page tables as kernels read them: one persistent tensor per component, one row per running sequence.

A sequence gets its row at the first step that asks for a table, and keeps it. A step writes into the rows of its
sequences what changed since they were last written, on its own stream: a decode step costs its new pages, not the
tables. The truth is the holdings' tables on the host; a row is derived, and never used to free anything.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

from ..device.kernels import index_of
from ..device.pool import ABSENT, ID_BYTES

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.step import Step
    from ..device.streams import Event, Stream
    from ..tree.lane import Lane
    from .lease import Hold

LONG = 64
"""Entries from which on a change is written as a run of its own, and not with the many small ones."""


class Tables:
    """The tables of one cache, and who has which row."""

    def __init__(self, cache: Cache, flushed: Tables | None = None) -> None:
        self._cache = cache
        self._flushed = flushed  # steps in flight may still read its tensors
        self._until = cache._flight.stamp
        self._free: deque[tuple[int, int]] = deque()  # (fence, row): a row is written anew when nobody reads it
        self._rows = 0
        self._tables: dict[str, Table] = {}

    def leave(self, hold: Hold) -> None:
        """The sequence of ``hold`` has ended."""
        self._free.append((self._cache._flight.stamp, hold.row))
        for table in self._tables.values():
            if hold.row < len(table.written):
                table.written[hold.row] = 0
        hold.row = -1

    def row_of(self, hold: Hold) -> int:
        if hold._cache is None:  # it has ended, be it by a flush, which makes new tables
            return -1
        if hold.row < 0:
            flight = self._cache._flight
            if self._free and (not flight.stamp or self._free[0][0] <= flight.over):
                hold.row = self._free.popleft()[1]
            else:
                hold.row = self._rows
                self._rows += 1
        return hold.row

    def of(self, step: Step, component: str) -> Any:
        """The rows of the step's sequences of one component's table, as wide as the longest.

        A boundary component's row is its running slot, and behind it those of the states after single tokens.
        """
        if self._flushed is not None and self._until <= self._cache._flight.over:
            self._flushed = None
        lane = self._cache._lane(component)
        table = self._tables.get(component)
        if table is None:
            table = self._tables[component] = Table(lane)
        holds = [sequence._lease for sequence in step._sequences]
        rows = [self.row_of(hold) for hold in holds]
        stream = step._stream or self._cache._stream(None)
        width = table.write(self._cache, stream, holds, rows)
        device = self._cache.composition.device
        if not rows:
            return empty(stream, (0, 0), device)
        whole = table.tensor
        first = rows[0]
        if first >= 0 and rows == list(range(first, first + len(rows))):
            chosen = whole[first : first + len(rows), :width]
        else:
            chosen = empty(stream, (len(rows), width), device)
            if width:
                stream.run(lambda: gather(whole[:, :width], rows, chosen))
        return chosen


class Table:
    """One component's table. ``written[row]``: how many entries of the row are as they should be."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.states = lane.unit == "boundary"
        self.tensor: Any = None
        self.written = array("q")
        self.filled = array("q")  # entries of the row that are not absent, or were not when last written
        self._made: Event | None = None
        self._known: set[Stream] = set()
        self._old: deque[tuple[int, Any]] = deque()  # outgrown tensors that steps in flight may read

    def write(self, cache: Cache, stream: Stream, holds: list[Hold], rows: list[int]) -> int:
        """Bring ``rows`` up to date on ``stream``; the width of the longest."""
        contents = [self._content(hold) for hold in holds]
        width = max((base + len(content) for content, base, _ in contents), default=0)
        if self.states:
            width = getattr(self.lane, "per_sequence", 1)  # also where all have ended
        self._make_room(cache, stream, max(rows, default=0) + 1, width)
        small_at, small = array("q"), array("i")
        runs: list[tuple[int, int, bytes]] = []
        columns = self.tensor.shape[1] if self.tensor is not None else 0
        for row, (content, base, changed) in zip(rows, contents, strict=True):
            if row < 0:
                continue
            length, filled = base + len(content), self.filled[row]
            first = min(self.written[row], changed)
            self.written[row] = length
            self.filled[row] = length
            if first >= length and filled <= length:
                continue
            data = content[first - base :] if first >= base else array("i", [ABSENT]) * (base - first) + content
            if filled > length:
                data.extend(array("i", [ABSENT]) * (filled - length))
            if len(data) < LONG:
                small_at.extend(range(row * columns + first, row * columns + first + len(data)))
                small.extend(data)
            else:
                runs.append((row, first, data.tobytes()))
        try:
            if stream not in self._known and self._made is not None:  # its rows are written after it was made
                stream.wait(self._made)
                self._known.add(stream)
            if small or runs:
                tensor = self.tensor
                stream.run(lambda: put(tensor, small_at, small, runs))
        except BaseException:  # no memory, or a closed stream: what the rows hold is not known
            for row in rows:
                if row >= 0:
                    self.written[row], self.filled[row] = 0, columns
            raise
        return width

    def _content(self, hold: Hold) -> tuple[array[int], int, int]:
        """What the sequence's row should be: (entries, absent ones before them, from where on it may have changed)."""
        if hold._cache is not None and hold.held:
            holding = hold.held[self.lane.index]
            if self.states:
                return array("i", [holding.slot, *holding.steps]), 0, 0
            changed = holding.changed
            holding.changed = holding.base + len(holding.table)
            return holding.table, holding.base, changed
        return array("i"), 0, 0

    def _make_room(self, cache: Cache, stream: Stream, rows: int, columns: int) -> None:
        tensor = self.tensor
        have = (0, 0) if tensor is None else tuple(tensor.shape)
        while self._old and self._old[0][0] <= cache._flight.over:
            self._old.popleft()
        if len(self.written) < rows:
            missing = rows - len(self.written)
            self.written.extend([0] * missing)
            self.filled.extend([0] * missing)
        if have[0] >= rows and have[1] >= columns and tensor is not None:
            return
        if tensor is not None:
            self._old.append((cache._flight.stamp, tensor))
        shape = (
            have[0] if have[0] >= rows else max(rows, 2 * have[0], 8),
            have[1] if have[1] >= columns else columns if self.states else max(columns, 2 * have[1], 8),
        )
        new = empty(stream, shape, cache.composition.device)
        stream.run(lambda: new.fill_(ABSENT))
        self.tensor = new
        self._made = stream.record()
        self._known = {stream}
        for row in range(len(self.written)):  # every row is written anew when a step next asks for it
            self.written[row] = self.filled[row] = 0


def empty(stream: Stream, shape: tuple[int, int], device: str) -> Any:
    """To be filled on ``stream``."""
    import torch

    with stream.current():
        return torch.empty(shape, dtype=torch.int32, device=device)


def put(tensor: Any, at: array[int], values: array[int], runs: list[tuple[int, int, bytes]]) -> None:
    """Small changes all at once, long runs one by one."""
    import torch

    def sent(data: bytes, dtype: torch.dtype) -> torch.Tensor:
        here = torch.frombuffer(bytearray(data), dtype=dtype)
        if tensor.device.type == "cuda":
            here = here.pin_memory()  # a copy from any other memory would wait for the device
        return here.to(tensor.device, non_blocking=True)

    if at:
        tensor.view(-1).index_copy_(0, sent(at.tobytes(), torch.int64), sent(values.tobytes(), torch.int32))
    for row, first, data in runs:
        tensor[row, first : first + len(data) // ID_BYTES].copy_(sent(data, torch.int32))


def gather(tensor: Any, rows: list[int], out: Any) -> None:
    """The rows that are wanted, *absent* throughout for a sequence that has ended."""
    import torch

    if tensor.numel():
        torch.index_select(tensor, 0, index_of([max(row, 0) for row in rows], [tensor]), out=out)
    for i, row in enumerate(rows):
        if row < 0:
            out[i].fill_(ABSENT)
