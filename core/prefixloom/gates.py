"""Gates: a step's layers wait for a load layer by layer, so that the first ones run while the last are still copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ProtocolError

if TYPE_CHECKING:
    from .flight import Work
    from .streams import Stream


class Gates:
    """Of one step: the loads that its stream has not waited for as a whole. ``passed``: up to which layer it has.

    ``missed`` says, once the step has ended, what a layer may have read too early.
    """

    __slots__ = ("_stream", "_works", "missed", "passed")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._works: list[Work] = []
        self.passed = -1
        self.missed = ""

    def add(self, work: Work) -> None:
        if work not in self._works:
            self._works.append(work)

    def open(self, layer: int) -> None:
        """What is enqueued from now on comes after what the loads bring up to ``layer``."""
        for work in self._works:
            for last, event in work.gates:
                if last > self.passed:  # else it has been waited for
                    self._stream.wait(event)
                if last >= layer:
                    break
        self.passed = max(self.passed, layer)

    def check(self) -> None:
        """After the end of the step: refuse that a layer may have read too early."""
        if self.missed:
            raise ProtocolError(self.missed)

    def finish(self) -> None:
        """What comes after the step comes after all of the loads."""
        last = max((work.gates[-1][0] for work in self._works), default=-1)
        if self.passed < last:
            self.missed = (
                f"this step was to pass a gate before each layer, and got to layer {self.passed} of {last}: call "
                f"step.gate(layer) before every layer, or run_ops() without gated"
            )
        self.open(last)
