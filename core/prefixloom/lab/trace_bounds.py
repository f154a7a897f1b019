"""Trace bounds: the share of a trace's tokens that no policy can hit with the pools of a composed cache.

``bounds`` has the mathematics, of paths of blocks and of pools that hold so many of them. Here the prompts of a trace
become paths of pages, at whose ends requests resume, and the components of a composition pools. Whatever the model of
pools leaves out only lowers what a real cache hits, so the bound holds:

- A component that is neither a whole path nor a window nor a state only forbids hits. So do all windows but one.
- A page that only a part of a prompt's window fills takes no room.

It is of requests whose prompts are computed in the order in which they come, each before the next one is looked up.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

import attrs

from ..cache.cache import Cache
from ..contract.composition import Part
from .bounds import Pools, upper_bound
from .outcome import ReplayOutcome
from .replay import PoolRoom
from .traces.requests import LabRequest

MOST_PAGES = 40_000_000
"""Of prompts, as far as they were there before. A longer trace has no bound: it takes 100 bytes a page."""
MOST_WORK = 150_000_000
"""Pages times rounds of prices. Longer traces get fewer rounds, which make the bound looser."""
ROUNDS = 150
FEWEST_ROUNDS = 20


@attrs.frozen
class Bound:
    """No policy hits more than this share of the tokens with so much memory."""

    bytes: int
    hit_rate: float


class TraceBounds:
    """The prompts of a trace as paths, for caches whose hits are multiples of ``page``.

    ``answers``: whether answers are cached as well. That is right only where requests come one after the other.
    """

    def __init__(self, requests: Iterable[LabRequest], page: int, *, answers: bool = False) -> None:
        self._page = page
        self._paths: list[Sequence[int]] = []
        self._sizes: list[Sequence[int]] = []
        self._prompts: list[int] = []
        self._lengths: list[int] = []
        self._units: set[int] = set()
        for request in requests:
            visited = request.whole if answers and request.whole is not None else request.prompt
            unit, links = visited.chain(request.namespace, page)
            self._units.add(unit)
            ends = [min(place * unit, visited.count) // page for place in range(len(links) + 1)]
            self._paths.append(array("q", links))
            self._sizes.append(array("i", [end - begin for begin, end in itertools.pairwise(ends)]))
            self._prompts.append(request.prompt.count)
            self._lengths.append(request.prompt.count + max(0, request.output - 1))

    def hit_rate(self, cache: Cache, chunk: int) -> float | None:
        """Return the bound for a cache that computes ``chunk`` tokens in a step, of the requests that it can hold.

        None: there is none for a cache with a tier below, for blocks of several sizes, or for a trace that is too long.
        """
        if cache.composition.tier is not None or len(self._units) != 1:
            return None
        room = PoolRoom(cache, chunk)
        held = [at for at, length in enumerate(self._lengths) if room.holds(length)]
        prompt, pages = (sum(self._prompts[at] for at in held), sum(sum(self._sizes[at]) for at in held))
        if not prompt or pages > MOST_PAGES:
            return None
        pools = pools_of(cache.composition.parts, self._page, max(sum(self._sizes[at]) for at in held))
        rounds = max(FEWEST_ROUNDS, min(ROUNDS, MOST_WORK // max(1, pages)))
        paths, sizes = [self._paths[at] for at in held], [self._sizes[at] for at in held]
        return upper_bound(paths, pools, rounds=rounds, sizes=sizes) * self._page / prompt


def pools_of(parts: Sequence[Part], page: int, longest: int) -> Pools:
    """Return the pools of a composition in pages of ``page`` tokens, for paths of at most ``longest`` pages."""
    whole: list[float] = []
    states: list[float] = []
    windows: list[tuple[float, int]] = []
    for part in parts:
        if not part.page_tokens:
            states.append(part.capacity)
            continue
        width = width_of(part, page, longest)
        tokens = part.capacity * part.page_tokens
        if width is None:
            whole.append(tokens / page)
        elif width >= page:
            windows.append((tokens / page, width // page))
        elif width:
            windows.append((tokens / width, 1))
    window, reach = min(windows, key=lambda each: each[0] / each[1], default=(None, 1))
    return Pools(whole=min(whole, default=None), window=window, reach=reach, states=min(states, default=None))


def width_of(part: Part, page: int, longest: int) -> int | None:
    """Return how many tokens before any boundary are needed at least, if that is not all of them; None: always all."""
    if part.reach.closed_upward:
        return None
    if part.reach.shape is None:
        return 0
    tail = part.reach.shape.tail
    widths = [end - begin for end in range(page, page * longest + 1, page) if (begin := tail(end)) > 0]
    return min(widths, default=None)


def share_closed(outcome: ReplayOutcome, outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound]) -> str:
    """Return how much of the gap between LRU and the bound an outcome closes, as text; empty if one of them lacks."""
    lru = next((each for each in outcomes if each.policy == "lru" and each.bytes == outcome.bytes), None)
    best = next((each.hit_rate for each in bounds if each.bytes == outcome.bytes), None)
    if lru is None or best is None or best - lru.hit_rate < 1e-6:
        return ""
    return f"{(outcome.hit_rate - lru.hit_rate) / (best - lru.hit_rate):.1%}"
