"""What a tier below the device answers: what came of a restore, and its figures."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


class Restored:
    """What came of a restore: the sequence goes on from ``ready``; ``wanted`` was the deepest that any tier had.

    ``why``: what kept it from getting there, in words; empty if nothing did. ``over``: whether a scheduler should go on
    without waiting. Until then ``poll`` may bring more, which counts if nothing else was done with the sequence.
    """

    __slots__ = ("over", "ready", "wanted", "why")

    def __init__(self, wanted: int, ready: int, why: str = "") -> None:
        self.wanted = wanted
        self.ready = ready
        self.why = why
        self.over = True

    def note(self, why: str) -> None:
        if why and why not in self.why:
            self.why = f"{self.why}; {why}" if self.why else why

    def __repr__(self) -> str:
        return f"Restored(wanted={self.wanted}, ready={self.ready}, why={self.why!r}, over={self.over})"


@attrs.frozen
class TierStats:
    """The figures of a tier below the device, by component in pages or states (docs/engine.md)."""

    name: str
    capacity: Mapping[str, int]
    cached: Mapping[str, int]
    backed_up: int
    dropped: int
    evicted: int
    restores: int
    restored_tokens: int
    fallbacks: int
    failed: int
    stored: int = 0
    refused: int = 0
    fetched: int = 0
    to_store: int = 0

    def __str__(self) -> str:
        held = ", ".join(f"{self.cached[name]} of {count} {name}" for name, count in self.capacity.items())
        return (
            f"tier {self.name!r}: {held}; {self.backed_up} copied down, {self.dropped} left out, {self.evicted} "
            f"evicted; {self.restored_tokens} tokens restored in {self.restores} loads, {self.fallbacks} of them "
            f"shortened; {self.failed} copies failed; its store took {self.stored}, refused {self.refused} and brought "
            f"{self.fetched}"
        )
