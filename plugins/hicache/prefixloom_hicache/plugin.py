"""What this plugin offers: a tier of the host's memory, as the component kind ``hicache``."""

from __future__ import annotations

from prefixloom import ComponentType, hookimpl

from .host import HostTier

prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_component() -> ComponentType:
    return ComponentType(
        kind="hicache",
        make=HostTier.make,
        summary="a host tier below the device: pools mirrored from every component that shares its data",
    )
