"""Scripts: operations on a bench as plain data. They are made from a seed, played, and shrunk when they fail.

An operation is a tuple of a name and numbers or tokens. A number selects a sequence or lease modulo how many there are,
so that every part of a script is itself a valid script. Tokens are numbers, and ranges of them.
"""

from __future__ import annotations

import logging
import pprint
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from ...contract.manifest import Layout
from ...errors import CapacityError, CompositionError, InputError, InvariantError, PluginError, ProtocolError, RaceError
from ..inside import backdoor
from ..inside.memory import POISON
from ..inside.names import Extra
from ..schedules.simulated import SimulatedStream
from .bench import Below, Bench, BenchSequence, Failure, PlannedStepError, require, text_of
from .case import ComponentCase

Op = tuple[Any, ...]
WEIGHTS = {
    "turn": 16, "open": 7, "run": 20, "publish": 5, "align": 7, "rewind": 7, "close": 8, "abort": 2, "evict": 5,
    "lease": 4, "release": 4, "reclaim": 3, "peek": 3, "fail": 2, "draft": 2,
}  # fmt: skip
MORE = WEIGHTS | {"arrive": 10, "together": 8}
"""With parts that arrive, and several sequences in a step."""
GONE_ON = "; going on without"
"""With these words the cache tells of a hook that failed, or whose answer it cannot use."""
WORK = 20_000
"""So much is played to shrink a script (``work_of``)."""
OPEN = 4
"""The most sequences that are open at once."""


@attrs.frozen
class Setting:
    """The setting of a script: companions, pool sizes, page size, layout, and a tier below the device.

    ``late``: a step's work runs only when somebody waits for it. ``blank``: no content is written or compared.
    ``small``: few layers and small entries, whoever may touch them.
    """

    beside: tuple[str, ...] = ()
    units: int = 14
    page: int | None = None
    late: bool = False
    layout: Layout = "layer_first"
    below: Below = ""
    blank: bool = False
    small: bool = False

    def __str__(self) -> str:
        plain = Setting()
        names = [field.name for field in attrs.fields(Setting)]
        changed = [name for name in names if getattr(self, name) != getattr(plain, name)]
        return f"Setting({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


# ---------------------------------------------------------------- making


def written(seed: str, length: int, unit: int, weights: Mapping[str, int] = WEIGHTS) -> list[Op]:
    """Return a random script. ``unit``: how many tokens a page of the tree has."""
    chance = random.Random(seed)
    ops: list[Op] = []
    while len(ops) < length:
        (kind,) = chance.choices(list(weights), list(weights.values()))
        ops += _some(kind, chance, unit)
    return ops[:length]


def _prompt(chance: random.Random, unit: int) -> tuple[int, ...]:
    length = chance.randrange(1, 9 * unit) if chance.randrange(2) else chance.randrange(1, 9) * unit + 1
    tokens = text_of(chance.randrange(2))[:length]
    if chance.randrange(5) == 0:
        kept = chance.randrange(length + 1)
        tokens = tokens[:kept] + tuple(chance.randrange(2) for _ in range(length - kept))
    return tokens


def images(length: int, unit: int, which: int) -> tuple[Extra, ...]:
    """Return long spans with extra keys, as far as a prompt has tokens; 0: none. Others begin like those of 1."""
    spans = ((unit // 2, 2 * unit, "an image"), (3 * unit - 1, 5 * unit + 1, which), (6 * unit, 8 * unit, "a film"))
    return tuple((start, min(end, length), key) for start, end, key in spans if which and start < length)


def _some(kind: str, chance: random.Random, unit: int) -> list[Op]:
    number = chance.randrange(5)
    if kind == "turn":  # one whole request, from start to end
        chunks = [("run", -1, chance.choice((unit, 2 * unit))) for _ in range(chance.randrange(3))]
        end = [("close", -1)] if chance.randrange(4) else [("publish", -1)]
        return [*_some("open", chance, unit), *chunks, ("align", -1), ("run", -1, 20 * unit), *end]
    if kind in ("open", "lease", "peek"):
        tokens, namespace, salt = _prompt(chance, unit), chance.choice(("", "", "", "b")), chance.randrange(8)
        return [(kind, tokens, namespace, salt, images(len(tokens), unit, chance.choice((0, 0, 1, 1, 2))))]
    if kind == "run":
        if chance.randrange(3) == 0:  # several small steps, as in decoding
            return [("run", number, 1 + chance.randrange(3)) for _ in range(1 + chance.randrange(3))]
        return [("run", number, chance.choice((1, 2, unit, unit + 1, 3 * unit, 20 * unit)))]
    if kind == "rewind":
        count = 2 + chance.randrange(3)  # part of a small step is rewound, and other tokens take its place
        return [("run", number, count), ("rewind", number, 1 + chance.randrange(count - 1)), ("run", number, 2)]
    if kind == "arrive":  # part of a prompt is computed elsewhere
        return [*_some("open", chance, unit), ("arrive", -1, chance.choice((1, unit, unit + 1, 3 * unit)))]
    if kind == "together":
        return [("together", chance.choice((1, 2, unit, 3 * unit)))]
    if kind == "evict":
        return [("evict", chance.choice((1, 1, unit, unit, 2 * unit, 6 * unit)))]
    return [(kind,)] if kind == "reclaim" else [(kind, number)]


# ---------------------------------------------------------------- playing


def flat(tokens: Iterable[Any]) -> tuple[int, ...]:
    """Return tokens in which ranges are written out."""
    out: list[int] = []
    for token in tokens:
        if isinstance(token, range):
            out += token
        else:
            out.append(token)
    return tuple(out)


def shortened(tokens: Any) -> Any:
    """Return a shorter beginning of tokens, written in the same way."""
    if isinstance(tokens, tuple) and isinstance(tokens[-1], range) and len(tokens[-1]) > 1:
        return (*tokens[:-1], shortened(tokens[-1]))
    return tokens[: len(tokens) * 3 // 4]


@attrs.define(eq=False)
class BenchLease:
    lease: Any
    tokens: tuple[int, ...]
    namespace: str
    boundary: int
    extra: Sequence[Extra]


class _Heard(logging.Handler):
    """Keeps what the cache says, in place of a log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """Inside this context, the warnings of caches are collected and written to no log."""
    log, handler = logging.getLogger("prefixloom"), _Heard()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield handler.said
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


class Player:
    """Performs operations on a bench and checks everything after each. ``said``: what the cache has warned of."""

    def __init__(self, bench: Bench, said: Sequence[str] = ()) -> None:
        self.bench = bench
        self.said = said
        self.running: list[BenchSequence] = []
        self.leases: list[BenchLease] = []
        self.counts: dict[str, int] = {}
        self.errors = bench.cache.stats().plugin_errors
        self.narrows = bool({"create_match_validator", "finalize_match_result"} & set(bench.spy.overridden))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def apply(self, op: Op) -> None:
        try:
            getattr(self, f"do_{op[0]}")(*op[1:])
        except (CapacityError, InputError):  # there is no room, or the sequence is longer than the pool
            self.count("refused")
        self.check()

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
        return self.running[number % len(self.running)] if self.running else None

    # ------------------------------------------------------------ operations
    def do_open(self, tokens: tuple[int, ...], namespace: str = "", salt: int = 0, extra: Sequence[Extra] = ()) -> None:
        if len(self.running) < OPEN:
            tokens = flat(tokens)
            extra = [span for span in extra if span[1] <= len(tokens)]  # the prompt may have been shortened
            run = self.bench.open(tokens, leave=salt % 2, namespace=namespace, extra=extra, salt=salt)
            self.count("hit" if run.restored else "miss")
            self.counts["hit tokens"] = self.counts.get("hit tokens", 0) + run.restored
            self.counts["from below"] = self.counts.get("from below", 0) + run.from_below
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
        self.counts["together"] = self.counts.get("together", 0) + (len(runs) > 1)

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

    def do_repeat(self, count: int, ops: Sequence[Op]) -> None:
        """Do these operations so many times."""
        for _ in range(count):
            for op in ops:
                self.apply(op)

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
        self.counts["evicted"] = self.counts.get("evicted", 0) + sum(freed.values())

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
            require(
                not figures.leased,
                "books",
                "in the end %s slots of %s are still counted as leased",
                figures.leased,
                part.name,
            )
            require(not figures.running, "books", "in the end %s slots of %s have no owner", figures.running, part.name)
            cache.evict({part.name: part.capacity})
            left = cache.stats().components[part.name].cached
            require(
                not left,
                "books",
                "in the end %s slots of %s cannot be evicted, and no lease covers them",
                left,
                part.name,
            )
        self.bench.spy.ask_again()


def play(case: ComponentCase, script: Sequence[Op], setting: Setting | None = None) -> Player:
    """Play a script to its end. Failure: the cache or the component did something wrong."""
    with heard() as said:
        return _played(case, script, setting or Setting(), said)


def _played(case: ComponentCase, script: Sequence[Op], setting: Setting, said: Sequence[str]) -> Player:
    stream = SimulatedStream("bench") if setting.late else None
    try:
        bench = Bench(
            case,
            setting.beside,
            units=setting.units,
            page=setting.page,
            stream=stream,
            layout=setting.layout,
            below=setting.below,
            blank=setting.blank,
            small=setting.small,
        )
        player = Player(bench, said)
        try:
            for op in script:
                player.apply(op)
            player.finish()
        finally:
            for topic, sentence in bench.spy.mistakes:
                raise Failure(topic, sentence)
        return player
    except (Failure, CompositionError):
        raise
    except RaceError as error:
        raise Failure("race", str(error)) from error
    except InvariantError as error:
        raise Failure("books", str(error)) from error
    except PluginError as error:
        raise Failure("raise", str(error)) from error
    except Exception as error:
        raise Failure("books", f"{type(error).__name__}: {error}") from error


def failure(case: ComponentCase, script: Sequence[Op], setting: Setting | None = None) -> Failure | None:
    """Play a script; return its failure, or None if all went well."""
    try:
        play(case, script, setting)
    except Failure as error:
        return Failure(error.topic, error.sentence)
    return None


# ---------------------------------------------------------------- shrinking


def work_of(script: Sequence[Op]) -> int:
    """Return about how much work a script is: each operation, and every eighth token of a prompt, counts as one."""
    total = len(script)
    for op in script:
        if op[0] in ("repeat", "uncopied"):
            total += work_of(op[-1]) * (op[1] if op[0] == "repeat" else 1)
        elif op[0] in ("open", "lease", "peek"):
            total += sum(len(token) if isinstance(token, range) else 1 for token in op[1]) // 8
    return total


def shrunk(case: ComponentCase, script: Sequence[Op], setting: Setting, topic: str, work: int = WORK) -> list[Op]:
    """Return a shorter script that fails with the same topic, found by leaving out smaller and smaller parts."""
    best, left = list(script), work

    def fails(ops: Sequence[Op]) -> bool:
        nonlocal left
        left -= work_of(ops)
        found = failure(case, ops, setting) if left > 0 else None
        return found is not None and found.topic == topic

    size = len(best) // 2
    while size:
        at = 0
        while at < len(best):
            shorter = best[:at] + best[at + size :]
            if fails(shorter):
                best = shorter
            else:
                at += size
        size //= 2
    for at, op in enumerate(best):
        while (less := _less(op)) is not None and fails([*best[:at], less, *best[at + 1 :]]):
            best[at] = op = less
    return best


def _less(op: Op) -> Op | None:
    """Return an operation with a shorter prompt, or that is done less often; None if there is none."""
    if op[0] == "open" and len(flat(op[1])) > 1:
        return (op[0], shortened(op[1]), *op[2:])
    if op[0] == "repeat" and op[1] > 1:
        return (op[0], op[1] * 3 // 4, *op[2:])
    return None


def as_code(case: ComponentCase, script: Sequence[Op], setting: Setting) -> str:
    """Return a script as code that can be pasted into a test."""
    body = pprint.pformat(list(script), width=110, compact=True)
    return (
        f"from prefixloom.testing import Setting, play\n\n"
        f"# case: the ComponentCase of your test ({case.label})\nplay(case, {body}, {setting})"
    )
