"""The world of content: a component that is served on a bench, and what is checked after each operation.

docs/conformance.md has a table of the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...contract.manifest import Layout
from ...errors import CapacityError, InputError, ProtocolError
from ...script import Failure, Op, PlannedStepError, World, Writer, flat, picked, require, text_of
from ..inside import backdoor
from ..inside.memory import POISON
from ..inside.names import Extra
from ..schedules.simulated import SimulatedStream
from .bench import Below, Bench, BenchSequence
from .case import ComponentCase

WEIGHTS = {
    "turn": 16, "open": 7, "run": 20, "publish": 5, "align": 7, "rewind": 7, "close": 8, "abort": 2, "evict": 5,
    "lease": 4, "release": 4, "reclaim": 3, "peek": 3, "fail": 2, "draft": 2,
}  # fmt: skip
MORE = WEIGHTS | {"arrive": 10, "together": 8}
"""With parts that arrive, and several sequences in a step."""
ARGUMENTS: dict[str, Callable[[Any], tuple[object, ...]]] = {
    **dict.fromkeys(("open", "lease", "peek"), lambda w: w.request()),
    **dict.fromkeys(("publish", "align", "close", "abort", "release", "fail", "draft"), lambda w: (w.below(5),)),
    "together": lambda w: (w.chance.choice((1, 2, w.unit, 3 * w.unit)),),
    "evict": lambda w: (w.chance.choice((1, 1, w.unit, w.unit, 2 * w.unit, 6 * w.unit)),),
}
"""By verb: what its arguments are drawn from."""
GONE_ON = "; going on without"
"""With these words the cache tells of a hook that failed, or whose answer it cannot use."""
OPEN = 4
"""The most sequences that are open at once."""


@attrs.frozen
class Setting:
    """Where scripts of content are played: companions, pool sizes, page size, layout, and a tier below the device.

    A call returns a new world. ``late``: a step's work runs only when somebody waits for it. ``blank``: no content is
    written or compared. ``small``: few layers and small entries, whoever may touch them.
    """

    case: ComponentCase
    beside: tuple[str, ...] = ()
    units: int = 14
    page: int | None = None
    late: bool = False
    layout: Layout = "layer_first"
    below: Below = ""
    blank: bool = False
    small: bool = False

    def __call__(self) -> Player:
        options = attrs.asdict(self, recurse=False, filter=lambda field, _: field.name not in ("case", "late"))
        return Player(Bench(self.case, stream=SimulatedStream("bench") if self.late else None, **options))

    def __str__(self) -> str:
        changed = [field for field in attrs.fields(Setting)[1:] if getattr(self, field.name) != field.default]
        return f"Setting({', '.join(['case', *(f'{each.name}={getattr(self, each.name)!r}' for each in changed)])})"


def images(length: int, unit: int, which: int) -> tuple[Extra, ...]:
    """Return long spans with extra keys, as far as a prompt has tokens; 0: none. Others begin like those of 1."""
    spans = ((unit // 2, 2 * unit, "an image"), (3 * unit - 1, 5 * unit + 1, which), (6 * unit, 8 * unit, "a film"))
    return tuple((start, min(end, length), key) for start, end, key in spans if which and start < length)


class ContentWriter(Writer):
    """Writes scripts for the world of content."""

    weights, arguments = WEIGHTS, ARGUMENTS

    def prompt(self) -> tuple[int, ...]:
        unit = self.unit
        length = self.chance.randrange(1, 9 * unit) if self.below(2) else self.chance.randrange(1, 9) * unit + 1
        return self.varied(text_of(self.below(2))[:length], 5)

    def request(self) -> tuple[object, ...]:
        tokens, namespace, salt = self.prompt(), self.chance.choice(("", "", "", "b")), self.below(8)
        return tokens, namespace, salt, images(len(tokens), self.unit, self.chance.choice((0, 0, 1, 1, 2)))

    def write_turn(self) -> None:
        """Write one whole request, from start to end."""
        self.write("open")
        for _ in range(self.below(3)):
            self.say("run", -1, self.chance.choice((self.unit, 2 * self.unit)))
        self.say("align", -1)
        self.say("run", -1, 20 * self.unit)
        self.say("close" if self.below(4) else "publish", -1)

    def write_run(self) -> None:
        number, unit = self.below(5), self.unit
        if self.below(3) == 0:  # several small steps, as in decoding
            for _ in range(1 + self.below(3)):
                self.say("run", number, 1 + self.below(3))
        else:
            self.say("run", number, self.chance.choice((1, 2, unit, unit + 1, 3 * unit, 20 * unit)))

    def write_rewind(self) -> None:
        """Write a small step of which a part is rewound, so that other tokens take its place."""
        number, count = self.below(5), 2 + self.below(3)
        self.say("run", number, count)
        self.say("rewind", number, 1 + self.below(count - 1))
        self.say("run", number, 2)

    def write_arrive(self) -> None:
        """Write a request of which a part is computed elsewhere."""
        self.write("open")
        self.say("arrive", -1, self.chance.choice((1, self.unit, self.unit + 1, 3 * self.unit)))


@attrs.define(eq=False)
class BenchLease:
    lease: Any
    tokens: tuple[int, ...]
    namespace: str
    boundary: int
    extra: Sequence[Extra]


class Player(World):
    """Performs operations on a bench and checks everything after each."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.running: list[BenchSequence] = []
        self.leases: list[BenchLease] = []
        self.errors = bench.cache.stats().plugin_errors
        self.narrows = bool({"create_match_validator", "finalize_match_result"} & set(bench.spy.overridden))

    def perform(self, op: Op) -> None:
        try:
            super().perform(op)
        except (CapacityError, InputError):  # there is no room, or the sequence is longer than the pool
            self.count("refused")

    def check(self) -> None:
        bench = self.bench
        bench.raise_late_failures()
        errors = bench.cache.stats().plugin_errors - self.errors
        why = next((told for told in self.said if GONE_ON in told), f"{errors} hooks raised, or gave a wrong answer")
        require(not errors, "raise", "%s", why.partition(GONE_ON)[0])
        bench.poison()
        if bench.stream is None:
            for run in self.running:
                bench.verify(run)
        for leased in self.leases if not self.narrows else ():
            got = bench.cache.peek(leased.tokens, namespace=leased.namespace, extra=leased.extra)
            said = "a lease holds the boundary %s, and after something else was done only %s can be resumed at"
            require(got >= leased.boundary, "lock", said, leased.boundary, got)

    def pick(self, number: int) -> BenchSequence | None:
        return picked(self.running, number)

    # ------------------------------------------------------------ operations
    def do_open(self, tokens: tuple[int, ...], namespace: str = "", salt: int = 0, extra: Sequence[Extra] = ()) -> None:
        if len(self.running) < OPEN:
            tokens = flat(tokens)
            extra = [span for span in extra if span[1] <= len(tokens)]  # the prompt may have been shortened
            run = self.bench.open(tokens, leave=salt % 2, namespace=namespace, extra=extra, salt=salt)
            self.count("hit" if run.restored else "miss")
            self.count("from below", run.from_below)
            self.running.append(run)

    def _asked(self, run: BenchSequence, count: int) -> int:
        """Return how many named tokens to compute, at most ``count``. If all are computed, name at most 4 more."""
        s = run.sequence
        if s.named == s.reserved:
            tokens = run.future[s.named : s.named + min(count, 4)]
            if any(isinstance(token, tuple) for token in tokens) or s.reserved > 14 * self.bench.unit:
                return 0
            s.append(tokens)
            self.bench.extend(run, s.named)
        return int(min(count, s.named - s.reserved))

    def do_run(self, number: int, count: int) -> None:
        """Compute at most ``count`` named tokens. If all named tokens are computed, decode at most 4 tokens."""
        run = self.pick(number)
        asked = self._asked(run, count) if run is not None else 0
        if run is not None and asked:
            self.bench.run(run, asked)
            self.count("step")

    def do_together(self, count: int) -> None:
        """Compute at most ``count`` named tokens of each sequence in one step, or decode."""
        runs = [(run, asked) for run in self.running if (asked := self._asked(run, count))]
        self.bench.run_all(runs)
        self.count("together", len(runs) > 1)

    def do_uncopied(self, ops: Sequence[Op]) -> None:
        """Do these operations while each copy to or from a tier fails."""
        with backdoor.failing_copies():
            for op in ops:
                self.apply(op)

    def do_arrive(self, number: int, count: int) -> None:
        """Take over at most ``count`` named tokens that were computed elsewhere."""
        run = self.pick(number)
        if run is not None and self.bench.stream is None and run.sequence.reserved == run.sequence.committed:
            count = min(count, run.sequence.named - run.sequence.reserved)
            if count > 0:
                self.bench.arrive(run, count)
                self.count("arrived")

    def do_align(self, number: int) -> None:
        """Compute up to the last boundary that can be published, where a state can be kept, and publish."""
        run = self.pick(number)
        if run is not None:
            s, cache = run.sequence, self.bench.cache
            count = (s.named - cache.composition.lookahead) // self.bench.unit * self.bench.unit - s.reserved
            if count > 0:
                self.bench.run(run, count)
            s.publish()

    def do_fail(self, number: int) -> None:
        """Run a step whose layers fail half way, then close the sequence: only complete content may stay."""
        run = self.pick(number)
        if run is None or self.bench.stream is not None:
            return
        s, bench = run.sequence, self.bench
        s.grow(2)
        try:
            with bench.cache.step([s]) as step:
                step.run_ops()
                for part in bench.parts:
                    for slot in () if part.page_tokens else (*s.pages(part.name), *s.rewind_slots(part.name)):
                        bench.memories[part.name].write(slot, 0, POISON)
                raise PlannedStepError
        except PlannedStepError:
            self.running.remove(run)
            s.close()

    def do_draft(self, number: int) -> None:
        """Run a draft model's step, which runs no ops and commits nothing."""
        run = self.pick(number)
        if run is not None:
            before = run.sequence.committed
            with self.bench.cache.step([run.sequence], role="draft") as step:
                step.run_ops(self.bench.stream)
                for part in self.bench.parts:
                    step.table(part.name)
            require(run.sequence.committed == before, "books", "a draft step commits")

    def do_publish(self, number: int) -> None:
        run = self.pick(number)
        if run is not None:
            run.sequence.publish()

    def do_rewind(self, number: int, count: int) -> None:
        """Rewind ``count`` tokens, and have the model produce other tokens."""
        run = self.pick(number)
        bench = self.bench
        if run is None or bench.rewind == 0 or run.sequence.reserved - count < run.arrived:
            return
        s = run.sequence
        try:
            s.rewind(count)
        except ProtocolError:
            return
        self.count("rewind")
        del run.future[s.named :]
        del run.ids[len(run.future) + 1 :]
        run.salt += 3
        bench.extend(run, s.named)
        for part in bench.parts:
            name = part.name
            if part.page_tokens:
                group = part.manifest.tokens_per_slot
                known = (s.named - bench.ahead(part)) if bench.ahead(part) else s.committed
                run.written[name] = min(run.written[name], s.committed, max(0, known)) // group * group
                odd = run.unfinished.get(name, {})
                for entry in [e for e in odd if e * group >= run.written[name]]:
                    del odd[entry]
            elif s.committed in run.singles.get(name, {}):
                run.states[name] = run.singles[name][s.committed]

    def do_close(self, number: int) -> None:
        run = self.pick(number)
        if run is not None:
            self.running.remove(run)
            run.sequence.close()

    def do_abort(self, number: int) -> None:
        run = self.pick(number)
        if run is not None:
            self.running.remove(run)
            run.sequence.abort()

    def do_evict(self, tokens: int) -> None:
        freed = self.bench.cache.evict(
            {part.name: -(-tokens // (part.page_tokens or self.bench.unit)) for part in self.bench.parts}
        )
        self.count("evicted", sum(freed.values()))

    def do_lease(
        self, tokens: tuple[int, ...], namespace: str = "", salt: int = 0, extra: Sequence[Extra] = ()
    ) -> None:
        tokens = flat(tokens)
        lease = self.bench.cache.lease(self.bench.cache.match(tokens, namespace=namespace, extra=extra))
        self.leases.append(BenchLease(lease, tokens, namespace, lease.boundary, extra))

    def do_release(self, number: int) -> None:
        if self.leases:
            self.leases.pop(number % len(self.leases)).lease.release()

    def do_reclaim(self) -> None:
        self.bench.cache.reclaim()

    def do_peek(self, tokens: tuple[int, ...], namespace: str = "", salt: int = 0, extra: Sequence[Extra] = ()) -> None:
        self.bench.cache.peek(flat(tokens), namespace=namespace, extra=extra)

    def finish(self) -> None:
        """Close and evict everything, then check that every slot is free and no lease is left."""
        while self.running:
            self.do_close(0)
        while self.leases:
            self.do_release(0)
        cache = self.bench.cache
        if self.bench.stream is not None:
            self.bench.stream.record().synchronize()
            cache.poll()
            self.bench.raise_late_failures()
        for part in self.bench.parts:
            figures = cache.stats().components[part.name]
            said = "in the end %s slots of %s are still counted as leased"
            require(not figures.leased, "books", said, figures.leased, part.name)
            require(not figures.running, "books", "in the end %s slots of %s have no owner", figures.running, part.name)
            cache.evict({part.name: part.capacity})
            left = cache.stats().components[part.name].cached
            said = "in the end %s slots of %s cannot be evicted, and no lease covers them"
            require(not left, "books", said, left, part.name)
        self.bench.spy.ask_again()

    def blame(self) -> None:
        for topic, sentence in self.bench.spy.mistakes:
            raise Failure(topic, sentence)
