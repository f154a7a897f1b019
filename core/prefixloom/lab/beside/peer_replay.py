"""Peer replay: serves a trace with a peer's cache manager, under the same service as ours."""

from __future__ import annotations

from collections.abc import Callable

from ...contract.composition import Composition
from ...errors import CapacityError
from ..outcome import PoolUse, ReplayOutcome
from ..replay import STRIDE, Active, Serving
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
            trace=trace,
        )  # fmt: skip
        self._peer, self._composition, self._name = peer, composition, name
        self._stateful = any(each.kind == "state" for each in memory_kinds(composition))
        self._before = dict(peer.uses())

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

    def _sample(self) -> None:
        uses = self._peer.uses()
        self._tally.sampled(
            self._now - (self._first or 0.0),
            {pool.name: uses[pool.name].cached * pool.page_bytes for pool in self._peer.pools},
            {pool.name: uses[pool.name].running * pool.page_bytes for pool in self._peer.pools},
        )

    def outcome(self) -> ReplayOutcome:
        tally, uses = self._tally, self._peer.uses()
        components = {}
        for pool in self._peer.pools:
            use, before = uses[pool.name], self._before[pool.name]
            evicted = use.evicted - before.evicted
            components[pool.name] = PoolUse(
                capacity=pool.capacity, page_tokens=pool.page_tokens, page_bytes=pool.page_bytes, evicted=evicted,
                made=use.cached - before.cached + evicted, stopped=tally.missed[pool.name],
                stops=tally.stops[pool.name], alone=None, peak=tally.peaks.get(pool.name, 0),
            )  # fmt: skip
        return ReplayOutcome(
            trace=self._trace,
            model=self._composition.name,
            policy=self._name,
            page=self._peer.grain,
            components=components,
            requests=tally.requests - tally.refused,
            refused=tally.refused,
            retracted=tally.retracted,
            prompt=tally.prompt,
            output=tally.output,
            hit=tally.hit,
            restored=0,
            computed=tally.computed,
            ideal=tally.ideal,
            missed=dict(tally.missed),
            states_made=self._peer.states(),
            states_used=tally.states_used,
            skipped=0,
            left=dict(tally.left),
            memory=tuple(tally.memory),
            span=self._now - (self._first or 0.0),
            cpu=self._cpu,
            complete=self._complete,
            notes=tuple(self._peer.sizing),
        )
