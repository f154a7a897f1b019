"""PrefixIndex: what routers know of all caches, kept by prefix: whose pages are there, and who can resume.

It follows the journals of the caches, as a publisher of events does, and derives from them where requests can resume
(``prefixloom_resumable``). What it hears counts for routers only ``late`` seconds after it happened.

A prefix is a number: the identity of its last page (``PageChain.number``). So one look answers for a thousand replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs

from prefixloom import Cache, Change, PageChain, Path
from prefixloom_resumable import PageRange, ResumablePages, Run

number = PageChain.number
HAS, RESUMES = 1, 2
"""Bits: a replica has the page under full attention; it can resume at the page's end."""


@attrs.frozen
class HeardLater:
    """What is different at a replica: links and the bits that they have now. It counts from second ``at`` on."""

    at: float
    number: int
    bits: Sequence[tuple[int, int, bool]]
    """(link, HAS or RESUMES, whether it is so now)."""


class FollowedCache:
    """The pages of one cache, followed from its journal."""

    def __init__(self, cache: Cache) -> None:
        self._journal = cache.journal()
        self._cache = cache
        self._pages = ResumablePages(cache.composition, str, tiers=("device",), namer=self._name)
        reaches = {part.name: part.reach for part in cache.composition.parts}
        paths = [each for each in self._pages.holders if isinstance(reaches[each.component], Path)]
        self._full = paths[0] if paths else None
        self._is_new = True

    def news(self) -> list[tuple[int, int, bool]]:
        """Return the news since the last call."""
        missing = self._journal.missing or self._is_new
        changes = self._journal.take()
        if missing:
            self._is_new = False
            changes = [Change("cleared"), *self._cache.contents()]
        if not changes:
            return []
        before = self._pages.everything() if any(each.kind == "cleared" for each in changes) else None
        found: list[tuple[int, int, bool]] = []
        if before is not None:
            links = (number(name) for run, _ in before.runs for name in run.names)
            found += ((link, bit, False) for link in links for bit in (HAS, RESUMES))
        differences = self._pages.apply(changes)
        gone, come = differences.resumable(0)
        found += self._bits(gone, RESUMES, False) + self._bits(come, RESUMES, True)
        if self._full is None:
            gone, come = differences.leading(0)
            return found + self._bits(gone, HAS, False) + self._bits(come, HAS, True)
        parts, index = self._full.parts, self._full.index
        whole = (1 << parts) - 1
        gone, come = differences.kept(self._full)
        for each in (*gone, *come):
            first, end = each.first // parts, -(-each.end // parts)
            kept = each.run.kept[index]
            names = map(number, self._pages.names(PageRange(each.run, first, end)))
            found += [
                (link, HAS, kept >> place * parts & whole == whole)
                for link, place in zip(names, range(first, end), strict=True)
            ]
        return found

    def _bits(self, ranges: Iterable[PageRange], bit: int, now: bool) -> list[tuple[int, int, bool]]:
        return [(number(name), bit, now) for each in ranges for name in self._pages.names(each)]

    def _name(self, run: Run, first: int, end: int) -> list[bytes]:
        chain = self._pages.chain
        return chain.pages(run.tokens, run.name_above(first) or chain.root(run.label), first, end)


class PrefixIndex:
    """Who has which prefix. ``late``: so many seconds pass until a router hears what has happened."""

    def __init__(self, late: float) -> None:
        self._late = late
        self._followed: dict[int, FollowedCache] = {}
        self._coming: deque[HeardLater] = deque()
        self._who: dict[int, dict[int, int]] = {}
        """By link, the replicas that have something there, each with its bits."""

    def follow(self, number: int, cache: Cache) -> None:
        """Follow a cache from now on. Its present content is news, too."""
        self._followed[number] = FollowedCache(cache)

    def poll(self, number: int, now: float) -> None:
        """Note what has happened at a replica until ``now``."""
        if bits := self._followed[number].news():
            self._coming.append(HeardLater(now + self._late, number, bits))

    def drop(self, number: int) -> None:
        """Forget a replica that is not there any more."""
        if self._followed.pop(number, None) is None:
            return
        for link in [link for link, who in self._who.items() if number in who]:
            self._clear(link, number, HAS | RESUMES)

    def depths(self, links: Sequence[int], now: float) -> tuple[dict[int, int], dict[int, int]]:
        """Return by replica how many pages of a path it has, and after how many it can resume; as known at ``now``."""
        self._hear(now)
        has: dict[int, int] = {}
        resumes: dict[int, int] = {}
        everybody = len(self._followed)
        for place in range(len(links) - 1, -1, -1):
            who = self._who.get(links[place])
            if who is None:
                continue
            for number, bits in who.items():
                if bits & HAS and number not in has:
                    has[number] = place + 1
                if bits & RESUMES and number not in resumes:
                    resumes[number] = place + 1
            if len(has) == len(resumes) == everybody:
                break
        return has, resumes

    def _hear(self, now: float) -> None:
        coming, who = self._coming, self._who
        while coming and coming[0].at <= now:
            news = coming.popleft()
            number = news.number
            if number not in self._followed:
                continue
            for link, bit, is_so in news.bits:
                if is_so:
                    here = who.setdefault(link, {})
                    here[number] = here.get(number, 0) | bit
                else:
                    self._clear(link, number, bit)

    def _clear(self, link: int, number: int, bits: int) -> None:
        here = self._who.get(link)
        if here is None or number not in here:
            return
        here[number] &= ~bits
        if not here[number]:
            del here[number]
            if not here:
                del self._who[link]
