"""The bench: a component in a small cache, served as an engine serves it, with content that tells whose it is.

The bench's forward pass reads what the layers read and writes what they write (``Truth``), through page tables. Every
mistake that it finds is a ``Failure`` with a topic; a law selects the failures of its topics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Literal

import attrs

from ...compose.entry import compose
from ...contract.manifest import Buffer, Layout, Manifest, TierManifest
from ...contract.reach import Path, Point, Window
from ...contract.values import Component
from ...script import Failure, ScriptError, require, text_of
from ..inside.memory import POISON, STRANGE, Memory, PatternBook
from ..inside.names import Extra, Names, with_extra
from ..schedules.explore import touch
from .case import ComponentCase, made
from .spy import Spy
from .truth import Truth

KV = Manifest([Buffer("kv", (3,), "float32")])


def companions() -> dict[str, Component]:
    """Return the components that a case is composed with: one of each kind of reach, and of what a manifest may say."""
    return {
        "path": Component("beside_path", KV, Path()),
        "window": Component("beside_window", KV, Window(6)),
        "state": Component("beside_state", KV, Point()),
        "ahead": Component("beside_ahead", attrs.evolve(KV, lookahead=1), Path()),
        "checkpoints": Component("beside_checkpoints", attrs.evolve(KV, checkpoint_every=8), Point()),
    }


STATES = {"state", "checkpoints"}
"""The companions that are states."""


SMALL = 16
"""The largest pages and grids where only orders and sets are of interest."""


def simplified(manifest: Manifest, truth: Truth) -> tuple[Manifest, Truth]:
    """Return a manifest without a codec, and with small pages and a small grid, and a truth that fits it."""
    small = attrs.evolve(manifest, stored_as=None)
    if manifest.page_size is not None and manifest.page_size > SMALL:
        group = manifest.tokens_per_slot
        small = attrs.evolve(small, page_size=max(1, SMALL // group) * group)
    known = manifest.grid if truth.grid is None else truth.grid
    if manifest.grid > SMALL and known > SMALL and manifest.grid % known == 0:
        return attrs.evolve(small, grid=SMALL), attrs.evolve(truth, grid=SMALL)
    return small, truth


LAYERS, EXTENT = 2, 4
"""So many layers, and entries so large in each direction, are enough where the component cannot touch content."""


def slim(manifest: Manifest) -> Manifest:
    """Return a manifest with fewer layers and smaller entries.

    A component without hooks, or without the attribute ``pool``, touches no content. Only the core moves it then, and
    treats all layers and all of an entry alike.
    """
    buffers = []
    for buffer in manifest.buffers:
        layers = buffer.layers[:LAYERS]
        shape = buffer.shape if manifest.stored_as else tuple(min(EXTENT, extent) for extent in buffer.shape)
        shared = {reader: owner for reader, owner in buffer.shared.items() if owner in layers}
        buffers.append(attrs.evolve(buffer, layers=layers, shape=shape, shared=shared))
    return attrs.evolve(manifest, buffers=buffers)


MOST_BYTES = 1 << 28
"""The most memory that long prompts may take of a component that can touch content."""


def that_fit(case: ComponentCase, lengths: Sequence[int], page: int | None = None) -> list[int]:
    """Return those of these lengths, in pages of the tree, of which a pool is not too large; the first in any case.

    The pools have room for two such prompts.
    """
    bench = Bench(case, units=2, blank=True, page=page)
    part, unit = bench.parts[0], bench.unit
    size = part.manifest.slot_bytes * (unit / part.manifest.tokens_per_slot if part.page_tokens else 1)
    return [length for length in lengths if length == lengths[0] or 2 * length * size <= MOST_BYTES]


REMEMBERED = 1 << 24
"""So many bytes of patterns are kept for the next bench with the same buffers."""


def _patterns(case: ComponentCase, buffers: tuple[Buffer, ...]) -> PatternBook:
    """Return the patterns of such buffers that an earlier bench of the case has made, if they are not too many."""
    key = f"patterns {[(buffer.shape, buffer.dtype, len(buffer.layers)) for buffer in buffers]}"
    if key not in case.memo or case.memo[key].size > REMEMBERED:
        case.memo[key] = PatternBook(buffers)
    found: PatternBook = case.memo[key]
    return found


Below = Literal["", "through", "selective", "back"]
"""When the tier below the device is written; without a word, there is none."""


class HostMemory:
    """A tier below the device, with no hook and no store of its own."""

    name = "kit_host"

    def __init__(self, write: Literal["through", "selective", "back"], tokens: int) -> None:
        self.manifest = TierManifest(capacity=tokens, write=write)


@attrs.define(eq=False)
class BenchSequence:
    """An open sequence and its expected content. ``future``: the tokens that the model will produce, named or not."""

    sequence: Any
    namespace: str
    future: list[Hashable]
    salt: int
    ids: list[int]
    written: dict[str, int]
    restored: int
    unfinished: dict[str, dict[int, int]] = attrs.field(factory=dict)
    """Entries that were written before their block of the grid was complete, so they lack their prefix's content."""
    states: dict[str, int] = attrs.field(factory=dict)
    singles: dict[str, dict[int, int]] = attrs.field(factory=dict)
    from_below: int = 0
    """How many tokens were brought back from the tier below the device."""
    arrived: int = 0
    """Up to here content was computed elsewhere, so no rewind may go below."""


class Bench:
    """One cache with the case's component and others ``beside`` it. ``units``: how many tree pages each pool holds.

    ``exact``  codec, pages and grid are the component's own; else they are ``simplified``, and what hooks do to content
               is not watched
    ``whole``  so are layers and shapes; else they are ``slim`` where the component cannot touch content
    ``small``  they are slim in any case
    ``lent``   an engine has the slots, and whoever uses the bench lends them
    ``blank``  no content is written, read or watched, so prompts may be very long
    """

    def __init__(
        self,
        case: ComponentCase,
        beside: Sequence[str] = (),
        *,
        units: int = 16,
        page: int | None = None,
        rewind: int | None = None,
        raising: str = "",
        listening: bool = False,
        exact: bool = True,
        whole: bool = False,
        lent: bool = False,
        stream: Any = None,
        layout: Layout = "layer_first",
        below: Below = "",
        without: Collection[str] = (),
        blank: bool = False,
        small: bool = False,
    ) -> None:
        component = made(case)
        self.blank = blank
        self.spy = Spy(component, raising, listening, without)
        truth = case.truth
        if not exact:
            self.spy.manifest, truth = simplified(component.manifest, truth)
        self.touches = bool(self.spy.overridden) and hasattr(component, "pool")
        """Whether the component can touch content: with its hooks, and the pool at hand."""
        if small or not (whole or self.touches):
            self.spy.manifest = slim(self.spy.manifest)
        manifest = self.spy.manifest
        known = companions()
        if unknown := [name for name in beside if name not in known]:
            raise ScriptError(f"no {unknown[0]!r} can stand beside a component; there are {', '.join(known)}")
        components: list[Any] = [self.spy, *(known[name] for name in beside)]
        self.rewind = depth(case, beside) if rewind is None else rewind
        every = case.page_size if page is None else page
        own = manifest.page_size or every
        unit = math.lcm(own, every, manifest.grid)
        capacity = {c.name: units * unit if c.reach.unit == "page" else self._states(c, units) for c in components}
        self.below = below
        tier = [HostMemory(below, 3 * units * unit // 2)] if below else []
        self.cache = compose(
            None,
            plugins=[*components, *tier],
            page_size=every,
            layout=layout,
            capacity=capacity,
            max_rewind=self.rewind,
            slots="lent" if lent else "own",
            max_running=4 if manifest.stored_as is not None else None,
            debug=True,
        )
        self.unit = self.cache.composition.page
        self.parts = self.cache.composition.parts
        self.names = Names()
        self.truths = {part.name: Truth() for part in self.parts}
        self.truths[component.name] = truth
        self.memories = {
            part.name: Memory(
                self.cache.pool(part.name), part.manifest, self._entries(part), _patterns(case, part.manifest.buffers)
            )
            for part in self.parts
        }
        self.spy.memory = self.memories[component.name] if exact and not blank else None
        self.stream = stream
        self.spy.has_stream = stream is not None
        self.late_failures: list[Failure] = []
        self.poison()

    def _states(self, component: Any, units: int) -> int:
        """Return how many states a pool has: more than four sequences need."""
        tracks = 2 if component.manifest.checkpoint_every else 0
        return units // 2 + 4 * (1 + (self.rewind + 1 if self.rewind else 0) + tracks)

    @staticmethod
    def _entries(part: Any) -> int:
        entries: int = part.page_tokens // part.manifest.tokens_per_slot if part.page_tokens else 1
        return entries

    # ------------------------------------------------------------ what content should be
    def ahead(self, part: Any) -> int:
        said = self.truths[part.name].ahead
        return int(part.manifest.lookahead if said is None else said)

    def grid(self, part: Any) -> int:
        said = self.truths[part.name].grid
        return int(part.manifest.grid if said is None else said)

    def exact(self, run: BenchSequence, part: Any, entry: int) -> int:
        """Return the number that belongs into an entry of this sequence's pages once its grid block is complete."""
        end: int = (entry + 1) * part.manifest.tokens_per_slot
        return run.ids[end + self.ahead(part)]

    def expected(self, run: BenchSequence, part: Any, entry: int) -> int:
        odd = run.unfinished.get(part.name, {}).get(entry)
        return self.exact(run, part, entry) if odd is None else odd

    def extend(self, run: BenchSequence, length: int) -> None:
        """Extend the future to at least ``length`` tokens, plus the tokens that content looks ahead at."""
        length += max(self.cache.composition.lookahead, *(self.ahead(part) for part in self.parts)) + self.unit
        text = text_of(run.salt % 4)
        while len(run.future) < length:
            run.future.append(text[(len(run.future) + run.salt) % len(text)])
        while len(run.ids) <= len(run.future):
            run.ids.append(self.names.child(run.ids[-1], run.namespace, run.future[len(run.ids) - 1]))

    # ------------------------------------------------------------ serving
    def open(
        self, tokens: Sequence[int], leave: int = 0, namespace: str = "", extra: Sequence[Extra] = (), salt: int = 0
    ) -> BenchSequence:
        sequence = self.cache.open(list(tokens), leave=leave, namespace=namespace, extra=extra)
        future = with_extra(tokens, extra)
        ids = self.names.prefixes(namespace, future)
        found = sequence.ready
        if self.below:
            sequence.restore()
        ready = sequence.ready
        for truth in self.truths.values():
            said = "with the extra keys %s, a hit ends at %s, from where the layers cannot go on (Truth.ends)"
            require(not ready or truth.ends is None or truth.ends(ready, tuple(extra)), "ends", said, extra, ready)
        run = BenchSequence(sequence, namespace, future, salt, ids, {}, ready, from_below=ready - found)
        self.extend(run, len(tokens))
        for part in self.parts:
            run.written[part.name] = ready
            if not part.page_tokens:
                run.states[part.name] = ids[ready]
            else:
                self._lists_what_it_needs(run, part)
        return run

    def _lists_what_it_needs(self, run: BenchSequence, part: Any) -> None:
        table, ready = run.sequence.pages(part.name), run.sequence.ready
        for low, high in part.reach.needs(ready):
            absent = [p for p in range(low, high) if table[p // part.page_tokens] < 0]
            said = (
                "a sequence resumes at %s, and its page table has no page for position %s of %s, which needs(%s) names"
            )
            require(not absent, "absent", said, ready, absent[0] if absent else 0, part.name, ready)

    def run(self, run: BenchSequence, count: int, stream: Any = None) -> None:
        """Reserve and compute ``count`` tokens in one step."""
        self.run_all([(run, count)], stream)

    def run_all(self, runs: Sequence[tuple[BenchSequence, int]], stream: Any = None) -> None:
        """Reserve and compute tokens of several sequences, so many of each, in one step."""
        stream = stream or self.stream
        for run, count in runs:
            run.sequence.grow(count)
            self.extend(run, run.sequence.reserved)
        with self.cache.step([run.sequence for run, _ in runs]) as step:
            step.run_ops(stream)
            work = [
                self._forward(run, part, run.sequence.committed, run.sequence.reserved)
                for run, _ in runs
                for part in (() if self.blank else self.parts)
            ]
            if stream is None:
                for one in work:
                    one()
            else:
                stream.run(lambda: [one() for one in work])

    def _forward(self, run: BenchSequence, part: Any, start: int, end: int) -> Callable[[], None]:
        """Return the work of one component's layers over [start, end), to be run on the step's stream."""
        if not part.page_tokens:
            return self._advance(run, part, start, end)
        group, page = part.manifest.tokens_per_slot, part.page_tokens
        table = run.sequence.pages(part.name)
        wanted = []
        for p in sorted(self._reads(run, part, start, end)):
            if p < min(start, run.written[part.name]):
                slot, entry = table[p // page], p // group
                said = "computing the tokens [%s, %s) reads position %s of %s, and its page is absent"
                require(slot >= 0, "absent", said, start, end, p, part.name)
                if (entry + 1) * group <= run.written[part.name]:
                    wanted.append((slot, entry, self.expected(run, part, entry), p))
        puts = self._puts(run, part, table, end)
        memory, per, failures = self.memories[part.name], page // group, self.late_failures
        reads, writes = (
            self._touched_slots(part, {w[0] for w in wanted}),
            self._touched_slots(part, {put[0] for put in puts}),
        )

        def work() -> None:
            touch(reads, writes)
            for slot, entry, number, p in wanted:
                found = memory.read(slot, entry % per)
                if not memory.same(found, number):
                    said = f"computing the tokens [{start}, {end}) reads position {p} of {part.name}, which "
                    failures.append(Failure("content", said + self._describe(run, found, number)))
                    return
            for slot, entry, number in puts:
                memory.write(slot, entry % per, number)

        return work

    def arrive(self, run: BenchSequence, count: int) -> None:
        """Take over ``count`` tokens that were computed elsewhere: what resuming at their end needs is copied in."""
        s = run.sequence
        start = s.reserved
        s.grow(count, arriving=True)
        end = run.restored = run.arrived = s.reserved
        self.extend(run, end)
        with self.cache.step([s]) as step:
            step.run_ops()
            for part in self.parts:
                memory = self.memories[part.name]
                if part.page_tokens:
                    per = part.page_tokens // part.manifest.tokens_per_slot
                    for slot, entry, number in self._puts(run, part, s.pages(part.name), end, arriving=True):
                        memory.write(slot, entry % per, number)
                else:
                    number = self._state_at(run, part, start, end)
                    memory.write(s.pages(part.name)[0], 0, number)
                    run.states[part.name], run.singles[part.name] = number, {}

    def _puts(
        self, run: BenchSequence, part: Any, table: list[int], end: int, arriving: bool = False
    ) -> list[tuple[int, int, int]]:
        """Return (slot, entry, number) of each write up to ``end``. Entries of incomplete grid blocks are rewritten."""
        group, page, grid, name = part.manifest.tokens_per_slot, part.page_tokens, self.grid(part), part.name
        odd = run.unfinished.setdefault(name, {})
        begin = min([run.written[name] // group, *odd])
        whole = end // grid * grid
        puts = []
        for entry in range(begin, end // group):
            index = entry * group // page
            if entry * group < run.sequence.published:
                continue  # the entry belongs to the tree; content that was inexact there stays so
            said = "the tokens up to %s are computed, and page %s of %s has no slot to write to"
            require(table[index] >= 0 or arriving, "absent", said, end, index, name)
            if table[index] < 0:
                continue
            number = self.exact(run, part, entry)
            odd.pop(entry, None)
            if (entry + 1) * group > whole:
                number = odd[entry] = self.names.child(number, run.namespace, f"unfinished at {end}")
            puts.append((table[index], entry, number))
        run.written[name] = max(run.written[name], end)
        return puts

    def _advance(self, run: BenchSequence, part: Any, start: int, end: int) -> Callable[[], None]:
        """Return the work of a recurrence: read the running state, write the one after ``end``.

        After a small step the states after each of its tokens are written, too.
        """
        s, memory = run.sequence, self.memories[part.name]
        slot, singles, wanted = s.pages(part.name)[0], s.rewind_slots(part.name), run.states[part.name]

        def number_at(n: int) -> int:
            return self._state_at(run, part, start, n)

        puts = [(slot, number_at(end))] if end > start else []
        kept = {n: number_at(n) for n in range(start + 1, end + 1)} if end - start <= len(singles) else {}
        puts += [(singles[n - start - 1], number) for n, number in kept.items()]
        if end > start:
            run.states[part.name] = number_at(end)
            run.singles[part.name] = kept
        failures, codec = self.late_failures, part.manifest.stored_as
        touched = self._touched_slots(part, {slot, *(at for at, _ in puts)})

        def work() -> None:
            touch(touched, touched if puts else ())
            found = memory.read(slot, 0)
            if not (memory.same(found, wanted) or (codec and memory.near(slot, 0, wanted, codec.tolerance))):
                said = f"the state of {part.name} at {start}, from which the next tokens are computed, "
                failures.append(Failure("content", said + self._describe(run, found, wanted)))
            for at, number in puts:
                memory.write(at, 0, number)

        return work

    def _state_at(self, run: BenchSequence, part: Any, start: int, n: int) -> int:
        """Return the number of the state at n, in a step that begins at ``start``."""
        exact = n % self.grid(part) == 0
        return run.ids[n] if exact else self.names.child(run.ids[n], run.namespace, f"since {start}")

    def _touched_slots(self, part: Any, slots: set[int]) -> list[Any]:
        """Return slots of a component in the form in which the schedule explorer knows them."""
        pool = self.cache.pool(part.name)
        return [("slot", pool.name, slot) for slot in sorted(slots)]

    def _describe(self, run: BenchSequence, found: int, wanted: int) -> str:
        belongs = f"and the content of {_prefix_length(run, wanted)} belongs there"
        if found == POISON:
            return f"lies in a slot that was given back, {belongs}"
        if found in (0, STRANGE):
            return f"{'holds zeros' if found == 0 else 'holds what no forward pass wrote'}, {belongs}"
        if found in run.ids:
            return f"holds the content of {_prefix_length(run, found)}, {belongs}"
        return f"holds the content of other tokens, or of tokens that were cut into other steps, {belongs}"

    def _reads(self, run: BenchSequence, part: Any, start: int, end: int) -> set[int]:
        reads = self.truths[part.name].reads
        if reads is not None:
            return {p for q in range(start, end) for p in reads(q) if p < q}
        had = run.restored
        kept = {p for low, high in part.reach.needs(had) for p in range(low, high)} if had else set()
        spans = {span for q in range(start, end) for span in part.reach.needs(q)}
        return {p for low, high in spans for p in range(low, high) if p >= had or p in kept}

    # ------------------------------------------------------------ checks
    def poison(self) -> None:
        if self.stream is None and not self.blank:
            for name, memory in self.memories.items():
                memory.poison(self.cache.pool(name).free_ids())

    def verify(self, run: BenchSequence) -> None:
        """Check that every page that a sequence lists has the expected content."""
        if not run.sequence.open or self.blank:
            return
        for part in self.parts:
            if not part.page_tokens:
                continue
            memory, group = self.memories[part.name], part.manifest.tokens_per_slot
            per = part.page_tokens // group
            done = min(run.written[part.name], run.sequence.committed)
            for index, slot in enumerate(run.sequence.pages(part.name)):
                for entry in range(index * per, (index + 1) * per) if slot >= 0 else ():
                    if (entry + 1) * group > done:
                        break
                    wanted, found = self.expected(run, part, entry), memory.read(slot, entry % per)
                    if not memory.same(found, wanted):
                        said = f"position {entry * group} of {part.name}, in a page that a running sequence lists, "
                        raise Failure("content", said + self._describe(run, found, wanted))

    def raise_late_failures(self) -> None:
        """Raise the first failure that was found while work ran on a stream."""
        if self.late_failures:
            raise self.late_failures[0]


def _prefix_length(run: BenchSequence, number: int) -> str:
    return f"the first {run.ids.index(number)} tokens" if number in run.ids else "what this sequence wrote"


def composed_as_it_is(case: ComponentCase) -> None:
    """Compose a small cache of the component itself, without a spy, so that an error names the component's class."""
    compose(None, plugins=[made(case)], page_size=case.page_size, capacity=8192, max_running=4)


def depth(case: ComponentCase, beside: Sequence[str] = ()) -> int:
    """Return how many committed tokens a case's compositions may rewind."""
    own = case.manifest.max_rewind
    if own is None:
        own = 0 if case.has_states else 3
    return 0 if STATES & set(beside) else min(3, own)
