"""Pages: what one layer keeps of every token, in the pages of a pool.

New entries are written into the pool. Attention gets the past entries and the new ones, gathered from the pool; they
equal, bit for bit, what transformers' own cache layer would return.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from prefixloom import CompositionError, ProtocolError

from ..contract.memory import LayerMemory
from .refusals import RECOMPOSE
from .rows import Rows, called_outside_pass


class Pages:
    """Some buffers of one layer.

    ``names``  the buffers, in the order in which the model's code passes their content
    ``reads``  how many tokens before the new ones the layer may read; 0: all
    """

    def __init__(self, layer: int, memory: LayerMemory, names: tuple[str, ...], reads: int) -> None:
        self.layer = layer
        self.memory = memory
        self.names = names
        self.reads = reads
        self.seen = 0
        """How many tokens the layer has. Those of a running pass count once the layer has been called."""
        self._rows: Rows | None = None

    def begin(self, rows: Rows) -> None:
        self._rows = rows
        self.seen = rows.past_count

    def end(self) -> None:
        self._rows = None

    def past_positions(self) -> Tensor | None:
        """Return the positions of the entries before the new ones, (rows, past); None if there are none."""
        if self._rows is None:
            raise called_outside_pass(self.layer)
        return self._rows.past_positions() if self._rows.past_count else None

    def extend(self, *new: Tensor) -> list[Tensor]:
        """Write new entries, each (rows, heads, count, width); return the readable past with the new ones after it."""
        rows = self._rows
        if rows is None:
            raise called_outside_pass(self.layer)
        rows.batch.gate(self.layer)
        past = min(rows.past_count, self.reads) if self.reads else rows.past_count
        out = [self._extended(name, entries, rows, past) for name, entries in zip(self.names, new, strict=True)]
        self.seen = rows.past_count + rows.count
        return out

    def _extended(self, name: str, new: Tensor, rows: Rows, past: int) -> Tensor:
        pool = self.memory.rows[name]
        self._check(name, new, pool, rows)
        batch, heads, count, _ = new.shape
        entries = new.transpose(1, 2).reshape(batch * count, *pool.shape[2:])
        if rows.uneven:
            entries = entries.index_select(0, rows.new)
        _write(pool, rows.fresh(self.memory, past + count), entries)
        if not past and not rows.uneven:
            return new.contiguous()
        return _read(pool, rows.readable(self.memory, past + count), heads, rows.by_head)

    def _check(self, name: str, new: Tensor, pool: Tensor, rows: Rows) -> None:
        batch, heads, count, width = new.shape
        if (batch, count) != (len(rows), rows.count):
            raise ProtocolError(
                f"layer {self.layer} was given {batch} rows of {count} tokens, in a pass over {len(rows)} rows of "
                f"{rows.count}"
            )
        shape = tuple(pool.shape[2:])
        if new.dtype != pool.dtype or shape not in ((heads, width), (heads * width,)):
            raise CompositionError(
                f"layer {self.layer} writes {name!r} as {heads} x {width} in {new.dtype}, and component "
                f"{self.memory.component!r} keeps {' x '.join(map(str, shape))} in {pool.dtype}. {RECOMPOSE}"
            )


def _write(pool: Tensor, at: Tensor, entries: Tensor) -> None:
    """Write entries at these indices into all pages laid end to end; a page-first pool has no such flat view."""
    if pool.is_contiguous():
        pool.flatten(0, 1).index_copy_(0, at, entries)
    else:
        pool.index_put_((at // pool.shape[1], at % pool.shape[1]), entries)


def _read(pool: Tensor, at: Tensor, heads: int, by_head: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Read the entries ``at`` (rows, columns), counted as in ``_write``: (rows, heads, columns, width), contiguous.

    ``by_head(at, heads)`` are the indices of their heads; so they are copied once, and come out in the order of models.
    """
    rows, columns = at.shape
    if pool.is_contiguous():
        return (
            pool.view(-1, pool[0, 0].numel() // heads)
            .index_select(0, by_head(at, heads))
            .view(rows, heads, columns, -1)
        )
    found = pool[at // pool.shape[1], at % pool.shape[1]]
    return found.view(rows, columns, heads, -1).transpose(1, 2).contiguous()
