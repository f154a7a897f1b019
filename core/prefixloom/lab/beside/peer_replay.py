"""Peer replay: serves a trace with a peer's cache manager, under the same service as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from ...contract.composition import Composition
from ...errors import CapacityError
from ..outcome import PoolUse, ReplayOutcome
from ..replay import STRIDE, Active, PoolFigures, Serving
from ..service import Service
from .peer import PeerCache, memory_kinds


class PeerReplay(Serving):
    """One replay over a peer's cache. Answers take memory while they run, and are not published.

    ``page``  what the ideal is rounded to: that of the sides that it is compared with
    """

    def __init__(
        self,
        peer: PeerCache,
        composition: Composition,
        *,
        name: str,
        service: Service,
        told: Callable[[int, float], None] | None = None,
        trace: str = "trace",
    ) -> None:
        super().__init__(
            page=composition.page, grain=peer.grain, chunk=service.chunk, stride=STRIDE, service=service, told=told,
            names=(trace, composition.name, name),
        )  # fmt: skip
        self._peer = peer
        self._stateful = any(each.kind == "state" for each in memory_kinds(composition))
        self._before = peer.pools()

    def _holds(self, length: int) -> bool:
        return self._peer.holds(length)

    def _admit(self, active: Active, alone: bool) -> bool:
        return self._open(active)

    def _open(self, active: Active) -> bool:
        request = active.request
        if not active.tokens:
            active.tokens = request.prompt.tokens()
        end = request.prompt.count + active.decoded
        try:
            active.sequence, match = self._peer.open(active.tokens, request.namespace, end)
        except CapacityError:
            return False
        if active.hit < 0:
            active.hit, active.restored = match.hit, 0
            active.walked, active.limited_by = match.walked, match.limited_by
        active.launched, active.end = match.hit, end
        return True

    def _compute(self, active: Active) -> None:
        done = self._peer.extend(active.sequence, min(self._chunk, active.end - active.launched))
        active.launched += done
        active.computed += done

    def _decode(self, active: Active, count: int) -> None:
        self._peer.decode(active.sequence, count)
        active.launched += count
        active.decoded += count

    def _pools(self) -> Mapping[str, PoolFigures]:
        return self._peer.pools()

    def _states_made(self, components: Mapping[str, PoolUse]) -> int:
        return self._peer.states()

    def outcome(self) -> ReplayOutcome:
        return attrs.evolve(super().outcome(), notes=tuple(self._peer.sizing))
