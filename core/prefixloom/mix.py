"""Mix: one memory budget shared out among the components of a cache, for a mix of traffic.

Requests are taken as paths of one length that begin alike. A component whose reach is a whole path gets every token of
every path; one whose reach ends soon, what running sequences hold at most and one end per cached path; states, those of
running sequences and one or more per cached path. As many paths are kept as the budget allows, so that no pool is the
only one that is too small. What each pool got, and why, is told in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from .errors import CompositionError
from .reach import Reach
from .sizing import Demand, Traffic, evenly, size_of, size_text, told

SAMPLES = 512
"""Boundaries at which a reach is asked how much it needs."""


@attrs.frozen
class Share:
    """What one component needs: ``running`` slots for each running sequence, ``cached`` for each cached path.

    ``whole``: it needs the paths themselves, and its slots follow from tokens instead. ``words`` says why.
    """

    demand: Demand
    whole: bool
    running: int
    cached: int
    spare: int
    words: str


@attrs.frozen
class Mix:
    """The shares of all components under one traffic, and what they cost together."""

    traffic: Traffic
    page: int
    shares: tuple[Share, ...]

    @property
    def has_paths(self) -> bool:
        return any(share.whole for share in self.shares)

    def tokens(self, paths: int) -> int:
        """Tokens of so many paths, whose common part is held once."""
        return self.traffic.common + paths * (self.traffic.length - self.traffic.common)

    def slots(self, paths: int, tokens: int) -> dict[str, int]:
        """Slots by component if ``tokens`` tokens of paths are held, and the ends of ``paths`` paths."""
        running, out = self.traffic.running, {}
        for share in self.shares:
            if share.whole:
                out[share.demand.name] = -(-tokens // self.page) * (self.page // share.demand.page_tokens)
            else:
                out[share.demand.name] = running * share.running + (paths - running) * share.cached + share.spare
        return out

    def cost(self, paths: int, tokens: int) -> int:
        slots = self.slots(paths, tokens)
        return sum(share.demand.size(slots[share.demand.name]) for share in self.shares)


def from_traffic(
    demands: Sequence[Demand], page: int, budget: int, traffic: Traffic, max_rewind: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Slots by component and the words for it; refused where not even the running sequences fit."""
    mix = Mix(traffic, page, tuple(_share(demand, page, traffic, max_rewind) for demand in demands))
    running, one = traffic.running, -(-traffic.length // page) * page
    least = mix.cost(running, one)
    if least > budget:
        raise CompositionError(
            f"memory of {budget} bytes is too little for {running} running sequences of {traffic.length} tokens: what "
            f"all of them hold of windows and states, and the whole path of one, takes {least} bytes "
            f"({size_text(least)}). Give more memory, or say a smaller traffic"
        )
    paths = running
    if mix.cost(paths + 1, mix.tokens(paths + 1)) > mix.cost(
        paths, mix.tokens(paths)
    ):  # or else nothing is ever cached
        paths = _most(lambda n: mix.cost(n, mix.tokens(n)) <= budget, paths)
    tokens = _most(lambda n: mix.cost(paths, n * page) <= budget, one // page) * page if mix.has_paths else 0
    slots = mix.slots(paths, tokens)
    return slots, _words(mix, budget, slots, paths, tokens)


def by_default(
    demands: Sequence[Demand], page: int, budget: int, max_rewind: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """A budget without a traffic: the default one, with as many running as fit; or else the same tokens for all."""
    running = Traffic().running
    while running:
        try:
            return from_traffic(demands, page, budget, Traffic(running=running), max_rewind)
        except CompositionError:
            running //= 2
    slots = evenly(demands, page, budget, max_rewind)
    return slots, told(demands, slots, "the same tokens for all, as the budget is small")


def _most(fits: Callable[[int], bool], low: int) -> int:
    """The largest number from ``low`` on that fits; ``low`` if that does not."""
    if not fits(low):
        return low
    step = 1
    while fits(low + step):
        step *= 2
    high = low + step
    low += step // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---------------------------------------------------------------- what one component needs


def _share(demand: Demand, page: int, traffic: Traffic, max_rewind: int) -> Share:
    if not demand.page_tokens:
        return _state_share(demand, traffic, max_rewind)
    if demand.reach.closed_upward and demand.manifest.shareable:
        return Share(demand, True, 0, 0, 0, "")
    length, own = traffic.length, demand.page_tokens
    needed = reach_tokens(demand.reach, length)
    early = not math.isinf(demand.reach.until(length))
    most = min(length, needed + traffic.chunk + page + max_rewind) if early else length
    running = -(-most // own) + 1
    if not demand.manifest.shareable:
        return Share(demand, False, running, 0, 0, f"{traffic.running} running x {most:,} tokens, and none is cached")
    words = f"{traffic.running} running x {most:,} tokens"
    if early and most < length:
        words += f" ({needed:,} that it reaches, {traffic.chunk:,} of a step, a page)"
    cached = -(-needed // own) + 1 if needed else 0
    return Share(demand, False, running, cached, cached, f"{words}, {{cached}} cached ends x {needed:,} tokens")


def _state_share(demand: Demand, traffic: Traffic, max_rewind: int) -> Share:
    manifest = demand.manifest
    each = demand.states_of_one(max_rewind)
    kept = 1
    if manifest.checkpoint_every:
        kept = max(1, (traffic.length - traffic.common) // manifest.checkpoint_every)
    if manifest.states_per_path is not None:
        kept = min(kept, manifest.states_per_path)
    if not manifest.shareable:
        return Share(demand, False, each, 0, 1, f"{traffic.running} running x {each}, 1 spare, and none is cached")
    shared = 1 if traffic.common else 0
    words = f"{traffic.running} running x {each}, 1 to copy into, {{cached}} cached paths x {kept}"
    return Share(demand, False, each + kept - 1, kept, 1 + shared, words + ", 1 for what is shared" * shared)


def reach_tokens(reach: Reach, length: int) -> int:
    """The most tokens that any boundary up to ``length`` needs, asked at boundaries that lie evenly."""
    step = max(1, length // SAMPLES)
    boundaries = [*range(step, length, step), length - 1, length]
    return max(sum(hi - lo for lo, hi in reach.needs(n)) for n in boundaries)


def _words(mix: Mix, budget: int, slots: dict[str, int], paths: int, tokens: int) -> tuple[str, ...]:
    traffic = mix.traffic
    first = (
        f"{size_text(budget)} for {traffic.running} running sequences of {traffic.prompt:,} + {traffic.output:,} "
        f"tokens, {traffic.common:,} of them shared, in steps of {traffic.chunk:,}"
    )
    own = max(1, traffic.length - traffic.common)
    whole = min(paths, (tokens - traffic.common) // own) if mix.has_paths else paths
    if whole < traffic.running:
        first += f"; {max(1, whole)} of them fit at once when they are done"
    out = [first]
    for share in mix.shares:
        words = f"{max(1, whole):,} whole paths" if share.whole else share.words
        out.append(
            f"{size_of(share.demand, slots[share.demand.name])}: {words.format(cached=f'{paths - traffic.running:,}')}"
        )
    return tuple(out)
