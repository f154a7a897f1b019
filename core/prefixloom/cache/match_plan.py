"""Match plans: where a prompt can resume, as a caller sees it. No node is shown, and nothing can be changed."""

from __future__ import annotations

from array import array

import attrs

from ..contract.reach import Interval
from ..errors import ProtocolError
from ..insight.explanation import explain
from ..operations.match import candidates, current, goes_on, wanted_at
from ..operations.state import Core, Match


@attrs.frozen(eq=False, repr=False)
class MatchPlan:
    """Where a prefix can resume. It holds true until something is lost (``stale``), and protects nothing.

    ``ready``   tokens whose every component is usable on the device
    ``walked``  tokens that the tree's keys agree with, whatever is still held there
    ``goes_on``  whether cached keys go on past ``walked``: the prompt parts from them there, or ends before they do
    ``branch``  a boundary deeper than ``ready`` where page components could resume but a boundary component has
                nothing: worth a checkpoint while recomputing; None if there is none
    ``limited_by``  the component that kept ``ready`` from being longer; None if the keys did
    ``restorable``  tokens whose every component is on the device or on a tier below: ``Sequence.restore`` brings them
                    back. ``ready`` if that is not worth a load
    """

    _core: Core
    _match: Match

    @property
    def core(self) -> Core:
        """What the cache has behind it: for debug tools and tests, and no part of the public interface."""
        return self._core

    @property
    def match(self) -> Match:
        """What was asked and found: for debug tools and tests, and no part of the public interface."""
        return self._match

    def match_for(self, core: Core) -> Match:
        """Return what was found, for the cache of ``core``; refuse another cache's plan.

        It is for the cache's own operations, and no part of the public interface.
        """
        if self._core is not core:
            raise ProtocolError(f"{self!r} was not made by this cache")
        return self._match

    @property
    def namespace(self) -> str:
        return self._match.namespace

    @property
    def ready(self) -> int:
        return self._match.ready

    @property
    def walked(self) -> int:
        return self._match.walked

    @property
    def goes_on(self) -> bool:
        self._core.check_whole()
        return goes_on(self._core, self._match)

    @property
    def branch(self) -> int | None:
        return self._match.branch

    @property
    def limited_by(self) -> str | None:
        return self._match.limited_by

    @property
    def restorable(self) -> int:
        return self._match.ready if self._core.below is None else self._match.restorable

    @property
    def key_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._match.count

    @property
    def stale(self) -> bool:
        """Whether something was lost since the plan was made."""
        return self._match.epoch != self._core.index.epoch

    @property
    def need(self) -> dict[str, int]:
        """Slots that opening a sequence here takes at once, per component."""
        self._core.check_whole()
        return {lane.name: count for lane, count in wanted_at(self._core, self._match)}

    @property
    def why(self) -> str:
        """Why the hit is no longer, in words: an explanation without a history."""
        self._core.check_whole()
        return " ".join(explain(self._core, current(self._core, self._match), None, closely=True).sentences)

    def pages(self, component: str) -> array[int]:
        """Return the page numbers of the matched prefix by position, -1 where absent. Only a lease keeps them true."""
        self._check_current()
        lane = self._core.shape.lane(component)
        return array("i", lane.row(self._match.node, self.ready) if self.ready else b"")

    def candidates(self) -> tuple[Interval, ...]:
        """Return all boundaries from which every component can resume, ascending, as closed runs one page apart.

        Computed on demand. 0 is always among them. A stale plan is refused: its candidates may be gone.
        """
        self._check_current()
        return candidates(self._core, self._match)

    def _check_current(self) -> None:
        self._core.check_whole()
        if self.stale:
            raise ProtocolError("this plan is stale: data was evicted since it was made; match again")

    def __repr__(self) -> str:
        limited = f", limited by {self.limited_by}" if self.limited_by else ""
        return f"<MatchPlan {self.ready} of {self.key_tokens} tokens{limited}{', stale' if self.stale else ''}>"
