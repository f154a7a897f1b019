"""Composition: the plain data of what a cache is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ..storage import Fingerprint
from .admission import AdmissionPolicy
from .hookspecs import HOT_HOOKS
from .identity import Identity
from .manifest import Layout, Manifest, TierManifest, Unit
from .policy import EvictionPolicy
from .reach import Reach

Hook = Callable[..., Any]


@attrs.frozen
class Part:
    """One component of a composition, with the numbers that follow from its manifest and reach.

    ``page_tokens`` is the number of tokens of one pool page, 0 for state slots. ``capacity`` counts pool pages or state
    slots. ``admission`` says which of its states the tree takes; it is None for pages.
    """

    name: str
    component: Any
    manifest: Manifest
    reach: Reach
    unit: Unit
    page_tokens: int
    capacity: int
    hooks: Hooks
    origin: str = ""
    admission: AdmissionPolicy | None = None
    running: int = 0
    """The part of the capacity that only running states use, where cached states are stored in another form."""

    def __str__(self) -> str:
        return f"component {self.name!r} ({self.origin})"

    def fingerprint(self, manifest: Manifest, entries: int, page: int, identity: Identity) -> Fingerprint:
        """Return everything beside the tokens that decides what the component's records mean.

        ``manifest`` and ``entries`` are those of the pool that the content lies in: states may rest in another form
        than the one in which they run. ``page``: tokens of one tree page.
        """
        component, buffers = type(self.component), manifest.buffers
        return Fingerprint(
            **identity.facts,  # type: ignore[arg-type]
            dtype=",".join(buffer.dtype for buffer in buffers),
            page_size=self.page_tokens or page,
            plugin=f"{component.__module__}.{component.__qualname__}",
            plugin_version=str(self.manifest.version),
            layout=f"record of {', '.join(buffer.name for buffer in buffers)}",
            shapes=[
                (f"{buffer.name} of layers {','.join(map(str, buffer.layers))}", (*buffer.shape, entries))
                for buffer in buffers
            ],
            layers=sorted({layer for buffer in buffers for layer in buffer.layers}),
            shards=identity.shards if self.manifest.placement == "sharded" else {},
        )


@attrs.frozen
class Composition:
    """The plan of a cache. ``page`` is the tokens of one tree page; every boundary is a multiple of it.

    ``sizing`` explains in words why the pools have their sizes. ``warnings`` are known problems of the model. ``lent``:
    an engine hands out the slots of the pools, and lends them.
    """

    name: str
    parts: tuple[Part, ...]
    page: int
    lookahead: int
    max_rewind: int
    device: str
    layout: Layout
    policy: EvictionPolicy
    debug: bool
    sizing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tier: TierPart | None = None
    lent: bool = False


@attrs.frozen
class TierPart:
    """The tier of a composition. ``capacity`` counts pages or states by component; components that the tier does not
    hold are left out.
    """

    name: str
    component: Any
    manifest: TierManifest
    capacity: Mapping[str, int]
    hooks: Hooks
    origin: str = ""
    sizing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"tier {self.name!r} ({self.origin})"


@attrs.frozen(these={name: attrs.field(default=None) for name in HOT_HOOKS})
class Hooks:
    """One component's hooks, by the names of ``ComponentSpecs``. None: not overridden, the derived default holds."""

    if TYPE_CHECKING:

        def __init__(self, **bound: Hook) -> None: ...

        def __getattr__(self, name: str) -> Hook | None: ...

    @property
    def overridden(self) -> tuple[str, ...]:
        """The names of the hooks that the component overrides."""
        return tuple(name for name in HOT_HOOKS if getattr(self, name) is not None)
