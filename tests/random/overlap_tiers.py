"""The traffic of ``overlap`` over a cache with a host tier: copies down and up run beside the layers, and some fail.

``python -m tests.random.overlap_tiers --steps 10000 --seed 1``
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence as Many
from typing import Any

import prefixloom.tiers.host_copies
from prefixloom.cache.sequence import Sequence
from prefixloom.contract.manifest import TierManifest
from prefixloom.device.pool import Pool
from prefixloom.testing.inside.backdoor import tier_lanes, transfer_streams
from prefixloom_hicache import HostTier
from tests.random.overlap import Injected, Traffic

WRITES = ("through", "back", "selective")


class Tiered(Traffic):
    """``write`` is the tier's policy; ``lame``: so many of its copies fail half-way."""

    def __init__(self, comps: str, seed: int, write: str, *, lame: float = 0.03, **options: Any) -> None:
        rng = random.Random(f"{comps} {seed} {write}")
        self.manifest = TierManifest(
            capacity={c: rng.choice((30, 60)) if c in "MC" else rng.choice((160, 640)) for c in comps},
            write=write,  # type: ignore[arg-type]
            hits=1,
            layout=rng.choice(("layer_first", "page_first")),  # type: ignore[arg-type]
            overlap=rng.random() < 0.7,
        )
        self.lame = lame
        self.dice = rng
        super().__init__(comps, seed, **options)

    def tiers(self) -> list[Any]:
        return [HostTier(self.manifest)]

    def opened(self, sequence: Sequence) -> None:
        ready = sequence.ready
        told = sequence.restore()
        self.counts["restored"] += told.ready > ready
        self.counts["restored less"] += told.ready < told.wanted
        assert told.ready == sequence.ready >= ready

    def copy(self, source: Pool, src: Many[int], target: Pool, dst: Many[int]) -> None:
        if self.dice.random() < self.lame:
            whole(source, src[: len(src) // 2], target, dst[: len(src) // 2])
            self.counts["failed copy"] += 1
            raise Injected("a copy failed")
        time.sleep(2e-4 * self.dice.random())
        whole(source, src, target, dst)

    def run(self, steps: int) -> None:
        prefixloom.tiers.host_copies.copy_between = self.copy  # type: ignore[assignment]
        try:
            super().run(steps)
            for stream in transfer_streams(self.cache).values():
                stream.close()
        finally:
            prefixloom.tiers.host_copies.copy_between = whole

    def quiet(self) -> None:
        super().quiet()
        self.cache.poll()  # copies that waited for a step
        for stream in transfer_streams(self.cache).values():
            stream.record().synchronize()

    def finish(self) -> None:
        self.lame = 0.0
        super().finish()
        for lane in tier_lanes(self.cache):
            assert lane.pool.free == lane.pool.capacity and not lane.in_tree, lane.pool.name


whole = prefixloom.tiers.host_copies.copy_between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compositions", nargs="*", default=["F", "FS", "M", "FM", "FSM", "FSC"])
    parser.add_argument("--no-debug", action="store_true")
    given = parser.parse_args()
    cases = [(comps, write) for comps in given.compositions for write in WRITES]
    for comps, write in cases:
        begun = time.monotonic()
        traffic = Tiered(comps, given.seed, write, debug=not given.no_debug)
        traffic.run(given.steps // len(cases))
        told = ", ".join(f"{what} {count}" for what, count in sorted(traffic.counts.items()))
        print(f"{comps}, {write}, page {traffic.page}, {time.monotonic() - begun:.1f} s: {told}")
    print("no race, no wrong content, nothing left")


if __name__ == "__main__":
    sys.exit(main())
