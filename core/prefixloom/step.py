"""Steps: one forward pass over some sequences, and the ops that must run before its layers.

The scheduler records, the forward stream runs: the caller opens a step, calls ``run_ops`` where its layers run, and the
end of the ``with`` block commits what was computed. Ops run exactly once; a draft step runs none and commits nothing; a
step that ends in an exception commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .errors import ProtocolError
from .lease import release_part
from .values import Op, WalkView

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane
    from .sequence import Sequence

CLEAR = -1


class Fill:
    """A state slot of a running sequence that must get its content: a copy of ``source``, or zeros (``CLEAR``)."""

    __slots__ = ("holding", "lane", "source")

    def __init__(self, lane: Lane, holding: Any, source: int) -> None:
        self.lane = lane
        self.holding = holding
        self.source = source

    def op(self) -> Op:
        dst = (self.holding.slot,)
        if self.source == CLEAR:
            return Op("clear", self.lane.name, dst=dst)
        return Op("copy", self.lane.name, dst=dst, src=(self.source,))


class Step:
    """The program of one forward pass. Made by ``cache.step``; a context manager; single use."""

    __slots__ = (
        "_cache", "_claimed", "_deferred", "_ends", "_fills", "_prepared", "_ran", "_sequences", "_starts", "_state",
        "role",
    )  # fmt: skip

    def __init__(self, cache: Cache, sequences: Many[Sequence], role: Literal["target", "draft"]) -> None:
        self._cache = cache
        self._sequences = tuple(sequences)
        self._ends = [sequence.reserved for sequence in self._sequences]
        self._starts: list[int] = []
        self.role = role
        self._ran = self._prepared = False
        self._state = "new"
        self._fills: tuple[tuple[Sequence, Fill], ...] = ()
        self._claimed: tuple[tuple[Sequence, Op], ...] = ()
        self._deferred: tuple[Op, ...] = ()
        if role == "target":
            self._fills = tuple([(sequence, fill) for sequence in self._sequences for fill in sequence._fills])
            if cache._match_hooks:
                self._claimed = tuple((sequence, op) for sequence in self._sequences for op in sequence._claimed_ops)
            if cache._step_hooks:
                self._deferred = self._ask_deferred()

    def _ask_deferred(self) -> tuple[Op, ...]:
        cache = self._cache
        ops: list[Op] = []
        for lane in cache._lanes:
            hook = lane.hooks.deferred_forward_ops
            if hook is not None:
                batch = tuple(
                    WalkView(s.namespace, s.committed, s.named, s.reserved, s.published) for s in self._sequences
                )
                more = cache._ask(lane, "deferred_forward_ops", tuple, hook, batch) or ()
                ops.extend(cache._check_ops(lane, "deferred_forward_ops", more))
        return tuple(ops)

    @property
    def ops(self) -> tuple[Op, ...]:
        """What ``run_ops`` runs, in order: the derived fills, then the plugins' own."""
        return (*(fill.op() for _, fill in self._fills), *(op for _, op in self._claimed), *self._deferred)

    def run_ops(self, stream: Any = None) -> None:
        """Run the ops, before the layers that read their slots. A second call is refused; a draft step runs none."""
        if self._state != "open":
            raise ProtocolError("run_ops belongs inside of the step's with block")
        if self._ran:
            raise ProtocolError("the ops of this step have run already; a forward split by layers runs them once")
        cache = self._cache
        if cache._guarded:
            cache._enter()
        self._ran = True
        for sequence, fill in self._fills:
            fill_slot(cache, sequence, fill)
        for sequence, op in self._claimed:
            if sequence.open and op in sequence._claimed_ops:  # another step may have run it
                sequence._claimed_ops.remove(op)
                cache._run_op(op, stream)
        for op in self._deferred:
            cache._run_op(op, stream)
        self._prepared = True
        if cache._debug is not None:
            cache._leave("run_ops")

    def table(self, component: str) -> Any:
        """Page numbers of each sequence as an int32 tensor (sequences, longest), -1 where a page is absent.

        For a boundary component: the running slots, one per sequence.
        """
        import torch

        rows = [torch.tensor(sequence.pages(component), dtype=torch.int32) for sequence in self._sequences]
        if not rows:
            return torch.empty((0, 0), dtype=torch.int32)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)

    def __enter__(self) -> Step:
        if self._state != "new":
            raise ProtocolError("a step is used once; ask the cache for a new one")
        self._state = "open"
        if self.role == "target":
            self._begin()
        return self

    def _begin(self) -> None:
        """The layers of this step go on from where the steps before it end, and write the running states."""
        for sequence, end in zip(self._sequences, self._ends, strict=True):
            start = sequence._planned
            if start < sequence.committed or not sequence._steps:
                start = sequence.committed
            self._starts.append(start)
            if end > start:
                sequence._planned = end
            sequence._steps += 1
            for _, holding in sequence._states:
                holding.writing += 1

    def _end(self) -> None:
        for sequence in self._sequences:
            sequence._steps -= 1
            for _, holding in sequence._states:
                holding.writing -= 1

    def _lost(self) -> None:
        """The step failed: if its layers may have begun, what they wrote of the running states is nobody's."""
        if not self._prepared and (self._fills or self._claimed or self._deferred):
            return
        for sequence, start, end in zip(self._sequences, self._starts, self._ends, strict=True):
            if end > start:
                for _, holding in sequence._states:
                    holding.ready = False
                    holding.lost = True
                    holding.steps_from = -1  # the states of single tokens were written over, too

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._state = "done"
        if self.role == "draft":
            return
        self._end()
        if kind is not None:
            self._lost()
            return
        if not self._ran and (self._fills or self._claimed or self._deferred):
            raise ProtocolError("this step has ops that were not run: call step.run_ops() before the layers")
        done = []
        for sequence, start, end in zip(self._sequences, self._starts, self._ends, strict=True):
            if not sequence.open:
                continue
            if sequence.committed < start:
                raise ProtocolError(
                    f"{sequence!r}: this step computed from {start} on, and the step before it failed or has not ended"
                )
            sequence._committable()
            done.append((sequence, max(sequence.committed, min(end, sequence.reserved))))
        for sequence, upto in done:  # all or none: what was reserved since the step was made is the next one's
            sequence._commit(upto)
        if self._cache._debug is not None:
            self._cache._leave("step")


def fill_slot(cache: Cache, sequence: Sequence, fill: Fill) -> None:
    """Give a state slot its content, and let go of the source."""
    lease = sequence._lease
    if lease._cache is None or fill not in sequence._fills:  # aborted between planning and running
        return
    lane, holding = fill.lane, fill.holding
    if fill.source == CLEAR:
        lane.pool.clear((holding.slot,))
    else:
        lane.pool.copy((fill.source,), (holding.slot,))
    holding.ready = True
    sequence._fills.remove(fill)
    if lease._records[lane.index] is not None:
        release_part(cache, lease, lane)
