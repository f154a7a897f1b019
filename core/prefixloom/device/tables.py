"""Page tables for kernels: one persistent tensor per component, with one row per running sequence.

A sequence gets its row at the first step that asks for a table, and keeps it. On its own stream, a step writes into the
rows of its sequences what changed since they were last written: a decode step writes its new pages, not whole rows. The
holdings' tables on the host are the truth; a row is derived from them, and nothing is ever freed because of a row.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import PrefixloomError
from .flight import Flight
from .kernels import index_of
from .pool import ABSENT
from .streams import Event, Stream, enqueue

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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

    def __init__(self, flight: Flight, device: str, flushed: Tables | None = None) -> None:
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

    def of(self, lane: Tabled, sequences: Many[Rowed], stream: Stream) -> Tensor:
        """Return the rows of ``sequences`` of one component's table, as wide as the longest, written on ``stream``.

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
        whole, first = table.tensor, rows[0]
        assert whole is not None
        if first >= 0 and rows == list(range(first, first + len(rows))):
            return whole[first : first + len(rows), :width]
        chosen = empty(stream, (len(rows), width), self._device)
        if width:
            enqueue(stream, "a read of a page table", lambda: gather(whole[:, :width], rows, chosen))
        return chosen


class Table:
    """One component's table.

    ``written``: by row, how many entries are up to date. ``filled``: how many were not *absent* when last written.
    """

    def __init__(self, lane: Tabled, flight: Flight, device: str) -> None:
        self.lane = lane
        self._flight = flight
        self._device = device
        self.states = lane.unit == "boundary"
        self.tensor: Tensor | None = None
        self._shape = 0, 0
        self.written = array("q")
        self.filled = array("q")
        self._made: Event | None = None
        self._known: set[Stream] = set()
        self.outgrown: deque[tuple[int, Tensor]] = deque()  # outgrown tensors that steps in flight may read

    def write(self, stream: Stream, sequences: Many[Rowed], rows: list[int]) -> int:
        """Bring ``rows`` up to date on ``stream``. Return the width of the longest."""
        contents = [self._content(running) for running in sequences]
        width = max((len(content) for content, _ in contents), default=0)
        if self.states:
            width = getattr(self.lane, "per_sequence", 1)  # also where all have ended
        self._make_room(stream, max(rows, default=0) + 1, width)
        at, values, columns = array("q"), array("i"), self._shape[1]
        for row, (content, changed) in zip(rows, contents, strict=True):
            if row < 0:
                continue
            length, filled = len(content), self.filled[row]
            first, start = min(self.written[row], changed, length), row * columns
            self.written[row] = self.filled[row] = length
            at.extend(range(start + first, start + max(length, filled)))
            values.extend(content[first:])
            values.extend([ABSENT] * (filled - length))
        try:
            if stream not in self._known and self._made is not None:  # write rows after the tensor was filled
                stream.wait(self._made)
                self._known.add(stream)
            if at and (tensor := self.tensor) is not None:
                enqueue(stream, "a write of a page table", lambda: put(tensor, at, values))
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
        have = self._shape
        while self.outgrown and self.outgrown[0][0] <= self._flight.over:
            self.outgrown.popleft()
        missing = [0] * (rows - len(self.written))
        self.written.extend(missing)
        self.filled.extend(missing)
        if self.tensor is not None:
            if have[0] >= rows and have[1] >= columns:
                return
            self.outgrown.append((self._flight.stamp, self.tensor))
        shape = (
            have[0] if have[0] >= rows else max(rows, 2 * have[0], 8),
            have[1] if have[1] >= columns else columns if self.states else max(columns, 2 * have[1], 8),
        )
        new = empty(stream, shape, self._device)
        enqueue(stream, "a new page table", lambda: new.fill_(ABSENT))
        self.tensor, self._shape = new, shape
        self._made = stream.record()
        self._known = {stream}
        for row in range(len(self.written)):  # every row is written anew when a step next asks for it
            self.written[row] = self.filled[row] = 0


def empty(stream: Stream, shape: tuple[int, int], device: str) -> Tensor:
    """Make an int32 tensor, which is to be filled on ``stream``."""
    import torch

    with stream.current():
        return torch.empty(shape, dtype=torch.int32, device=device)


def put(tensor: Tensor, at: array[int], values: array[int]) -> None:
    """Write ``values`` into a table, counted through all rows: at these places."""
    import torch

    def sent(data: array[int], dtype: torch.dtype) -> Tensor:
        here = torch.frombuffer(bytearray(data), dtype=dtype)
        if tensor.device.type == "cuda":
            here = here.pin_memory()  # a copy from any other memory would wait for the device
        return here.to(tensor.device, non_blocking=True)

    tensor.view(-1).index_copy_(0, sent(at, torch.int64), sent(values, torch.int32))


def gather(tensor: Tensor, rows: list[int], out: Tensor) -> None:
    """Copy rows of a table to ``out``. The row of a sequence that has ended (-1) is all *absent*."""
    import torch

    if tensor.numel():
        torch.index_select(tensor, 0, index_of([max(row, 0) for row in rows], [tensor]), out=out)
    for i, row in enumerate(rows):
        if row < 0:
            out[i].fill_(ABSENT)
