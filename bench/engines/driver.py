"""The interface of every driver: what a side of the comparison must do.

A driver does what its own scheduler does with its cache manager, and nothing more: pools have no memory, and states are
not computed. What a call returns belongs to the driver; the rows only hand it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Driver(ABC):
    """A cache with room for ``tokens`` tokens in each paged component, and for ``states`` states.

    ``comps`` has a letter for each component: F for full attention, S for a window of ``window`` tokens, M for a
    recurrent state.
    """

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int) -> None:
        self.comps = comps
        self.page = page

    # tokens

    @abstractmethod
    def key(self, tokens: list[int]) -> Any:
        """Return the tokens in the form that the cache takes."""

    @abstractmethod
    def joined(self, key: Any, tail: Any) -> Any:
        """Return the key of a prompt and its answer, if ``finish`` needs one."""

    # whole requests

    @abstractmethod
    def open(self, key: Any) -> Any:
        """Open a request: find the cached prefix, protect it, and know its page numbers."""

    @abstractmethod
    def hit(self, request: Any) -> int:
        """Return the number of tokens that hit when the request was opened."""

    @abstractmethod
    def grow(self, request: Any, tokens: int) -> None:
        """Take slots for ``tokens`` tokens in all, a multiple of the page. Evict if there is no room.

        A cache that can take slots only for known tokens takes the slots of the answer in ``finish``.
        """

    @abstractmethod
    def finish(self, request: Any, tail: Any, whole: Any) -> None:
        """Compute everything. ``tail`` is the answer, or None if there is none.

        The cache may publish the whole pages now.
        """

    @abstractmethod
    def close(self, request: Any) -> None:
        """End the request: its whole pages are cached, and nothing is protected for it any more."""

    @abstractmethod
    def chunk(self, request: Any, tokens: int, key: Any) -> None:
        """Take slots up to ``tokens``, compute up to there, and publish. ``key`` is the key of these tokens."""

    # the parts of a request

    @abstractmethod
    def match(self, key: Any) -> Any:
        """Find the cached prefix, and protect nothing."""

    @abstractmethod
    def matched(self, found: Any) -> int:
        """Return the number of tokens that a match found."""

    @abstractmethod
    def pages(self, found: Any) -> Any:
        """Return the page numbers (or slot numbers) of a match in the first component."""

    @abstractmethod
    def lock(self, found: Any) -> Any: ...

    @abstractmethod
    def unlock(self, lock: Any) -> None: ...

    @abstractmethod
    def evict(self, tokens: int) -> int:
        """Free ``tokens`` tokens, the least recently used ones first. Return how many were freed."""

    def filled(self) -> None:
        """Prepare the filled cache for evictions that are timed."""
