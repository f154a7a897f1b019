"""States: what a recurrent layer keeps of a whole prefix, in the state slots of a pool.

transformers' code for these layers reads a state, or hands a new one over to be copied, or writes it in place. One row
on a CPU gets a view of its slot, so that all this happens in the pool. Several rows, or a device whose memory is not
read back to learn the slot's number, get a copy, which is written back at the end of the pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefixloom import CompositionError

from ..binding import LayerMemory
from .refusals import RECOMPOSE
from .rows import Rows, outside

CONV, RECURRENT = "conv", "recurrent"


class States:
    """The conv state of one layer, its recurrent one, or both. ``owner`` is transformers' cache layer."""

    def __init__(self, layer: int, memory: LayerMemory, owner: Any) -> None:
        self.layer = layer
        self.memory = memory
        self._held: dict[str, dict[int, Tensor | None]] = {CONV: owner.conv_states, RECURRENT: owner.recurrent_states}
        self._owner = owner
        self._rows: Rows | None = None
        self._copied: Tensor | None = None
        self.entered = False
        owner.is_conv_states_initialized[0] = CONV in memory.rows
        owner.is_recurrent_states_initialized[0] = RECURRENT in memory.rows
        if CONV in memory.rows:
            owner.conv_kernel_size[0] = memory.rows[CONV].shape[-1]

    def begin(self, rows: Rows) -> None:
        """Whether there is a state is known now; it is read when the layer is reached."""
        self._rows = rows
        self._owner.has_previous_state[0] = rows.past_count > 0

    def enter(self) -> None:
        """The layer is reached, and asks for its states or writes them; the first time in a pass they are fetched."""
        if self.entered:
            return
        rows = self._rows
        if rows is None:
            raise outside(self.layer)
        rows.batch.gate(self.layer)
        self.entered = True
        slots = rows.batch.tables[self.memory.component][:, 0]
        in_place = len(rows) == 1 and slots.device.type == "cpu"
        index = slots.long()
        self._copied = None if in_place else index
        for name, pool in self.memory.rows.items():
            if in_place:
                slot = int(index)
                self._held[name][0] = pool[slot : slot + 1]
            else:
                self._held[name][0] = pool.index_select(0, index)

    def end(self) -> None:
        """Every layer has run: what was copied goes back."""
        for name, pool in self.memory.rows.items():
            held = self._held[name][0]
            if held is not None and self._copied is not None:
                pool.index_copy_(0, self._copied, held)
            self._held[name][0] = None
        self._copied = self._rows = None
        self.entered = False

    def check(self, name: str, new: Tensor) -> None:
        """The first state of a sequence has the dtype in which the model's code keeps it from then on."""
        pool = self.memory.rows.get(name)
        if pool is None:
            raise CompositionError(
                f"layer {self.layer} has a {name} state, and component {self.memory.component!r} keeps none for it. "
                f"{RECOMPOSE}"
            )
        shape, kept = tuple(new.shape[1:]), tuple(pool.shape[1:])
        if name == CONV:  # handed over as long as the pass; the last of it is kept
            shape, kept = shape[:-1], kept[:-1]
        starts = self._rows is not None and not self._rows.past_count
        if shape != kept or (starts and new.dtype != pool.dtype):
            raise CompositionError(
                f"layer {self.layer} has a {name} state of {shape} in {new.dtype}, and component "
                f"{self.memory.component!r} keeps {kept} in {pool.dtype}. {RECOMPOSE}"
            )
