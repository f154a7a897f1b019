"""SharedStore: what replicas have written for all of them, boundary by boundary, and what it costs to read it.

The store is a model. It holds no bytes and is no storage backend: the host tier writes to a real store from a thread of
its own, in real time, and moves bytes, which a cache on the device "meta" does not have. What it models is this:

- A replica writes what it computes, with all that resuming at the end of it needs: pages of a path up to there, a
  window before it, a state. Whoever reads it needs the boundaries above it on its path, too. These are always there.
- One link serves all replicas, in the order of asking. Reading takes ``latency`` and the bytes' time on the link, and
  the reader computes nothing else meanwhile. Writing takes the bytes' time as well, and nobody waits for it.
- What was used the longest time ago goes first when the memory is used up.

A replica reads only if that is sooner than computing. What it has read is then in its cache as if it were computed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from prefixloom import Cache, InputError


@attrs.frozen
class StoreSpeed:
    """A store's memory in bytes, what its link moves in a second, and the seconds before a read begins."""

    memory: int
    bandwidth: float = 10 * 2**30
    latency: float = 0.002

    def __attrs_post_init__(self) -> None:
        if not (self.memory > 0 and 0 < self.bandwidth < math.inf and 0 <= self.latency < math.inf):
            raise InputError(
                f"a store has a memory and a bandwidth above 0 and a latency from 0 up, got {self.memory!r}, "
                f"{self.bandwidth!r} and {self.latency!r}"
            )


@attrs.define
class StoredBoundary:
    """A boundary that can be resumed at.

    ``above``  the link of the boundary before it on its path; None: it is the first one
    ``bytes``  what was written for it
    ``ready``  from when on it can be read
    """

    above: int | None
    bytes: int
    ready: float


class BytesOfBoundaries:
    """How many bytes resuming at a boundary needs, by the reaches of the components of a cache."""

    def __init__(self, cache: Cache) -> None:
        sizes = {name: each.page_bytes for name, each in cache.stats().components.items()}
        parts = cache.composition.parts
        self._paged = [(part.reach, sizes[part.name] / part.page_tokens) for part in parts if part.page_tokens]
        self._states = sum(sizes[part.name] for part in parts if not part.page_tokens)

    def between(self, start: int, boundary: int) -> int:
        """Return the bytes that resuming at ``boundary`` needs beyond what resuming at ``start`` does."""
        found = float(self._states)
        for reach, each in self._paged:
            found += each * sum(max(0, hi - max(lo, start)) for lo, hi in reach.needs(boundary))
        return round(found)


class SharedStore:
    """The boundaries that are stored, by the link of the last page before each."""

    def __init__(self, speed: StoreSpeed, sizes: BytesOfBoundaries, page: int) -> None:
        self._speed, self._sizes, self._page = speed, sizes, page
        self._stored: OrderedDict[int, StoredBoundary] = OrderedDict()
        self._used = 0
        self._free_at = 0.0
        """When the link has moved all that was asked of it."""
        self.read = self.written = 0
        """Bytes so far."""

    def write(self, links: Sequence[int], start: int, ends: Iterable[int], now: float) -> None:
        """Store that a path can be resumed at ``ends``, counted in pages, by a replica that went on from ``start``.

        Nobody could use what lies behind a boundary that is not stored any more, so that is not written.
        """
        above = links[start - 1] if start else None
        if above is not None and above not in self._stored:
            return
        for end in ends:
            link = links[end - 1]
            if link in self._stored:
                self._stored.move_to_end(link)
            else:
                size = self._sizes.between(start * self._page, end * self._page)
                self._free_at = max(self._free_at, now) + size / self._speed.bandwidth
                self._stored[link] = StoredBoundary(above, size, self._free_at)
                self._used += size
                self.written += size
            start, above = end, link
        self._touch(above)
        while self._used > self._speed.memory:
            _, oldest = self._stored.popitem(last=False)
            self._used -= oldest.bytes

    def deepest(self, links: Sequence[int], start: int, now: float) -> int:
        """Return the deepest boundary of a path, in pages, that whoever can resume at ``start`` can read at ``now``.

        ``start`` if there is none behind it.
        """
        for pages in range(len(links), start, -1):
            stored = self._stored.get(links[pages - 1])
            if stored is not None and stored.ready <= now:
                return pages
        return start

    def seconds(self, start: int, end: int, now: float) -> float:
        """Return how long reading takes from ``now`` on, so that a replica resumes at ``end`` and not at ``start``."""
        size = self._sizes.between(start * self._page, end * self._page)
        return max(self._free_at - now, 0.0) + self._speed.latency + size / self._speed.bandwidth

    def take(self, links: Sequence[int], start: int, end: int, now: float) -> float:
        """Read it. Return how long it takes."""
        seconds = self.seconds(start, end, now)
        size = self._sizes.between(start * self._page, end * self._page)
        self._free_at = max(self._free_at, now) + size / self._speed.bandwidth
        self.read += size
        self._touch(links[end - 1])
        return seconds

    def _touch(self, link: int | None) -> None:
        """Note that a path was used. Its end is evicted before its beginning, so each stored path is whole."""
        while link is not None and (stored := self._stored.get(link)) is not None:
            self._stored.move_to_end(link)
            link = stored.above
