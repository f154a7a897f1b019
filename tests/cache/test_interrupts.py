"""Ctrl-C at any line of a bare cache: the books of one operation may be half done, and ``flush`` makes it whole."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import Path, Point, PrefixloomError, TierManifest, Window
from prefixloom_hicache import HostTier
from tests.support.helpers import cache_of, part, settle
from tests.support.interrupting import Interrupt

PROMPT = list(range(40))


def traffic(cache: Any, seed: int) -> None:
    """A turn, a second one that hits, one that grows past what is free, an eviction, a lease, and a drop."""
    rng = random.Random(seed)
    for length in (40, 40, 24):
        tokens = [*PROMPT[: rng.randrange(length)], *(rng.randrange(3) for _ in range(length))]
        with cache.open(tokens, namespace=rng.choice(("", "a")), leave=1) as sequence:
            for _ in range(2):
                count = (len(tokens) - sequence.reserved + 1) // 2
                sequence.grow(max(count, 0))
                with cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
            sequence.append([7, 8])
    cache.lease(cache.match(PROMPT)).release()
    cache.evict(8)
    cache.drop_namespace("a")
    cache.pool("path").mint(1).free()
    step = cache.step([cache.open(PROMPT)])
    with step:
        step.run_ops()
    del step
    cache.flush()


def whole(cache: Any) -> None:
    """It serves as a new one does, and no slot is lost."""
    settle(cache)
    for expected in (0, 36):
        with cache.open(PROMPT, leave=1) as sequence:
            assert sequence.ready == expected
            for length in (36, 40):
                sequence.grow(length - sequence.reserved)
                with cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
    settle(cache)


TIERS: dict[str, Callable[[], list[Any]]] = {
    "no tier": list,
    "a tier": lambda: [HostTier(TierManifest(capacity=256))],
    "a tier that copies in a thread": lambda: [HostTier(TierManifest(capacity=256, overlap=True))],
}


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("every", [331, 11])
@pytest.mark.timeout(1800)
def test_a_flush_makes_whole_whatever_an_interrupt_left(every: int, tier: str) -> None:
    def made() -> Any:
        parts = (part("path", Path()), part("window", Window(8)), part("point", Point()))
        return cache_of(*parts, *TIERS[tier](), tokens=96, slots=6)

    def ran(line: int, cache: Any) -> int:
        """How many lines there were."""
        interrupt = Interrupt(line)
        with contextlib.suppress(KeyboardInterrupt, PrefixloomError), interrupt:  # debug mode sees what is half done
            traffic(cache, line)
        return line - interrupt.left

    lines = ran(-1, made())
    assert lines > 1000
    cache = made()
    for line in range(1, lines, every):
        ran(line, cache)
        with contextlib.suppress(PrefixloomError):
            cache.poll()
        cache.flush()
        whole(cache)
        cache.flush()
