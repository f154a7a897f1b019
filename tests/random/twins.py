"""Random operations on caches that must not differ: what is asked of each, what it answers, and what it looks like.

Two caches of one composition get the same operations from the same seed. After each, everything that can be told of
them is compared: answers, refusals and their words, statistics, trees, covers, tables, free lists, orders of eviction.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

from prefixloom import Claim, Component, Op, PrefixloomError, Receipt, SplitRule, Touch, hookimpl
from tests.random.twins_look import look

HOOKS = (
    "create_match_validator", "finalize_match_result", "commit_insert", "redistribute_on_node_split",
    "acquire_component_lock", "release_component_lock", "evict_component", "deferred_forward_ops",
)  # fmt: skip


class Failing(Exception):
    """Raised on purpose."""


class Fuse:
    """Counts what plain Python is asked, and makes one of the calls fail."""

    def __init__(self) -> None:
        self.calls = self.left = 0

    def arm(self, left: int) -> None:
        self.left = left

    def burn(self) -> None:
        self.calls += 1
        if self.left:
            self.left -= 1
            if not self.left:
                raise Failing("told to")


def answering(*hooks: str) -> type[Component]:
    """A component that overrides ``hooks`` with answers that change something, each a call that may be told to fail."""

    class Answers(Component):
        fuse = Fuse()

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.fuse = Fuse()

    def create_match_validator(self: Any, tiers: Any) -> Any:
        def valid(walk: Any) -> int:
            self.fuse.burn()
            return int(walk.boundary - 1 if walk.boundary and walk.boundary % 24 == 0 else walk.boundary)

        return valid

    def finalize_match_result(self: Any, walk: Any) -> Claim:
        self.fuse.burn()
        return Claim(need=walk.boundary % 3, branch=walk.walked, ops=(Op("own", self.name),))

    def commit_insert(self: Any, walk: Any) -> Claim | None:
        self.fuse.burn()
        return Claim(keep=((walk.start, walk.start + 4),)) if walk.boundary % 3 == 0 else None

    def redistribute_on_node_split(self: Any, parent: Any, child: Any) -> SplitRule | None:
        self.fuse.burn()
        return SplitRule(keep="drop") if child.end % 3 == 0 else None

    def acquire_component_lock(self: Any, anchor: Any, tier: Any) -> Receipt | None:
        self.fuse.burn()
        return Receipt(positions=((0, 4),)) if anchor.boundary % 3 else None

    def release_component_lock(self: Any, receipt: Any) -> Touch | None:
        self.fuse.burn()
        return Touch(positions=()) if receipt.positions else None

    def evict_component(self: Any, node: Any, tier: Any) -> Claim | None:
        self.fuse.burn()
        return Claim(keep=tuple(i for i, view in enumerate(node) if not view.start))

    def deferred_forward_ops(self: Any, batch: Any) -> tuple[Op, ...]:
        self.fuse.burn()
        return (Op("own", self.name), Op("own", self.name, after=True))

    def run_forward_op(self: Any, op: Any, stream: Any) -> None:
        self.fuse.burn()

    made = dict(locals())
    for name in (*hooks, "run_forward_op"):
        setattr(Answers, name, hookimpl(made[name]))
    return Answers


# ---------------------------------------------------------------- what is done


class Play:
    """One cache, and random operations on it. ``failing``: how likely an operation is to fail in plain Python."""

    def __init__(self, cache: Any, fuses: Iterable[Fuse], seed: object, longest: int, failing: float = 0.0) -> None:
        self.cache = cache
        self.fuses = list(fuses)
        self.rng = random.Random(str(seed))
        self.longest = longest
        self.failing = failing
        self.sequences: list[Any] = []
        self.leases: list[Any] = []
        self.plans: list[Any] = []
        self.documents = [[self.rng.randrange(2) for _ in range(longest + 40)] for _ in range(3)]

    def pick(self, among: list[Any]) -> Any:
        return self.rng.choice(among) if among else None

    def request(self) -> dict[str, Any]:
        rng = self.rng
        tokens = rng.choice(self.documents)[: rng.randrange(self.longest)]
        if tokens and rng.random() < 0.3:
            at = rng.randrange(len(tokens))
            tokens = tokens[:at] + [rng.randrange(2) for _ in tokens[at:]]
        extra: Any = ()
        if tokens and rng.random() < 0.1:
            extra = [(0, 1 + rng.randrange(len(tokens)), f"image {rng.randrange(2)}")]
        namespace, leave = rng.choice(("", "", "", "b")), rng.choice((0, 1, 1, 3))
        return {"tokens": tokens, "namespace": namespace, "leave": leave, "extra": extra}

    def turn(self) -> tuple[str, Any]:
        """One operation: its name, and what came of it."""
        rng = self.rng
        self.sequences = [sequence for sequence in self.sequences if sequence.open or rng.random() < 0.4]
        names, weights = zip(*WEIGHTS.items(), strict=True)
        (name,) = rng.choices(names, weights)
        armed = rng.random() < self.failing
        fuse = self.pick(self.fuses)
        left = 1 + int(rng.expovariate(0.3))
        if armed and fuse is not None:
            fuse.arm(left)
        try:
            answer = getattr(self, f"do_{name}")()
        except (PrefixloomError, Failing) as error:
            answer = type(error).__name__, str(error)
        for fuse in self.fuses:
            fuse.arm(0)
        return name, answer

    # ------------------------------------------------------------ each kind
    def do_open(self) -> Any:
        asked = self.request()
        label, priority = self.rng.choice(("", "one")), self.rng.choice((0, 0, 2))
        if len(self.sequences) > 4:
            self.do_close()
        sequence = self.cache.open(asked.pop("tokens"), label=label, priority=priority, **asked)
        self.sequences.append(sequence)
        return sequence.ready, sequence.branch

    def do_plan(self) -> Any:
        plan = self.cache.match(**self.request())
        self.plans = [*self.plans[-3:], plan]
        need = plan.need
        return plan.ready, plan.walked, plan.branch, plan.limited_by, plan.stale, need, plan.why

    def do_use(self) -> Any:
        plan = self.pick(self.plans)
        if plan is None:
            return None
        if self.rng.random() < 0.5 or len(self.sequences) > 4:
            self.leases.append(self.cache.lease(plan))
            return self.leases[-1].boundary
        self.sequences.append(self.cache.open(plan))
        return self.sequences[-1].ready

    def do_release(self) -> Any:
        lease = self.pick(self.leases)
        if lease is not None:
            self.leases.remove(lease)
            lease.release()
        return None

    def do_grow(self) -> Any:
        sequence = self.pick(self.sequences)
        count = self.rng.choice((0, 1, 3, 8, self.longest // 2))
        whole = self.rng.random() < 0.5
        arriving = self.rng.random() < 0.1
        if sequence is None:
            return None
        if whole:
            count = max(0, sequence.named - sequence.reserved)
        return sequence.grow(count, arriving=arriving)

    def do_append(self) -> Any:
        sequence = self.pick(self.sequences)
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(6))]
        return None if sequence is None else sequence.append(tokens)

    def do_step(self) -> Any:
        rng = self.rng
        batch = [sequence for sequence in self.sequences if rng.random() < 0.7]
        role = "draft" if rng.random() < 0.1 else "target"
        how = rng.random()
        step = self.cache.step(batch, role)
        if how < 0.05:
            return None
        if how < 0.1 and batch:
            self.end(batch[-1])
        with step:
            if 0.1 < how < 0.15 and batch:
                batch[0].grow(1)
            if how < 0.93:
                step.run_ops()
            tables = [step.table(lane.name).tolist() for lane in self.cache.core.shape.lanes] if how > 0.5 else None
            if 0.15 < how < 0.2:
                raise Failing("layers")
            if 0.2 < how < 0.3 and batch:
                self.end(batch[-1])
            if 0.2 < how < 0.23:
                raise Failing("layers")
            if 0.3 < how < 0.35 and batch:
                batch[0].publish()
        return tables, [(op.kind, op.component) for op in step.ops]

    def do_nested(self) -> Any:
        """Steps in steps, which is how steps of other streams end in another order."""
        batch = [sequence for sequence in self.sequences if self.rng.random() < 0.7]
        late = self.rng.random()
        first = self.cache.step(batch)
        first.__enter__()
        try:
            first.run_ops()
            second = self.cache.step(batch)
            with second:
                if late < 0.3:
                    first.__exit__(None, None, None)
                second.run_ops()
        finally:
            if first._state >= 0:
                first.__exit__(None, None, None)
        return None

    def do_fill(self) -> Any:
        sequence = self.pick(self.sequences)
        return None if sequence is None else sequence.fill()

    def do_commit(self) -> Any:
        sequence = self.pick(self.sequences)
        short = self.rng.choice((0, 0, 1, 3))
        return None if sequence is None else sequence.commit(sequence.reserved - short)

    def do_publish(self) -> Any:
        sequence = self.pick(self.sequences)
        short = self.rng.choice((0, 0, 0, 1, 2)) * self.cache.core.shape.page
        return None if sequence is None else sequence.publish(sequence.publishable - short if short else None)

    def do_rewind(self) -> Any:
        sequence = self.pick(self.sequences)
        count = self.rng.choice((0, 1, 1, 2, 4))
        return None if sequence is None else sequence.rewind(count)

    def do_turn(self) -> Any:
        """A chunk of one request, as it should be."""
        sequence = self.pick(self.sequences)
        part = 1 + self.rng.randrange(self.longest)
        if sequence is None:
            return None
        sequence.grow(min(part, max(0, sequence.named - sequence.reserved)))
        with self.cache.step([sequence]) as step:
            step.run_ops()
        return sequence.publish() if part % 3 == 0 else None

    def end(self, sequence: Any) -> None:
        if self.rng.random() < 0.7:
            sequence.close()
        else:
            sequence.abort()

    def do_close(self) -> Any:
        sequence = self.pick(self.sequences)
        dropped = self.rng.random() < 0.1
        if sequence is None:
            return None
        self.sequences.remove(sequence)
        if dropped:
            del sequence
            self.cache.poll()
        else:
            self.end(sequence)
        return None

    def do_evict(self) -> Any:
        counts = {part.name: self.rng.randrange(4) for part in self.cache.composition.parts}
        return self.cache.evict(self.rng.choice((self.rng.randrange(9), counts)))

    def do_reclaim(self) -> Any:
        return self.cache.reclaim()

    def do_restore(self) -> Any:
        sequence = self.pick(self.sequences)
        if sequence is None or self.cache.core.below is None:
            return None
        told = sequence.restore()
        return told.ready, told.wanted, told.why

    def do_poll(self) -> Any:
        self.cache.poll()

    def do_drop(self) -> Any:
        return self.cache.drop_namespace(self.rng.choice(("", "b", "b")))

    def do_flush(self) -> Any:
        self.cache.flush()
        self.sequences, self.leases, self.plans = [], [], []

    def finish(self) -> None:
        """Everything ends, and every slot is free."""
        for sequence in self.sequences:
            sequence.close()
        for lease in self.leases:
            if lease.active:
                lease.release()
        self.sequences, self.leases, self.plans = [], [], []
        gc.collect()
        self.cache.poll()
        kept = [name for name, each in self.cache.stats().components.items() if each.leased or each.running]
        assert not kept, f"something is still held of {kept}: {self.cache.stats()}"


WEIGHTS = {
    "open": 14, "plan": 5, "use": 5, "release": 3, "grow": 12, "append": 9, "step": 18, "nested": 3, "fill": 4,
    "commit": 5, "publish": 10, "rewind": 6, "turn": 16, "close": 8, "evict": 3, "reclaim": 2, "restore": 3, "poll": 1,
    "drop": 1, "flush": 0.4,
}  # fmt: skip


Make = Callable[[bool], tuple[Any, list[Fuse]]]


def differ(make: Make, seed: object, count: int, longest: int, failing: float) -> None:
    """``count`` operations on two caches of ``make``, fast and general; AssertionError where they differ."""
    log = logging.getLogger("prefixloom")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        plays = [Play(*make(fast), seed, longest, failing) for fast in (True, False)]
        done = []
        for number in range(count):
            told = [play.turn() for play in plays]
            done.append(told[1])
            assert told[0] == told[1], f"after {number} operations: {told[0]} fast, and {told[1]}; {done[-8:]}"
            calls = [[fuse.calls for fuse in play.fuses] for play in plays]
            assert calls[0] == calls[1], f"after {number} operations, {told[0]}: asked {calls[0]} fast, and {calls[1]}"
            looks = [look(play.cache, play.sequences, play.leases) for play in plays]
            if looks[0] != looks[1]:
                where = [what for what in looks[0] if looks[0][what] != looks[1].get(what)]
                raise AssertionError(
                    f"after {number} operations, {told[0]}: {where[0]} is {looks[0][where[0]]} fast, and "
                    f"{looks[1].get(where[0])}; {done[-8:]}"
                )
        for play in plays:
            play.finish()
    finally:
        log.setLevel(before)
