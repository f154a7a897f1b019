"""Needs: how many slots of every pool one running sequence holds, from the reaches and manifests alone.

The answer is plain data, without a cache: a scheduler asks whether a request fits, and a router in another process
where it fits best.
"""

from __future__ import annotations

import attrs

from ..contract.composition import Composition
from ..contract.reach import Reach
from .sizing import Demand


@attrs.frozen
class PoolNeed:
    """What decides how much of one pool a sequence holds. ``states``: the slots that it holds of a pool of states."""

    name: str
    page_tokens: int
    reach: Reach
    capacity: int
    states: int


@attrs.frozen
class SequenceNeeds:
    """How many slots of every pool one sequence holds at most while it runs.

    A path needs a page for every token of a sequence. A window needs the pages that its reach covers at the end of the
    sequence, and those that one step adds. Of states a sequence has those that ``compose`` counts for it.

    ``step``: the most tokens that one step adds, those included that may be taken back.
    """

    pools: tuple[PoolNeed, ...]
    step: int

    @classmethod
    def of(cls, composition: Composition, chunk: int) -> SequenceNeeds:
        """Those of a cache's composition, where one step of prefill computes ``chunk`` tokens."""
        rewind = composition.max_rewind
        pools = tuple(
            PoolNeed(
                part.name, part.page_tokens, part.reach, part.capacity,
                Demand(part.name, part.manifest, part.page_tokens).states_of_one(rewind),
            )
            for part in composition.parts
        )  # fmt: skip
        return cls(pools, max(chunk, 1 + rewind) + rewind)  # a step computes a chunk, or a token and guesses

    def slots(self, length: int) -> dict[str, int]:
        """By component, the pages or states that a sequence of ``length`` tokens holds."""
        return {pool.name: self._pages(pool, length) if pool.page_tokens else pool.states for pool in self.pools}

    def shares(self, length: int) -> dict[str, float]:
        """By component, which part of the whole pool that is."""
        found = self.slots(length)
        return {pool.name: found[pool.name] / pool.capacity for pool in self.pools if pool.capacity}

    def _pages(self, pool: PoolNeed, length: int) -> int:
        size = pool.page_tokens
        kept = sum(-(-end // size) - start // size for start, end in pool.reach.needs(length))
        step = -(-self.step // size) + 1
        return min(-(-length // size), kept + step)
