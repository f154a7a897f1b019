"""The world of sets: operations that are done to a cache and to the oracle's model, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...device.streams import InlineStream, Stream
from ...errors import CapacityError, InputError, PluginError, ProtocolError
from ...keys.tokens import TOKEN_LIMIT
from ...script import Op, PlannedStepError
from ..inside import backdoor
from ..inside.backdoor import anchor
from ..inside.memory import POISON
from ..schedules.simulated import SimulatedStream
from .sequence_operations import Pieces, SequenceOperations
from .sets import Facts, ModelLease, ModelSequence, Piece, with_extra
from .view import require

OPEN = 5
"""The most sequences that are open at once."""


SPANS = {"match": 4, "plan": 4, "open": 4, "insert": 3}
"""Where an operation that asks with a prompt, its second argument, has the prompt's extra keys."""


class Operations(SequenceOperations):
    """All operations on one cache."""

    def perform(self, op: Op) -> None:
        """Perform an operation, without the extra keys that a prompt has no tokens for: it may have been shortened."""
        at = SPANS.get(op[0])
        if at is not None and at < len(op):
            op = (*op[:at], tuple(span for span in op[at] if span[1] <= len(op[2])), *op[at + 1 :])
        super().perform(op)

    # ------------------------------------------------------------ matching
    def do_match(self, namespace: str, tokens: tuple[int, ...], leave: int, extra: tuple[Any, ...] = ()) -> None:
        self.remember(namespace, tokens, extra, leave)
        self.match_and_check(namespace, tokens, extra, leave, candidates=True)
        got = self.cache.peek(list(tokens), namespace=namespace, leave=leave)
        ids = self.ids(namespace, tokens)
        self.check_boundary("peek", got, ids, self.model.limit(len(tokens), leave))
        self.compare("match")

    def remember(self, namespace: str, tokens: tuple[int, ...], extra: tuple[Any, ...], leave: int) -> None:
        self.asked = [*self.asked[-11:], (namespace, tokens, extra, leave)]

    def do_plan(self, namespace: str, tokens: tuple[int, ...], leave: int, extra: tuple[Any, ...] = ()) -> None:
        self.plans.append(
            (
                self.match_and_check(namespace, tokens, extra, leave, False),
                namespace,
                self.ids(namespace, tokens, extra),
            )
        )
        del self.plans[:-4]
        self.compare("plan")

    def is_fresh(self, plan: Any) -> bool:
        """Return whether a kept plan still leads where it said; a stale plan is matched anew."""
        if plan.stale:
            self.count("stale plan")
        return not plan.stale

    def check_boundary_of_plan(self, plan: Any, fresh: bool, got: int, ids: list[int]) -> int:
        """Check the boundary of what was opened or leased with a plan."""
        if fresh:
            require(got == plan.ready, "a plan at %s led to %s", plan.ready, got)
            require(self.model.usable(ids, got), "a plan at %s is not stale and cannot be resumed", plan.ready)
            return got
        return self.check_boundary("a stale plan", got, ids, backdoor.longest_match(plan))

    # ------------------------------------------------------------ leases
    def do_lease(self, number: int) -> None:
        if not self.plans:
            return
        plan, namespace, ids = self.plans[number % len(self.plans)]
        fresh = self.is_fresh(plan)
        deepest = self.model.deepest(ids, backdoor.longest_match(plan))
        if not self.allowances.narrows and deepest < plan.ready:
            self.expect_refusal("lease exactly", ProtocolError, partial(self.cache.lease, plan, exact=True))
        lease = self.cache.lease(plan, exact=fresh)
        boundary = self.check_boundary_of_plan(plan, fresh, lease.boundary, ids)
        leased = ModelLease(lease, namespace, ids, boundary, cover={name: [] for name in self.facts})
        self.leases.append(leased)
        self.compare("lease")
        self.record_cover(leased, anchor(lease))
        self.check_lease_pages(leased)

    def check_lease_pages(self, leased: ModelLease) -> None:
        """Check that a lease lists what resuming at its boundary needs, where the tree has it."""
        for f in self.model.facts:
            self.check_listed(f, leased.lease.pages(f.name), leased.ids, leased.boundary)

    # ------------------------------------------------------------ slots of an engine
    def do_insert(
        self, namespace: str, tokens: tuple[int, ...], extra: tuple[Any, ...], priority: int, lacking: int
    ) -> None:
        """Hand in what an engine computed in slots of its own. ``lacking``: the pages and states that it does not have.

        Depending on this too, it reads pages of the cache up to where it hits, or says nothing of these; and what it
        hands in is written by then, or by a pass that runs behind.
        """
        if not self.cache.composition.lent:
            return
        stream: Stream = SimulatedStream("the engine's pass") if lacking & 64 else InlineStream("written")
        self.remember(namespace, tokens, extra, 0)
        ids, count = self.ids(namespace, tokens, extra), len(tokens)
        boundary = self.model.limit(count, 0)
        plan = self.cache.match(list(tokens), namespace=namespace, extra=extra)
        hit = plan.ready if lacking & 2 else 0
        start = hit if lacking & 4 else 0
        if lacking & 8:  # not all that lies before it is in the tree
            start = min(hit + self.model.page, count // self.model.page * self.model.page)
        outside = self.cache.take_back()
        unnamed = {f.name for f in self.model.facts[1:] if lacking & 48 == 48 and not f.path and not f.boundary}
        slots = {}
        for f in self.model.facts:
            mine = outside.setdefault(f.name, [])
            if f.boundary:
                slots[f.name] = [mine.pop()] if mine and boundary and lacking % 3 else []
                for slot in slots[f.name]:
                    stream.run(partial(self.slots[f.name].write, slot, 0, ids[boundary]))
                continue
            pages = range(-(-count // f.page))
            lost = {page for page in pages if hit <= page * f.page < start}
            if f.path:
                lost |= {lacking // 4 % (len(pages) + 1)} if lacking % 4 == 0 else set()
            else:
                lost |= {page for page in pages if lacking >> page % 8 & 1 or f.name in unnamed}
            read = plan.pages(f.name)[: hit // f.page].tolist()
            new = [mine.pop() if mine and page not in lost else -1 for page in pages[len(read) :]]
            stream.run(partial(self.write_handed, f, [-1] * len(read) + new, ids, count))
            slots[f.name] = [*read, *new]
        every = self.model.candidates(ids, boundary)
        self.outside = outside
        given = {
            f.name: slots[f.name][0 if f.boundary else start // f.page :]
            for f in self.model.facts
            if f.name not in unnamed
        }
        options = {"namespace": namespace, "extra": extra, "priority": priority, "start": start, "stream": stream}
        got = self.cache.insert(list(tokens), given, **options)
        if isinstance(stream, SimulatedStream):
            for name, early in self.cache.take_back().items():
                outside[name] += early
                handed = set(slots[name]) & set(early)
                require(not handed, "%s: %s came back before the pass was over that writes them", name, handed)
            while stream.ready:
                stream.advance()
            self.cache.poll()
        require(got.ready in every if self.allowances.narrows else got.ready == every[-1], "insert at %s", got.ready)
        upto = self.check_inserted(got, slots, ids, hit)
        self.count("inserted" if upto > got.ready else "nothing inserted")
        for name, returned in self.cache.take_back().items():
            outside[name] += returned
        self.cache.lend(outside)
        self.outside = {}
        self.compare("lend")
        for f in self.model.facts:
            for slot in self.view.slots[f.name].values():
                self.expect_refusal("lend what is here", ProtocolError, self.cache.lend, {f.name: [slot]})
                break

    def write_handed(self, f: Facts, slots: list[int], ids: list[int], count: int) -> None:
        """Write what the layers of an engine write, which have ``count`` tokens."""
        for end in range(f.group, count + 1, f.group):
            page, last = divmod(end - f.group, f.page)
            if slots[page] >= 0:
                known = end + f.lookahead <= count
                self.slots[f.name].write(slots[page], last // f.group, ids[end + f.lookahead] if known else POISON)

    def check_inserted(self, got: Any, slots: dict[str, list[int]], ids: list[int], hit: int) -> int:
        """Check what an insert says and what the tree has of it. Return the boundary up to which it must have been.

        Up to ``hit`` the pages are the cache's.
        """
        count = reaches = len(ids) - 1
        boundary = self.model.limit(count, 0)
        whole = (count - self.model.lookahead) // self.model.page * self.model.page
        for f in self.model.facts:
            if not f.path:
                continue
            for page in range(got.ready // f.page, whole // f.page):
                if slots[f.name][page] < 0 and self.model.piece(f, ids, page) not in self.model.resident[f.name]:
                    reaches = min(reaches, page * f.page)
                    break
        limit = min(count - self.model.lookahead, reaches)
        upto: int = max(got.ready, limit // self.model.page * self.model.page)
        require(got.length == upto, "inserted up to %s, not %s", got.length, upto)
        added: Pieces = {}
        optional: Pieces = {}
        for f in self.model.facts:
            handed = slots[f.name]
            if upto == got.ready:
                pieces: set[Piece] = set()
            elif f.boundary:
                pieces = {self.model.piece(f, ids, upto)} if handed and upto == boundary else set()
            else:
                own = [i for i, slot in enumerate(handed) if slot >= 0 and got.ready <= i * f.page < upto]
                pieces = {self.model.piece(f, ids, index) for index in own}
            (optional if f.name in self.allowances.keeps else added)[f.name] = pieces
            taken = len(pieces - self.model.resident[f.name])
            exact = f.name not in self.allowances.keeps
            told, back = got.taken.get(f.name, 0), got.returned.get(f.name, 0)
            require(not exact or told == taken, "%s: took %s, not %s", f.name, told, taken)
            mine = sum(slot >= 0 for slot in handed[0 if f.boundary else hit // f.page :])
            require(told + back == mine, "%s: %s of %s slots", f.name, got, mine)
        self.compare("insert", {}, added, optional=optional)
        return upto

    def do_release(self, number: int, how: int = 0) -> None:
        if not self.leases:
            return
        leased = self.leases.pop(number % len(self.leases))
        if how == 0:
            leased.lease.release()
            self.expect_refusal("release twice", ProtocolError, leased.lease.release)
        elif how == 1:
            with leased.lease:
                pass
        else:
            leased.lease = None
            self.cache.poll()
            self.figures["recovered"] += not leased.gone
        self.compare("release")

    # ------------------------------------------------------------ opening
    def do_open(
        self, namespace: str, tokens: tuple[int, ...], leave: int, extra: tuple[Any, ...], priority: int, salt: int
    ) -> None:
        if len([run for run in self.running if not run.gone]) >= OPEN:
            return
        self.remember(namespace, tokens, extra, leave)
        ids = self.ids(namespace, tokens, extra)
        limit = self.model.limit(len(tokens), leave)
        until = float(salt) if salt % 4 == 3 else math.inf
        options = {"namespace": namespace, "leave": leave, "extra": extra, "priority": priority, "until": until}
        self.open_sequence(
            list(tokens),
            options,
            namespace,
            with_extra(tokens, extra),
            lambda got: self.check_boundary("open", got, ids, limit),
            salt,
        )

    def do_open_plan(self, number: int, salt: int) -> None:
        if not self.plans or len([run for run in self.running if not run.gone]) >= OPEN:
            return
        plan, namespace, ids = self.plans[number % len(self.plans)]
        fresh = self.is_fresh(plan)
        tokens = self.model.names.tokens(ids)
        self.open_sequence(
            plan, {}, namespace, tokens, lambda got: self.check_boundary_of_plan(plan, fresh, got, ids), salt
        )

    def open_sequence(
        self,
        what: Any,
        options: dict[str, Any],
        namespace: str,
        tokens: list[Any],
        judged: Callable[[int], int],
        salt: int,
    ) -> None:
        states = {f.name: 1 + f.steps for f in self.model.facts if f.boundary}
        try:
            sequence = self.cache.open(what, **options)
        except CapacityError:
            asked = {name: option for name, option in options.items() if name not in ("priority", "until")}
            with self.cache.lease(self.cache.match(what, **asked) if asked else what) as lease:
                view = self.view = self.reader.read([*self.anchors(), (namespace, anchor(lease))])
                refused = self.room_is_exact and self.room(states, anchor(lease))
                require(not refused, "no room for running states, and there is: %s", view)
            self.compare("open refused", may_lose=None)
            return
        boundary = judged(sequence.ready)
        ids = self.model.names.prefixes(namespace, tokens)
        pending = {f.name for f in self.model.facts if f.boundary}
        run = ModelSequence(
            sequence,
            namespace,
            list(tokens),
            salt,
            boundary,
            boundary,
            boundary,
            boundary,
            len(tokens),
            ids,
            dict.fromkeys(self.facts, boundary),
            pending,
            set(pending) if boundary else set(),
        )
        run.tracks = {name: [] for name in pending}
        run.deepest = run.floor = run.complete = boundary
        run.alone = run.named
        run.cover = {name: [] for name in self.facts}
        self.extend(run, len(tokens) + self.model.lookahead)
        self.running.append(run)
        for name, count in (("opened", 1), ("asked_tokens", len(tokens)), ("hit_tokens", boundary)):
            self.figures[name] += count
        self.count("hit" if boundary else "miss")
        self.compare("open", may_lose=self.everything() if self.allowances.narrows else states)
        self.record_cover(run, anchor(sequence))
        for f in self.model.facts:
            if not f.boundary:
                listed = self.held(run)[f.name]
                require(listed >= f.needed(boundary), "%s: open at %s lists %s", f.name, boundary, listed)

    # ------------------------------------------------------------ ending
    def do_close(self, number: int, how: int) -> None:
        """End a sequence. ``how``: 0 and 1 close, 2 abort, 3 an exception in its with block, 4 drop the reference."""
        if not self.running:
            return
        run = self.running[number % len(self.running)]
        added: Pieces = {}
        optional: Pieces = {}
        may_lose: dict[str, int] = {}
        upto = run.published
        if not run.gone and how < 2:
            upto = self.model.publishable(run)
            added, optional, may_lose = self.expected_publication(run, upto, last=True)
        held = {} if run.gone else self.held(run)
        sequence, run.sequence = run.sequence, None
        tokens = sequence.tokens
        self.running.remove(run)
        if how < 2:
            try:
                sequence.close()
            except PluginError:  # the sequence is closed anyway; what it published before stays
                require(not sequence.open, "%s is still open", sequence)
                del sequence
                may = {name: added.get(name, set()) | optional.get(name, set()) for name in {*added, *optional}}
                self.compare("close failed", may_lose, optional=may)
                return
            sequence.close()
        elif how == 2 or (how == 3 and run.gone):
            sequence.abort()
        elif how == 3:
            try:
                with sequence:
                    raise PlannedStepError
            except PlannedStepError:
                pass
        if how < 4:
            require(not sequence.open, "%s is still open", sequence)
            try:
                sequence.grow(1)
            except ProtocolError:
                pass
            else:
                require(False, "a closed sequence grew")
        del sequence
        self.cache.poll()
        self.figures["recovered"] += how == 4 and not run.gone
        self.compare("close" if how < 2 else "abort", may_lose, added, optional=optional)
        if how < 2 and not run.gone and not run.detached:
            self.check_complete(run, held, upto, tokens)

    def check_complete(self, run: ModelSequence, held: dict[str, set[int]], upto: int, named: Any) -> None:
        """Check that the tokens of a closed sequence match up to its boundary, if it held all that this needs."""
        for f in self.model.facts:
            if f.name in self.allowances.keeps:
                return
            if f.boundary and self.model.piece(f, run.ids, upto) not in self.model.resident[f.name] and upto:
                return
            if not f.boundary and not f.needed(upto) <= held[f.name]:
                return
        self.count("complete")
        require(self.model.usable(run.ids, upto), "closed at %s with everything held, and it cannot be resumed", upto)
        tokens = named.part(0, upto + self.model.lookahead)
        ids = self.ids(run.namespace, tokens.tolist(), tokens.extra)
        require(ids == run.ids[: len(ids)], "a sequence's tokens are %s, with the extra keys %s", tokens, tokens.extra)
        plan = self.match_and_check(run.namespace, tuple(tokens.tolist()), tokens.extra, 0, False)
        got = self.cache.peek(tokens, namespace=run.namespace)
        require(got == plan.ready, "a sequence's tokens hit %s, and with their extra keys given %s", got, plan.ready)

    # ------------------------------------------------------------ room
    def do_evict(self, number: int, count: int) -> None:
        """Evict from one component by name or, if ``number`` is 0, by tokens from all components with pages.

        Now and then, of one by name only what no boundary needs.
        """
        unneeded = bool(number) and count % 4 == 3
        if number:
            f = self.model.facts[number % len(self.model.facts)]
            wanted = {f.name: count}
            need: Any = wanted
        else:
            wanted = {f.name: -(-count // f.page) for f in self.model.facts if not f.boundary}
            need = count
        before = {name: len(self.slots[name].free) for name in wanted}
        can = {name: self.evictable(self.facts[name], self.view) for name in wanted}
        told = {name: self.cache.stats().components[name].evictable for name in wanted}
        freed = self.cache.evict(need, unneeded=unneeded)
        self.compare("evict", may_lose={name: before[name] + want for name, want in wanted.items()})
        for name, want in wanted.items():
            got = len(self.slots[name].free) - before[name]
            require(got == freed.get(name, 0), "%s: %s freed, %s said", name, got, freed.get(name))
            can_all = unneeded or self.allowances.widens or got >= min(want, can[name])
            require(can_all, "%s: %s freed of %s, %s could go", name, got, want, can[name])
            if number and self.room_is_exact:  # else another component may have gone with it, or it with another
                enough = unneeded or got >= min(want, told[name])
                require(enough and got <= told[name], "%s: %s freed of %s, told %s", name, got, want, told[name])

    def do_dry(self, number: int, left: int) -> None:
        """Take free slots of a component away until only ``left`` are free."""
        self.do_flood()
        f = self.model.facts[number % len(self.model.facts)]
        pool = self.cache.pool(f.name)
        self.minted[f.name] = pool.mint(max(0, pool.free - left))
        self.compare("dry")

    def do_flood(self) -> None:
        """Give back the slots that ``do_dry`` took."""
        while self.minted:
            self.minted.popitem()[1].free()
        self.compare("flood")

    def do_drop_namespace(self, namespace: str) -> None:
        for run in self.running:
            run.detached |= run.namespace == namespace
        for leased in self.leases:
            leased.detached |= leased.namespace == namespace
        self.cache.drop_namespace(namespace)
        self.compare("drop_namespace", wipe=namespace)

    def do_flush(self) -> None:
        """Flush, and where a sequence runs twice, while all slots wait for its step to be over."""
        stream = SimulatedStream("a step before the flush")
        going = [run.sequence for run in self.running if not run.gone][:1]
        if going:
            with self.cache.step(going, role="draft") as step:
                step.run_ops(stream)
                stream.run(lambda: None)
            self.cache.flush()
        self.cache.flush()
        for run in self.running:
            run.gone = True
        for leased in self.leases:
            leased.gone = True
        self.minted = {}
        self.compare("flush", wipe="*")
        while stream.ready:
            stream.advance()
        self.cache.poll()
        self.compare("poll")
        for plan, _, _ in self.plans:
            self.expect_refusal("plan from before a flush", ProtocolError, self.cache.open, plan)
        self.plans = []
        for run in self.running:
            self.expect_refusal("use after flush", ProtocolError, run.sequence.grow, 1)

    def do_want(self, number: int, until: int) -> None:
        """Say until when what a sequence uses and leaves is wanted; 0: for ever."""
        run = self.pick(number)
        if run is not None:
            run.sequence.until = until or math.inf
            self.compare("want")

    def do_expire(self, now: int) -> None:
        """Let the time come at which some things are wanted no more, which evicts nothing."""
        self.cache.expire(now)
        self.compare("expire")

    def do_poll(self) -> None:
        self.cache.poll()
        self.compare("poll")

    def do_illegal(self, number: int, kind: int) -> None:
        """Check that calls that break the contract are refused and change nothing."""
        run = self.pick(number)
        if run is None:
            return
        s, page = run.sequence, self.model.page
        if kind == 0:
            self.expect_refusal("publish too far", ProtocolError, s.publish, self.model.publishable(run) + page)
        elif kind == 1:
            self.expect_refusal("commit too far", ProtocolError, s.commit, run.reserved + 1)
        elif kind == 2:
            self.expect_refusal("grow backwards", InputError, s.grow, -1)
        elif kind == 3 and page > 1:
            self.expect_refusal("publish off the page", ProtocolError, s.publish, run.published + 1)
        elif kind == 4:
            self.expect_refusal("tokens out of range", InputError, s.append, [TOKEN_LIMIT])

    # ------------------------------------------------------------ the end
    def finish(self) -> None:
        """Close and evict everything, then check that every slot is free and nothing is locked."""
        self.do_flood()
        while self.running:
            self.do_close(0, len(self.running) % 3)
        while self.leases:
            self.do_release(0)
        for f in self.model.facts:
            self.cache.evict({f.name: f.capacity})
        for f in self.model.facts:
            pool = self.cache.pool(f.name)
            require(pool.free == pool.capacity, "%s: %s of %s are free in the end", f.name, pool.free, pool.capacity)
            require(self.cache.stats().components[f.name].leased == 0, "%s: something is leased in the end", f.name)
        require(self.cache.stats().nodes == 0, "%s nodes are left in the end", self.cache.stats().nodes)
        remembered = backdoor.remembered(self.cache)
        require(not remembered, "the queues remember %s cells that are gone", remembered)
