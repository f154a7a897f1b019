"""A cache on explored streams, and a model whose every slot says by its content what it stands for.

The layers of each component compute on the stream, from what they *read in the slots at that moment*: an entry of a
path is a checksum of its token and all entries before it, a window's of those in the window, a state's of the state
before. So one wrong read spoils everything that follows, and what is published is right only if nothing ever was wrong.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from prefixloom import Buffer, Component, Manifest, Path, Point, Window
from prefixloom.cache.sequence import Sequence
from prefixloom.compose.build import build
from prefixloom.compose.registry import default_registry
from prefixloom.contract.composition import Composition
from prefixloom.testing.schedules.explore import ExplorationReport as Report
from prefixloom.testing.schedules.explore import ExploredStream, explore, touch
from prefixloom.testing.schedules.explore import ScheduleRun as Run
from prefixloom.testing.schedules.watch import Watch
from prefixloom.tree.partial_lane import PartialLane
from tests.support.helpers import cache_of

MORE = bool(os.environ.get("PREFIXLOOM_EXPLORE"))
"""More steps, more choice points and a larger budget, for a machine with time."""
BUDGET = 100_000 if MORE else 4_000
KINDS = ("M", "FM", "FSM")
"""Compositions: a state; with a path; with a window, too."""
FEW = KINDS if MORE else ("M", "FSM")
PROMPT = tuple(range(100, 112))
explorations: list[Report] = []
"""What this test run has explored; told at its end."""


def explored(scenario: Callable[[Run], object], budget: int = BUDGET) -> Report:
    """Run all schedules of ``scenario``, or fail; never run some of them."""
    report = explore(scenario, budget=budget)
    explorations.append(report)
    print(f"\n  {report}")
    assert report.complete, str(report)
    return report


Steps = Generator[Any, None, None]
PAGE = 2
NEAR = 4
"""The window, in tokens, the query included."""
NAMES = {"F": "full", "S": "near", "M": "state"}
REACHES = {"F": Path(), "S": Window(NEAR), "M": Point()}
GARBAGE = 77
BITS = (1 << 62) - 1


class Injected(Exception):
    """A step that a scenario lets fail."""


def mix(*values: int) -> int:
    return hash(values) & BITS


def embedded(namespace: str, token: int) -> int:
    return mix(zlib.crc32(namespace.encode()), token)


def entry(kind: str, hidden: int, before: list[int]) -> int:
    """Return what one component keeps for a token: a window reads only the last of ``before``."""
    return mix(hidden, *(before if kind == "F" else before[-(NEAR - 1) :]))


@lru_cache(maxsize=10_000)
def contents(kinds: str, namespace: str, tokens: tuple[int, ...]) -> tuple[dict[str, list[int]], list[int]]:
    """Return what each component's slots must hold (a state's after so many tokens), and each token's output."""
    hidden = [embedded(namespace, token) for token in tokens]
    held: dict[str, list[int]] = {}
    for kind in kinds:
        out: list[int] = [0] if kind == "M" else []
        for value in hidden:
            out.append(mix(value, out[-1]) if kind == "M" else entry(kind, value, out))
        held[kind] = out
        hidden = out[1:] if kind == "M" else out
    return held, hidden


class Runner:
    """A sequence, all the tokens that it will come to have, and what its steps put out."""

    def __init__(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        self.sequence = sequence
        self.namespace = sequence.namespace
        self.tokens = tokens
        self.guesses: dict[int, int] = {}  # what a step is to take for the token at a position, instead
        self.out: dict[int, int] = {}
        self.drafts: list[tuple[int, dict[str, list[int]]]] = []
        self.steps: list[Any] = []  # an event for each step that was enqueued

    def result(self, step: int) -> Callable[[], Any]:
        """Return the end of that step, as soon as it is enqueued."""
        return lambda: len(self.steps) > step and self.steps[step]

    def publish(self, upto: int | None = None) -> None:
        if self.sequence.open:
            self.sequence.publish(upto)


@lru_cache
def composition(kinds: str, tokens: int, slots: int, every: int, rewind: int) -> Composition:
    """Composed once: a schedule has a cache of its own, and thousands have the same components."""
    parts = []
    for kind in kinds:
        facts = {"checkpoint_every": every, "max_rewind": rewind} if kind == "M" else {}
        parts.append(Component(NAMES[kind], Manifest([Buffer("sum", (1,), "int64")], **facts), REACHES[kind]))
    return cache_of(*parts, page=PAGE, tokens=tokens, slots=slots, max_rewind=rewind or None).composition


class World:
    """A cache of the components ``kinds``, its streams, and the sequences that were opened."""

    def __init__(
        self,
        run: Run,
        kinds: str,
        *streams: str,
        tokens: int = 32,
        slots: int = 8,
        every: int = 0,
        rewind: int = 0,
    ) -> None:
        self.run = run
        self.kinds = kinds
        self.streams = [run.stream(name) for name in streams or ("forward",)]
        self.cache = build(self.composition(kinds, tokens, slots, every, rewind), default_registry())
        self.watch = Watch(self.cache, run)
        for name in self.names:
            self.cache.pool(name).buffers["sum"].fill_(GARBAGE)
        self.runners: list[Runner] = []
        self.may_fail = False
        run.at_end(self.check)

    composition = staticmethod(composition)

    @property
    def names(self) -> list[str]:
        return [NAMES[kind] for kind in self.kinds]

    @property
    def stream(self) -> ExploredStream:
        return self.streams[0]

    def open(self, tokens: Iterable[int], more: Iterable[int] = (), **options: Any) -> Runner:
        """Open a sequence over ``tokens``; ``more`` are those that it will be told later."""
        prompt = tuple(tokens)
        runner = Runner(self.cache.open(prompt, **options), (*prompt, *more))
        self.runners.append(runner)
        return runner

    def open_plan(self, plan: Any, tokens: tuple[int, ...]) -> Runner:
        runner = Runner(self.cache.open(plan), tokens)
        self.runners.append(runner)
        return runner

    # ------------------------------------------------------------ steps
    def forward(
        self,
        stream: ExploredStream,
        *runners: Runner,
        role: Any = "target",
        inside: bool = False,
        split: bool = False,
        fails: bool = False,
        kept: list[int] | None = None,
    ) -> Steps:
        """One step. ``inside``: others may act while it is planned or open. ``split``: a piece for every component."""
        step = self.cache.step([runner.sequence for runner in runners], role)
        if inside:
            yield f"enter {step!r}, run its ops"
        with step:
            step.run_ops(stream)
            if inside:
                yield f"enqueue the layers of {step!r}"
            Layers(self, step, stream, runners, fails).enqueue(split)
            if kept is not None:
                step.accept(torch.tensor(kept))
            if inside:
                yield f"end {step!r}"
        for runner in runners:
            runner.steps.append(stream.record())

    def prefill(self, stream: ExploredStream, runner: Runner, count: int, **options: Any) -> Steps:
        runner.sequence.grow(count)
        yield from self.forward(stream, runner, **options)

    def serve(self, tokens: Iterable[int], *ends: int, **options: Any) -> None:
        """Serve one request from its beginning to its end, before anything is explored."""
        runner = self.open(tokens, **options)
        for end in ends or (len(runner.tokens),):
            for _ in self.prefill(self.stream, runner, end - runner.sequence.reserved):
                pass
            runner.sequence.publish()
        runner.sequence.close()
        while self.stream.ready:
            self.stream.advance()
        self.cache.poll()

    # ------------------------------------------------------------ afterwards
    def check(self) -> None:
        """Whatever the order was: what is cached equals its key, what came out was right, and every slot is back."""
        cache = self.cache
        for runner in self.runners:
            runner.sequence.close()
        cache.poll()
        self.check_streams()
        self.watch.check()
        for name, figures in cache.stats().components.items():
            assert (figures.running, figures.leased) == (0, 0), f"{name}: {figures}"
            assert figures.free + figures.cached == figures.capacity, f"{name}: slots are nobody's"
        hits = self.check_tree()
        for runner in self.runners:
            self.check_runner(runner)
        self.run.outcome = (hits, *(tuple(sorted(runner.out)) for runner in self.runners))
        cache.flush()
        for lane in cache.core.shape.lanes:
            assert lane.pool.at_hand == lane.pool.capacity, f"{lane.name}: slots are missing after the flush"
        assert not cache.core.flight.works

    def check_streams(self) -> None:
        for stream in self.streams:
            for _, error in stream.failures:
                if not (isinstance(error, Injected) and self.may_fail):
                    raise AssertionError(f"work on {stream!r} failed") from error

    def check_runner(self, runner: Runner) -> None:
        if runner.sequence.running.failed is not None:
            assert self.may_fail
            return
        held, out = contents(self.kinds, runner.namespace, runner.tokens)
        wrong = [position for position, value in runner.out.items() if value != out[position]]
        assert not wrong, f"what came out of {runner.sequence!r} at {wrong} is wrong"
        for length, read in runner.drafts:
            for kind, values in read.items():
                right = [held[kind][length]] if kind == "M" else held[kind][:length]
                assert values == right[-len(values) :], f"a draft read something else in {NAMES[kind]} up to {length}"

    def edges(self) -> Iterator[tuple[str, tuple[int, ...], Any, dict[str, list[int]]]]:
        """Yield (namespace, tokens down to its end, node, what each component's slots must hold) of each edge."""
        stack: list[tuple[Any, str, tuple[int, ...]]] = [
            (root, name, ()) for name, root in self.cache.core.index.tree.roots.items()
        ]
        while stack:
            node, namespace, before = stack.pop()
            tokens = (*before, *array("i", node.key))
            stack += [(kid, namespace, tokens) for kid in node.children]
            if tokens:
                yield namespace, tokens, node, contents(self.kinds, namespace, tokens)[0]

    def check_tree(self) -> tuple[Any, ...]:
        """Check that every slot of the tree holds what its key says, and return which boundaries there are."""
        found = []
        for namespace, tokens, node, held in self.edges():
            for kind, lane in zip(self.kinds, self.cache.core.shape.lanes, strict=True):
                cell = node.cells[lane.index]
                if cell is None:
                    continue
                found.append((namespace, tokens, kind))
                buffer = lane.pool.buffers["sum"][0].flatten(1)
                if kind == "M":
                    got, right = buffer[cell.slot].tolist(), [held[kind][len(tokens)]]
                    assert got == right, f"{lane.name}: the state at {len(tokens)} of {tokens} is another one"
                    continue
                pages = list(array("i", cell.data))
                for back, page in enumerate(reversed(pages)):
                    end = len(tokens) - back * PAGE
                    if page < 0:
                        assert isinstance(lane, PartialLane)
                        continue
                    got, right = buffer[page].tolist(), held[kind][end - PAGE : end]
                    assert got == right, f"{lane.name}: page {page}, the tokens before {end} of {tokens}, is another"
        return tuple(sorted(found))


class Layers:
    """The layers of one step: where they read and write is looked up when they run, in the tables they were given."""

    def __init__(
        self, world: World, step: Any, stream: ExploredStream, runners: tuple[Runner, ...], fails: bool
    ) -> None:
        self.world = world
        self.step = step
        self.stream = stream
        self.draft = step.role == "draft"
        self.fails = fails
        self.spans = [
            (
                k,
                runner,
                runner.sequence.committed if self.draft else step._rows[k].start,
                runner.sequence.reserved if self.draft else step._rows[k].end,
                runner.sequence.running,
            )
            for k, runner in enumerate(runners)
            if runner.sequence.open
        ]
        self.tables = {kind: step.table(NAMES[kind]) for kind in world.kinds}
        self.singles = {kind: step.rewind_table(NAMES[kind]) for kind in world.kinds if kind == "M"}
        self.tokens = {
            k: [runner.guesses.get(p, runner.tokens[p]) for p in range(start, end)]
            for k, runner, start, end, _ in self.spans
            if not self.draft
        }
        self.rows = [lease.row for *_, lease in self.spans]
        self.hidden: dict[int, list[int]] = {}

    def enqueue(self, split: bool) -> None:
        for kinds in self.world.kinds if split else (self.world.kinds,):

            def layers(kinds: str = kinds) -> None:
                for kind in kinds:
                    self.read_only(kind) if self.draft else self.layer(kind)
                if self.world.kinds.endswith(kinds):
                    self.put_out()

            what = f"{self.step!r}, layers of {', '.join(NAMES[kind] for kind in kinds)}"
            layers.__name__ = what
            self.stream.run(layers)

    def put_out(self) -> None:
        if self.fails:
            raise Injected
        for k, runner, start, _, _ in self.spans:
            for number, value in enumerate(self.hidden.get(k, ())):
                runner.out[start + number] = value

    def layer(self, kind: str) -> None:
        name = NAMES[kind]
        touch(reads=[("row", name, row) for row in self.rows])
        pool = self.world.cache.pool(name)
        buffer = pool.buffers["sum"][0].flatten(1)
        now, table = buffer.tolist(), self.tables[kind].tolist()
        for k, runner, start, end, _ in self.spans:
            if self.world.kinds[0] == kind:
                tokens = [-1] * (end - start) if self.fails else self.tokens[k]
                self.hidden[k] = [embedded(runner.namespace, token) for token in tokens]
            hidden = self.hidden[k]
            if kind == "M":
                self.hidden[k] = self._states(pool, buffer, now, table[k][0], self.singles[kind][k].tolist(), hidden)
            else:
                self.hidden[k] = self._entries(kind, pool, buffer, now, table[k], start, hidden)

    def _entries(
        self, kind: str, pool: Any, buffer: Any, now: Any, row: list[int], start: int, hidden: list[int]
    ) -> list[int]:
        low = 0 if kind == "F" else max(0, start - NEAR + 1)
        pages = {row[p // PAGE] for p in range(low, start)}
        touch(reads=pool.things(sorted(pages)))
        before = [now[row[p // PAGE]][p % PAGE] if row[p // PAGE] >= 0 else -1 for p in range(low, start)]
        for number, value in enumerate(hidden):
            page, offset = row[(start + number) // PAGE], (start + number) % PAGE
            assert page >= 0, "a page that is written is absent"
            before.append(entry(kind, value, before))
            touch(writes=pool.things([page]))
            buffer[page, offset] = before[-1]
        return before[len(before) - len(hidden) :]

    def _states(self, pool: Any, buffer: Any, now: Any, slot: int, singles: list[int], hidden: list[int]) -> list[int]:
        if not hidden:
            return []
        assert slot >= 0, "the running state is absent"
        touch(writes=pool.things([slot]))
        out = [now[slot][0]]
        for number, value in enumerate(hidden):
            out.append(mix(value, out[-1]))
            if len(hidden) <= len(singles):
                touch(writes=pool.things([singles[number]]))
                buffer[singles[number], 0] = out[-1]
        buffer[slot, 0] = out[-1]
        return out[1:]

    def read_only(self, kind: str) -> None:
        """Run a draft's layers, and remember what they read."""
        name = NAMES[kind]
        touch(reads=[("row", name, row) for row in self.rows])
        pool = self.world.cache.pool(name)
        now, table = pool.buffers["sum"][0].flatten(1).tolist(), self.tables[kind].tolist()
        for k, runner, start, _, _ in self.spans:
            if kind == "M":
                slots, read = [table[k][0]], [now[table[k][0]][0]]
            else:
                places = range(0 if kind == "F" else max(0, start - NEAR + 1), start)
                slots = sorted({table[k][p // PAGE] for p in places})
                read = [now[table[k][p // PAGE]][p % PAGE] for p in places]
            touch(reads=pool.things(slots))
            if read:
                runner.drafts.append((start, {kind: read}))
