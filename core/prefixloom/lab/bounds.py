"""Bounds: what no policy can beat, since they know the future of a trace.

A trace is a list of *paths*, one for each request in their order: what names the blocks of a prompt from the front on.
A name stands for all that lies before it as well, so two paths share a block exactly where they have the same name.
``chained`` makes such names of ids that stand for a block's own text only. Requests are served one after the other.

``optimum`` is the optimum for one pool of blocks, Belady's MIN with bypass. ``upper_bound`` bounds what several pools
can give together, where a request resumes at a boundary only if all pools have what that needs.

Why MIN keeps the prefix rule (a block hits only if all blocks before it hit). Whoever uses a block uses all blocks
above it, so the next use of a block is never sooner than that of a block above it. MIN keeps the blocks whose next
use comes first, and of equals the shallower ones. So it never keeps a block without those above it, and each block
that it keeps hits. Without the prefix rule, MIN with bypass is optimal for blocks of one size; the rule only forbids
hits.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Hashable, Iterable, Sequence

import attrs
import torch

from ..errors import InputError

Path = Sequence[Hashable]
NEVER = 1 << 62


def chained(paths: Iterable[Path]) -> list[list[int]]:
    """Number the blocks of each path, so that a number stands for the block and all blocks before it."""
    numbers: dict[tuple[Hashable, Hashable], int] = {}
    found = []
    for path in paths:
        above, row = -1, []
        for block in path:
            above = numbers.setdefault((above, block), len(numbers))
            row.append(above)
        found.append(row)
    return found


def optimum(paths: Sequence[Path], capacity: int) -> list[int]:
    """Return the blocks that each request hits under MIN with bypass, in a pool of ``capacity`` blocks, empty at first.

    The sum of these is the most that any policy can hit. It takes O(n log n) for n names of blocks.
    """
    if capacity < 0:
        raise InputError(f"a pool holds a number of blocks from 0 up, got {capacity}")
    coming = _next_uses(paths)
    resident: dict[Hashable, int] = {}
    heap: list[tuple[int, int, Hashable]] = []  # the latest next use first, and of equals the deepest
    hits = []
    for path, uses in zip(paths, coming, strict=True):
        hit = 0
        for block in path:
            if block not in resident:
                break
            hit += 1
        hits.append(hit)
        for depth, (block, use) in enumerate(zip(path, uses, strict=True)):
            if use == NEVER:
                resident.pop(block, None)
            else:
                resident[block] = use
                heapq.heappush(heap, (-use, -depth, block))
        while len(resident) > capacity:
            use, _, block = heapq.heappop(heap)
            if resident.get(block) == -use:
                del resident[block]
    return hits


def _next_uses(paths: Sequence[Path]) -> list[list[int]]:
    """Return for each block of each path the number of the next request that uses the block, or NEVER."""
    later: dict[Hashable, int] = {}
    coming: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        path = paths[number]
        coming.append([later.get(block, NEVER) for block in path])
        later.update(dict.fromkeys(path, number))
    coming.reverse()
    return coming


@attrs.frozen
class Pools:
    """The pools of a composition, in blocks, of which the last may be a part. None: there is no such pool, or it never
    limits anything.

    ``whole``   blocks of full attention: to resume behind block n, blocks 1 to n must be there
    ``window``  blocks of a window, and ``reach``, how many blocks before a boundary must be there
    ``states``  states: to resume behind block n, its state must be there
    """

    whole: float | None = None
    window: float | None = None
    reach: int = 1
    states: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("whole", "window", "states"):
            count = getattr(self, name)
            if count is not None and count < 0:
                raise InputError(f"the pool {name!r} holds a number of blocks from 0 up, got {count}")
        if self.reach < 1:
            raise InputError(f"a window reaches over at least one block, got {self.reach}")


def upper_bound(
    paths: Sequence[Path], pools: Pools, *, rounds: int = 150, sizes: Sequence[Sequence[int]] | None = None
) -> float:
    """Bound the sum of the blocks behind which requests resume, over all policies, also those that know the future.

    What is bounded: requests come one after the other and the pools start empty. A request resumes behind block n if
    each pool has what that needs. It then has everything behind block n computed, and any policy decides freely what of
    that and of what was resident stays, also which boundaries get a state; each pool holds at most its capacity between
    two requests. What a running request holds is not counted, so a real cache has less room. No tier is below.

    ``rounds``: how often the prices are improved.
    ``sizes``: how many blocks each name stands for, where a trace names longer pieces than those at whose ends requests
    resume. The pools and the result are in blocks then.

    Proof. Say that a request *visits* the blocks of its path. What a request needs of a block comes to be only when a
    visit of this block computes it. So what request i needs of a block lies in its pool at all times from the visit
    before (at prev) to i. Such a *stay* (block, prev, i) belongs to i alone, since i is the next visit. At each time t
    between two requests the stays of one pool that are used and span t lie in the pool together: at most its capacity
    C. Let p(t) >= 0 be any prices, one for each pool and time. In sum, the stays of a policy cost at most sum over
    pools and times of C * p(t). Hence

        hits <= sum of C * p(t) + sum over i of max(0, max over n of n - the price of the stays that n needs)

    for all prices (weak duality). The prices are then improved by subgradient steps, and the best sum counts. Prices of
    zero give the ideal of infinite memory. For one pool of whole paths the best prices give exactly ``optimum``, since
    intervals on a line make a totally unimodular program; ``optimum`` is therefore a bound as well, and the smaller one
    is returned. So is the bound of such a pool with others, which only forbid hits.
    """
    trace = _Stays(paths, pools, sizes)
    best = trace.ideal
    if pools.whole is not None:
        best = min(best, _optimum_of_pieces(paths, sizes, pools.whole, trace.ideal))
    if trace.pools and trace.ideal:
        prices = [torch.zeros(trace.requests, dtype=torch.float64) for _ in trace.pools]
        squares = [torch.zeros(trace.requests, dtype=torch.float64) for _ in trace.pools]
        reached = best
        for done in range(1, rounds + 1):
            value, slopes = trace.dual(prices)
            reached = min(reached, value)
            scale = trace.step / (1 + done / 25)
            for price, square, slope in zip(prices, squares, slopes, strict=True):
                square.mul_(0.9).addcmul_(slope, slope, value=0.1)
                price.addcdiv_(slope, square.sqrt() + 1e-9, value=-scale).clamp_(min=0)
        best = min(best, reached)
    return best


def _optimum_of_pieces(
    paths: Sequence[Path], sizes: Sequence[Sequence[int]] | None, capacity: float, ideal: float
) -> float:
    """Return ``optimum`` in a pool that may hold a piece in part. Pieces smaller than others count as hit."""
    if sizes is None:
        return float(sum(optimum(paths, math.ceil(capacity))))
    size = max((max(each) for each in sizes if len(each)), default=1) or 1
    cut = [
        path[: next((at for at, each in enumerate(row) if each != size), len(row))]
        for path, row in zip(paths, sizes, strict=True)
    ]
    never_evicted, best = (size * sum(optimum(cut, most)) for most in (NEVER, math.ceil(capacity / size)))
    return float(ideal - never_evicted + best)


class _Stays:
    """The stays of a trace by pool, as flat tensors, one entry for each block that was visited before."""

    def __init__(self, paths: Sequence[Path], pools: Pools, sizes: Sequence[Sequence[int]] | None) -> None:
        visited: dict[Hashable, int] = {}
        before, counts, known = array("q"), array("q"), array("q", bytes(8 * len(paths)))
        for number, path in enumerate(paths):
            for place, block in enumerate(path):
                at = visited.get(block)
                if at is None:
                    break
                count = 1 if sizes is None else sizes[number][place]
                before.append(at)
                counts.append(count)
                known[number] += count
            visited.update(dict.fromkeys(path, number))
        self.requests = len(paths)
        deepest = _tensor(known)
        places = torch.arange(int(deepest.sum()))
        self.before = _tensor(before).repeat_interleave(_tensor(counts))
        self.owner = torch.arange(self.requests).repeat_interleave(deepest)
        self.first = (deepest.cumsum(0) - deepest).repeat_interleave(deepest)
        self.depth = places - self.first + 1
        self.ideal = float(len(places))
        self.pools: list[tuple[float, torch.Tensor]] = []
        """(capacity, for each entry the first entry that resuming behind it needs)"""
        for capacity, reach in ((pools.whole, NEVER), (pools.window, pools.reach), (pools.states, 1)):
            if capacity is not None:
                self.pools.append((capacity, torch.maximum(self.first, places - (reach - 1))))
        spans = (self.owner - self.before).double()
        self.step = float(self.depth.double().sum() / spans.sum().clamp(min=1)) / 4 if len(places) else 0.0

    def dual(self, prices: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
        """Return the bound with these prices, and its slope in each of them."""
        gain = self.depth.double()
        total = 0.0
        for (capacity, start), price in zip(self.pools, prices, strict=True):
            total += capacity * float(price.sum())
            upto = torch.cat((torch.zeros(1, dtype=torch.float64), price.cumsum(0)))
            cost = torch.cat((torch.zeros(1, dtype=torch.float64), (upto[self.owner] - upto[self.before]).cumsum(0)))
            gain = gain - (cost[1:] - cost[start])
        best = torch.zeros(self.requests, dtype=torch.float64).scatter_reduce_(0, self.owner, gain, "amax")
        total += float(best.sum())
        chosen = ((gain > 0) & (gain >= best[self.owner])).nonzero().flatten()
        chosen = chosen[torch.cat((torch.ones(1, dtype=torch.bool), self.owner[chosen].diff() > 0))[: len(chosen)]]
        slopes = []
        for capacity, start in self.pools:
            held = torch.zeros(len(gain) + 1, dtype=torch.int64)  # entries from ``start`` to the chosen one
            held.index_add_(0, start[chosen], torch.ones_like(chosen))
            held.index_add_(0, chosen + 1, -torch.ones_like(chosen))
            used = held.cumsum(0)[:-1]
            change = torch.zeros(self.requests + 1, dtype=torch.int64)
            change.index_add_(0, self.before, used)
            change.index_add_(0, self.owner, -used)
            slopes.append(capacity - change.cumsum(0)[: self.requests].double())
        return total, slopes


def _tensor(numbers: array[int]) -> torch.Tensor:
    return torch.tensor(numbers.tolist(), dtype=torch.int64)
