"""Peers of the comparison that are none: one that works; others cannot be had, fail, or take their process along."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from bench.engines.driver import Driver
from bench.engines.stand_ins import EngineUnavailable


class Works(Driver):
    """Keeps whole pages by all that comes before them; the longest unused goes first."""

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int) -> None:
        super().__init__(comps, page, tokens, states, window)
        self.room = tokens // page
        self.kept: OrderedDict[int, None] = OrderedDict()

    def key(self, tokens: list[int]) -> list[int]:
        return tokens

    def joined(self, key: list[int], tail: list[int]) -> list[int]:
        return key + tail

    def _pages(self, key: list[int]) -> Iterator[int]:
        before = 0
        for at in range(0, len(key) // self.page * self.page, self.page):
            before = hash((before, *key[at : at + self.page]))
            yield before

    def match(self, key: list[int]) -> list[int]:
        found = []
        for page in self._pages(key):
            if page not in self.kept:
                break
            found.append(page)
        for page in reversed(found):
            self.kept.move_to_end(page)
        return found

    def matched(self, found: list[int]) -> int:
        return len(found) * self.page

    open, hit = match, matched

    def grow(self, request: list[int], tokens: int) -> None:
        pass

    def finish(self, request: list[int], tail: Any, whole: list[int]) -> None:
        for page in reversed(list(self._pages(whole))):
            self.kept[page] = None
            self.kept.move_to_end(page)
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)

    def close(self, request: list[int]) -> None:
        pass

    def chunk(self, request: list[int], tokens: int, key: list[int]) -> None:
        self.finish(request, None, key)

    def pages(self, found: list[int]) -> list[int]:
        return found

    def lock(self, found: list[int]) -> list[int]:
        return found

    def unlock(self, lock: list[int]) -> None:
        pass

    def evict(self, tokens: int) -> int:
        for _ in range(tokens // self.page):
            self.kept.popitem(last=False)
        return tokens


class Absent(Works):
    def __init__(self, *sizes: Any) -> None:
        raise EngineUnavailable("no module named absent. Install it: pip install absent")


class Fails(Works):
    """In one thing alone."""

    def lock(self, found: list[int]) -> list[int]:
        raise ValueError("no lock today")


class Ends(Works):
    """Its process, and the child in which evictions are measured."""

    def lock(self, found: list[int]) -> list[int]:
        os._exit(2)

    def evict(self, tokens: int) -> int:
        os._exit(3)
