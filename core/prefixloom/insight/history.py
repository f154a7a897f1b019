"""History: what a cache has lost or has not kept, when and why, so that a miss can be explained afterwards.

It follows the cache through a journal and knows each page and state by a number, which is made of the page's identity.
So it holds no tokens. It remembers everything that is cached now, and the last ``most`` of what is not.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice

import attrs

from ..contract.reach import Interval
from ..keys.pages import PageChain
from ..keys.tokens import Tokens
from ..operations.state import Core
from ..tree.journal import MOST as CHANGES
from ..tree.journal import Change, contents

MOST = 1 << 18
"""The most losses that a history remembers, unless it is made with another number."""
PATHS = 64
"""The numbers of so many paths are kept at hand."""
RECENT = 64
"""So many of the latest losses are kept as they were told."""
HOT = 512
"""So many hot prefixes are counted; of more, those that were hit last."""
AGES = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the histograms, in seconds."""


@attrs.frozen
class Loss:
    """Pages (states) that are not cached any more, or were not kept. Those that came and went together have one.

    ``kind``    "removed", "refused" or "cleared": the change that told it, as do ``component``, ``cause`` and ``by``
    ``tier``    where they were, or would have been
    ``when``    the time of it, and ``stored`` when they had come; None if that is not known
    ``number``  how many pages (states) the component had lost on this tier by then, with the first of these
    ``count``   how many they are; 0 if the cache was flushed
    """

    kind: str
    component: str
    tier: str
    cause: str
    by: str
    when: float
    stored: float | None
    number: int
    count: int

    @property
    def figure(self) -> str:
        """The cause, as figures and lists name it."""
        return f"refused: {self.cause.partition(':')[0]}" if self.kind == "refused" else self.cause


@attrs.define
class Histogram:
    """How many times fell below each bound of ``AGES``, and above the last; with their sum."""

    counts: list[int] = attrs.field(factory=lambda: [0] * (len(AGES) + 1))
    sum: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.sum += seconds * times
        self.counts[bisect_left(AGES, seconds)] += times


@attrs.define
class Losses:
    """What one component has lost on one tier so far.

    ``count``  pages (states), and ``causes`` how many by cause
    ``ages``   how long they had been cached
    ``gaps``   how long after the loss a prompt missed them
    """

    count: int = 0
    causes: dict[str, int] = attrs.field(factory=dict)
    ages: Histogram = attrs.field(factory=Histogram)
    gaps: Histogram = attrs.field(factory=Histogram)


@attrs.define
class HotPrefix:
    """A prefix that requests have hit: its length in tokens, how often, and when last."""

    tokens: int
    hits: int
    last: float


class Paths:
    """The identities of the pages of the latest paths."""

    def __init__(self, chain: PageChain) -> None:
        self.chain = chain
        self._known: list[tuple[str, Tokens, list[bytes]]] = []
        """Of the latest paths, the last one first: the namespace, the tokens, and the identities."""

    def of(self, namespace: str, tokens: Tokens, upto: int) -> list[bytes]:
        """Return the identities of the pages of ``tokens`` that end at ``upto`` or before."""
        chain, count = self.chain, upto // self.chain.page
        pages: list[bytes] = []
        for place, (known_in, known, known_pages) in enumerate(self._known):
            if known_in != namespace:
                continue
            if count <= len(known_pages) and known.begins_with(tokens):
                self._known.insert(0, self._known.pop(place))
                return known_pages[:count]
            if tokens.begins_with(known):
                pages = known_pages[: chain.whole(known.count)]  # all of whose tokens it had
                del self._known[place]
                break
        pages += chain.pages(tokens, pages[-1] if pages else chain.root(namespace), len(pages), count)
        self._known.insert(0, (namespace, tokens, pages))
        del self._known[PATHS:]
        return pages[:count]


class History:
    """The losses of one cache since this was made. Made by ``Cache.history``; ``Cache.explain`` asks it.

    ``poll`` reads the cache's journal, and takes the time of what it finds; ``Cache.poll`` does so once per step.

    ``since``          losses before this time are not known, or not all of them; None: all are known
    ``by_component``   what was lost, by component and tier
    ``missed_tokens``  by component, tier and reason, as far as ``missed`` was told of them
    ``recent``         the latest losses, the oldest first
    ``hot``            the prefixes that were hit most, as far as ``hit`` was told of them, by the number of their path
    """

    def __init__(self, core: Core, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        with core:
            self._journal = core.follow(CHANGES)
        shape = core.shape
        self._pages = {lane.name: lane.part.page_tokens or shape.page for lane in shape.lanes}
        """The tokens of a page of each component; a state is asked for as a page of the tree."""
        self._core = core
        self._paths = Paths(PageChain(shape.page, shape.lookahead))
        self._most = most
        self.closed = False
        self.clock = clock
        self.since: float | None = clock() if core.counts.opened or core.index.epoch else None
        self.by_component: dict[tuple[str, str], Losses] = {}
        self.missed_tokens: dict[tuple[str, str, str], int] = {}
        self.recent: deque[Loss] = deque(maxlen=RECENT)
        self.hot: dict[int, HotPrefix] = {}
        self._stored: dict[int, float] = {}
        """When what is cached now had come, by its number."""
        self._lost: dict[int, Loss] = {}
        """What became of what is not cached any more, by its number; the latest last."""
        self._note_cached()

    def _note_cached(self) -> None:
        for change in contents(self._core.keys, self._core.shape.all_lanes, self._core.index.tree.roots.values()):
            self._note(change)

    def close(self) -> None:
        """Follow the cache no longer."""
        self.closed = True
        self._journal.close()

    def lost_since(self, component: str, tier: str, number: int) -> int:
        """Return how many different pages (states) that a component lost, from this number on, are gone now."""
        found = 0
        for loss in reversed(self._lost.values()):
            if loss.component == component and loss.tier == tier:
                if loss.number < number:
                    break
                found += loss.kind == "removed"
        return found

    @property
    def remembered(self) -> int:
        """The number of losses that it remembers now."""
        return len(self._lost)

    def poll(self) -> None:
        """Read what has changed since the last call."""
        missing, changes = self._journal.missing, self._journal.take()
        if missing:  # what was lost meanwhile is not known: begin again with what there is
            self._stored.clear()
            self.since = self.clock()
            self._note_cached()
            return
        for change in changes:
            self._note(change)

    def losses(self, component: str, tier: str) -> Losses:
        """Return what a component has lost on a tier so far."""
        return self.by_component.setdefault((component, tier), Losses())

    def find(
        self, component: str, tiers: tuple[str, ...], namespace: str, tokens: Tokens, spans: Iterable[Interval]
    ) -> list[Loss | None]:
        """Return for each page of ``spans`` the loss on ``tiers`` that decided: the latest, or that the store below had
        refused what was lost then. A state is asked for as the page of the tree that ends at its boundary.
        """
        spans = tuple(spans)
        found = [map(self._lost.get, self._keys(component, tier, namespace, tokens, spans)) for tier in tiers]
        return [_decisive([loss for loss in at if loss is not None]) for at in zip(*found, strict=True)]

    def missed(self, component: str, reason: str, tokens: int, loss: Loss | None) -> None:
        """Count tokens of a request that missed for this reason, which ``loss`` had caused."""
        key = component, "" if loss is None else loss.tier, reason
        self.missed_tokens[key] = self.missed_tokens.get(key, 0) + tokens
        if loss is not None and loss.kind == "removed":
            self.losses(component, loss.tier).gaps.add(self.clock() - loss.when)

    def hit(self, namespace: str, tokens: Tokens, ready: int) -> None:
        """Count that a request has hit ``ready`` of its tokens."""
        links = self._paths.of(namespace, tokens, ready)
        if not links:
            return
        number = PageChain.number(links[-1])
        known = self.hot.get(number)
        if known is not None:
            known.hits, known.last = known.hits + 1, self.clock()
            return
        if len(self.hot) >= HOT:
            for old, _ in sorted(self.hot.items(), key=lambda each: each[1].last)[: HOT // 4]:
                del self.hot[old]
        self.hot[number] = HotPrefix(ready, 1, self.clock())

    # ------------------------------------------------------------ following
    def _keys(
        self, component: str, tier: str, namespace: str, tokens: Tokens, spans: tuple[Interval, ...]
    ) -> list[int]:
        """Return the numbers of the pages of ``spans``. Each is made of the page of the tree in which it begins."""
        kind, whole, page = hash((component, tier)), self._paths.chain.page, self._pages[component]
        deepest = max((high for _, high in spans), default=0)
        links = self._paths.of(namespace, tokens, -(-deepest // whole) * whole)
        return [
            kind ^ (hash((link, inside)) if inside else PageChain.number(link))
            for low, high in spans
            for start in range(low, high, page)
            for link, inside in ((links[start // whole], start % whole),)
        ]

    def _note(self, change: Change) -> None:
        now = self.clock()
        if change.kind == "cleared":
            self._forget_losses(self._stored)
            for key, stored in self._stored.items():
                self._lost[key] = Loss("cleared", "", "", "flushed", "", now, stored, 0, 0)
            self._stored.clear()
            self._forget()
            return
        losses = self.losses(change.component, change.tier)
        at = change.boundary  # of a state
        spans = change.spans if at is None else ((at - self._paths.chain.page, at),)
        keys = self._keys(change.component, change.tier, change.namespace, change.tokens, spans)
        self._forget_losses(keys)
        if change.kind == "stored":
            self._stored.update(dict.fromkeys(keys, now))
            return
        came = [self._stored.pop(key, None) if change.kind == "removed" else None for key in keys]
        about = change.kind, change.component, change.tier, change.cause, change.by
        shared: dict[float | None, Loss] = {}  # by the time at which they came
        for moment, count in Counter(came).items():
            loss = shared[moment] = Loss(*about, now, moment, losses.count + 1, count)
            losses.causes[loss.figure] = losses.causes.get(loss.figure, 0) + count
            self.recent.append(loss)
            if moment is not None:
                losses.ages.add(now - moment, count)
        self._lost.update(zip(keys, map(shared.__getitem__, came), strict=True))
        losses.count += len(keys)
        self._forget()

    def _forget_losses(self, keys: Iterable[int]) -> None:
        """Forget what was lost of these pages before: it is cached again, or is lost again."""
        if not self._lost.keys().isdisjoint(keys):
            for key in keys:
                self._lost.pop(key, None)

    def _forget(self) -> None:
        """Forget the oldest losses where there are too many."""
        over = len(self._lost) - self._most
        if over > 0:
            for old in list(islice(self._lost, max(over, self._most // 16))):
                self.since = max(self.since or 0.0, self._lost.pop(old).when)


def _decisive(losses: list[Loss]) -> Loss | None:
    """Return, of the losses of one page on several tiers, the one without which it would be there."""
    if not losses:
        return None
    latest = max(losses, key=lambda loss: loss.when)
    refused = (loss for loss in losses if loss.kind == "refused" and loss.when >= (latest.stored or loss.when))
    return next(refused, latest) if latest.kind == "removed" else latest
