"""The operations of the property test, each done to the cache and to the model.

An operation is a plain tuple: a name and numbers or tokens. What it applies to is found from the numbers modulo what
there is, so that any part of a script is a script.
"""

from __future__ import annotations

import random
from functools import cache as memoised
from typing import Any

from backdoor import anchor, hold, sequence_anchor
from model import Facts, Leased, Running, with_extra
from world import World

from prefixloom import CapacityError, InputError, ProtocolError

Op = tuple[Any, ...]
DOCUMENTS = 3
LONG = 400


@memoised
def document(number: int, alphabet: int = 2) -> tuple[int, ...]:
    """A text that prompts begin with; document 2k + 1 leaves document 2k after a while."""
    chance = random.Random(f"document {number} {alphabet}")
    text = tuple(chance.randrange(alphabet) for _ in range(LONG))
    if number % 2:
        shared = 5 + 7 * number
        text = document(number - 1, alphabet)[:shared] + text[shared:]
    return text


class Planned(Exception):
    """Raised inside of a step on purpose."""


class Operations(World):
    """``apply`` does one operation; each ``do_`` method is one kind."""

    def apply(self, op: Op) -> None:
        getattr(self, f"do_{op[0]}")(*op[1:])

    # ------------------------------------------------------------ choosing
    def pick(self, number: int) -> Running | None:
        usable = [run for run in self.running if not run.gone]
        return usable[number % len(usable)] if usable else None

    def extend(self, run: Running, length: int) -> None:
        """Make the future of ``run`` at least ``length`` tokens long."""
        text = document(run.salt % 4)
        while len(run.future) < length:
            run.future.append(text[(len(run.future) + run.salt // 4) % LONG])
        while len(run.ids) <= len(run.future):
            token = run.future[len(run.ids) - 1]
            run.ids.append(self.model.names.child(run.ids[-1], run.namespace, token))

    def refused(self, what: str, error: type[Exception], call: Any, *args: Any) -> None:
        """``call`` must raise, and nothing may have changed."""
        try:
            call(*args)
        except error:
            self.settle(what)
            return
        hold(False, "%s was not refused with %s", what, error.__name__)

    # ------------------------------------------------------------ matching
    def do_match(self, namespace: str, tokens: tuple[int, ...], leave: int, extra: tuple[Any, ...] = ()) -> None:
        self.remember(namespace, tokens, extra, leave)
        self.ask(namespace, tokens, extra, leave, candidates=True)
        got = self.cache.peek(list(tokens), namespace=namespace, leave=leave)
        ids = self.ids(namespace, tokens)
        wanted = self.model.deepest(ids, self.model.limit(len(tokens), leave))
        hold(got == wanted, "peek says %s, the sets say %s", got, wanted)
        self.settle("match")

    def remember(self, namespace: str, tokens: tuple[int, ...], extra: tuple[Any, ...], leave: int) -> None:
        self.asked = [*self.asked[-11:], (namespace, tokens, extra, leave)]

    def do_plan(self, namespace: str, tokens: tuple[int, ...], leave: int, extra: tuple[Any, ...] = ()) -> None:
        self.plans.append((self.ask(namespace, tokens, extra, leave, False), namespace, self.ids(namespace, tokens, extra)))
        del self.plans[:-4]
        self.settle("plan")

    def planned_boundary(self, plan: Any, ids: list[int]) -> int:
        """Where a kept plan leads now: what it said while it is fresh, and a new match if it is stale."""
        if plan.stale:
            self.count("stale plan")
            return self.model.deepest(ids, plan._limit)
        hold(self.model.usable(ids, plan.ready), "a plan at %s is not stale and cannot be resumed", plan.ready)
        return int(plan.ready)

    # ------------------------------------------------------------ leases
    def do_lease(self, number: int) -> None:
        if not self.plans:
            return
        plan, namespace, ids = self.plans[number % len(self.plans)]
        boundary = self.planned_boundary(plan, ids)
        lease = self.cache.lease(plan)
        hold(lease.boundary == boundary, "a lease stands at %s, not %s", lease.boundary, boundary)
        leased = Leased(lease, namespace, ids, boundary, cover={name: [] for name in self.facts})
        self.leases.append(leased)
        self.settle("lease")
        self.settled(leased, anchor(lease))

    def do_release(self, number: int, how: int = 0) -> None:
        if not self.leases:
            return
        leased = self.leases.pop(number % len(self.leases))
        if how == 0:
            leased.lease.release()
            self.refused("release twice", ProtocolError, leased.lease.release)
        elif how == 1:
            with leased.lease:
                pass
        else:
            leased.lease = None
            self.cache.poll()
        self.settle("release")

    # ------------------------------------------------------------ opening
    def do_open(
        self, namespace: str, tokens: tuple[int, ...], leave: int, extra: tuple[Any, ...], priority: int, salt: int
    ) -> None:
        if len([run for run in self.running if not run.gone]) >= 5:
            return
        self.remember(namespace, tokens, extra, leave)
        ids = self.ids(namespace, tokens, extra)
        boundary = self.model.deepest(ids, self.model.limit(len(tokens), leave))
        options = {"namespace": namespace, "leave": leave, "extra": extra, "priority": priority}
        self.opened(list(tokens), options, namespace, with_extra(tokens, extra), boundary, salt)

    def do_open_plan(self, number: int, salt: int) -> None:
        if not self.plans or len([run for run in self.running if not run.gone]) >= 5:
            return
        plan, namespace, ids = self.plans[number % len(self.plans)]
        boundary = self.planned_boundary(plan, ids)
        names = {number: token for (_, _, token), number in self.model.names._ids.items()}
        self.opened(plan, {}, namespace, [names[number] for number in ids[1:]], boundary, salt)

    def opened(
        self, what: Any, options: dict[str, Any], namespace: str, tokens: list[Any], boundary: int, salt: int
    ) -> None:
        states = {f.name: 1 for f in self.model.facts if f.boundary}
        try:
            sequence = self.cache.open(what, **options)
        except CapacityError:
            with self.cache.lease(self.cache.match(what, **options) if options else what) as lease:
                view = self.view = self.reader.read([*self.anchors(), (namespace, lease._node)])
                hold(not self.room(states, anchor(lease)), "no room for running states, and there is: %s", view)
            self.settle("open refused", may_lose=None)
            return
        ids = self.model.names.prefixes(namespace, tokens)
        run = Running(
            sequence, namespace, list(tokens), salt, boundary, boundary, boundary, boundary, len(tokens), ids,
            {f.name: boundary for f in self.model.facts}, set(states), set(states) if boundary else set(),
        )  # fmt: skip
        run.deepest = run.floor = boundary
        run.cover = {name: [] for name in self.facts}
        self.extend(run, len(tokens) + self.model.lookahead)
        self.running.append(run)
        hold(sequence.ready == boundary, "a sequence starts at %s, not %s", sequence.ready, boundary)
        self.count("hit" if boundary else "miss")
        self.settle("open", may_lose=states)
        self.settled(run, sequence_anchor(sequence))
        for f in self.model.facts:
            if not f.boundary and f.shareable:
                listed = self.held(run)[f.name]
                hold(listed >= f.needed(boundary), "%s: open at %s lists %s", f.name, boundary, listed)

    # ------------------------------------------------------------ running
    def do_grow(self, number: int, count: int) -> None:
        """``count`` below 0: up to what is named, that much short."""
        run = self.pick(number)
        if run is None:
            return
        if count < 0:
            count = max(0, run.named - run.reserved + count + 1)
        length = run.reserved + count
        wanted = {}
        for f in self.model.facts:
            if not f.boundary:
                missing = -(-length // f.page) - len(run.sequence.pages(f.name))
                wanted[f.name] = max(0, missing)
        try:
            run.sequence.grow(count)
        except CapacityError as error:
            hold(not self.room(wanted), "refused, and there is room: %s", error)
            self.settle("grow refused")
            return
        except InputError:
            longest = min((f.capacity * f.page for f in self.model.facts if f.path), default=1 << 62)
            hold(length > longest, "%s tokens are not too long for %s", length, longest)
            self.settle("grow too long")
            return
        run.reserved = length
        self.extend(run, length + self.model.lookahead)
        self.settle("grow", may_lose=wanted)

    def do_append(self, number: int, count: int) -> None:
        run = self.pick(number)
        if run is None:
            return
        self.extend(run, run.named + count + self.model.lookahead)
        more = run.future[run.named : run.named + count]
        if any(isinstance(token, tuple) for token in more):
            return  # known to the device by a key that append cannot say
        run.sequence.append(more)
        run.named += count
        self.settle("append")

    def forward(self, run: Running, upto: int) -> None:
        """What the layers of a forward pass do: write pages and advance states, from what is in the slots."""
        for f in self.model.facts:
            if f.boundary:
                slot = run.sequence.pages(f.name)[0]
                state = self.slots[f.name].read(slot)[0]
                for token in run.future[run.committed : upto]:
                    state = self.model.names.child(state, run.namespace, token)
                self.slots[f.name].write(slot, 0, state)
            else:
                self.write_pages(run, f, upto)

    def write_pages(self, run: Running, f: Facts, upto: int) -> None:
        table = run.sequence.pages(f.name)
        for end in range((run.written[f.name] // f.group + 1) * f.group, upto + 1, f.group):
            index, last = divmod(end - f.group, f.page)
            hold(index * f.page >= run.published, "%s: published content must be written again", f.name)
            hold(table[index] >= 0, "%s: page %s of %s has no slot to write", f.name, index, table)
            self.slots[f.name].write(table[index], last // f.group, run.ids[end + f.lookahead])
        run.written[f.name] = max(run.written[f.name], upto)

    def committed(self, run: Running, upto: int) -> None:
        run.committed = upto
        self.model.retain(run)

    def do_step(self, mask: int, mode: int) -> None:
        """Modes: 0 to 5 a pass, 6 a draft, 7 and 8 a pass that fails before and after its ops."""
        batch = [run for i, run in enumerate(self.running) if not run.gone and mask >> i & 1]
        if not batch:
            return
        sequences = [run.sequence for run in batch]
        try:
            with self.cache.step(sequences, role="draft" if mode == 6 else "target") as step:
                if mode == 6:
                    step.table(self.model.facts[0].name)
                if mode == 7:
                    raise Planned
                step.run_ops()
                if mode != 6:
                    for run in batch:
                        run.pending, run.sourced = set(), set()
                if mode == 8:
                    raise Planned
                if mode < 6:
                    for run in batch:
                        self.forward(run, run.reserved)
        except Planned:
            self.settle("step failed")
            return
        finally:
            del sequences
        if mode < 6:
            for run in batch:
                self.committed(run, run.reserved)
        self.settle("step")
        for run in batch:
            self.check_released(run)

    def do_commit(self, number: int, short: int) -> None:
        """Commit all that is reserved but ``short`` tokens."""
        run = self.pick(number)
        if run is None:
            return
        if run.pending:
            self.refused("commit before ops", ProtocolError, run.sequence.commit)
            return
        upto = max(run.committed, run.reserved - short)
        self.forward(run, upto)
        run.sequence.commit(upto)
        self.committed(run, upto)
        self.settle("commit")
        self.check_released(run)

    def check_released(self, run: Running) -> None:
        """What no boundary from the floor on can need has been given back."""
        held = self.held(run)
        for f in self.model.facts:
            if f.boundary or f.path:
                continue
            late = [i for i in held[f.name] if (i + 1) * f.page <= run.floor and not f.ever_needed_from(i, run.floor)]
            hold(not late, "%s: pages %s are kept, and nothing from %s on needs them", f.name, late, run.floor)

    # ------------------------------------------------------------ publishing
    def do_publish(self, number: int, pick: int) -> None:
        """``pick`` below 0: the default boundary."""
        run = self.pick(number)
        if run is None:
            return
        limit = self.model.publishable(run)
        hold(run.sequence.publishable == limit, "publishable %s, not %s", run.sequence.publishable, limit)
        legal = range(run.published, limit + 1, self.model.page)
        upto = limit if pick < 0 else legal[pick % len(legal)]
        added, may_lose = self.bring(run, upto, last=False)
        got = run.sequence.publish(None if pick < 0 else upto)
        hold(got == upto, "published %s, not %s", got, upto)
        moved = upto > run.published
        if moved:
            run.published = upto
            self.model.retain(run)
            run.pending |= run.donating
            run.sourced |= run.donating
        self.settle("publish", may_lose, added)
        if moved:
            self.settled(run, sequence_anchor(run.sequence))
        self.check_released(run)

    def bring(self, run: Running, upto: int, last: bool) -> tuple[dict[str, Any], dict[str, int]]:
        """The pieces that publishing brings, and the slots that donations take."""
        if upto <= run.published:
            return {}, {}
        added: dict[str, Any] = self.model.published_by(run, self.held(run), upto)
        room: dict[str, int] = {}
        run.donating = set()
        for f in self.model.facts:
            if not f.boundary:
                continue
            added[f.name] = set()
            if not f.shareable or run.committed != upto or f.name in run.pending:
                continue
            piece = self.model.piece(f, run.ids, upto)
            if not run.detached and piece in self.model.resident[f.name]:
                room[f.name] = 1  # a slot is made free before it is known that the tree has the state already
                continue
            if last:
                added[f.name] = {piece}
            elif self.room({f.name: 1}):
                added[f.name] = {piece}
                room[f.name] = 1
                run.donating.add(f.name)
        return ({} if run.detached else added), room

    def do_rewind(self, number: int, count: int, salt: int) -> None:
        """Take back some of what may be taken back; sometimes one token too many is tried first."""
        run = self.pick(number)
        if run is None:
            return
        floor = self.model.rewind_floor(run)
        if salt % 4 == 0:
            too_far = max(1, run.reserved - floor + 1)
            self.refused("rewind too far", ProtocolError, run.sequence.rewind, too_far)
        length = min(run.reserved, max(floor, run.reserved - count))
        run.sequence.rewind(run.reserved - length)
        if length < run.reserved:
            self.rewound(run, length, salt)
        self.settle("rewind")

    def rewound(self, run: Running, length: int, salt: int) -> None:
        """Other tokens follow from ``length`` on, and what depends on them must be computed again."""
        del run.future[length:], run.ids[length + 1 :]
        run.salt = salt
        run.reserved = length
        run.committed = min(run.committed, length)
        run.named = min(run.named, length)
        self.extend(run, length + self.model.lookahead)
        for f in self.model.facts:
            run.written[f.name] = min(run.written[f.name], max(0, length - f.lookahead))
            if f.lookahead:  # a draft's last entries are written again before their tokens are named
                self.write_pages(run, f, run.committed)

    # ------------------------------------------------------------ ending
    def do_close(self, number: int, how: int) -> None:
        """How: 0 and 1 close, 2 abort, 3 an exception in a with block, 4 dropped without a word."""
        if not self.running:
            return
        run = self.running[number % len(self.running)]
        added: dict[str, Any] = {}
        upto = run.published
        if not run.gone and how < 2:
            upto = self.model.publishable(run)
            added = self.bring(run, upto, last=True)[0]
        held = {} if run.gone else self.held(run)
        sequence, run.sequence = run.sequence, None
        self.running.remove(run)
        if how < 2:
            sequence.close()
            sequence.close()
        elif how == 2 or (how == 3 and run.gone):
            sequence.abort()
        elif how == 3:
            try:
                with sequence:
                    raise Planned
            except Planned:
                pass
        if how < 4:
            hold(not sequence.open, "%s is still open", sequence)
            try:
                sequence.grow(1)
            except ProtocolError:
                pass
            else:
                hold(False, "a closed sequence grew")
        del sequence
        self.cache.poll()
        self.settle("close" if how < 2 else "abort", added=added)
        if how < 2 and not run.gone and not run.detached:
            self.check_complete(run, held, upto)

    def check_complete(self, run: Running, held: dict[str, set[int]], upto: int) -> None:
        """If a closed sequence held all that its boundary needs, its tokens now match up to there."""
        for f in self.model.facts:
            if f.boundary and self.model.piece(f, run.ids, upto) not in self.model.resident[f.name] and upto:
                return
            if not f.boundary and (not f.shareable or not f.needed(upto) <= held[f.name]):
                return
        self.count("complete")
        hold(self.model.usable(run.ids, upto), "closed at %s with everything held, and it cannot be resumed", upto)
        tokens = run.future[: upto + self.model.lookahead]
        if not any(isinstance(token, tuple) for token in tokens):
            self.ask(run.namespace, tuple(tokens), (), 0, False)  # type: ignore[arg-type]

    # ------------------------------------------------------------ room
    def do_evict(self, number: int, count: int) -> None:
        """Of one component by name, or (number 0) of all page components by tokens."""
        if number:
            f = self.model.facts[number % len(self.model.facts)]
            wanted = {f.name: count}
            need: Any = wanted
        else:
            wanted = {f.name: -(-count // f.page) for f in self.model.facts if not f.boundary}
            need = count
        before = {name: len(self.slots[name].free) for name in wanted}
        can = {name: self.evictable(self.facts[name], self.view) for name in wanted}
        freed = self.cache.evict(need)
        self.settle("evict", may_lose={name: before[name] + want for name, want in wanted.items()})
        for name, want in wanted.items():
            got = len(self.slots[name].free) - before[name]
            hold(got == freed.get(name, 0), "%s: %s freed, %s said", name, got, freed.get(name))
            hold(got >= min(want, can[name]), "%s: %s freed of %s, %s could go", name, got, want, can[name])

    def do_drop_namespace(self, namespace: str) -> None:
        for run in self.running:
            run.detached |= run.namespace == namespace
        for leased in self.leases:
            leased.detached |= leased.namespace == namespace
        self.cache.drop_namespace(namespace)
        self.settle("drop_namespace", wipe=namespace)

    def do_flush(self) -> None:
        self.cache.flush()
        for thing in (*self.running, *self.leases):
            thing.gone = True
        self.settle("flush", wipe="*")
        for plan, _, _ in self.plans:
            self.refused("plan from before a flush", ProtocolError, self.cache.open, plan)
        self.plans = []
        for run in self.running:
            self.refused("use after flush", ProtocolError, run.sequence.grow, 1)

    def do_poll(self) -> None:
        self.cache.poll()
        self.settle("poll")

    def do_illegal(self, number: int, kind: int) -> None:
        """Calls that break the contract change nothing."""
        run = self.pick(number)
        if run is None:
            return
        s, page = run.sequence, self.model.page
        if kind == 0:
            self.refused("publish too far", ProtocolError, s.publish, self.model.publishable(run) + page)
        elif kind == 1:
            self.refused("commit too far", ProtocolError, s.commit, run.reserved + 1)
        elif kind == 2:
            self.refused("grow backwards", InputError, s.grow, -1)
        elif kind == 3 and page > 1:
            self.refused("publish off the page", ProtocolError, s.publish, run.published + 1)
        elif kind == 4:
            self.refused("tokens out of range", InputError, s.append, [1 << 31])

    # ------------------------------------------------------------ the end
    def finish(self) -> None:
        """Everything closed and evicted: every slot is free and nothing is locked."""
        while self.running:
            self.do_close(0, len(self.running) % 3)
        while self.leases:
            self.do_release(0)
        for f in self.model.facts:
            self.cache.evict({f.name: f.capacity})
        for f in self.model.facts:
            pool = self.cache.pool(f.name)
            hold(pool.free == pool.capacity, "%s: %s of %s are free in the end", f.name, pool.free, pool.capacity)
            hold(self.cache.stats().components[f.name].leased == 0, "%s: something is leased in the end", f.name)
        hold(self.cache.stats().nodes == 0, "%s nodes are left in the end", self.cache.stats().nodes)
