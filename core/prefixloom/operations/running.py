"""Pairs: what a sequence holds, component by component, for all that is not a request's usual way.

Refusals: what a sequence may not be asked for as it stands, and why.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..tree.holdings import StateHolding
    from ..tree.state_lane import PointLane
    from .lease import Hold

    Each = Many[tuple[Any, Any]]


class Pairs:
    """(lane, holding) of a sequence's components, and which of them."""

    __slots__ = ()

    _cache: Cache
    _lease: Hold

    @property
    def _pairs(self) -> Each:
        """(lane, holding) of every component, those with page cells first."""
        return self._lease.pairs(self._cache)

    @property
    def _shared(self) -> Each:
        """Those that publish."""
        return [pair for pair in self._pairs if pair[0].shared]

    @property
    def _paged(self) -> Each:
        """Those with page cells; none once all has been handed over."""
        held = self._lease.held
        return [(lane, held[lane.index]) for lane in self._cache._page_lanes] if held else ()

    @property
    def _states(self) -> Many[tuple[PointLane, StateHolding]]:
        """Those with boundary cells; none once all has been handed over, which a step may live to see."""
        held = self._lease.held
        return [(lane, held[lane.index]) for lane in self._cache._point_lanes] if held else ()

    def _keep_states(self) -> None:
        """Not to be published: the running states, which stand for nothing while layers may write them."""
        for _, holding in self._states:
            holding.ready = False


def why_ended(sequence: Sequence) -> ProtocolError:
    """The error of one that may not be used any more."""
    if sequence._lease.failed is not None:
        return ProtocolError(
            f"{sequence!r} ended when a step or copy failed that it was in or had read from, or its publication did: "
            f"open it again"
        )
    if sequence._lease._flushes != sequence._cache._flushes:
        return ProtocolError(f"{sequence!r} was made before the cache was flushed: open it again")
    return ProtocolError(f"{sequence!r} is closed")


def check_states(sequence: Sequence) -> None:
    """Refuse to build on a running state that is not there."""
    if sequence._lost:
        raise ProtocolError(
            f"{sequence!r}: a step that failed may have written half a state of component "
            f"{sequence._states[0][0].name!r}. Abort the sequence and open it again; what it published is still there"
        )
    if sequence._fills:
        raise ProtocolError(
            f"{sequence!r} has ops that have not run: commit through cache.step(...), or call sequence.fill() first"
        )
