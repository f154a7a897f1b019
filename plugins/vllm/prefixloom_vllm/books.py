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
    compose,
    open_store,
)
from prefixloom.storage import shown_url

from .groups import Group, slot_bytes, tree_page
from .options import Options
from .region import Region

log = logging.getLogger("vllm.prefixloom")

Slots = Mapping[str, Many[int]]


def size(groups: Many[Group], options: Options, ranks: int) -> int:
    """Return how many slots the host has. Scheduler and workers compute the same number from the same options."""
    if options.blocks is not None:
        return options.blocks
    assert options.memory is not None
    each = slot_bytes(groups) * ranks
    if options.memory < each * len(groups):
        raise CompositionError(
            f"memory is {options.memory} bytes, and a block of each of the {len(groups)} groups takes "
            f"{each * len(groups)}"
        )
    return options.memory // each


@attrs.define(eq=False)
class Claimed:
    """Content that a load reads: a lease, and the slots that it protects."""

    lease: Lease | None
    ready: int
    slots: Slots


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
        self.gains = 0
        """How often the cache may have got something."""
        self._store: Any = None
        self.slots = size(groups, options, ranks)
        model: Profile | None = None
        more: dict[str, Any] = {"device": "meta"}
        if options.store is not None:
            staging = options.staging or max(1, self.slots * slot_bytes(groups) * ranks // 4)
            tier = {"memory": staging, "identity": identity, "keep": options.keep}
            model = Profile([ComponentSpec("hicache", "host", {**tier, "fetch": options.fetch})], name="vLLM")
            more = {"device": "cpu", "tensors": region.tensors()}
        self.cache = compose(
            model,
            plugins=[group.component(ranks) for group in groups],
            page_size=tree_page(groups),
            capacity={group.name: self.slots * (1 if group.is_state else group.tokens) for group in groups},
            slots="lent",
            policy=options.policy,
            **more,
        )
        self.cache.identity = identity
        self.page = self.cache.composition.page
        """Tokens from one boundary to the next."""
        self._paths = [group.name for group in groups if group.reach.closed_upward]
        self._pages = [group.name for group in groups if not group.is_state]
        self.free: list[int] = list(range(self.slots))[::-1]
        self._out: set[int] = set()  # taken, and not handed in yet
        self._read: Counter[int] = Counter()  # by loads under way
        self._fetches = 0  # whose slots are lent, and free until the store has answered
        self._parked: set[int] = set()  # free once no load reads them
        if options.store is not None:
            self._attach()

    # ------------------------------------------------------------ finding
    def match(self, tokens: Any, namespace: str, extra: Any) -> MatchPlan:
        """Find where a prompt can resume, with one token left to compute."""
        return self.cache.match(tokens, namespace=namespace, leave=1, extra=extra)

    def claim(self, plan: MatchPlan) -> Claimed:
        """Protect what resuming at ``plan.ready`` needs, until ``release``."""
        lease = self.cache.lease(plan, exact=True)
        slots = {group.name: lease.pages(group.name).tolist() for group in self.groups}
        for mine in slots.values():
            self._read.update(slot for slot in mine if slot >= 0)
        return Claimed(lease, plan.ready, slots)

    def release(self, claimed: Claimed) -> None:
        """Release the slots of a load that is over, or is not made. Slots evicted meanwhile are free then."""
        lease, claimed.lease = claimed.lease, None
        if lease is None:
            return
        lease.release()
        for mine in claimed.slots.values():
            self._read.subtract(slot for slot in mine if slot >= 0)
            for slot in mine:
                if slot >= 0 and not self._read[slot]:
                    del self._read[slot]
                    if slot in self._parked:
                        self._parked.discard(slot)
                        self.free.append(slot)
        self._collect()

    # ------------------------------------------------------------ keeping
    def take(self, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Take free slots to write to, evicting first what is needed least. If too few are free, share them out."""
        count = sum(wanted.values())
        if count > len(self.free):
            self._make_room(count)
        taken = self._share(wanted)
        for mine in taken.values():
            self._out.update(mine)
        return taken

    def _share(self, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Take as many free slots for each name as it asks for; if there are too few, give each a proportional part."""
        count, have = sum(wanted.values()), len(self.free)
        shares = {}
        for name, asked in wanted.items():
            first = len(self.free) - (asked if count <= have else asked * have // count)
            shares[name] = self.free[first:][::-1]
            del self.free[first:]
        return shares

    def _make_room(self, count: int) -> None:
        """Evict until so many slots are free, if so many can be evicted.

        Evict first what no boundary needs. Then evict the ends of the paths that were used least recently, with their
        windows and states. Last, or if no component keeps whole paths, evict anything.
        """
        for names, unneeded in (
            (self._pages, True),
            (self._paths, False),
            ([group.name for group in self.groups], False),
        ):
            evicted = True
            while evicted and count > len(self.free):
                short = -(-(count - len(self.free)) // max(1, len(names)))
                gone = self.cache.evict(dict.fromkeys(names, short), unneeded=unneeded)
                evicted = any(gone.values())
                self._collect(lent=True)

    def give(self, slots: Slots) -> None:
        """Give back slots that were taken and not handed in."""
        for mine in slots.values():
            self._out.difference_update(mine)
            self.free.extend(mine)

    def insert(self, tokens: Any, slots: Slots, start: int, namespace: str, extra: Any) -> Inserted:
        """Give the cache the content of these slots: tokens from ``start`` on, and the state at their end."""
        self.gains += 1
        for mine in slots.values():
            self._out.difference_update(mine)
        try:
            return self.cache.insert(tokens, slots, start=start, namespace=namespace, extra=extra)
        finally:
            self._collect()

    def _collect(self, lent: bool = False) -> None:
        """Take back what the cache has evicted or did not want. ``lent``: even what a fetch may still need."""
        if self._fetches and not lent:
            return
        for slots in self.cache.take_back().values():
            for slot in slots:
                if slot in self._read:
                    self._parked.add(slot)
                else:
                    self.free.append(slot)

    def forget(self) -> None:
        """Invalidate all that was computed so far, in the cache and in the store."""
        self.epoch += 1
        self.gains += 1
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
        place = str(self.options.store)
        if not self.options.store_is_url:
            check_identity(Path(place), self.identity)
        try:
            self._store = (
                open_store(place)
                if self.options.store_is_url
                else open_store("file", directory=Path(place) / "records", capacity=self.options.store_capacity)
            )
        except StorageError as error:
            raise StorageError(f"the store {shown_url(place)!r} cannot be used: {error}") from error
        self._tier.attach(self._store)
        self.cache.poll()

    @property
    def has_store(self) -> bool:
        return self._store is not None

    @property
    def writing(self) -> bool:
        """Whether the store has not taken yet what it was given."""
        return self._store is not None and self._tier.store.status().writes_waiting[0] > 0

    def poll(self) -> None:
        """Continue what a store reads and writes."""
        if self._store is not None:
            self.cache.poll()
            self._collect()

    def fetch(self, plan: MatchPlan) -> Fetching:
        """Look in the store, and in the memory before it, for more of a prompt."""
        lacking = plan.key_tokens - plan.ready
        wanted = {group.name: 2 if group.is_state else lacking // group.tokens for group in self.groups}
        lent = self._share(wanted)  # what is free; the cache itself evicts for more, once it knows what it can bring
        self.cache.lend(lent)
        try:
            sequence = self.cache.open(plan)
        except BaseException:
            self._collect()
            raise
        self._fetches += 1
        return Fetching(sequence, sequence.restore())

    def fetched(self, fetching: Fetching) -> None:
        """End a fetch, whose content is in the cache."""
        self._fetches -= 1
        self.gains += 1
        fetching.sequence.abort()
        self._collect()

    def close(self, patience: float = 10.0) -> None:
        """Write to the store what waits for it, for at most so many seconds, and close it."""
        if self._store is None:
            return
        end = time.monotonic() + patience
        while time.monotonic() < end:
            self.cache.poll()
            tier = self.cache.stats().tier
            assert tier is not None
            if not self.writing and not tier.to_store:
                break
            time.sleep(0.005)
        self._tier.detach()
        self._store.close()
        self._store = None

    # ------------------------------------------------------------ debug mode
    def check(self) -> None:
        """Check that each slot is in one place: here, with a copy, waiting for a load to end, or with the cache."""
        cached = sum(each.capacity - each.outside for each in self.cache.stats().components.values())
        free, out, parked = self.free, self._out, self._parked
        here = {*free} | out | parked
        if len(here) != len(free) + len(out) + len(parked):
            raise InvariantError(f"a slot is in two places: free {free}, taken {out}, parked {parked}")
        if len(here) + cached != self.slots:
            raise InvariantError(f"{len(here)} of {self.slots} slots are here, and the cache has {cached}")
        if reading := [slot for slot in free if slot in self._read]:
            raise InvariantError(f"slots {reading} are free, and a load reads them")


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
