"""The cache: what ``compose`` returns and an engine calls.

It ties the tree, the lanes and the plugins' hooks together and owns no idea of its own: every derived answer comes from
a lane, every special one from a hook, folded in one direction. One thread drives a cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from ..compose.build import Assembly
from ..device.flight import Flight
from ..device.pool import Pool
from ..device.streams import Stream, stream_for
from ..errors import InputError, ProtocolError
from ..operations.lease import Hold, Lease, acquire, bury, release
from ..operations.match import MatchPlan, again, look, tell
from ..operations.open import open_at
from ..operations.publish import split
from ..operations.retain import reclaim
from ..operations.room import evict, evict_told
from ..operations.running import check_states
from ..operations.tables import Tables
from ..operations.teardown import Dropped, forget_everything
from ..tiers.host_tier import LowerTier
from ..tree.keys import TOKEN_BYTES, Tokens, encode, namespace_of
from ..tree.lane import Lane
from ..tree.path_lane import PathLane
from ..tree.radix import Counted, Node, Root, Tree
from .debug import Debug
from .sequence import Sequence
from .session import open_session
from .stats import CacheStats, cache_stats
from .step import Step

if TYPE_CHECKING:
    from ..contract.composition import Composition


class Cache(Assembly):
    """One composed cache. Made by ``prefixloom.compose``; see docs/design.md for a request's way through it."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        self._debug = Debug(self) if composition.debug else None
        self._guarded = self._debug is not None
        self._opened = self._asked = self._hit = 0
        self._skipped_checkpoints = self._plugin_errors = self._recovered = 0
        self._live: dict[Hold, None] = {}
        self._epoch = self._flushed_at = 0
        self._flushes = 0
        self._dropped = Dropped(self)
        self._flight = Flight(self)
        self._streams: dict[Any, Stream] = {}
        self._inline: Stream | None = None  # the one that None stands for, where that is the caller
        self._tables = Tables(self)
        self._tier = None if composition.tier is None else LowerTier(self, composition.tier)
        self._all_lanes: tuple[Lane, ...] = self._lanes + (() if self._tier is None else self._tier.lanes)
        self._width = len(self._all_lanes)
        for lane in self._all_lanes:
            for pool in lane.pools:
                pool.dropped = self._dropped
                pool.fence = self._flight
        self._fresh_tree()

    def _fresh_tree(self) -> None:
        kind = Node if self._tier is None else Counted
        self._tree = Tree(self._page, self._keys.element_bytes, self._width, kind)
        self._empty_root = self._new_root("")
        self._graves: list[Node] = []

    def _new_root(self, namespace: str) -> Root:
        root = self._tree.root(namespace)
        for lane in self._lanes:
            if isinstance(lane, PathLane):
                lane.root_cell(root)
        return root

    def __repr__(self) -> str:
        names = ", ".join(lane.name for lane in self._lanes)
        return f"<Cache {self.composition.name}: {names}; boundaries every {self._page} tokens>"

    # ------------------------------------------------------------ guarding
    def _enter(self) -> None:
        """Before an operation: the right thread (debug), and what was dropped without release is taken back."""
        if self._debug is not None:
            self._debug.enter()
        if self._dropped:
            self._dropped.recover()

    def _leave(self, what: str) -> None:
        if self._debug is not None:
            self._debug.check(what)

    # ------------------------------------------------------------ matching
    def match(
        self, tokens: Any, *, namespace: str = "", leave: int = 0, extra: Iterable[tuple[int, int, Hashable]] = ()
    ) -> MatchPlan:
        """Where ``tokens`` could resume. Pure: nothing changes, and nothing is protected.

        ``leave``: at least so many tokens are left to compute. ``extra``: (start, end, key) spans whose content depends
        on more than the tokens, such as an image's hash at its placeholders.
        """
        if self._guarded:
            self._enter()
        return self._plan(tokens, namespace, leave, extra)

    def _plan(self, tokens: Any, namespace: str, leave: int, extra: Iterable[tuple[int, int, Hashable]]) -> MatchPlan:
        tokens, key, single, namespace, most = self._asked_for(tokens, namespace, leave, extra)
        plan = MatchPlan()
        plan._cache = self
        plan._epoch = self._epoch
        plan._claims = ()
        plan._tokens = tokens
        plan._key = key
        plan._single = single
        plan.namespace = namespace
        plan._most = most
        node, ready, reached, walked_to, walked, limited_by, branch = look(self, namespace, tokens, key, most)
        tell(self, plan, node, ready, reached, walked_to, walked, limited_by, branch)
        return plan

    def _asked_for(
        self, tokens: Any, namespace: str, leave: int, extra: Iterable[tuple[int, int, Hashable]]
    ) -> tuple[Tokens, bytes, bytes | None, str, int]:
        """Checked: (tokens, their key, those with extra keys in place, namespace, how many to resume at most)."""
        if namespace.__class__ is not str:
            namespace = namespace_of(namespace)
        if leave.__class__ is not int or leave < 0:
            raise InputError(f"leave takes a number of tokens from 0 up, got {leave!r}")
        if tokens.__class__ is not Tokens:
            tokens = encode(tokens)
        key: bytes = tokens
        single = None
        if extra:
            single = self._keys.with_extra(tokens, extra)
            key = self._keys.widen(single)
        elif self._lookahead:
            key = self._keys.widen(tokens)
        most = len(tokens) // TOKEN_BYTES - leave
        if self._lookahead and leave < self._lookahead:
            most += leave - self._lookahead
        return tokens, key, single, namespace, most

    def peek(
        self, tokens: Any, *, namespace: str = "", leave: int = 0, extra: Iterable[tuple[int, int, Hashable]] = ()
    ) -> int:
        """How many of ``tokens`` would hit. Pure."""
        return self.match(tokens, namespace=namespace, leave=leave, extra=extra).ready

    def lease(self, plan: MatchPlan) -> Lease:
        """Protect what resuming at ``plan.ready`` needs. A stale plan is planned again, so the lease may be shorter."""
        if self._guarded:
            self._enter()
        plan = self._current(plan)
        lease = acquire(self, self._anchor(plan._node, plan.ready, plan.namespace), plan.namespace, Lease)
        self._leave("lease")
        return lease

    def _release(self, lease: Lease) -> None:
        release(self, lease)

    def _current(self, plan: MatchPlan) -> MatchPlan:
        if not isinstance(plan, MatchPlan) or plan._cache is not self:
            raise ProtocolError(f"{plan!r} was not made by this cache")
        if plan._epoch != self._epoch:
            if plan._epoch < self._flushed_at:
                raise ProtocolError(f"{plan!r} was made before the cache was flushed: match again")
            return again(plan, plan._key, plan._most)
        return plan

    def _anchor(self, node: Node, boundary: int, namespace: str) -> Node:
        """The node that ends at ``boundary``, which lies in ``node`` or above: the one change that a match makes to
        the tree is this split.
        """
        if not boundary:
            return self._root(namespace)
        while node.parent.end >= boundary:
            node = node.parent
        return node if node.end == boundary else split(self, node, boundary)

    def _root(self, namespace: str) -> Node:
        root = self._tree.roots.get(namespace)
        if root is None:
            root = self._tree.roots[namespace] = self._new_root(namespace)
        return root

    # ------------------------------------------------------------ sequences
    def open(
        self,
        tokens: Any,
        *,
        namespace: str = "",
        leave: int = 0,
        extra: Iterable[tuple[int, int, Hashable]] = (),
        label: str = "",
        priority: int = 0,
    ) -> Sequence:
        """A sequence over ``tokens``: match, lease, and a slot for each running state.

        ``tokens`` may also be a ``MatchPlan``, which has its own namespace, leave and extra; a stale one is planned
        again. CapacityError: no running slot can be had.
        """
        if self._guarded:
            self._enter()
        if label.__class__ is not str or priority.__class__ is not int:
            raise InputError(f"a label is a string and a priority a whole number, got {label!r} and {priority!r}")
        if tokens.__class__ is not Tokens and isinstance(tokens, MatchPlan):
            return self._open_given(tokens, bool(namespace or leave or extra), label, priority)
        if self._asks_more:
            plan = self._plan(tokens, namespace, leave, extra)
            return self._open_planned(plan, label, priority)
        tokens, key, single, namespace, most = self._asked_for(tokens, namespace, leave, extra)
        node, ready, reached, _, _, _, branch = look(self, namespace, tokens, key, most)
        return open_at(self, node, ready, reached, branch, tokens, key, single, namespace, label, priority, (), None)

    def _open_given(self, plan: MatchPlan, told_twice: bool, label: str, priority: int) -> Sequence:
        if told_twice:
            raise InputError("a plan has its namespace, leave and extra already: give them to match")
        return self._open_planned(self._current(plan), label, priority)

    def _open_planned(self, plan: MatchPlan, label: str, priority: int) -> Sequence:
        return open_at(
            self, plan._node, plan.ready, plan._reached, plan.branch, plan._tokens, plan._key, plan._single,
            plan.namespace, label, priority, plan._claims, plan,
        )  # fmt: skip

    def session(
        self, model: Any, ids: Any, *, namespace: str = "", label: str = "", **options: Any
    ) -> AbstractContextManager[Any]:
        """One conversation that the model's own code runs over this cache: ``with cache.session(model, ids) as s``.

        Made by an installed adapter that knows the model, which takes the ``options``. CompositionError: none does.
        """
        return open_session(self, model, ids, {"namespace": namespace, "label": label, **options})

    def _too_long(self, length: int) -> None:
        kept = [lane for lane in self._page_lanes if not lane.retains]
        lane = min(kept, key=lambda lane: lane.pool.capacity * lane.part.page_tokens)
        raise InputError(
            f"a sequence of {length} tokens is longer than the pool of component {lane.name!r}, which holds "
            f"{lane.pool.capacity * lane.part.page_tokens}"
        )

    def step(self, sequences: Many[Sequence], role: Literal["target", "draft"] = "target") -> Step:
        """The program of one forward pass over ``sequences``."""
        if role != "target" and role != "draft":
            raise InputError(f"a step's role is 'target' or 'draft', got {role!r}")
        if sequences.__class__ is not tuple and not isinstance(sequences, (list, tuple)):
            raise InputError(f"a step takes a list of sequences, got {sequences!r}")
        if self._guarded:
            self._enter()
        if len(sequences) > 1 and len(set(map(id, sequences))) < len(sequences):
            raise InputError("a step takes each sequence once")
        for sequence in sequences:
            if sequence.__class__ is not Sequence or sequence._lease._cache is not self or sequence._lost:
                _check_member(self, sequence, role)
        return Step(self, sequences, role)

    # ------------------------------------------------------------ room
    def evict(self, need: int | Mapping[str, int]) -> dict[str, int]:
        """Free at least so many tokens of every page component (an int), or pages and slots by name.

        Boundary components keep their states, but for those that serve no boundary any more. Returns the pages (slots)
        freed of what was asked for; what leases cover stays, so it may be less.
        """
        if self._guarded:
            self._enter()
        out: dict[str, int] = {}  # first what has been freed before
        if need.__class__ is not int or need < 0:
            out = evict_told(self, need)
        elif need:
            for lane in self._page_lanes:
                out[lane.name] = lane.evicted
            for lane in self._page_lanes:
                missing = -(-need // lane.page) - lane.evicted + out[lane.name]  # some went with another's
                if missing > 0:
                    evict(self, lane, missing)
            for lane in self._page_lanes:
                out[lane.name] = lane.evicted - out[lane.name]
        if self._debug is not None:
            self._leave("evict")
        return out

    def reclaim(self) -> dict[str, int]:
        """Have running sequences give back at once what they keep only because there is room; pages by component."""
        self._enter()
        before = {lane.name: lane.pool.free for lane in self._lanes}
        for lane in self._page_lanes:
            reclaim(self, lane, lane.pool.capacity)
        self._leave("reclaim")
        return {lane.name: lane.pool.free - before[lane.name] for lane in self._page_lanes}

    def drop_namespace(self, namespace: str) -> int:
        """No future match finds anything of ``namespace``. What leases cover is freed when they end.

        Returns how many cells are still covered.
        """
        self._enter()
        kept = bury(self, namespace_of(namespace))
        self._leave("drop_namespace")
        return kept

    def flush(self) -> None:
        """Everything cached is invalid (new weights, say): free it all, at once.

        Open sequences, leases and plans made before become unusable; closing or aborting them does nothing more.
        """
        self._enter()
        forget_everything(self)
        self._leave("flush")

    def poll(self) -> None:
        """Take back what was dropped without release, and see which steps are over. Engines call it once per step.

        Never waits for a device. A step that failed on its stream is told here: its sequences end, and so does
        whatever was built on what it published.
        """
        self._enter()
        if self._flight.works:
            self._flight.poll()
        if self._tier is not None:
            self._tier.poll()
        self._leave("poll")

    # ------------------------------------------------------------ telling
    def pool(self, component: str) -> Pool:
        """The pool of a component: its tensors are ``pool.buffers``."""
        return self._lane(component).live

    def _lane(self, component: str) -> Lane:
        for lane in self._lanes:
            if lane.name == component:
                return lane
        raise InputError(f"no component {component!r} here; there are {', '.join(lane.name for lane in self._lanes)}")

    def stats(self) -> CacheStats:
        """Counters and gauges, by component and in all."""
        return cache_stats(self)

    # ------------------------------------------------------------ streams
    def _stream(self, given: Any) -> Stream:
        if given is None and self._inline is not None:
            return self._inline
        stream = stream_for(given, self.composition.device, self._streams)
        self._inline = self._streams.get(None)
        if self._debug is not None:
            self._debug.race.follow(stream)
        return stream


def _check_member(cache: Cache, given: Any, role: str) -> None:
    """Refuse what cannot go through a step of ``cache``."""
    if not isinstance(given, Sequence):
        raise InputError(f"a step takes sequences, got {given!r}")
    if given._cache is not cache:
        raise ProtocolError(f"{given!r} belongs to another cache")
    given._usable()
    if given._lost and role == "target":
        check_states(given)
