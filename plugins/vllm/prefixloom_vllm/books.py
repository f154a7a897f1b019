"""Books: the host's memory as the scheduler knows it. Which slot holds what, who may use it, and the store behind it.

The slots belong to this module: they are lent to a prefixloom cache, which takes them with their content and returns
them when it has evicted that. The memory itself is the region's, which the workers fill. It knows tokens and slots, and
nothing of vLLM.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import attrs

from prefixloom import (
    Cache,
    ComponentSpec,
    CompositionError,
    Identity,
    Inserted,
    InvariantError,
    Lease,
    MatchPlan,
    Profile,
    Restored,
    Sequence,
    StorageError,
    Traffic,
    compose,
    open_store,
)

from .groups import Group, tree_page
from .options import Options
from .region import Region

log = logging.getLogger("prefixloom.vllm")

Slots = Mapping[str, Many[int]]


def sizes(groups: Many[Group], options: Options, ranks: int) -> dict[str, int]:
    """The host's slots of each component. Scheduler and workers compute the same from the same options."""
    return {part.name: part.capacity for part in _composed(groups, options, ranks).composition.parts}


def _composed(groups: Many[Group], options: Options, ranks: int, **more: Any) -> Cache:
    components = [group.component(ranks) for group in groups]
    page = tree_page(groups)
    common: dict[str, Any] = {"plugins": components, "slots": "lent", "policy": options.policy, "page_size": page}
    common = {"device": "meta", **common, **more}
    model = common.pop("model", None)
    if options.capacity is not None:
        return compose(model, capacity=dict(options.capacity), **common)
    try:
        return compose(model, memory=options.memory, traffic=Traffic(**{"running": 1, **options.traffic}), **common)
    except CompositionError:
        if options.traffic:
            raise
        return compose(model, memory=options.memory, **common)


def _unit(group: Group) -> int:
    """What a capacity counts of a group: the tokens of a block, or states."""
    return 1 if group.is_state else group.tokens


@attrs.define(eq=False)
class Claimed:
    """Content that a load reads: a lease, and the slots that it protects."""

    lease: Lease | None
    ready: int
    slots: dict[str, list[int]]


@attrs.define(eq=False)
class Fetching:
    """A prompt that a store may have more of."""

    sequence: Sequence
    restored: Restored

    @property
    def over(self) -> bool:
        return self.restored.over


class Books:
    """The host's memory of one engine. One thread uses it: the scheduler's."""

    def __init__(
        self, groups: Many[Group], options: Options, ranks: int, region: Region, identity: Identity, debug: bool
    ) -> None:
        self.groups = groups
        self.options = options
        self.debug = debug
        self.identity = identity
        self.epoch = 0
        """How often everything was forgotten. Content from before belongs to no tokens any more."""
        self._store: Any = None
        capacity = sizes(groups, options, ranks)
        fixed = attrs.evolve(options, memory=None, capacity={g.name: capacity[g.name] * _unit(g) for g in groups})
        if options.store is None:
            self.cache = _composed(groups, fixed, ranks)
        else:
            staging = options.staging or max(1, (options.memory or 0) // 4)
            tier = {"memory": staging, "identity": identity, "keep": options.keep}
            profile = Profile([ComponentSpec("hicache", "host", {**tier, "fetch": options.fetch})], name="vLLM")
            self.cache = _composed(groups, fixed, ranks, model=profile, device="cpu", tensors=region.tensors())
        self.cache.identity = identity
        self.capacity = {part.name: part.capacity for part in self.cache.composition.parts}
        self.free: dict[str, list[int]] = {name: list(range(count))[::-1] for name, count in self.capacity.items()}
        self._out: dict[str, set[int]] = {name: set() for name in self.capacity}  # taken, and not handed in yet
        self._read: dict[str, Counter[int]] = {name: Counter() for name in self.capacity}  # by loads under way
        self._fetches = 0  # whose slots are lent, and free until the store has answered
        self._parked: dict[str, set[int]] = {name: set() for name in self.capacity}  # free once no load reads them
        if options.store is not None:
            self._attach()

    @property
    def page(self) -> int:
        """Tokens from one boundary to the next."""
        return self.cache.composition.page

    # ------------------------------------------------------------ finding
    def match(self, tokens: Any, namespace: str, extra: Any) -> MatchPlan:
        """Where a prompt can resume, with one token left to compute."""
        return self.cache.match(tokens, namespace=namespace, leave=1, extra=extra)

    def claim(self, plan: MatchPlan) -> Claimed:
        """Protect what resuming at ``plan.ready`` needs, until ``release``."""
        lease = self.cache.lease(plan, exact=True)
        slots = {name: lease.pages(name).tolist() for name in self.capacity}
        for name, mine in slots.items():
            self._read[name].update(slot for slot in mine if slot >= 0)
        return Claimed(lease, plan.ready, slots)

    def release(self, claimed: Claimed) -> None:
        """The load is over, or is not made: nobody reads these slots for it any more."""
        lease, claimed.lease = claimed.lease, None
        if lease is None:
            return
        lease.release()
        for name, mine in claimed.slots.items():
            reads, parked = self._read[name], self._parked[name]
            reads.subtract(slot for slot in mine if slot >= 0)
            for slot in mine:
                if slot >= 0 and not reads[slot]:
                    del reads[slot]
                    if slot in parked:
                        parked.discard(slot)
                        self.free[name].append(slot)
        self._collect()

    # ------------------------------------------------------------ keeping
    def take(self, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Free slots to write to, evicting what is needed least. It may be fewer than wanted."""
        short = {name: count - len(self.free[name]) for name, count in wanted.items() if count > len(self.free[name])}
        if short:
            self.cache.evict(short)
            self._collect(lent=True)
        taken = {}
        for name, count in wanted.items():
            free = self.free[name]
            first = max(0, len(free) - count)
            taken[name] = free[first:][::-1]
            del free[first:]
            self._out[name].update(taken[name])
        return taken

    def give(self, slots: Slots) -> None:
        """Give back slots that were taken and not handed in."""
        for name, mine in slots.items():
            self._out[name].difference_update(mine)
            self.free[name].extend(mine)

    def insert(self, tokens: Any, slots: Slots, start: int, namespace: str, extra: Any) -> Inserted:
        """The slots have the content of these tokens now: from ``start`` on, and the state at their end."""
        for name, mine in slots.items():
            self._out[name].difference_update(mine)
        try:
            return self.cache.insert(tokens, slots, start=start, namespace=namespace, extra=extra)
        finally:
            self._collect()

    def _collect(self, lent: bool = False) -> None:
        """Take back what the cache has evicted or did not want. ``lent``: even what a fetch may still need."""
        if self._fetches and not lent:
            return
        for name, slots in self.cache.take_back().items():
            reads = self._read[name]
            for slot in slots:
                if slot in reads:
                    self._parked[name].add(slot)
                else:
                    self.free[name].append(slot)

    def forget(self) -> None:
        """Nothing that was computed so far is valid any more, nor what a store has of it."""
        self.epoch += 1
        if self._store is not None:
            self.identity = attrs.evolve(self.identity, salt=f"reset {uuid.uuid4()}")
            self._tier.identity = self.identity
            self.cache.identity = self.identity
        self.cache.flush()
        self._collect()

    # ------------------------------------------------------------ the store
    @property
    def _tier(self) -> Any:
        tier = self.cache.composition.tier
        assert tier is not None
        return tier.component

    def _attach(self) -> None:
        folder = Path(str(self.options.store))
        check_identity(folder, self.identity)
        try:
            self._store = open_store("file", directory=folder / "records", capacity=self.options.store_capacity)
        except StorageError as error:
            raise StorageError(f"the store {str(folder)!r} cannot be used: {error}") from error
        self._tier.attach(self._store)
        self.cache.poll()

    @property
    def writing(self) -> bool:
        """Whether the store has not taken yet what it was given."""
        return self._store is not None and self._tier.store.status().writes_waiting[0] > 0

    def poll(self) -> None:
        """Go on with what a store reads and writes."""
        if self._store is not None:
            self.cache.poll()
            self._collect()

    def fetch(self, plan: MatchPlan) -> Fetching | None:
        """Look in the store, and in the memory before it, for more of a prompt. None: there is no store."""
        if self._store is None:
            return None
        lent = {}
        for group in self.groups:  # what is free; the cache itself evicts for more, once it knows what it can bring
            free = self.free[group.name]
            count = 2 if group.is_state else (plan.key_tokens - plan.ready) // group.tokens
            lent[group.name] = free[max(0, len(free) - count) :]
            del free[len(free) - len(lent[group.name]) :]
        self.cache.lend(lent)
        try:
            sequence = self.cache.open(plan)
        except BaseException:
            self._collect()
            raise
        self._fetches += 1
        return Fetching(sequence, sequence.restore())

    def fetched(self, fetching: Fetching) -> None:
        """End a fetch: what it brought is in the cache."""
        self._fetches -= 1
        fetching.sequence.abort()
        self._collect()

    def close(self, patience: float = 10.0) -> None:
        """Write to the store what waits for it, for at most so many seconds, and close it."""
        if self._store is None:
            return
        end = time.monotonic() + patience
        told, since = -1, time.monotonic()
        while time.monotonic() < min(end, since + 0.2) or (self.writing and time.monotonic() < end):
            self.cache.poll()
            tier = self.cache.stats().tier
            assert tier is not None
            if told != tier.stored + tier.refused:
                told, since = tier.stored + tier.refused, time.monotonic()
            time.sleep(0.005)
        self._tier.detach()
        self._store.close()
        self._store = None

    # ------------------------------------------------------------ debug mode
    def check(self) -> None:
        """Check that each slot is in one place: here, with a copy, waiting for a load to end, or with the cache."""
        figures = self.cache.stats().components
        for name, count in self.capacity.items():
            free, out, parked = self.free[name], self._out[name], self._parked[name]
            here = {*free} | out | parked
            if len(here) != len(free) + len(out) + len(parked):
                raise InvariantError(f"{name}: a slot is in two places: free {free}, taken {out}, parked {parked}")
            if len(here) != figures[name].outside:
                raise InvariantError(
                    f"{name}: {len(here)} of {count} slots are here, and the cache says {figures[name].outside}"
                )
            if reading := {slot for slot in free if slot in self._read[name]}:
                raise InvariantError(f"{name}: slots {sorted(reading)} are free, and a load reads them")


def check_identity(folder: Path, identity: Identity) -> None:
    """Refuse the store of another model. The first one that uses a folder writes down whose it is."""
    path = folder / "identity.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = json.loads(path.read_text()) if path.exists() else None
        if there is None:
            new = folder / f"identity.{uuid.uuid4().hex}"
            new.write_text(json.dumps(identity.facts, indent=1))
            new.rename(path)
            return
    except (OSError, ValueError) as error:
        raise StorageError(f"the store {str(folder)!r} cannot be used: {error}") from error
    if difference := identity.difference(there):
        raise StorageError(
            f"the store {str(folder)!r} belongs to another model: {difference}. Give each model a folder of its own"
        )
