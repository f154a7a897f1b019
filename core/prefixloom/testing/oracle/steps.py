"""What a running sequence does until its tokens are committed: growing, arriving, steps."""

from __future__ import annotations

import random
from functools import cache as memoised
from functools import partial
from typing import Any

from ...errors import CapacityError, InputError, PluginError, ProtocolError
from ..memory import POISON
from .backdoor import has_ops, hold, needs_a_step, unfilled
from .sets import Facts, Running
from .world import World

DOCUMENTS = 4
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


class Steps(World):
    """Reserving and computing."""

    # ------------------------------------------------------------ choosing
    def pick(self, number: int) -> Running | None:
        usable = [run for run in self.running if not run.gone]
        return usable[number % len(usable)] if usable else None

    def extend(self, run: Running, length: int) -> None:
        """Make the future of ``run`` at least ``length`` tokens long."""
        text = document(run.salt % DOCUMENTS)
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
            hold(not (self.sure_of_room and self.room(wanted)), "refused, and there is room: %s", error)
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

    def do_arrive(self, number: int, count: int) -> None:
        """Reserve for tokens that were computed elsewhere: only what resuming at their end needs gets slots."""
        run = self.pick(number)
        if run is None or run.reserved != run.committed:
            return
        length = run.reserved + count
        first = {f.name: len(run.sequence.pages(f.name)) for f in self.model.facts}
        fresh = {
            f.name: {
                i
                for i in range(first[f.name], -(-length // f.page))
                if i in f.needed(length) or (i + 1) * f.page > length  # a page begun is written on
            }
            for f in self.model.facts
            if not f.boundary
        }
        wanted = {name: len(pages) for name, pages in fresh.items()}
        try:
            run.sequence.grow(count, arriving=True)
        except CapacityError as error:
            hold(not (self.sure_of_room and self.room(wanted)), "refused, and there is room: %s", error)
            self.settle("arrive refused")
            return
        except InputError:
            self.settle("grow too long")
            return
        run.reserved = run.arrived = length
        self.extend(run, length + self.model.lookahead)
        self.settle("arrive", may_lose=wanted)
        for name, listed in self.held(run).items():
            if name in fresh:
                got = {i for i in listed if i >= first[name]}
                hold(got == fresh[name], "%s: arriving pages %s, not %s", name, got, fresh[name])
                run.absent.setdefault(name, set()).update(set(range(first[name], len(run.sequence.pages(name)))) - got)

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
                singles = run.sequence.rewind_slots(f.name)
                hold(len(singles) == f.steps, "%s: %s slots for single states", f.name, len(singles))
                found, right = self.slots[f.name].read(slot), run.ids[run.committed]
                state = right if self.slots[f.name].same(found, [right]) else found[0]
                for i, token in enumerate(run.future[run.committed : upto]):
                    state = self.model.names.child(state, run.namespace, token)
                    if upto - run.committed <= len(singles):
                        self.slots[f.name].write(singles[i], 0, state)
                self.slots[f.name].write(slot, 0, state)
            else:
                self.write_pages(run, f, upto)

    def write_pages(self, run: Running, f: Facts, upto: int) -> None:
        table = run.sequence.pages(f.name)
        for end in range((run.written[f.name] // f.group + 1) * f.group, upto + 1, f.group):
            index, last = divmod(end - f.group, f.page)
            if index in run.absent.get(f.name, ()):
                continue
            shared = f.shareable and index * f.page < run.published
            hold(not shared, "%s: published content must be written again", f.name)
            hold(table[index] >= 0, "%s: page %s of %s has no slot to write", f.name, index, table)
            self.slots[f.name].write(table[index], last // f.group, run.ids[end + f.lookahead])
        run.written[f.name] = max(run.written[f.name], upto)

    def committed(self, run: Running, upto: int, room: dict[str, int] | None) -> None:
        """``room`` counts the slots that checkpoints take, of all sequences of a step; a bare commit keeps none."""
        before, run.committed = run.committed, upto
        for f in self.model.facts:
            if not f.boundary:
                continue
            small = upto - before <= f.steps and before >= run.arrived
            run.step_from = before if before < upto and small and not run.spoiled else -1
            at = self.due(f, run, before, upto)
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

    def due(self, f: Facts, run: Running, before: int, upto: int) -> int | None:
        """Where a step over [before, upto) keeps a checkpoint: the deepest boundary whose state it has."""
        at = upto // f.every * f.every if f.every else before
        small = upto - before <= f.steps and before >= run.arrived
        return at if at > before and (at == upto or small) else None

    def planned_room(self, batch: list[Running]) -> dict[str, int]:
        """Slots for checkpoints that a step has planned before it failed."""
        room: dict[str, int] = {}
        for run in batch:
            for f in self.model.facts:
                more = room.get(f.name, 0) + 1
                fresh = f.boundary and len(run.tracks[f.name]) < 2
                if fresh and self.due(f, run, run.committed, run.reserved) is not None and self.room({f.name: more}):
                    room[f.name] = more
        return room

    def do_step(self, mask: int, mode: int) -> None:
        """Modes: 0 to 5 a pass, 6 a draft, 7 and 8 a pass that fails before and after its ops."""
        batch = [run for i, run in enumerate(self.running) if not run.gone and mask >> i & 1]
        if mode != 6:
            for run in [run for run in batch if self.lost(run)]:
                batch.remove(run)
                self.refused("step on a lost state", ProtocolError, partial(self.cache.step, [run.sequence]))
        if not batch:
            return
        sequences = [run.sequence for run in batch]
        waiting = any(run.pending for run in batch)
        try:
            with self.cache.step(sequences, role="draft" if mode == 6 else "target") as step:
                waiting = waiting or has_ops(step)
                if mode == 6:
                    step.table(self.model.facts[0].name)
                if mode == 7:
                    raise Planned
                step.run_ops()
                if mode != 6:
                    for run in batch:
                        run.pending, run.sourced = set(), set()
                if mode == 8:
                    self.spoil(batch)
                    raise Planned
                if mode < 6:
                    for run in batch:
                        self.forward(run, run.reserved)
        except PluginError:  # in a hook: before the layers
            for run in batch:
                run.pending = unfilled(run.sequence)
                run.sourced &= run.pending
            self.settle("step failed", may_lose=self.planned_room(batch))
            raise
        except Planned:
            room = self.planned_room(batch)
            for run in batch:
                if (mode == 8 or not waiting) and run.reserved > run.committed:
                    run.spoiled = True
                    run.step_from = -1
            self.settle("step failed", may_lose=room)
            return
        finally:
            del sequences
        room = {}
        if mode < 6:
            for run in batch:
                self.committed(run, run.reserved, room)
        self.settle("step", may_lose=room)
        for run in batch if mode < 6 else ():
            self.check_released(run)

    def lost(self, run: Running) -> bool:
        return run.spoiled and any(f.boundary for f in self.model.facts)

    def spoil(self, batch: list[Running]) -> None:
        """What the layers of a failed pass leave: half a state."""
        for run in batch:
            for f in self.model.facts:
                if f.boundary and run.reserved > run.committed:
                    for slot in (*run.sequence.pages(f.name), *run.sequence.rewind_slots(f.name)):
                        self.slots[f.name].write(slot, 0, POISON)

    def do_commit(self, number: int, short: int) -> None:
        """Commit all that is reserved but ``short`` tokens, outside of a step; if it is odd, fill states first."""
        run = self.pick(number)
        if run is None:
            return
        if run.pending:
            self.refused("commit before ops", ProtocolError, run.sequence.commit)
            if not short % 2:
                return
            if self.lost(run) or needs_a_step(run.sequence):
                self.refused("fill of what needs a step", ProtocolError, run.sequence.fill)
                return
            run.sequence.fill()
            run.pending, run.sourced = set(), set()
            self.settle("fill")
            self.count("filled alone")
        if self.lost(run):
            self.refused("commit on a lost state", ProtocolError, run.sequence.commit)
            return
        upto = max(run.committed, run.reserved - short)
        self.forward(run, upto)
        run.sequence.commit(upto)
        self.committed(run, upto, None)
        self.settle("commit")
        self.check_released(run)

    def check_released(self, run: Running) -> None:
        """Where room is scarce, what no boundary from the floor on can need has been given back."""
        for f in self.model.facts:
            late = self.spare(f, run)
            if len(self.slots[f.name].free) * 8 < f.capacity:
                hold(not late, "%s: pages %s are kept, and nothing from %s on needs them", f.name, late, run.keep)
            elif late:
                self.count("spare")
