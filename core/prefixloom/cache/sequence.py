"""Sequences: what an engine holds for one running request.

Four lengths, each at most the next where both are known: ``published`` (handed to the tree) <= ``committed`` (computed)
<= ``reserved`` (slots taken); ``named`` (tokens known) runs apart, since a prompt is named before it has slots and with
overlap a slot is taken before its token is known. Whatever happens in a ``with`` block, nothing leaks.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..device.handles import Handle
from ..errors import InputError, ProtocolError
from ..operations.lease import Hold, ended, release
from ..operations.publish import publish, publish_end, publish_on, stops
from ..operations.retain import commit, retain_published, rewind
from ..operations.room import find_room, reserve_arriving
from ..operations.running import Pairs, check_states, why_ended
from ..operations.step_ops import Fill, check_alone, fill_alone
from ..tiers.restore import Restored, restore_and_fetch
from ..tree.holdings import go_on
from ..tree.keys import TOKEN_BYTES, Elements, Named, Tokens, encode

if TYPE_CHECKING:
    from ..contract.values import Op
    from ..operations.match import MatchPlan
    from ..tree.lane import Lane
    from ..tree.radix import Node
    from .cache import Cache


class Sequence(Named, Pairs, Handle):
    """A running request. Made by ``cache.open``; a context manager: ``close`` at the end, ``abort`` on an exception."""

    __slots__ = (
        "__weakref__", "_cache", "_claimed_ops", "_fills", "_high", "_lease", "_lost", "_plan", "_planned",
        "_reached", "_steps", "branch", "committed", "namespace", "priority", "published", "ready", "reserved",
    )  # fmt: skip

    _fills: list[Fill]
    _claimed_ops: list[Op]  # where plugins are asked for claims
    _plan: MatchPlan  # where the cache has a tier below the device
    _reached: Node | None  # below where it resumes, the deepest that its key is known to spell; it may be gone by now
    priority: int

    def __init__(
        self, cache: Cache, lease: Hold, tokens: Tokens, key: bytes, single: bytes | None, namespace: str, ready: int,
        reached: Node, branch: int | None, fills: list[Fill], priority: int,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._lease = lease
        self._head = tokens
        self._more = b""
        self._wide = None if key is tokens else Elements(cache._keys, key, single)
        self.named = len(tokens) // TOKEN_BYTES
        self._planned = self._steps = 0  # where open steps end, and how many there are
        self._lost = False  # a step that failed may have written half of its running states
        self._reached = reached
        self._fills = fills
        self.priority = priority
        self.namespace = namespace
        self.branch = branch
        self.ready = self.reserved = self.committed = self.published = self._high = ready

    # ------------------------------------------------------------ state
    def _usable(self) -> Cache:
        """The cache, if the sequence may still be used."""
        cache = self._lease._cache
        if cache is None:
            raise why_ended(self) from self._lease.failed
        if cache._guarded:
            cache._enter()
        return cache

    @property
    def open(self) -> bool:
        """Whether the sequence may still be used: neither closed nor aborted nor flushed away."""
        return self._lease._cache is not None

    @property
    def failed(self) -> BaseException | None:
        """The error of its publication; of a step that it was in, or of a step or copy that it had read, once a
        ``poll`` has seen it.

        Of a sequence that is closed, too.
        """
        return self._lease.failed

    @property
    def label(self) -> str:
        return self._lease.label

    @property
    def resume(self) -> int:
        """Where the engine resumes: ``ready``, or earlier where a component rebuilds itself by replay.

        Positions from ``resume`` to ``ready`` are run for that component alone; the others have them already.
        """
        return max(0, self.ready - self._cache._replay)

    @property
    def tokens(self) -> Tokens:
        """The named tokens, encoded: what a conversation's next turn extends."""
        return Tokens(self._head + self._more)

    @property
    def publishable(self) -> int:
        """The deepest boundary that could be published now."""
        return self._publishable()

    def _publishable(self) -> int:
        cache = self._cache
        upto = self.named - cache._lookahead
        if upto > self.committed:
            upto = self.committed
        upto = upto // cache._page * cache._page
        return upto if upto > self.published else self.published

    def pages(self, component: str) -> list[int]:
        """Page numbers by position, -1 where absent; for a boundary component, its running slot."""
        lane, holding = self._holding(component)
        return [holding.slot] if lane.unit == "boundary" else holding.row()

    def rewind_slots(self, component: str) -> list[int]:
        """Slots where a step of at most ``max_rewind + 1`` tokens writes a boundary component's state after each."""
        holding = self._holding(component)[1]
        return list(getattr(holding, "steps", ()))

    def owned(self, component: str) -> int:
        """Pages (or slots) of a component that this sequence owns."""
        lane, holding = self._holding(component)
        return int(lane.owned(holding))

    def _holding(self, component: str) -> tuple[Lane, Any]:
        if self._lease._cache is None:
            raise ProtocolError(f"{self!r} holds nothing any more")
        for pair in self._pairs:
            if pair[0].name == component:
                return pair
        raise InputError(f"no component {component!r} here; there are {', '.join(p[0].name for p in self._pairs)}")

    # ------------------------------------------------------------ running
    def restore(self) -> Restored:
        """Bring back what the tiers below have of this sequence, as deep as all components have it. It comes first.

        It holds true at once: a step that reads what is copied comes after the copies.
        """
        cache = self._usable()
        if self.reserved != self.ready or self._steps:
            raise ProtocolError(f"{self!r} has been used already: restore comes first")
        if cache._tier is None:
            return Restored(self.ready, self.ready)
        restored = restore_and_fetch(cache, self)
        cache._leave("restore")
        return restored

    def grow(self, count: int, *, arriving: bool = False) -> None:
        """Reserve slots for ``count`` more tokens in every component, evicting if need be.

        All or nothing: CapacityError says which pool lacks how much and who holds it, and no slot was taken.
        ``arriving``: the tokens were computed elsewhere and only what resuming at their end needs will be filled in; a
        component gets slots for that (a window's tail), and *absent* for the rest.
        """
        cache = self._cache
        if self._lease._cache is None or cache._guarded:
            self._usable()
        if count.__class__ is not int or count < 0:
            raise InputError(f"grow takes a number of tokens from 0 up, got {count!r}")
        length = self.reserved + count
        if length > cache._longest:
            cache._too_long(length)
        if arriving:
            reserve_arriving(cache, self, count, length)
            return
        held = self._lease.held
        for lane in cache._page_lanes:
            holding = held[lane.index]
            table = holding.table
            missing = -(-length // lane.page) - holding.base - len(table)
            if missing > 0:
                pool = lane.pool
                if missing > pool.at_hand:
                    find_room(cache, self, length, count)
                    ids = pool.take(missing)
                else:
                    ids = pool.take_at_hand(missing)
                table += ids
        if cache._flight.claimed:
            self._lease.claim(cache._flight)
        self.reserved = length
        if cache._debug is not None:
            cache._leave("grow")

    def append(self, tokens: Any) -> None:
        """Name the tokens that follow the named ones."""
        cache = self._cache
        if self._lease._cache is None or cache._guarded:
            self._usable()
        if tokens.__class__ is not Tokens:
            tokens = encode(tokens)
        known = self._more
        if not known:
            self._more = tokens
        elif known.__class__ is bytearray:
            known += tokens
        else:
            self._more = bytearray(known) + tokens
        self.named += len(tokens) // TOKEN_BYTES
        if self._wide is not None:
            self._widen(tokens)
        if cache._debug is not None:
            cache._leave("append")

    def fill(self, stream: Any = None) -> None:
        """What ``run_ops`` is to a step, to a sequence that is computed alone: its ops, on ``stream``, behind all that
        may still write what its layers read, and before these. What comes after them is ordered by ``stream`` alone.
        """
        cache = self._cache
        if self._lease._cache is None or cache._guarded:
            self._usable()
        if self._steps or self._lost or cache._plugin_ops:
            check_alone(self)
        fill_alone(cache, self, stream)
        if cache._debug is not None:
            cache._leave("fill")

    def commit(self, upto: int | None = None) -> None:
        """The content up to ``upto`` (default: all that is reserved) has been computed. A step's end does this."""
        cache = self._cache
        if self._lease._cache is None or cache._guarded:
            self._usable()
        if upto is None:
            upto = self.reserved
        elif upto.__class__ is not int:
            raise InputError(f"commit takes a number of tokens, got {upto!r}")
        elif not self.committed <= upto <= self.reserved:
            told = f"{self.committed} are committed and {self.reserved} reserved (grow reserves)"
            raise ProtocolError(f"{self!r} cannot commit {upto}: {told}")
        if self._fills or self._lost:
            check_states(self)
        if cache._flight.alone:
            cache._flight.end_alone(self._lease)
        if cache._debug is not None:
            cache._debug.arrived(self, self.committed, upto)
        if cache._max_rewind and upto > self.committed:
            go_on(self._states)
        if cache._retaining:
            commit(cache, self, upto)
        else:
            self.committed = upto
        if cache._debug is not None:
            cache._leave("commit")

    def publish(self, upto: int | None = None) -> int:
        """Checkpoint into the tree while running; ``upto`` is a page boundary that is named and committed.

        Default: the deepest such. Returns the published length.
        """
        cache = self._cache
        if self._lease._cache is None or cache._guarded:
            self._usable()
        limit = self._publishable()
        if upto is None:
            upto = limit
        elif upto.__class__ is not int:
            raise InputError(f"publish takes a number of tokens, got {upto!r}")
        elif upto % cache._page or not self.published <= upto <= limit:
            raise ProtocolError(
                f"{self!r} cannot publish {upto}: it must be a multiple of {cache._page} from {self.published} to "
                f"{limit} (named {self.named}, committed {self.committed}"
                + (f", lookahead {cache._lookahead})" if cache._lookahead else ")")
            )
        if upto > self.published:
            if self._steps:
                self._keep_states()
            if cache._attended:
                for stop in stops(self, upto) if cache._tracking else (upto,):
                    publish(cache, self, stop, last=False)
            else:
                publish_on(cache, self, upto)
            if cache._tracking:
                for lane, state in self._states:
                    lane.forget_tracks(state, upto, self.reserved)
            if cache._sparing:
                retain_published(self)
        if cache._debug is not None:
            cache._leave("publish")
        return self.published

    def rewind(self, count: int) -> None:
        """Take the last ``count`` reserved tokens back, names included: every component is at the boundary before.

        Not past what is published, nor further below the committed length than the composition's ``max_rewind`` where
        a component limits it.
        """
        cache = self._usable()
        rewind(cache, self, count)
        if cache._debug is not None:
            cache._leave("rewind")

    # ------------------------------------------------------------ ending
    def close(self) -> None:
        """Publish what is complete and give everything back. A second close does nothing."""
        cache = self._cache
        if self._lease._cache is None:
            return
        if cache._guarded:
            cache._enter()
        if self._steps:
            self._keep_states()
        if cache._flight.alone:
            cache._flight.end_alone(self._lease)
        try:
            publish_end(cache, self)
        finally:
            if self._lease.held:
                self._give_back(cache)
        if cache._debug is not None:
            cache._leave("close")

    def abort(self) -> None:
        """Publish nothing and give everything back. A second abort does nothing.

        The slots are free at once: end the steps whose layers still write them first.
        """
        cache = self._lease._cache
        if cache is None:
            return
        if cache._guarded:
            cache._enter()
        self._give_back(cache)
        if cache._debug is not None:
            cache._leave("abort")

    def _give_back(self, cache: Cache) -> None:
        if cache._flight.alone:
            cache._flight.end_alone(self._lease)
        ended(cache, self._lease)
        for lane, holding in self._pairs:
            lane.close(holding)
        if self._lease._cache is not None:
            release(cache, self._lease)

    def __enter__(self) -> Sequence:
        self._usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if self._lease._cache is not None:
            self._cache._dropped.append(self)

    def __repr__(self) -> str:
        name = self.label or "sequence"
        state = "" if self.open else " closed"
        return (
            f"<{name}{state}: {self.named} named, {self.reserved} reserved, {self.committed} committed, "
            f"{self.published} published>"
        )
