"""Stop strings: an answer ends in front of the first one in its text."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Ends a text in front of the first stop string in it, wherever the pieces of the text are cut."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        """What may be the beginning of a stop string."""
        self.met = False

    def push(self, text: str) -> str:
        """Return what is certain not to belong to a stop string."""
        if not self._stops or self.met:
            return "" if self.met else text
        text = self._held + text
        at = min((found for found in map(text.find, self._stops) if found >= 0), default=-1)
        if at >= 0:
            self.met, self._held = True, ""
            return text[:at]
        keep = max(beginning(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """Return what was held back, where no more text comes."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins, and which is shorter than it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
