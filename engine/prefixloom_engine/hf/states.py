"""States: what a recurrent layer keeps of a whole prefix, in the state slots of a pool.

transformers' code for these layers reads a state, passes a new one, or writes it in place. A single row on a CPU gets a
view of its slot, so all of this happens in the pool itself. Several rows get a copy; so does a row on another device,
since a view would need the slot's number on the host. The copy, or the new state that took its place, is written back
when the pass comes to another layer, while the processor's caches still have it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefixloom import CompositionError

from ..contract.memory import LayerMemory
from .refusals import RECOMPOSE
from .rows import Rows, called_outside_pass

CONV, RECURRENT = "conv", "recurrent"


class States:
    """The conv state of one layer, its recurrent state, or both. ``owner``: transformers' cache layer."""

    def __init__(self, layer: int, memory: LayerMemory, owner: Any) -> None:
        self.layer = layer
        self.memory = memory
        self._held: dict[str, dict[int, Tensor | None]] = {CONV: owner.conv_states, RECURRENT: owner.recurrent_states}
        self._owner = owner
        self._rows: Rows | None = None
        self._copied: Tensor | None = None
        self.entered = False
        """Whether the layer has read or written a state in this pass."""
        self._fetched = False
        owner.is_conv_states_initialized[0] = CONV in memory.rows
        owner.is_recurrent_states_initialized[0] = RECURRENT in memory.rows
        if CONV in memory.rows:
            owner.conv_kernel_size[0] = memory.rows[CONV].shape[-1]

    def begin(self, rows: Rows) -> None:
        """Begin a pass: tell transformers' layer whether there is a state. The state itself is fetched in ``enter``."""
        self._rows = rows
        self._owner.has_previous_state[0] = rows.past_count > 0

    def enter(self) -> None:
        """Fetch the states, unless the layer has them. Called whenever the layer reads or writes a state."""
        if self._fetched:
            return
        rows = self._rows
        if rows is None:
            raise called_outside_pass(self.layer)
        rows.batch.gate(self.layer)
        self.entered = self._fetched = True
        index = rows.slots(self.memory)
        in_place = len(rows) == 1 and index.device.type == "cpu"
        self._copied = None if in_place else index
        for name, pool in self.memory.rows.items():
            if in_place:
                slot = int(index)
                self._held[name][0] = pool[slot : slot + 1]
            else:
                self._held[name][0] = pool.index_select(0, index)

    def replace(self, name: str, new: Tensor) -> Tensor:
        """Take a new state in place of the one that the layer has, and return the state that the layer has then."""
        held = self._held[name][0]
        assert held is not None
        if self._copied is None:
            return held.copy_(new)
        new = self._held[name][0] = new.to(held.dtype)
        return new

    def leave(self) -> None:
        """Write copied states back into the pool. Called when the pass comes to another layer, or ends."""
        for name, pool in self.memory.rows.items():
            held = self._held[name][0]
            if held is not None and self._copied is not None:
                pool.index_copy_(0, self._copied, held)
            self._held[name][0] = None
        self._copied = None
        self._fetched = False

    def end(self) -> None:
        """End a pass."""
        self.leave()
        self._rows = None
        self.entered = False

    def check(self, name: str, new: Tensor) -> None:
        """Refuse a new state that does not fit the pool.

        The dtype is checked at position 0 only: the model's code keeps a state in the dtype of the first one.
        """
        pool = self.memory.rows.get(name)
        if pool is None:
            raise CompositionError(
                f"layer {self.layer} has a {name} state, and component {self.memory.component!r} keeps none for it. "
                f"{RECOMPOSE}"
            )
        shape, kept = tuple(new.shape[1:]), tuple(pool.shape[1:])
        if name == CONV:  # passed with all inputs of the pass, of which the last are kept
            shape, kept = shape[:-1], kept[:-1]
        starts = self._rows is not None and not self._rows.past_count
        if shape != kept or (starts and new.dtype != pool.dtype):
            raise CompositionError(
                f"layer {self.layer} has a {name} state of {shape} in {new.dtype}, and component "
                f"{self.memory.component!r} keeps {kept} in {pool.dtype}. {RECOMPOSE}"
            )
