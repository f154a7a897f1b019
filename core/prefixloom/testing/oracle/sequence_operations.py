"""The operations on an open sequence: growing, arriving, steps, publishing and taking back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

from ...errors import CapacityError, InputError, PluginError, ProtocolError
from ...script import PlannedStepError, picked, text_of
from ..inside.backdoor import anchor, has_plugin_ops, needs_a_step, unfilled
from ..inside.memory import POISON
from .comparison import ComparedCache
from .sets import Facts, ModelSequence, Piece, with_extra
from .view import require

TEXTS = 4
"""The number of texts that prompts begin with, and that the model says."""
BOOK = "document {} 2"

Pieces = dict[str, set[Piece]]


class SequenceOperations(ComparedCache):
    """Operations on one open sequence: reserve, compute, commit, publish and take back."""

    # ------------------------------------------------------------ choosing
    def pick(self, number: int) -> ModelSequence | None:
        return picked([run for run in self.running if not run.gone], number)

    def extend(self, run: ModelSequence, length: int) -> None:
        """Extend the future of ``run`` to at least ``length`` tokens."""
        text = text_of(run.salt % TEXTS, BOOK)[:400]
        while len(run.future) < length:
            run.future.append(text[(len(run.future) + run.salt // 4) % len(text)])
        while len(run.ids) <= len(run.future):
            token = run.future[len(run.ids) - 1]
            run.ids.append(self.model.names.child(run.ids[-1], run.namespace, token))

    def expect_refusal(self, what: str, error: type[Exception], call: Any, *args: Any) -> None:
        """Check that ``call`` raises ``error`` and changes nothing."""
        try:
            call(*args)
        except error:
            self.compare(what)
            return
        require(False, "%s was not refused with %s", what, error.__name__)

    # ------------------------------------------------------------ running
    def do_grow(self, number: int, count: int) -> None:
        """Reserve ``count`` tokens. -1 reserves up to the last named token, -2 one less, and so on."""
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
        self.reserve(run, count, wanted, "grow")

    def reserve(self, run: ModelSequence, count: int, wanted: dict[str, int], what: str) -> bool:
        """Reserve ``count`` tokens, which takes the ``wanted`` slots. Return whether there was room."""
        length = run.reserved + count
        try:
            run.sequence.grow(count, arriving=what == "arrive")
        except CapacityError as error:
            require(not (self.room_is_exact and self.room(wanted)), "refused, and there is room: %s", error)
            self.check_refusal(error, wanted)
            self.compare(f"{what} refused")
            return False
        except InputError:
            longest = min((f.capacity * f.page for f in self.model.facts if f.path), default=1 << 62)
            require(length > longest, "%s tokens are not too long for %s", length, longest)
            self.compare("grow too long")
            return False
        run.reserved = length
        if what == "arrive":
            run.arrived = length
        self.extend(run, length + self.model.lookahead)
        self.compare(what, may_lose=wanted)
        return True

    def do_advance(self, number: int, budget: int) -> None:
        """Reserve up to where the sequence says that the next step should end, run that step alone, and publish.

        If that is a boundary, every state component must have a state to publish there.
        """
        run = self.pick(number)
        if run is None or run.reserved != run.committed or self.has_lost_state(run):
            return
        number = [each for each in self.running if not each.gone].index(run)
        stop = run.sequence.next_stop(budget)
        self.check_next_stop(run, budget, stop)
        self.do_grow(number, stop - run.reserved)
        if run.reserved < stop:
            return
        self.do_step(1 << self.running.index(run), 0)
        if self.model.publishable(run) == stop > run.published:
            for f in self.model.facts:
                kept = self.model.checkpoint(f, run, stop) if f.boundary else stop
                require(kept == stop, "%s: a step ended at %s, and its state is of %s", f.name, stop, kept)
            self.count("stopped at a boundary")
        self.do_publish(number, -1)

    def check_next_stop(self, run: ModelSequence, budget: int, stop: int) -> None:
        """Check that the next step ends at a boundary if it can, and passes none where a state is worth a slot."""
        start, page = run.reserved, self.model.page
        longest = start + budget
        require(start < stop <= longest, "a step from %s of at most %s ends at %s", start, budget, stop)
        if start >= run.named:
            require(stop == longest, "a step from %s of at most %s ends at %s", start, budget, stop)
            return
        longest = min(longest, run.named)
        whole = stop == longest and (longest == run.named or longest // page * page <= start)
        require(whole or stop % page == 0, "a step from %s to %s ends at %s, off a boundary", start, longest, stop)
        states = [f for f in self.model.facts if f.boundary]
        for at in (self.model.limit(run.named, 1), run.sequence.branch or 0) if states else ():
            require(not start < at < stop, "a step from %s to %s passes %s", start, stop, at)
        for at in (longest // f.every * f.every for f in states if f.every):
            require(not start < at < stop, "a step from %s to %s passes the checkpoint at %s", start, stop, at)

    def do_arrive(self, number: int, count: int) -> None:
        """Reserve for tokens computed elsewhere: only the pages that resuming at their end needs get slots."""
        run = self.pick(number)
        if run is None or run.reserved != run.committed:
            return
        length = run.reserved + count
        first = {f.name: len(run.sequence.pages(f.name)) for f in self.model.facts}
        fresh = {
            f.name: {
                i
                for i in range(first[f.name], -(-length // f.page))
                if i in f.needed(length) or (i + 1) * f.page > length  # the last page will be written on
            }
            for f in self.model.facts
            if not f.boundary
        }
        wanted = {name: len(pages) for name, pages in fresh.items()}
        if not self.reserve(run, count, wanted, "arrive"):
            return
        for name, listed in self.held(run).items():
            if name in fresh:
                got = {i for i in listed if i >= first[name]}
                require(got == fresh[name], "%s: arriving pages %s, not %s", name, got, fresh[name])
                run.absent.setdefault(name, set()).update(set(range(first[name], len(run.sequence.pages(name)))) - got)

    def do_append(self, number: int, count: int, key: Hashable = None) -> None:
        """Name ``count`` tokens, the second and all that follow it with the extra key ``key`` if there is one."""
        run = self.pick(number)
        if run is None:
            return
        self.extend(run, run.named + count + self.model.lookahead)
        more = run.future[run.named : run.named + count]
        if any(isinstance(token, tuple) for token in more):
            return  # they were opened with an extra key, and taken back
        unseen = max(run.reserved, run.chosen_upto) <= run.named and run.chosen_from < 0
        spans = ((1, count, key),) if key is not None and unseen else ()
        if spans:  # no layer has these tokens yet
            run.future[run.named :] = with_extra(more, spans)  # type: ignore[arg-type]
            del run.ids[run.named + 1 :]
            self.extend(run, run.named + count + self.model.lookahead)
            self.count("append with a key")
        run.sequence.append(more, extra=spans)
        run.named += count
        self.compare("append")

    def name_more(self, run: ModelSequence, count: int) -> None:
        """Name tokens while a step is open, which does not have them."""
        self.extend(run, run.named + count + self.model.lookahead)
        more = run.future[run.named : run.named + count]
        if not any(isinstance(token, tuple) for token in more):
            run.sequence.append(more)
            run.named += count

    def catch_up(self, batch: list[ModelSequence]) -> None:
        """Do what the layers of a draft step do: write again what waited for tokens that are named."""
        for run in batch:
            for f in self.model.facts:
                if f.lookahead:
                    self.write_pages(run, f, run.committed, max(run.named, run.committed))
            run.complete = max(run.complete, min(run.committed, run.named - self.model.lookahead))

    def forward(self, run: ModelSequence, upto: int, known: int) -> None:
        """Do what the layers of a forward pass do: write pages, and advance states from what is in the slots.

        The layers have the first ``known`` tokens.
        """
        for f in self.model.facts:
            if f.boundary:
                slot = run.sequence.pages(f.name)[0]
                singles = run.sequence.rewind_slots(f.name)
                require(len(singles) == f.steps, "%s: %s slots for single states", f.name, len(singles))
                found, right = self.slots[f.name].numbers(slot), run.ids[run.committed]
                state = right if self.slots[f.name].agree(found, [right]) else found[0]
                for i, token in enumerate(run.future[run.committed : upto]):
                    state = self.model.names.child(state, run.namespace, token)
                    if upto - run.committed <= len(singles):
                        self.slots[f.name].write(singles[i], 0, state)
                self.slots[f.name].write(slot, 0, state)
            else:
                self.write_pages(run, f, upto, known)

    def write_pages(self, run: ModelSequence, f: Facts, upto: int, known: int) -> None:
        """Write what has no content yet, or none that is exact. ``run.written``: up to here it is exact."""
        table = run.sequence.pages(f.name)
        for end in range((run.written[f.name] // f.group + 1) * f.group, upto + 1, f.group):
            index, last = divmod(end - f.group, f.page)
            if index in run.absent.get(f.name, ()):
                continue
            shared = index * f.page < run.published
            require(not shared, "%s: published content must be written again", f.name)
            require(table[index] >= 0, "%s: page %s of %s has no slot to write", f.name, index, table)
            number = run.ids[min(end + f.lookahead, known)]
            if end + f.lookahead > known:
                number = self.model.names.child(number, run.namespace, "what follows is not known")
            self.slots[f.name].write(table[index], last // f.group, number)
        exact = min(upto, known - f.lookahead) if f.lookahead else upto
        run.written[f.name] = max(run.written[f.name], exact)

    def committed(self, run: ModelSequence, upto: int, room: dict[str, int] | None) -> None:
        """Update the model after a commit. ``room`` counts the slots that the step's checkpoints take.

        A commit outside a step passes None, because it keeps no checkpoint.
        """
        before, run.committed = run.committed, upto
        for f in self.model.facts:
            if not f.boundary:
                continue
            small = upto - before <= f.steps and before >= run.arrived
            run.step_from = before if before < upto and small and not run.spoiled else -1
            at = self.due_checkpoint(f, run, before, upto)
            if room is None or at is None or run.spoiled:
                continue
            tracks = run.tracks[f.name]
            if len(tracks) == 2:
                tracks.pop(0)
            elif self.room({f.name: room.get(f.name, 0) + 1}):
                room[f.name] = room.get(f.name, 0) + 1
            else:
                self.count("checkpoint skipped")
                continue
            self.count("checkpoint")
            tracks.append(at)
        self.model.retain(run)

    def due_checkpoint(self, f: Facts, run: ModelSequence, before: int, upto: int) -> int | None:
        """Return where a step over [before, upto) keeps a checkpoint: the deepest boundary whose state it has."""
        at = upto // f.every * f.every if f.every else before
        small = upto - before <= f.steps and before >= run.arrived
        return at if at > before and (at == upto or small) else None

    def do_step(self, mask: int, mode: int) -> None:
        """Run a step over the sequences in ``mask``.

        Modes: 0 to 5 a normal pass; 6 a draft step; 7 a pass that fails before its ops; 8 one that fails after them.
        Where content looks ahead: in 1 and 2, tokens are named while the step is open; from 3 to 5, its layers choose
        tokens themselves, 1 to all that are looked ahead at.
        """
        ahead = min(mode - 2, self.model.lookahead) if 2 < mode < 6 else 0
        batch = [run for i, run in enumerate(self.running) if not run.gone and mask >> i & 1]
        if mode != 6:
            for run in [run for run in batch if self.has_lost_state(run)]:
                batch.remove(run)
                self.expect_refusal("step on a lost state", ProtocolError, partial(self.cache.step, [run.sequence]))
        if not batch:
            return
        sequences = [run.sequence for run in batch]
        waiting = any(run.pending for run in batch)
        touched = [self.touched_by_layers(f, batch) for f in self.model.facts]
        self.told.clear()
        try:
            named = [run.named for run in batch]
            with self.cache.step(sequences, role="draft" if mode == 6 else "target", ahead=ahead) as step:
                if 0 < mode < 3 and self.model.lookahead:
                    self.name_more(batch[0], 2)
                waiting = waiting or has_plugin_ops(step)
                if mode == 6:
                    self.check_table(step, batch)
                    self.catch_up(batch)
                if mode == 7:
                    raise PlannedStepError
                self.check_fills(step, () if mode == 6 else batch)
                step.run_ops()
                if mode != 6:
                    for run in batch:
                        run.pending, run.sourced = set(), set()
                    self.check_fills(step, ())
                    self.check_table(step, batch)
                if mode == 8:
                    self.spoil(batch)
                    raise PlannedStepError
                roomy = self.held_where_there_is_room(batch)
                if mode < 6:
                    for run, count in zip(batch, named, strict=True):
                        self.forward(run, run.reserved, max(count, run.reserved + ahead))
        except PluginError:  # a hook raised before the layers ran
            for run in batch:
                run.pending = unfilled(run.sequence)
                run.sourced &= run.pending
            self.compare("step failed")
            raise
        except PlannedStepError:
            for run in batch:
                if (mode == 8 or not waiting) and run.reserved > run.committed:
                    run.spoiled = True
                    run.step_from = -1
            self.compare("step failed")
            return
        finally:
            del sequences
        room: dict[str, int] = {}
        if mode < 6:
            for run, count in zip(batch, named, strict=True):
                self.model.saw(run, run.committed, run.reserved, count, ahead)
                self.committed(run, run.reserved, room)
            self.check_kept(roomy)
            self.check_told(touched)
        self.compare("step", may_lose=room)
        for run in batch if mode < 6 else ():
            self.check_released(run)

    def touched_by_layers(self, f: Facts, batch: list[ModelSequence]) -> tuple[set[int], set[int]]:
        """Return the slots that the layers of a step read, and those that they write, maybe again."""
        reads: set[int] = set()
        writes: set[int] = set()
        for run in batch:
            first = min(run.committed, run.complete) if f.lookahead else run.committed
            slots = run.sequence.pages(f.name)
            if f.boundary:
                singles = run.sequence.rewind_slots(f.name) if run.reserved - first <= f.steps else []
                writes |= {*slots, *singles} if run.reserved > first else set()
                continue
            for index, slot in enumerate(slots):
                own = index * f.page >= run.published
                written = own and run.reserved > first and (index + 1) * f.page > first
                if slot >= 0:
                    (writes if written else reads).add(slot)
        return reads, writes

    def check_told(self, touched: list[tuple[set[int], set[int]]]) -> None:
        """Check that the race detector was told of all that the layers of a step touch, and of nothing else."""
        for f, right in zip(self.model.facts, touched, strict=True):
            told = [
                (set(reads), set(writes))
                for _, what, pool, reads, writes, _ in self.told
                if pool.name == f.name and what.startswith("the layers of")
            ]
            agree = told == [right] or not self.debug
            require(agree, "%s: the layers of a step touch %s, and told was %s", f.name, right, told)

    def check_fills(self, step: Any, batch: Iterable[ModelSequence]) -> None:
        """Check that what a step says of its ops gives each running state of ``batch`` its content that has none."""
        if has_plugin_ops(step):
            return
        due = {(name, run.sequence.pages(name)[0]) for run in batch for name in run.pending}
        told = [(op.component, slot) for op in step.ops if op.kind != "track" for slot in op.dst]
        require(sorted(told) == sorted(due), "the ops of a step fill %s, not %s", told, due)

    def check_table(self, step: Any, batch: list[ModelSequence]) -> None:
        """Check the page tables of all components, which say what the sequences of a step have."""
        for f in self.model.facts:
            rows = [run.sequence.pages(f.name) for run in batch]
            width = max(map(len, rows))
            right = [[*row, *[-1] * (width - len(row))] for row in rows]
            require(step.table(f.name).tolist() == right, "%s: the page table is not %s", f.name, right)
            if f.steps:
                right = [run.sequence.rewind_slots(f.name) for run in batch]
                told = step.rewind_table(f.name).tolist()
                require(told == right, "%s: the slots to rewind to are not %s", f.name, right)

    def has_lost_state(self, run: ModelSequence) -> bool:
        return run.spoiled and any(f.boundary for f in self.model.facts)

    def spoil(self, batch: list[ModelSequence]) -> None:
        """Overwrite the states as the layers of a failed pass do, which leave half a state."""
        for run in batch:
            for f in self.model.facts:
                if f.boundary and run.reserved > run.committed:
                    for slot in (*run.sequence.pages(f.name), *run.sequence.rewind_slots(f.name)):
                        self.slots[f.name].write(slot, 0, POISON)

    def do_commit(self, number: int, short: int) -> None:
        """Commit all reserved tokens except ``short``, outside a step. If ``short`` is odd, fill the states first."""
        run = self.pick(number)
        if run is None:
            return
        if run.pending:
            self.expect_refusal("commit before ops", ProtocolError, run.sequence.commit)
            if not short % 2:
                return
            if self.has_lost_state(run) or needs_a_step(run.sequence):
                self.expect_refusal("fill of what needs a step", ProtocolError, run.sequence.fill)
                return
            run.sequence.fill()
            run.alone = run.named
            run.pending, run.sourced = set(), set()
            self.compare("fill")
            self.count("filled alone")
        if self.has_lost_state(run):
            self.expect_refusal("commit on a lost state", ProtocolError, run.sequence.commit)
            return
        upto = max(run.committed, run.reserved - short)
        self.forward(run, upto, max(run.alone, upto))
        roomy = self.held_where_there_is_room([run])
        run.sequence.commit(upto)
        self.check_kept(roomy)
        self.model.saw(run, run.committed, upto, run.alone)
        self.committed(run, upto, None)
        self.compare("commit")
        self.check_released(run)

    def check_released(self, run: ModelSequence) -> None:
        """Check that pages which nothing needs any more were released, if room is scarce."""
        for f in self.model.facts:
            late = self.releasable_pages(f, run)
            if len(self.slots[f.name].free) * 8 < f.capacity:
                require(not late, "%s: pages %s are kept, and nothing from %s on needs them", f.name, late, run.keep)
            elif late:
                self.count("spare")

    # ------------------------------------------------------------ publishing
    def do_publish(self, number: int, pick: int) -> None:
        """Publish up to one of the legal boundaries; ``pick`` below 0: up to the default one."""
        run = self.pick(number)
        if run is None:
            return
        limit = self.model.publishable(run)
        require(run.sequence.publishable == limit, "publishable %s, not %s", run.sequence.publishable, limit)
        legal = range(run.published, limit + 1, self.model.page)
        upto = limit if pick < 0 else legal[pick % len(legal)]
        added, optional, may_lose = self.expected_publication(run, upto, last=False)
        waiting = set(run.pending)
        got = run.sequence.publish(None if pick < 0 else upto)
        require(got == upto, "published %s, not %s", got, upto)
        moved = upto > run.published
        if moved:
            run.published = upto
            for name, tracks in run.tracks.items():
                run.tracks[name] = [boundary for boundary in tracks if boundary > upto]
            self.model.retain(run)
            run.pending = unfilled(run.sequence)
            run.sourced |= run.pending - waiting
        self.compare("publish", may_lose, added, optional=optional)
        if moved:
            self.record_cover(run, anchor(run.sequence))
            self.check_released(run)

    def expected_publication(self, run: ModelSequence, upto: int, last: bool) -> tuple[Pieces, Pieces, dict[str, int]]:
        """Return the pieces that a publication must add, those that it may add, and what it may evict for room."""
        if upto <= run.published and not (last and self.allowances.keeps):
            return {}, {}, {}
        added: Pieces = self.model.published_by(run, self.held(run), upto)
        optional: Pieces = {}
        room: dict[str, int] = {}
        for f in self.model.facts:
            if not f.boundary:
                continue
            name = f.name
            due = self.model.checkpoint(f, run, upto)
            tracked = run.tracks[name]
            added[name] = set()
            optional[name] = {self.model.piece(f, run.ids, boundary) for boundary in tracked if boundary <= upto}
            if due % self.model.page or due <= run.published:
                continue
            piece = self.model.piece(f, run.ids, due)
            if due in tracked or last:
                added[name] = {piece}
                continue
            optional[name].add(piece)
            room.setdefault(name, 1)
            if self.room({name: 1}) and (run.detached or piece not in self.model.resident[name]):
                added[name] = {piece}
        for name in self.allowances.keeps:
            f = self.facts[name]
            every = range(self.model.page, upto + 1, self.model.page) if f.boundary else ()
            optional.setdefault(name, set()).update({self.model.piece(f, run.ids, boundary) for boundary in every})
            optional[name] |= added.pop(name, set())
        return ({}, {}, room) if run.detached else (added, optional, room)

    def do_rewind(self, number: int, count: int, salt: int) -> None:
        """Rewind as far as allowed. Depending on ``salt``, first check that one token more is refused."""
        run = self.pick(number)
        if run is None:
            return
        floor = self.model.rewind_floor(run)
        if salt % 2 == 0:
            too_far = max(1, run.reserved - floor + 1)
            self.expect_refusal("rewind too far", ProtocolError, run.sequence.rewind, too_far)
        length = min(run.reserved, max(floor, run.reserved - count))
        run.sequence.rewind(run.reserved - length)
        if length < run.reserved:
            self.take_back(run, length, salt)
        self.compare("rewind")

    def take_back(self, run: ModelSequence, length: int, salt: int) -> None:
        """Update the model after a rewind: other tokens follow ``length``, and what depends on them is recomputed."""
        del run.future[length:], run.ids[length + 1 :]
        run.salt = salt
        run.reserved = length
        run.arrived = min(run.arrived, length)
        if length < run.committed:
            run.pending |= {f.name for f in self.model.facts if f.boundary}
        for name, tracks in run.tracks.items():
            run.tracks[name] = [boundary for boundary in tracks if boundary <= length]
        for f in self.model.facts:
            if not f.boundary:
                run.absent[f.name] = {i for i in run.absent.get(f.name, ()) if i * f.page < length}
        run.committed = min(run.committed, length)
        chosen = run.named <= length and -1 < run.chosen_from < length
        run.complete = min(run.complete, length if chosen else max(0, length - self.model.lookahead))
        run.chosen_from = run.chosen_from if chosen else -1
        run.named, run.alone = min(run.named, length), min(run.alone, length)
        run.keep = min(run.keep, self.model.lowest(run))
        self.extend(run, length + self.model.lookahead)
        for f in self.model.facts:
            run.written[f.name] = min(run.written[f.name], max(0, length - f.lookahead))
            if f.lookahead and chosen:  # the layers wrote with the token that they chose, not with a wrong guess
                self.write_pages(run, f, run.committed, length + f.lookahead)
