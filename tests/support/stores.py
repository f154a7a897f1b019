"""Makers of caches over a host tier with a store behind it, and of stores that hold calls back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from prefixloom import TierManifest
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.tiers.consensus import Consensus, LocalConsensus
from prefixloom.tiers.restore import Restored
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from tests.support.helpers import cache_of, every_reach, part
from tests.support.tiers import serve, wrong

Composed = tuple[Cache, HostTier]


def parts(names: tuple[str, ...]) -> list[Any]:
    return [part(name, every_reach()[name]) for name in names]


def composed(
    *components: Any, store: Any = None, model: str = "m", page: int = 4, host: Any = 4096, fetch: str = "wait",
    layout: str = "layer_first", limits: GuardLimits | None = None, keep: str = "through",
    consensus: Consensus | None = None, **options: Any,
) -> Composed:  # fmt: skip
    """A cache over a host tier, with ``store`` attached."""
    tier = HostTier(
        TierManifest(capacity=host, layout=layout), identity={"model": model, "weights": "1"}, fetch=fetch,  # type: ignore[arg-type]
        limits=limits or GuardLimits(deadline=5.0), keep=keep, consensus=consensus or LocalConsensus(),  # type: ignore[arg-type]
    )  # fmt: skip
    cache = cache_of(*(components or parts(("path", "window", "point"))), tier, page=page, **options)  # type: ignore[arg-type]
    if store is not None:
        tier.attach(store)
        cache.poll()
    return cache, tier


def until(cache: Cache, done: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it never came"
        cache.poll()
        time.sleep(0.0005)


def idle(cache: Cache) -> None:
    """All that is to be stored has been."""
    store = behind(cache)
    writes = store.writes
    until(cache, lambda: not (writes.unseen or writes.queue or writes.calls or store.store.follows))


def behind(cache: Cache) -> Any:
    assert cache.core.below is not None
    return cache.core.below


def restored(cache: Cache, sequence: Sequence) -> Restored:
    told = sequence.restore()
    until(cache, lambda: told.over)
    return told


def read_back(cache: Cache, tokens: list[int], **options: Any) -> int:
    """Restore, and see that what is there is what was computed; up to where."""
    with cache.open(tokens, leave=1, **options) as sequence:
        restored(cache, sequence)
        with cache.step([sequence]) as step:
            step.run_ops()
        assert wrong(cache, sequence, tokens) == []
        return sequence.ready


TOKENS = list(range(40))


def stocked(
    *components: Any, tokens: list[int] = TOKENS, kind: type[MemoryBackend] = MemoryBackend, **options: Any
) -> Any:
    """A store that has ``tokens``, and forgets the process that wrote it."""
    store = kind(capacity=1 << 24)
    cache, tier = composed(*components, store=store, **options)
    tier.fetch_at_least = 1 << 30  # it writes alone: a late look would read what was stored meanwhile, for nobody
    serve(cache, tokens)
    idle(cache)
    return store


class Gated(MemoryBackend):
    """Holds every call of the kinds in ``holds`` until the gate is open."""

    holds = ("get", "put", "exists")

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()

    def _pass(self, kind: str) -> None:
        if kind in self.holds and not self.gate.is_set():
            self.held.set()
            assert self.gate.wait(20)

    def get(self, *given: Any) -> Any:
        self._pass("get")
        return super().get(*given)

    def put(self, *given: Any) -> Any:
        self._pass("put")
        return super().put(*given)

    def exists(self, *given: Any) -> Any:
        self._pass("exists")
        return super().exists(*given)


def write_out(cache: Cache, seconds: float = 20) -> None:
    """Poll until the store has answered for all that was to be written."""
    until = time.monotonic() + seconds
    cache.poll()
    while cache.stats().tier.to_store:  # type: ignore[union-attr]
        assert time.monotonic() < until, cache.stats()
        time.sleep(0.005)
        cache.poll()
