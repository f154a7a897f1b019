"""The cache: what ``compose`` returns and an engine calls.

It checks arguments and calls operations on its ``Core``, which holds the state. One thread drives a cache.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import Any, Literal

from ..contract.composition import Composition
from ..contract.identity import Identity
from ..device.pool import Pool
from ..device.timeline import MOST as MOST_ACTIVITIES
from ..device.timeline import Timeline
from ..errors import InputError, ProtocolError
from ..insight.explanation import Explanation, explain
from ..insight.figures import Figure, figures_of
from ..insight.history import MOST as HISTORY
from ..insight.history import History
from ..insight.stats import CacheStats, cache_stats
from ..keys.tokens import namespace_of
from ..operations.insert import Inserted, insert, lend, take_back
from ..operations.lease import Lease, acquire, drop_namespace
from ..operations.match import Extra, ask, current, find
from ..operations.open import anchor, open_at
from ..operations.retain import reclaim
from ..operations.room import evict_asked
from ..operations.state import Core, Running
from ..operations.step import Step
from ..operations.teardown import forget_everything
from ..storage import Fingerprint
from ..tree.expiries import check_until, is_time
from ..tree.journal import MOST, Change, Journal, contents
from ..tree.radix import FOREVER
from .match_plan import MatchPlan
from .sequence import Sequence
from .session import SessionPlugin, open_session


class Cache:
    """One composed cache. Made by ``prefixloom.compose``; see docs/design.md for a request's way through it."""

    def __init__(self, core: Core, sessions: Callable[[], Iterable[SessionPlugin]]) -> None:
        """Make the cache of ``core``. ``sessions`` returns the installed adapters of models, in their order."""
        self._core = core
        self._sessions = sessions
        self._history: History | None = None

    @property
    def composition(self) -> Composition:
        """What the cache is made of."""
        return self._core.shape.composition

    @property
    def core(self) -> Core:
        """What lies behind it: for tiers, debug tools and tests, and no part of the public interface."""
        return self._core

    @property
    def identity(self) -> Identity | None:
        """What content depends on beside its tokens, for operations whose ``namespace`` is a plain name.

        Whoever drives a cache without an adapter that knows the model may set it, and must where content leaves the
        process. Sessions and engines set it to their model's. What was cached under another one is found no more, until
        that is set again. A namespace that ``Identity.namespace`` made is used as it is. None: plain names are alone.
        """
        return self._core.identity

    @identity.setter
    def identity(self, identity: Identity | Mapping[str, Any] | None) -> None:
        self._core.identity = None if identity is None else Identity.of(identity)

    def __repr__(self) -> str:
        shape = self._core.shape
        names = ", ".join(lane.name for lane in shape.lanes)
        return f"<Cache {shape.composition.name}: {names}; boundaries every {shape.page} tokens>"

    # ------------------------------------------------------------ matching
    def match(self, tokens: object, *, namespace: str = "", leave: int = 0, extra: Extra = ()) -> MatchPlan:
        """Find where ``tokens`` could resume. Pure: nothing changes, and nothing is protected.

        ``leave``: at least so many tokens are left to compute. ``extra``: (start, end, key) spans whose content depends
        on more than the tokens, such as an image's hash at its placeholders.
        """
        core = self._core
        core.enter()
        return MatchPlan(core, find(core, ask(core, tokens, namespace, leave, extra)))

    def peek(self, tokens: object, *, namespace: str = "", leave: int = 0, extra: Extra = ()) -> int:
        """Return how many of ``tokens`` would hit. Pure."""
        return self.match(tokens, namespace=namespace, leave=leave, extra=extra).ready

    def lease(self, plan: MatchPlan, *, exact: bool = False) -> Lease:
        """Protect what resuming at ``plan.ready`` needs. A stale plan is planned again, so the lease may be shorter.

        ``exact``: in place of a shorter lease, ProtocolError. A lease that is released at once marks what it covered as
        used just now, and does nothing else.
        """
        core = self._core
        if not isinstance(plan, MatchPlan):
            raise ProtocolError(f"{plan!r} was not made by this cache")
        with core:
            match = current(core, plan.match_for(core))
            if exact and match.ready < plan.ready:
                raise ProtocolError(
                    f"{plan!r} can be resumed at {match.ready} only: something was lost since it was made"
                )
            return acquire(core, anchor(core, match), match.namespace)

    # ------------------------------------------------------------ sequences
    def open(
        self,
        tokens: object,
        *,
        namespace: str = "",
        leave: int = 0,
        extra: Extra = (),
        label: str = "",
        priority: int = 0,
        until: float = FOREVER,
    ) -> Sequence:
        """Open a sequence over ``tokens``: match, lease, and take a slot for each running state.

        ``tokens`` may also be a ``MatchPlan``, which has its own namespace, leave and extra; a stale one is planned
        again. ``until``: when nobody wants any more what it uses and leaves (``expire``). CapacityError: no running
        slot can be had.
        """
        core = self._core
        if label.__class__ is not str or priority.__class__ is not int:
            raise InputError(f"a label is a string and a priority a whole number, got {label!r} and {priority!r}")
        if until != FOREVER:
            check_until(until)
        if isinstance(tokens, MatchPlan):
            if namespace or leave or extra:
                raise InputError("a plan has its namespace, leave and extra already: give them to match")
            match = tokens.match_for(core)
        else:
            match = ask(core, tokens, namespace, leave, extra)
        with core:
            match = current(core, match) if isinstance(tokens, MatchPlan) else find(core, match)
            sequence = Sequence(core, open_at(core, match, label, priority, until))
            if core.below is not None:
                core.below.used(sequence.running.node)
            return sequence

    def session(
        self, model: object, ids: object, *, namespace: str = "", label: str = "", **options: object
    ) -> AbstractContextManager[Any]:
        """Open a conversation that the model's own code runs over this cache: ``with cache.session(model, ids) as s``.

        An installed adapter that knows the model makes it, and takes the ``options``. CompositionError: none knows it.
        """
        options = {"namespace": namespace, "label": label, **options}
        return open_session(self._sessions(), self, model, ids, options)

    def step(self, sequences: Many[Sequence], role: Literal["target", "draft"] = "target", *, ahead: int = 0) -> Step:
        """Return the program of one forward pass over ``sequences``.

        ``ahead``: with a lookahead, how many tokens behind the last of each sequence its layers have, though they are
        not named yet, since the layers choose them: behind each position they write with the token that they chose.
        """
        core = self._core
        if role != "target" and role != "draft":
            raise InputError(f"a step's role is 'target' or 'draft', got {role!r}")
        if ahead.__class__ is not int or ahead < 0 or (ahead and role == "draft"):
            raise InputError(f"ahead takes a number of tokens that a target step chooses, from 0 up; got {ahead!r}")
        if sequences.__class__ is not tuple and not isinstance(sequences, (list, tuple)):
            raise InputError(f"a step takes a list of sequences, got {sequences!r}")
        core.enter()
        if len(sequences) > 1 and len(set(map(id, sequences))) < len(sequences):
            raise InputError("a step takes each sequence once")
        rows: list[Running] = []
        for sequence in sequences:
            if not isinstance(sequence, Sequence):
                raise InputError(f"a step takes sequences, got {sequence!r}")
            running = sequence.running_for(core)
            if running.lost and role == "target":
                running.check_states()
            rows.append(running)
        return Step(core, rows, role, sequences, ahead)

    # ------------------------------------------------------------ slots of an engine
    def insert(
        self,
        tokens: object,
        slots: Mapping[str, Any],
        *,
        start: int = 0,
        namespace: str = "",
        extra: Extra = (),
        priority: int = 0,
        until: float = FOREVER,
        stream: object = None,
    ) -> Inserted:
        """Publish what an engine computed in slots of its own, with ``compose(slots="lent")``.

        ``slots``: by component, the page of each position from the boundary ``start`` on, -1 where there is none; of a
        boundary component, the one slot of the state at the deepest boundary that ``tokens`` name. What is the engine's
        own is the cache's from now on, until ``take_back`` returns it: at once what the tree has already or cannot use,
        and the rest when it is evicted. Where the engine reads pages of the cache, these may stand as well.

        The content must be written by now, or with ``stream`` by what has been enqueued there: then all that the cache
        does with these slots comes after that, and ``take_back`` does not return them before.

        InputError and ProtocolError: nothing was taken. After any other error (a hook raised) the slots are the
        cache's, and ``take_back`` returns those that the tree does not have. After an interrupt, ``flush`` and
        ``take_back``: all slots are the engine's then.
        """
        core = self._core
        if priority.__class__ is not int:
            raise InputError(f"a priority is a whole number, got {priority!r}")
        check_until(until)
        behind = None if stream is None else core.stream(stream)
        asked = ask(core, tokens, namespace, 0, extra)
        with core:
            return insert(core, asked, slots, start, priority, until, behind)

    def lend(self, slots: Mapping[str, Any]) -> None:
        """Hand in slots without content, for sequences, loads and checkpoints, with ``compose(slots="lent")``."""
        core = self._core
        with core:
            lend(core, slots)

    def take_back(self) -> dict[str, array[int]]:
        """Return to the engine all slots that nobody uses any more, by component, with ``compose(slots="lent")``."""
        core = self._core
        with core:
            return take_back(core)

    # ------------------------------------------------------------ room
    def evict(self, need: int | Mapping[str, int], *, unneeded: bool = False) -> dict[str, int]:
        """Free at least so many tokens of every page component (an int), or pages and slots by name.

        Boundary components keep their states, but for those that serve no boundary any more. Returns the pages (slots)
        freed of what was asked for; what leases cover stays, so it may be less. ``unneeded``, with names: only pages
        that no published boundary needs, such as those of a window far behind it.
        """
        core = self._core
        with core:
            return evict_asked(core, need, unneeded)

    def expire(self, now: float) -> None:
        """Let cells that nobody wants any more at ``now`` be evicted before all others, until they are used again.

        Sequences say until when they want what they use and leave (``open``), in seconds or whatever the engine's clock
        counts; what several used is wanted until the latest of their times. The cache reads no clock: an engine calls
        this with its own, once per step. If nothing is due, it costs nothing. Ranks of one model give the same times.
        """
        core = self._core
        if not is_time(now) or now == FOREVER:
            raise InputError(f"now is a number on the engine's clock, got {now!r}")
        with core:
            if core.index.expiries is not None:
                core.index.expiries.expire(core.shape.all_lanes, now)

    def reclaim(self) -> dict[str, int]:
        """Have running sequences give back at once what they keep only because there is room; pages by component."""
        core = self._core
        with core:
            before = {lane.name: lane.pool.free for lane in core.shape.page_lanes}
            for keeping in core.shape.partial_lanes:
                reclaim(core, keeping, keeping.pool.capacity)
        return {lane.name: lane.pool.free - before[lane.name] for lane in core.shape.page_lanes}

    def drop_namespace(self, namespace: str) -> int:
        """Let no future match find pages or states of ``namespace``, whatever the identity.

        What leases cover is freed when they end. Return how many cells are still covered.
        """
        name = namespace_of(namespace)
        with self._core:
            return drop_namespace(self._core, name)

    def flush(self) -> None:
        """Free all that is cached at once, because it is invalid (new weights, say, or after a ``BrokenError``).

        Open sequences, leases and plans made before become unusable; closing or aborting them does nothing more.
        """
        core = self._core
        forget_everything(core)

    def poll(self) -> None:
        """Take back slots of dropped handles, and find out which steps are over. Engines call it once per step.

        It never waits for a device. If a step failed on its stream, its sequences end, and so do those that built on
        what it published.
        """
        core = self._core
        with core:
            if core.flight.works:
                core.flight.poll()
            if core.below is not None:
                core.below.poll()
        self._told_history()

    def take_over(self) -> None:
        """Let the calling thread drive the cache from now on; debug mode then refuses the one that did.

        Threads must take turns: no other one is in an operation.
        """
        if self._core.watcher is not None:
            self._core.watcher.take_over()

    # ------------------------------------------------------------ telling
    def pool(self, component: str) -> Pool:
        """Return the pool of a component, whose tensors are ``pool.buffers``."""
        return self._core.shape.lane(component).live

    def fingerprint(self, component: str, identity: Identity) -> Fingerprint:
        """Return what the content of a component's running pool means, computed by a model of this identity.

        Two caches whose fingerprints are equal may exchange that content as records.
        """
        lane = self._core.shape.lane(component)
        pool = lane.live
        return lane.part.fingerprint(pool.manifest, pool.entries, self.composition.page, identity)

    def journal(self, most: int = MOST) -> Journal:
        """Record from now on what is stored in the tree and removed from it: ``Journal.take`` returns it.

        ``most``: the number of changes after which one that nobody took begins again. A cache may have several
        journals; each records until its ``close``.
        """
        core = self._core
        if most.__class__ is not int or most < 1:
            raise InputError(f"a journal holds at least 1 change, got {most!r}")
        with core:
            return core.follow(most)

    def timeline(self, most: int = MOST_ACTIVITIES) -> Timeline:
        """Time from now on copies between tiers, calls of a store and waits: ``Timeline.take`` returns what is over.

        ``most``: how many activities it holds. More are left out and counted. A cache may have several timelines; each
        records until its ``close``.
        """
        core = self._core
        core.enter()
        if most.__class__ is not int or most < 1:
            raise InputError(f"a timeline holds at least 1 activity, got {most!r}")
        return core.time(most)

    def contents(self) -> list[Change]:
        """Return all that is cached on any tier and can be found, as "stored" changes, each after what it needs."""
        core = self._core
        core.enter()
        return contents(core.keys, core.shape.all_lanes, core.index.tree.roots.values())

    def history(self, most: int = HISTORY, *, clock: Callable[[], float] = time.monotonic) -> History:
        """Remember from now on what is lost or not kept, and why, for ``explain``: the last ``most`` losses.

        ``clock`` says the time of what happens, in seconds. A cache has one history: a second call returns the same
        one. Poll it once per step, or close it.
        """
        core = self._core
        core.enter()
        if most.__class__ is not int or most < 1:
            raise InputError(f"a history remembers at least 1 loss, got {most!r}")
        if self._history is None or self._history.closed:
            self._history = History(core, most, clock)
        return self._history

    def explain(
        self, tokens: object, *, namespace: str = "", leave: int = 0, extra: Extra = (), closely: bool = True
    ) -> Explanation:
        """Explain why ``tokens`` hit what they hit: component by component, and what would have helped. Pure.

        ``tokens`` may also be a ``MatchPlan``, or a ``Sequence`` that was just opened. A ``history`` knows what was
        lost, when and why. ``closely``: look into other namespaces as well, and at single tokens where the keys
        diverge.
        """
        core = self._core
        core.enter()
        if isinstance(tokens, MatchPlan):
            match = current(core, tokens.match_for(core))
        elif isinstance(tokens, Sequence):
            match = current(core, tokens.running_for(core).match)
        else:
            match = find(core, ask(core, tokens, namespace, leave, extra))
        return explain(core, match, self._open_history, closely)

    @property
    def _open_history(self) -> History | None:
        return None if self._history is None or self._history.closed else self._history

    def _told_history(self) -> History | None:
        """Return the history, which has read its journal just now. An interrupt meanwhile gives the history up."""
        history, self._history = self._open_history, None
        if history is not None:
            history.poll()
        self._history = history
        return history

    def account(self, opened: Sequence | MatchPlan) -> Explanation:
        """Explain the hit of a sequence that was just opened, or of a plan that is about to be used, and count it.

        It is counted in the ``history``, which this may begin.

        Call it once for each request, so that ``figures`` say why tokens miss.
        """
        history = self.history()
        told = self.explain(opened, closely=False)
        for each in told.findings:
            history.missed(each.component, each.reason, each.tokens, each.loss)
        tokens = opened.tokens if isinstance(opened, Sequence) else opened.match_for(self._core).tokens
        history.hit(opened.namespace, tokens, told.ready)
        return told

    def figures(self) -> list[Figure]:
        """Return what the cache counts and measures, by name and label; of losses what its ``history`` knows."""
        stats = self.stats()
        return figures_of(stats, self._told_history())

    def stats(self) -> CacheStats:
        """Return counters and gauges, by component and in all."""
        self._core.check_whole()
        return cache_stats(self._core)
