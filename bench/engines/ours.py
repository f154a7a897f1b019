"""The drivers of our own cache. They use the public API only.

The pools lie on the meta device, so the figures are those of the cache's own work, as they are for the peers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import prefixloom
from bench.engines.driver import Driver
from prefixloom import (
    Buffer,
    Cache,
    Component,
    ComponentSpec,
    Lease,
    Manifest,
    MatchPlan,
    Path,
    Point,
    Profile,
    Sequence,
    TierManifest,
    Tokens,
    Window,
)

NAMES = {"F": "full", "S": "swa", "M": "mamba"}


class ForeignComponent(Component):
    """A component that is not among the installed plugins, with the reach of one of them."""


def installed(letter: str, window: int) -> ComponentSpec:
    """Return the specification of an installed component, as small as possible."""
    kv = {"layers": (0,), "kv_heads": 1, "k_dim": 1, "v_dim": 1, "dtype": "bfloat16"}
    options = {"F": kv, "S": {**kv, "window": window}, "M": {"conv": (1, 1), "recurrent": (1,)}}[letter]
    return ComponentSpec(NAMES[letter], options=options)


def foreign(letter: str, window: int) -> Component:
    """Return a foreign component with the same reach as the installed one."""
    buffers = (Buffer("k", (1, 1)), Buffer("v", (1, 1)))
    reach = {"F": Path(), "S": Window(window), "M": Point()}[letter]
    return ForeignComponent(NAMES[letter], Manifest(buffers), reach)


class Prefixloom(Driver):
    """Our cache with the installed plugins."""

    foreign: ClassVar[bool] = False
    tier: ClassVar[dict[str, Any] | None] = None
    """The options of the host tier's manifest that say when it copies. None: there is no tier."""

    def __init__(
        self, comps: str = "F", page: int = 16, tokens: int = 1 << 20, states: int = 4096, window: int = 1024
    ) -> None:
        super().__init__(comps, page, tokens, states, window)
        self.lead = NAMES[comps[0]]
        self.cache = self.compose(tokens, states, window)

    def compose(self, tokens: int, states: int, window: int) -> Cache:
        counts = {letter: states if letter == "M" else -(-tokens // self.page) * self.page for letter in self.comps}
        capacity = {NAMES[letter]: count for letter, count in counts.items()}
        plugins: list[Any] = [foreign(letter, window) for letter in self.comps] if self.foreign else []
        if self.tier is not None:
            from prefixloom_hicache import HostTier

            host = {name: 2 * count for name, count in capacity.items()}
            plugins.append(HostTier(TierManifest(capacity=host, **self.tier)))
        return prefixloom.compose(
            None if self.foreign else Profile([installed(letter, window) for letter in self.comps]),
            plugins=plugins,
            page_size=self.page,
            capacity=capacity,
            device="meta",
            debug=False,
        )

    def key(self, tokens: list[int]) -> Tokens:
        return prefixloom.encode(tokens)

    def joined(self, key: Tokens, tail: Tokens) -> None:
        return None  # a sequence extends its own key

    def open(self, key: Tokens) -> Sequence:
        return self.cache.open(key)

    def hit(self, request: Sequence) -> int:
        return request.ready

    def grow(self, request: Sequence, tokens: int) -> None:
        request.grow(tokens - request.reserved)

    def finish(self, request: Sequence, tail: Tokens | None, whole: Any) -> None:
        if tail is not None:
            request.append(tail)
        self.compute(request)

    def compute(self, sequence: Sequence) -> None:
        """Compute all reserved tokens of this sequence alone in one pass."""
        sequence.fill()
        sequence.commit()

    def close(self, request: Sequence) -> None:
        request.close()

    def chunk(self, request: Sequence, tokens: int, key: Any) -> None:
        request.grow(tokens - request.reserved)
        self.compute(request)
        request.publish()

    def match(self, key: Tokens) -> MatchPlan:
        return self.cache.match(key)

    def matched(self, found: MatchPlan) -> int:
        return found.ready

    def pages(self, found: MatchPlan) -> Any:
        return found.pages(self.lead)

    def lock(self, found: MatchPlan) -> Lease:
        return self.cache.lease(found)

    def unlock(self, lock: Lease) -> None:
        lock.release()

    def evict(self, tokens: int) -> int:
        return self.cache.evict(tokens)[self.lead] * self.page


class InSteps(Prefixloom):
    """Each forward pass is a step, as in an engine that computes several sequences at once."""

    def compute(self, sequence: Sequence) -> None:
        with self.cache.step((sequence,)) as step:
            step.run_ops()


class WithIdleTier(Prefixloom):
    """Our cache with a host tier to which nothing is ever copied."""

    tier = {"write": "selective", "hits": 1 << 30}


class WithForeignComponents(Prefixloom):
    """Our cache with foreign components in place of the installed ones."""

    foreign = True
