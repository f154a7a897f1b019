"""Pairs: what a sequence holds, component by component, for all that is not a request's usual way."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Cache
    from .lane_point import PointLane
    from .lease import Hold
    from .states import StateHolding

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
