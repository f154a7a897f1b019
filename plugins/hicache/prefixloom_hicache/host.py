"""The host tier: it keeps in the host's memory what the device cannot hold, and gives it back when a prompt needs it.

What is kept below the device, and in what form, the core derives from the components of the composition. This plugin
says how much is kept, when it is copied down, what is worth copying back, and which store is behind it. It names no
component and no kind of store.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from prefixloom import (
    ComponentType,
    CompositionError,
    Consensus,
    Identity,
    LocalConsensus,
    StorageError,
    TierManifest,
    hookimpl,
)
from prefixloom.storage import Backend, shown_url

from .guards import Guarded, GuardLimits
from .guards.breaker import at_least

CHOICES = {"fetch": ("best_effort", "wait", "timeout"), "keep": ("through", "selective", "back")}
TYPES = {"manifest": TierManifest, "limits": GuardLimits, "consensus": Consensus}


def _identity(given: object) -> Identity:
    return Identity.of(given)


@attrs.define(eq=False)
class HostTier:
    """A tier of host memory: pass ``HostTier(TierManifest(memory="200GiB"))`` among a profile's components, or in
    compose's ``plugins``.

    ``identity``  what the records of a store belong to: an ``Identity``, or a mapping of its fields. A store needs its
                  ``model`` and ``weights``, and the ``adapters``, ``shards`` and the rest where they apply
    ``keep``      what is written to the store. "through": all that comes to the host; "selective": what was hit as
                  often as the manifest says; "back": what the host is about to evict
    ``fetch``     how long a prompt waits for the store. "best_effort": never; "wait": until the store has answered;
                  "timeout": at most ``fetch_base`` seconds, and ``fetch_per_page`` seconds for each page
    ``fetch_at_least``  the smallest number of tokens that is worth a fetch
    ``limits``    the store's deadline, breaker and backlog
    ``consensus`` how the ranks that run one model agree
    """

    manifest: TierManifest
    name: str = "host"
    identity: Identity = attrs.field(factory=Identity, converter=_identity)
    keep: Literal["through", "selective", "back"] = "through"
    fetch: Literal["best_effort", "wait", "timeout"] = attrs.field(default="timeout")
    fetch_at_least: int = attrs.field(default=1, validator=at_least(0))
    fetch_base: float = attrs.field(default=0.1, validator=at_least(0))
    fetch_per_page: float = attrs.field(default=0.001, validator=at_least(0))
    limits: GuardLimits = attrs.field(factory=GuardLimits)
    consensus: Consensus = attrs.field(factory=LocalConsensus)
    store: Guarded | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise CompositionError(f"{name} must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        for name, kind in TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise CompositionError(f"{name} must be of type {kind.__name__}, got {getattr(self, name)!r}")

    @classmethod
    def make(cls, name: str = "host", **options: Any) -> HostTier:
        """Make a tier from the options of a profile: those of the manifest, and those of this class."""
        of_manifest = attrs.fields_dict(TierManifest).keys() & options.keys()
        return cls(TierManifest(**{each: options.pop(each) for each in of_manifest}), name, **options)

    # ------------------------------------------------------------ the store behind the tier
    def attach(self, store: Backend) -> None:
        """Attach an open store while the cache runs. The tier writes to it and reads from it from the next poll on.

        What the host holds by then is written to the store as well.
        """
        if self.store is not None:
            raise StorageError("a store is attached already: detach it first")
        if isinstance(store, str):
            raise StorageError(f"attach takes an open store: open_store({shown_url(store)!r})")
        if unknown := self.identity.unknown:
            raise StorageError(
                f"a store keeps records for other processes, so the tier must say what they belong to; it does not say "
                f"its {' and '.join(unknown)}: "
                f"HostTier(..., identity={{'model': ..., 'weights': ...}})"
            )
        self.store = Guarded(store, self.limits)

    def detach(self) -> None:
        """Detach and close the store. Calls that it has not answered are dropped, and counted as such."""
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def patience(self, pages: int) -> float:
        """Return the seconds that a fetch of ``pages`` pages may take, where ``fetch`` is "timeout"."""
        return self.fetch_base + self.fetch_per_page * pages

    def now(self) -> float:
        """Return the time of the store's clock, or infinity without a store."""
        return self.store.now() if self.store is not None else float("inf")


prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the tier to the registry."""
    return ComponentType(
        kind="hicache",
        make=HostTier.make,
        summary="a host tier below the device: pools mirrored from every component that shares its data",
    )
