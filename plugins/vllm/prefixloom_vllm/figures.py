"""Figures: the counts of both sides, since vLLM last asked."""

from __future__ import annotations

import threading

NAMES = {
    "asked_tokens": "Tokens of prompts that were looked up on the host",
    "hit_tokens": "Tokens of prompts that the host had",
    "loads": "Loads to the device that were begun",
    "loaded_tokens": "Tokens that were loaded to the device",
    "loaded_bytes": "Bytes that were loaded to the device",
    "loaded_seconds": "Seconds that loads took",
    "failed_loads": "Loads that failed; vLLM computes these again, or fails the request, as its policy says",
    "stores": "Stores to the host that were entered",
    "stored_tokens": "Tokens that were stored on the host",
    "stored_bytes": "Bytes that were copied to the host",
    "stored_seconds": "Seconds that stores took",
    "failed_stores": "Stores that failed",
    "refused_tokens": "Tokens that were not stored, for want of room",
    "fetched_tokens": "Tokens that the store behind the host brought",
}
"""Each count by its name, with what it says."""
MISSED = "missed_tokens"
"""Begins the names of counts of missed tokens; the component, the tier and the reason come after it."""
MISSED_LABELS = ("component", "tier", "reason")


class Figures:
    """Counts that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self.total: dict[str, float] = dict.fromkeys(NAMES, 0)

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] = self._counts.get(name, 0) + count
                    self.total[name] += count

    def add_missed(self, component: str, tier: str, reason: str, tokens: int) -> None:
        """Count so many tokens of a prompt that were not on the host, by component, tier and reason."""
        name = "|".join((MISSED, component, tier, reason))
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + tokens

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call, and begin again."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
