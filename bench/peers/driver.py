"""What a side of the comparison must do: the interface that our driver and those of the peers implement.

Each does it as the scheduler does that the cache manager was made for, and does no more: pools without memory, states
that are not computed. What a call returns is the side's own; the rows only hand it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Missing(ImportError):
    """What a driver drives cannot be imported. The message says what to install."""


class Driver(ABC):
    """A cache of ``tokens`` tokens in each of the page components and of ``states`` states.

    ``comps``: letters, F for full attention, S for a window of ``window`` tokens, M for a recurrent state.
    """

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int) -> None:
        self.comps = comps
        self.page = page

    # tokens

    @abstractmethod
    def key(self, tokens: list[int]) -> Any:
        """These tokens in the form that the cache takes."""

    @abstractmethod
    def joined(self, key: Any, tail: Any) -> Any:
        """The key of a prompt and its answer, where ``finish`` needs one."""

    # whole requests

    @abstractmethod
    def open(self, key: Any) -> Any:
        """A request: what hits is found and protected, and its page numbers are there."""

    @abstractmethod
    def hit(self, request: Any) -> int:
        """Tokens that did."""

    @abstractmethod
    def grow(self, request: Any, tokens: int) -> None:
        """Slots for so many tokens in all, a multiple of the page; evicts where there is no room.

        A side that can take slots only for tokens that are known leaves those of the answer to ``finish``.
        """

    @abstractmethod
    def finish(self, request: Any, tail: Any, whole: Any) -> None:
        """The answer is known (``tail``; None: there is none), and all is computed. Its whole pages may be cached."""

    @abstractmethod
    def close(self, request: Any) -> None:
        """It is over: its whole pages are cached, and nothing is protected for it any more."""

    @abstractmethod
    def chunk(self, request: Any, tokens: int, key: Any) -> None:
        """The prompt is computed up to here (``key``: so far): slots for it, and others can hit it from now on."""

    # the parts of one

    @abstractmethod
    def match(self, key: Any) -> Any:
        """What would hit."""

    @abstractmethod
    def matched(self, found: Any) -> int:
        """Tokens of it."""

    @abstractmethod
    def pages(self, found: Any) -> Any:
        """Its page (or slot) numbers, of the first component."""

    @abstractmethod
    def lock(self, found: Any) -> Any: ...

    @abstractmethod
    def unlock(self, lock: Any) -> None: ...

    @abstractmethod
    def evict(self, tokens: int) -> int:
        """Frees so many tokens, the longest unused first; how many it freed."""

    def filled(self) -> None:
        """Called once the cache is filled, before evictions are timed."""
