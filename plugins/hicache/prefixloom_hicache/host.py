"""The host tier: what the device cannot hold rests in the host's memory, and comes back when a prompt asks for it.

What is kept below the device, and in what form, follows from the components of the composition; this plugin says how
much, when it is copied down, and what is worth bringing back. It names no component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from prefixloom import TierManifest


@attrs.define(eq=False)
class HostTier:
    """``HostTier(memory="200GiB")`` among a profile's components or compose's ``plugins``. See ``TierManifest``."""

    manifest: TierManifest
    name: str = "host"

    @classmethod
    def make(
        cls,
        name: str = "host",
        *,
        memory: int | str | None = None,
        capacity: int | Mapping[str, int] | None = None,
        **options: Any,
    ) -> HostTier:
        return cls(TierManifest(memory=memory, capacity=capacity, **options), name)
