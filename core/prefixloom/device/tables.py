"""Page tables for kernels: one persistent tensor per component, with one row per running sequence.

A sequence gets its row at the first step that asks for a table, and keeps it. On its own stream, a step writes into the
rows of its sequences what changed since they were last written: a decode step writes its new pages, not whole rows. The
holdings' tables on the host are the truth; a row is derived from them, and nothing is ever freed because of a row.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Many
from typing import Any, Protocol

from ..errors import PrefixloomError
from .flight import Flight
from .kernels import index_of
from .pool import ABSENT, ID_BYTES
from .streams import Event, Stream, enqueue

LONG = 64
"""A change of at least so many entries is written as a run of its own, and not together with the small ones."""


class Tabled(Protocol):
    """A component, as far as tables know it. ``index``: where its holding stands in ``Rowed.held``."""

    index: int
    name: str

    @property
    def unit(self) -> str:
        """The unit of the component's reach: "page" or "boundary"."""


class Rowed(Protocol):
    """A running sequence, as far as tables know it. ``core`` is None once it has ended; ``row`` is -1 without a row."""

    core: Any
    held: list[Any]
    row: int


class Tables:
    """The tables of one cache, and the rows of its sequences."""

    def __init__(self, flight: Flight[Any], device: str, flushed: Tables | None = None) -> None:
        self._flight = flight
        self._device = device
        self._flushed = flushed  # steps in flight may still read its tensors
        self._until = flight.stamp
        self._free: deque[tuple[int, int]] = deque()  # (fence, row): a row is used again when no step reads it
        self._rows = 0
        self.by_component: dict[str, Table] = {}

    def leave(self, running: Rowed) -> None:
        """Free the row of ``running``, which has ended."""
        self._free.append((self._flight.stamp, running.row))
        for table in self.by_component.values():
            if running.row < len(table.written):
                table.written[running.row] = 0
        running.row = -1

    def row_of(self, running: Rowed) -> int:
        if running.core is None:  # it has ended, maybe by a flush, which makes new tables
            return -1
        if running.row < 0:
            flight = self._flight
            if self._free and (not flight.stamp or self._free[0][0] <= flight.over):
                running.row = self._free.popleft()[1]
            else:
                running.row = self._rows
                self._rows += 1
        return running.row

    def of(self, lane: Tabled, sequences: Many[Rowed], stream: Stream) -> Any:
        """The rows of ``sequences`` of one component's table, as wide as the longest, written on ``stream``.

        A boundary component's row is its running slot, and behind it those of the states after single tokens.
        """
        if self._flushed is not None and self._until <= self._flight.over:
            self._flushed = None
        table = self.by_component.get(lane.name)
        if table is None:
            table = self.by_component[lane.name] = Table(lane, self._flight, self._device)
        rows = [self.row_of(running) for running in sequences]
        width = table.write(stream, sequences, rows)
        if not rows:
            return empty(stream, (0, 0), self._device)
        whole = table.tensor
        first = rows[0]
        if first >= 0 and rows == list(range(first, first + len(rows))):
            chosen = whole[first : first + len(rows), :width]
        else:
            chosen = empty(stream, (len(rows), width), self._device)
            if width:
                enqueue(stream, "a read of a page table", lambda: gather(whole[:, :width], rows, chosen))
        return chosen


class Table:
    """One component's table. ``written[row]`` is the number of entries of a row that are up to date."""

    def __init__(self, lane: Tabled, flight: Flight[Any], device: str) -> None:
        self.lane = lane
        self._flight = flight
        self._device = device
        self.states = lane.unit == "boundary"
        self.tensor: Any = None
        self.written = array("q")
        self.filled = array("q")  # entries of the row that are not absent, or were not when last written
        self._made: Event | None = None
        self._known: set[Stream] = set()
        self.outgrown: deque[tuple[int, Any]] = deque()  # outgrown tensors that steps in flight may read

    def write(self, stream: Stream, sequences: Many[Rowed], rows: list[int]) -> int:
        """Bring ``rows`` up to date on ``stream``. Return the width of the longest."""
        contents = [self._content(running) for running in sequences]
        width = max((len(content) for content, _ in contents), default=0)
        if self.states:
            width = getattr(self.lane, "per_sequence", 1)  # also where all have ended
        self._make_room(stream, max(rows, default=0) + 1, width)
        small_at, small = array("q"), array("i")
        runs: list[tuple[int, int, bytes]] = []
        columns = self.tensor.shape[1] if self.tensor is not None else 0
        for row, (content, changed) in zip(rows, contents, strict=True):
            if row < 0:
                continue
            length, filled = len(content), self.filled[row]
            first = min(self.written[row], changed)
            self.written[row] = length
            self.filled[row] = length
            if first >= length and filled <= length:
                continue
            data = content[first:]
            if filled > length:
                data.extend(array("i", [ABSENT]) * (filled - length))
            if len(data) < LONG:
                small_at.extend(range(row * columns + first, row * columns + first + len(data)))
                small.extend(data)
            else:
                runs.append((row, first, data.tobytes()))
        try:
            if stream not in self._known and self._made is not None:  # write rows after the tensor was filled
                stream.wait(self._made)
                self._known.add(stream)
            if small or runs:
                tensor = self.tensor
                enqueue(stream, "a write of a page table", lambda: put(tensor, small_at, small, runs))
        except PrefixloomError:  # no memory, or a closed stream: the content of the rows is unknown
            for row in rows:
                if row >= 0:
                    self.written[row], self.filled[row] = 0, columns
            raise
        return width

    def _content(self, running: Rowed) -> tuple[array[int], int]:
        """Return the entries of a sequence's row, and the first that may have changed."""
        if running.core is not None and running.held:
            holding = running.held[self.lane.index]
            if self.states:
                return array("i", [holding.slot, *holding.steps]), 0
            changed = holding.changed
            holding.changed = len(holding.table)
            return holding.table, changed
        return array("i"), 0

    def _make_room(self, stream: Stream, rows: int, columns: int) -> None:
        tensor = self.tensor
        have = (0, 0) if tensor is None else tuple(tensor.shape)
        while self.outgrown and self.outgrown[0][0] <= self._flight.over:
            self.outgrown.popleft()
        if len(self.written) < rows:
            missing = rows - len(self.written)
            self.written.extend([0] * missing)
            self.filled.extend([0] * missing)
        if have[0] >= rows and have[1] >= columns and tensor is not None:
            return
        if tensor is not None:
            self.outgrown.append((self._flight.stamp, tensor))
        shape = (
            have[0] if have[0] >= rows else max(rows, 2 * have[0], 8),
            have[1] if have[1] >= columns else columns if self.states else max(columns, 2 * have[1], 8),
        )
        new = empty(stream, shape, self._device)
        enqueue(stream, "a new page table", lambda: new.fill_(ABSENT))
        self.tensor = new
        self._made = stream.record()
        self._known = {stream}
        for row in range(len(self.written)):  # every row is written anew when a step next asks for it
            self.written[row] = self.filled[row] = 0


def empty(stream: Stream, shape: tuple[int, int], device: str) -> Any:
    """Make an int32 tensor, which is to be filled on ``stream``."""
    import torch

    with stream.current():
        return torch.empty(shape, dtype=torch.int32, device=device)


def put(tensor: Any, at: array[int], values: array[int], runs: list[tuple[int, int, bytes]]) -> None:
    """Write changes into a table: the small ones all at once, long runs one by one."""
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
    """Copy rows of a table to ``out``. The row of a sequence that has ended (-1) is all *absent*."""
    import torch

    if tensor.numel():
        torch.index_select(tensor, 0, index_of([max(row, 0) for row in rows], [tensor]), out=out)
    for i, row in enumerate(rows):
        if row < 0:
            out[i].fill_(ABSENT)
