"""Fences: up to which step something comes after. What runs, and what is in flight, is ``flight``'s to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pool import Pool


class Fence:
    """``stamp``: the number of the newest step that runs, 0 while none does. ``retiring``: whether slots wait.

    ``claimed``: slots were taken that waited, and their new owner has yet to be told up to which step.
    """

    __slots__ = ("claimed", "retiring", "stamp")

    def __init__(self) -> None:
        self.stamp = self.claimed = 0
        self.retiring = False

    def reused(self, pool: Pool, data: bytes) -> None:
        """Slots go to another owner before the steps that they retired from are over."""
