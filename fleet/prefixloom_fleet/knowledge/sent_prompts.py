"""SentPrompts: what a router sent to one replica, as pages, in place of events that cannot be gone by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prefixloom import PageChain, encode

from ..routing.contract import RoutingRequest

PAGE = 16
"""Tokens of a page. The replica may have others: this is a guess about it."""
MOST_PAGES = 1 << 16


class SentPrompts:
    """The pages of the last prompts that were sent, and where these ended.

    A replica of a hybrid keeps a state where a prompt ended, so a prompt that goes on from there can resume there.
    ``most``: the pages that are remembered; those that were used the longest time ago are forgotten first.
    """

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most = most
        self._pages: OrderedDict[int, bool] = OrderedDict()
        """By link, whether a prompt ended in this page or in the one after it."""

    def add(self, request: RoutingRequest) -> None:
        """Remember a prompt that was sent."""
        for link in request.links:
            self._pages[link] = self._pages.pop(link, False)
        if request.links:
            self._pages[request.links[-1]] = True
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def matched(self, request: RoutingRequest) -> int:
        """Return how many tokens lie in pages of prompts that were sent."""
        found = 0
        for at, link in enumerate(request.links, 1):
            if link not in self._pages:
                break
            found = at * request.unit
        return found

    def resumable(self, request: RoutingRequest) -> int:
        """Return the deepest page in which a prompt ended that was sent."""
        found = 0
        for at, link in enumerate(request.links, 1):
            ended = self._pages.get(link)
            if ended is None:
                break
            if ended:
                found = at * request.unit
        return found


def links_of(tokens: Sequence[int], namespace: str) -> tuple[int, ...]:
    """Return a number for each whole page, which stands for all tokens up to its end, and for the namespace."""
    return tuple(PageChain(PAGE).numbers(encode(tokens), namespace))
