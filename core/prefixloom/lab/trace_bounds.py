"""Trace bounds: the share of a trace's tokens that no policy can hit with the pools of a composed cache.

``bounds`` has the mathematics, of paths of blocks and of pools that hold so many of them. Here the prompts of a trace
become paths, and the components of a composition pools. A block is what the trace says, or a page where prompts are
known by token. Whatever the model of pools leaves out only lowers what a real cache hits, so the bound holds:

- A component that is neither a whole path nor a window nor a state only forbids hits. So do all windows but one.
- Between two blocks no boundary is better than the end of the block above, which everybody computes who computes more.
- A block that a prompt fills only in part counts as a whole one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import attrs

from ..cache.cache import Cache
from ..contract.composition import Part
from .bounds import Pools, upper_bound
from .outcome import ReplayOutcome
from .replay import PoolRoom
from .traces.requests import LabRequest

MOST_WORK = 300_000_000
"""Blocks of all prompts times rounds of prices. Longer traces get fewer rounds, which make the bound looser."""
ROUNDS = 150
FEWEST_ROUNDS = 10


@attrs.frozen
class Bound:
    """No policy hits more than this share of the tokens with so much memory."""

    bytes: int
    hit_rate: float


class TraceBounds:
    """The prompts of a trace, as paths of blocks. ``answers``: whether answers are cached as well."""

    def __init__(self, requests: Iterable[LabRequest], page: int, *, answers: bool = False) -> None:
        self._paths: list[Sequence[int]] = []
        self._prompts: list[int] = []
        self._lengths: list[int] = []
        self._longest = 0
        self._units: set[int] = set()
        for request in requests:
            visited = request.whole if answers and request.whole is not None else request.prompt
            unit, links = visited.chain(request.namespace, page)
            self._units.add(unit)
            self._paths.append(array("q", links))
            self._prompts.append(request.prompt.count)
            self._lengths.append(request.prompt.count + max(0, request.output - 1))
            self._longest = max(self._longest, len(links))

    def hit_rate(self, cache: Cache, chunk: int) -> float | None:
        """The bound for a cache that computes ``chunk`` tokens in a step, of the requests that it can hold.

        None: there is none for a cache with a tier below, or for blocks of several sizes.
        """
        if cache.composition.tier is not None or len(self._units) != 1:
            return None
        (unit,) = self._units
        room = PoolRoom(cache, chunk)
        held = [at for at, length in enumerate(self._lengths) if room.holds(length)]
        prompt = sum(self._prompts[at] for at in held)
        if not prompt:
            return None
        paths = [self._paths[at] for at in held]
        rounds = MOST_WORK // max(1, sum(map(len, paths)))
        pools = pools_of(cache.composition.parts, unit, self._longest)
        best = upper_bound(paths, pools, rounds=max(FEWEST_ROUNDS, min(ROUNDS, rounds)))
        return best.blocks * unit / prompt


def pools_of(parts: Sequence[Part], unit: int, longest: int) -> Pools:
    """The pools of a composition in blocks of ``unit`` tokens, for paths of at most ``longest`` blocks."""
    whole: list[float] = []
    states: list[float] = []
    windows: list[tuple[float, int]] = []
    for part in parts:
        if not part.page_tokens:
            states.append(part.capacity)
            continue
        width = width_of(part, unit, longest)
        tokens = part.capacity * part.page_tokens
        if width is None:
            whole.append(tokens / unit)
        elif width >= unit:
            windows.append((tokens / unit, width // unit))
        elif width:  # a stay takes only the end of a block
            windows.append((tokens / width, 1))
    window, reach = min(windows, key=lambda each: each[0] / each[1], default=(None, 1))
    return Pools(
        whole=min(whole, default=None), window=window, reach=reach, states=min(states, default=None)
    )  # fmt: skip


def width_of(part: Part, unit: int, longest: int) -> int | None:
    """How many tokens before any boundary are needed at least, if that is not all of them; None: always all."""
    if part.reach.closed_upward:
        return None
    if part.reach.shape is None:
        return 0
    tail = part.reach.shape.tail
    widths = [end - begin for end in range(unit, unit * longest + 1, unit) if (begin := tail(end)) > 0]
    return min(widths, default=None)


def share_closed(outcome: ReplayOutcome, outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound]) -> str:
    """How much of the gap between LRU and the bound an outcome closes, as text; empty where one of both is missing."""
    lru = next((each for each in outcomes if each.policy == "lru" and each.bytes == outcome.bytes), None)
    best = next((each.hit_rate for each in bounds if each.bytes == outcome.bytes), None)
    if lru is None or best is None or best - lru.hit_rate < 1e-6:
        return ""
    return f"{(outcome.hit_rate - lru.hit_rate) / (best - lru.hit_rate):.1%}"
