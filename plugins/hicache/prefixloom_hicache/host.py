"""The host tier: what the device cannot hold rests in the host's memory, and comes back when a prompt asks for it.

What is kept below the device, and in what form, follows from the components of the composition; this plugin says how
much, when it is copied down, what is worth bringing back, and which store lies behind it. It names no component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from prefixloom import CompositionError, Consensus, LocalConsensus, StorageError, TierManifest
from prefixloom.storage import Backend, BackendType, opened

from .guarded import Guarded, GuardLimits

FETCHES = ("best_effort", "wait", "timeout")
KEEPS = ("through", "selective", "back")


@attrs.define(eq=False)
class HostTier:
    """``HostTier(TierManifest(memory="200GiB"))`` among a profile's components or compose's ``plugins``.

    ``identity``  what a store's records are of: ``model``, and where they apply ``weights`` and ``shards`` (axis ->
                  (rank, of how many)). Needed where a store is attached
    ``keep``      what a store gets: "through": all that comes to the host; "selective": what was hit as often as the
                  manifest says; "back": what the host is about to lose
    ``fetch``     "best_effort": a prompt never waits for the store; "wait": until it has answered; "timeout": no longer
                  than ``fetch_base`` seconds and ``fetch_per_page`` for each page
    ``fetch_at_least``  tokens that a fetch must promise
    ``limits``    deadline, breaker, rate and backlog of the store
    ``consensus`` of the ranks that run one model
    """

    manifest: TierManifest
    name: str = "host"
    identity: Mapping[str, Any] = attrs.field(factory=dict)
    keep: Literal["through", "selective", "back"] = "through"
    fetch: Literal["best_effort", "wait", "timeout"] = attrs.field(default="timeout")
    fetch_at_least: int = 1
    fetch_base: float = 0.1
    fetch_per_page: float = 0.001
    limits: GuardLimits = attrs.field(factory=GuardLimits)
    consensus: Consensus = attrs.field(factory=LocalConsensus)
    store: Guarded | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        for name, allowed in (("fetch", FETCHES), ("keep", KEEPS)):
            if getattr(self, name) not in allowed:
                raise CompositionError(f"{name} must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}")

    @classmethod
    def make(
        cls,
        name: str = "host",
        *,
        memory: int | str | None = None,
        capacity: int | Mapping[str, int] | None = None,
        write: Literal["through", "selective", "back"] = "through",
        hits: int = 2,
        load_at_least: int = 1,
        layout: Literal["layer_first", "page_first"] = "layer_first",
        gates: int = 1,
        overlap: bool = False,
        **options: Any,
    ) -> HostTier:
        """From the options of a profile."""
        manifest = TierManifest(
            memory=memory, capacity=capacity, write=write, hits=hits, load_at_least=load_at_least, layout=layout,
            gates=gates, overlap=overlap,
        )  # fmt: skip
        return cls(manifest, name, **options)

    # ------------------------------------------------------------ a store
    def attach(self, kind: BackendType | Backend, **options: Any) -> None:
        """From the next ``poll()`` on, write to this store and fetch from it. What the host has by then goes there too.

        ``kind`` is an open store, or what opens one with ``options``. While the cache runs.
        """
        if self.store is not None:
            raise StorageError("a store is attached already: detach it first")
        if "model" not in self.identity:
            raise StorageError(
                "a store keeps records for other processes, so it must be known of which model they are: "
                "HostTier(..., identity={'model': ..., 'weights': ...})"
            )
        backend = opened(kind, **options) if isinstance(kind, BackendType) else kind
        self.store = Guarded(backend, self.limits)

    def detach(self) -> None:
        """Let the store go. What it was asked and has not answered is dropped, and counted as such."""
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def patience(self, pages: int) -> float:
        """Seconds that a fetch of so many pages may take, where ``fetch`` is "timeout"."""
        return self.fetch_base + self.fetch_per_page * pages

    def now(self) -> float:
        return self.store.clock.now() if self.store is not None else float("inf")
