"""What a running sequence has of a boundary component: its state, and states beside it. Nothing here knows a tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .pool import NO_SLOT


class Track:
    """A state kept at ``as_of``, not yet published; ``complete`` once the copy that makes it has been enqueued.

    Until then the slot still has the state of ``before``, if it was kept for that (-1: it was not).
    """

    __slots__ = ("as_of", "before", "complete", "slot")

    def __init__(self, slot: int, as_of: int, before: int) -> None:
        self.slot = slot
        self.as_of = as_of
        self.before = before
        self.complete = False


class StateHolding:
    """``slot`` is the running state's, ``as_of`` the boundary that its content stands for.

    ``ready`` says whether it does, to who publishes: until the op that fills the slot has run, the content is not the
    sequence's, and while steps are open, their layers write it. It is False for good after a step that failed, whose
    layers may have written half a state.
    What a sequence has besides where it tracks or rewinds is said below; elsewhere there is nothing of that.
    """

    __slots__ = ("as_of", "ready", "slot")
    accepted: bool = False
    tracks: Any = ()
    steps: tuple[int, ...] = ()
    steps_from: int = -1

    def __init__(self, as_of: int) -> None:
        self.slot = NO_SLOT
        self.as_of = as_of
        self.ready = False

    def slots(self) -> list[int]:
        """All slots that the sequence owns."""
        running = [] if self.slot == NO_SLOT else [self.slot]
        return [*running, *(track.slot for track in self.tracks), *self.steps]


class SteppedHolding(StateHolding):
    """With states beside the running one: ``tracks``, and ``steps``.

    ``steps[i]`` is the state after i + 1 tokens of the last small step, which began at ``steps_from`` (-1: none).
    ``accepted``: the device has put the state after the kept tokens of that step into ``slot``, and how many these are
    is not known here yet. Of what arrived, which ends at ``arrived``, there is no state but that of its end.
    """

    __slots__ = ("accepted", "arrived", "steps", "steps_from", "tracks")

    def __init__(self, as_of: int) -> None:
        super().__init__(as_of)
        self.accepted = False
        self.arrived = 0
        self.tracks: list[Track] = []
        self.steps = ()
        self.steps_from = -1


def go_on(states: Iterable[tuple[Any, StateHolding]]) -> None:
    """More was computed of a sequence: what a device chose in an earlier step of it is past."""
    for _, holding in states:
        if isinstance(holding, SteppedHolding):
            holding.accepted = False
