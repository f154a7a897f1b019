"""Schemes: how a store on a server is offered, one entry point for each scheme of URLs. It knows no server."""

from __future__ import annotations

from collections.abc import Callable

from prefixloom import hookimpl
from prefixloom.storage import Backend, BackendType


class Scheme:
    """A scheme of URLs, as a plugin that offers its store."""

    prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md

    def __init__(
        self, name: str, open_store: Callable[..., Backend], open_url: Callable[[str], Backend], summary: str
    ) -> None:
        self._type = BackendType(name, open_store, summary, open_url)

    @hookimpl
    def prefixloom_storage(self) -> BackendType:
        """Offer the store to the registry."""
        return self._type
