"""Sequences: what an engine holds for one running request.

Four lengths, each at most the next where both are known: ``published`` (handed to the tree) <= ``committed`` (computed)
<= ``reserved`` (slots taken); ``named`` (tokens known) runs apart, since a prompt is named before it has slots and with
overlap a slot is taken before its token is known. Whatever happens in a ``with`` block, nothing leaks.

A sequence checks arguments and calls operations on its ``Running``, which holds the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from ..contract.tier_answers import Restored
from ..device.handles import Handle, dropped_without_release
from ..errors import InputError, ProtocolError
from ..keys.tokens import Tokens, encode
from ..operations.match import Extra
from ..operations.open import append
from ..operations.publish import close, publish
from ..operations.retain import commit_alone, rewind
from ..operations.room import grow, grow_arriving
from ..operations.state import Core, Running
from ..operations.step import check_alone, fill_alone, next_stop
from ..operations.teardown import give_back
from ..tree.expiries import check_until


class Sequence(Handle):
    """A running request. Made by ``cache.open``; a context manager: ``close`` at the end, ``abort`` on an exception."""

    __slots__ = ("__weakref__", "_core", "_running")

    def __init__(self, core: Core, running: Running) -> None:
        self._core = core
        self._running = running

    # ------------------------------------------------------------ state
    @property
    def core(self) -> Core:
        """What the cache has behind it: for debug tools and tests, and no part of the public interface."""
        return self._core

    @property
    def running(self) -> Running:
        """Its state: for debug tools and tests, and no part of the public interface."""
        return self._running

    def running_for(self, core: Core) -> Running:
        """Return its state, for the cache of ``core``; refuse another cache's sequence, and one that has ended.

        It is for the cache's own operations, which enter by themselves, and no part of the public interface.
        """
        if self._core is not core:
            raise ProtocolError(f"{self!r} belongs to another cache")
        return self._entered()

    def _entered(self) -> Running:
        """Return its state before an operation, or refuse if the sequence has ended."""
        running = self._running
        if running.core is None:
            raise running.why_ended() from running.failed
        return running

    @property
    def open(self) -> bool:
        """Whether the sequence may still be used: neither closed nor aborted nor flushed away."""
        return self._running.core is not None

    @property
    def failed(self) -> BaseException | None:
        """The error of its publication; of a step that it was in, or of a step or copy that it had read, once a
        ``poll`` has seen it.

        Of a sequence that is closed, too.
        """
        return self._running.failed

    @property
    def label(self) -> str:
        return self._running.label

    @property
    def namespace(self) -> str:
        return self._running.namespace

    @property
    def priority(self) -> int:
        """What an eviction policy may go by. It may be set; it counts for what is published from then on."""
        return self._running.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        if priority.__class__ is not int:
            raise InputError(f"a priority is a whole number, got {priority!r}")
        self._running.priority = priority

    @property
    def until(self) -> float:
        """When nobody wants any more what it uses and leaves. A later time that is set counts at once."""
        return self._running.until

    @until.setter
    def until(self, until: float) -> None:
        check_until(until)
        core, running = self._core, self._entered()
        with core:
            running.until = until
            core.index.want(running.node, until)

    @property
    def branch(self) -> int | None:
        """A boundary worth a checkpoint while recomputing; None if there is none."""
        return self._running.branch

    @property
    def ready(self) -> int:
        """Where it resumed: tokens whose every component was usable on the device."""
        return self._running.ready

    @property
    def named(self) -> int:
        return self._running.names.count

    @property
    def reserved(self) -> int:
        return self._running.reserved

    @property
    def committed(self) -> int:
        return self._running.committed

    @property
    def published(self) -> int:
        return self._running.published

    @property
    def publishable(self) -> int:
        """The deepest boundary that could be published now."""
        return self._running.publishable

    @property
    def tokens(self) -> Tokens:
        """The named tokens, encoded, with their extra keys: what a conversation's next turn extends."""
        return self._running.names.tokens

    def pages(self, component: str) -> list[int]:
        """Return page numbers by position, -1 where absent; for a boundary component, its running slot."""
        lane, holding = self._running.holding(component)
        return [holding.slot] if lane.unit == "boundary" else list(holding.row())

    def rewind_slots(self, component: str) -> list[int]:
        """Return the slots into which a step of at most ``max_rewind + 1`` tokens writes a state after each token."""
        holding = self._running.holding(component)[1]
        return list(getattr(holding, "steps", ()))

    def owned(self, component: str) -> int:
        """Return the number of pages (or slots) of a component that this sequence owns."""
        lane, holding = self._running.holding(component)
        return lane.owned(holding)

    def next_stop(self, budget: int, *, stops: Iterable[int] = ()) -> int:
        """Return where the next step of at most ``budget`` tokens should end, so that its content can be resumed.

        A state is kept only where a step ends, and only if ``publish`` is called then. ``stops`` are further boundaries
        that the engine wants, for example where a waiting prompt diverges from this one. Past the named tokens, all of
        ``budget`` is used.
        """
        if budget.__class__ is not int or budget < 1:
            raise InputError(f"next_stop takes a number of tokens from 1 up, got {budget!r}")
        wanted = tuple(stops) if isinstance(stops, Iterable) else (None,)
        if any(at.__class__ is not int for at in wanted):
            raise InputError(f"stops are whole numbers, positions of the sequence, got {stops!r}")
        return next_stop(self._core, self._entered(), budget, wanted)

    # ------------------------------------------------------------ running
    def restore(self) -> Restored:
        """Bring back what the tiers below have of this sequence, as deep as all components have it. It comes first.

        It holds true at once: a step that reads what is copied comes after the copies.
        """
        core, running = self._core, self._entered()
        with core:
            if running.reserved != running.ready or running.steps:
                raise ProtocolError(f"{self!r} has been used already: restore comes first")
            if core.below is None:
                return Restored(running.ready, running.ready)
            return core.below.restore(running)

    def grow(self, count: int, *, arriving: bool = False) -> None:
        """Reserve slots for ``count`` more tokens in every component, evicting if need be.

        All or nothing: CapacityError says which pool lacks how much and who holds it, and no slot was taken.
        ``arriving``: the tokens were computed elsewhere and only what resuming at their end needs will be filled in; a
        component gets slots for that (a window's tail), and *absent* for the rest.
        """
        core, running = self._core, self._entered()
        with core:
            if count.__class__ is not int or count < 0:
                raise InputError(f"grow takes a number of tokens from 0 up, got {count!r}")
            if running.reserved + count > core.shape.longest:
                raise self._too_long(running.reserved + count)
            if arriving:
                grow_arriving(core, running, count)
            else:
                grow(core, running, count)

    def _too_long(self, length: int) -> InputError:
        kept = [lane for lane in self._core.shape.page_lanes if not lane.retains]
        lane = min(kept, key=lambda lane: lane.pool.capacity * lane.page)
        return InputError(
            f"a sequence of {length} tokens is longer than the pool of component {lane.name!r}, which holds "
            f"{lane.pool.capacity * lane.page}"
        )

    def append(self, tokens: object, *, extra: Extra = ()) -> None:
        """Name the tokens that follow the named ones.

        ``extra``: (start, end, key) spans of these tokens, as ``open`` takes them; 0 is the first that is appended.
        """
        core, running = self._core, self._entered()
        if tokens.__class__ is not Tokens:
            tokens = encode(tokens)  # not in the block: an iterable of the caller's may raise anything
        if extra:
            tokens = tokens.keyed(extra)
        with core:
            append(core, running, tokens)

    def fill(self, stream: object = None) -> None:
        """Run the ops of a sequence that is computed alone on ``stream``, as ``run_ops`` does for a step: behind all
        that may still write what its layers read. What comes after the ops is ordered by ``stream`` alone.
        """
        core, running = self._core, self._entered()
        with core:
            if running.steps or running.lost or running.claimed_ops or "deferred_forward_ops" in core.shape.hooks:
                check_alone(core, running)
            fill_alone(core, running, stream)

    def commit(self, upto: int | None = None) -> None:
        """Note that content up to ``upto`` (default: all that is reserved) is computed. A step's end does this."""
        core, running = self._core, self._entered()
        with core:
            commit_alone(core, running, upto)

    def publish(self, upto: int | None = None) -> int:
        """Checkpoint into the tree while running; ``upto`` is a page boundary that is named and committed.

        Default: the deepest such. Returns the published length.
        """
        core, running = self._core, self._entered()
        with core:
            limit = running.publishable
            if upto is None:
                upto = limit
            elif upto.__class__ is not int:
                raise InputError(f"publish takes a number of tokens, got {upto!r}")
            elif upto % core.shape.page or not running.published <= upto <= limit:
                lookahead = core.shape.lookahead
                raise ProtocolError(
                    f"{self!r} cannot publish {upto}: it must be a multiple of {core.shape.page} from "
                    f"{running.published} to {limit} (named {running.names.count}, committed {running.committed}"
                    + (f", of which {running.complete} complete, lookahead {lookahead})" if lookahead else ")")
                )
            if upto > running.published:
                publish(core, running, upto)
        return running.published

    def rewind(self, count: int) -> None:
        """Take the last ``count`` reserved tokens back, names included: every component is at the boundary before.

        Not past what is published, nor further below the committed length than the composition's ``max_rewind`` where
        a component limits it.
        """
        core, running = self._core, self._entered()
        with core:
            rewind(core, running, count)

    # ------------------------------------------------------------ ending
    def close(self) -> None:
        """Publish what is complete and give everything back. A second close does nothing."""
        core, running = self._core, self._running
        if running.core is None:
            return
        with core:
            close(core, running)

    def abort(self) -> None:
        """Publish nothing and give everything back. A second abort does nothing.

        The slots are free at once: end the steps whose layers still write them first. Of a broken cache the sequence
        just ends: a flush frees its slots.
        """
        core, running = self._core, self._running
        if core.changing:
            running.core = None
        if running.core is None:
            return
        with core:
            give_back(core, running)

    def __enter__(self) -> Sequence:
        self._entered()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        running = getattr(self, "_running", None)  # None: an interrupt came while it was made
        if running is not None and running.active:
            core = self._core
            what = dropped_without_release(getattr(running, "made_at", None))
            core.dropped.add(running, what, lambda: give_back(core, running))

    def __repr__(self) -> str:
        return repr(self._running)
