"""The world of ``schedules`` over a host tier whose copies run piece by piece on streams of their own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import lru_cache
from typing import Any

import prefixloom.tiers.host_copies
from prefixloom import Buffer, Component, Manifest, TierManifest
from prefixloom.contract.composition import Composition
from prefixloom.device.pool import Pool
from prefixloom.testing.inside.backdoor import put_transfer_stream, tier_lanes
from prefixloom.testing.schedules.explore import ScheduleRun as Run
from prefixloom.testing.schedules.explore import touch
from prefixloom_hicache import HostTier
from tests.support.helpers import cache_of
from tests.support.schedules import NAMES, PAGE, REACHES, Injected, World

whole = prefixloom.tiers.host_copies.copy_between


@lru_cache
def tiered(kinds: str, tokens: int, slots: int, write: Any, host: int) -> Composition:
    parts = [Component(NAMES[kind], Manifest([Buffer("sum", (1,), "int64")]), REACHES[kind]) for kind in kinds]
    capacity = {NAMES[kind]: host if kind == "M" else host * PAGE for kind in kinds}
    tier = HostTier(TierManifest(capacity=capacity, write=write, hits=1))
    return cache_of(*parts, tier, page=PAGE, tokens=tokens, slots=slots).composition  # type: ignore[arg-type]


class TieredWorld(World):
    """``fails``: of the copies that are made while schedules run, these raise, by their number."""

    def __init__(
        self,
        run: Run,
        kinds: str,
        *streams: str,
        write: str = "back",
        host: int = 16,
        fails: Many[int] = (),
        **more: Any,
    ) -> None:
        self.write, self.host = write, host
        self.copies = 0
        self.fails: Many[int] = ()
        super().__init__(run, kinds, *streams, **more)
        self.ways = {way: run.stream(way) for way in ("down", "up")}
        for way, stream in self.ways.items():
            put_transfer_stream(self.cache, way, stream)
        prefixloom.tiers.host_copies.copy_between = self.copy  # type: ignore[assignment]
        run.afterwards(lambda: setattr(prefixloom.tiers.host_copies, "copy_between", whole))
        self._later = fails

    def composition(self, kinds: str, tokens: int, slots: int, every: int, rewind: int) -> Composition:  # type: ignore[override]
        assert not every and not rewind
        return tiered(kinds, tokens, slots, self.write, self.host)

    def copy(self, source: Pool, src: Many[int], target: Pool, dst: Many[int]) -> None:
        touch([("slot", source.name, slot) for slot in src], [("slot", target.name, slot) for slot in dst])
        self.copies += 1
        if self.copies in self.fails:
            whole(source, src[: len(src) // 2], target, dst[: len(src) // 2])
            raise Injected
        whole(source, src, target, dst)

    def below(self, *tokens: int) -> None:
        """Leave what was served on the host alone, before anything is explored."""
        self.drain()
        self.cache.evict(dict.fromkeys(self.names, 1000))
        self.drain()
        if tokens:
            assert (self.cache.peek(tokens), self.cache.match(tokens).restorable) == (0, len(tokens))

    def go(self) -> None:
        """Let copies fail from here on."""
        self.copies, self.fails = 0, self._later

    def drain(self) -> None:
        everything = [*self.streams, *self.ways.values()]
        while True:
            while ready := [stream for stream in everything if stream.ready]:
                ready[0].advance()
            self.cache.poll()
            if not any(stream.pending for stream in everything):
                return

    # ------------------------------------------------------------ afterwards
    def check(self) -> None:
        for runner in self.runners:
            runner.sequence.close()
        self.drain()
        self.check_host()
        super().check()
        for lane in tier_lanes(self.cache):
            assert lane.pool.at_hand == lane.pool.capacity, f"{lane.pool.name}: slots are missing after the flush"

    def check_streams(self) -> None:
        for stream in self.ways.values():
            for _, error in stream.failures:
                if not (isinstance(error, Injected) and self.may_fail):
                    raise AssertionError(f"a copy on {stream!r} failed") from error
        super().check_streams()

    def check_host(self) -> None:
        """Check that what the host holds is what its keys say, too."""
        for _, tokens, node, held in self.edges():
            for kind, lane in zip(self.kinds, tier_lanes(self.cache), strict=True):
                cell = node.cells[lane.index]
                if cell is None:
                    continue
                buffer = lane.pool.buffers["sum"][0].flatten(1)
                if kind == "M":
                    assert buffer[lane.slots_of(cell)[0]].tolist() == [held[kind][len(tokens)]], (
                        f"{lane.pool.name}: another state"
                    )
                    continue
                for place, page in enumerate(lane.edge(node)):
                    at = node.start + place * PAGE
                    if page >= 0:
                        found = buffer[page].tolist()
                        assert found == held[kind][at : at + PAGE], (
                            f"{lane.pool.name}: page {page} holds something else"
                        )
