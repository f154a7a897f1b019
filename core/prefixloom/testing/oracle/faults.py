"""Faults at every step: a script in which each fallible point of each operation fails once before it succeeds.

After every failure the state is the one before, which the sets say exactly; what is only counted leaves the state
after. Then the same operation is done again, and the script goes on, to an end at which every slot is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import PluginError
from ..bench import Bench, hold
from ..case import ComponentCase
from .liberties import Liberties
from .operations import Op, Operations
from .steps import document


def walkthrough(unit: int) -> list[Op]:
    """A script that comes by everything that can fail: misses, hits, splits, publications, leases, evictions.

    ``unit``: tokens of a page of the tree; states are kept where a step ends on one.
    """

    def turn(number: int, pages: int, *between: Op) -> list[Op]:
        asked = ("open", "", document(number)[: pages * unit], 1, (), 0, number)
        steps: list[Op] = [("grow", -1, pages // 2 * unit), ("step", 31, 0), ("publish", -1, -1), ("grow", -1, -1)]
        return [asked, *steps, ("step", 31, 0), *between, ("close", -1, 0)]

    decode: list[Op] = [("append", -1, 3), ("grow", -1, 3), ("step", 31, 0), ("rewind", -1, 1, 1), ("publish", -1, -1)]
    held: list[Op] = [("plan", "", document(0)[: 8 * unit], 0, ()), ("lease", -1)]
    return [
        *turn(0, 8),
        *turn(1, 6, *decode),
        *held,
        ("evict", 1, 3),
        *turn(0, 8, *decode),
        ("plan", "", document(1)[: 8 * unit], 0, ()),
        ("lease", -1),
        *turn(2, 8),
        *[("release", 0)] * 2,
        *[("evict", number, 1) for number in (1, 2, 1, 2, 1)],
        *turn(3, 4),
        ("evict", 0, 16 * unit),
    ]


REFUSED = ("grow refused", "arrive refused", "open refused")


class Faulty(Operations):
    """Operations under a spy that raises when it is told to."""

    def __init__(self, bench: Bench) -> None:
        own = set(bench.spy.overridden)
        open_to = Liberties.of(bench.parts, bool(bench.cache._admitting))
        if not own:  # a hook that is only there to raise leaves nothing open
            open_to = Liberties(keeps=frozenset(name for name in open_to.keeps if _admits(bench, name)))
        super().__init__(bench.cache, open_to)
        self.spy = bench.spy

    def settle(self, *args: object, **options: object) -> None:
        self.spy.arm(0)  # looking raises nothing
        super().settle(*args, **options)  # type: ignore[arg-type]

    def attempt(self, op: Op) -> bool:
        """Whether the operation was done; if not, nothing has changed."""
        try:
            self.apply(op)
        except PluginError:
            self.settle("failed")
            return False
        return True

    def refusals(self) -> int:
        return sum(self.counts.get(what, 0) for what in REFUSED)


def _admits(bench: Bench, name: str) -> bool:
    return any(part.name == name and part.manifest.admission is not None for part in bench.parts)


def in_hook(case: ComponentCase, beside: Sequence[str], hook: str, script: Sequence[Op]) -> int:
    """Each call of ``hook`` within an operation raises once; how often it did."""
    bench = Bench(case, beside, units=14, raising=hook, coded=False)
    bench.spy.arm(0)
    world = Faulty(bench)
    for op in script:
        nth = 1
        while True:
            bench.spy.arm(nth)
            if world.attempt(op):
                break
            nth += 1
            hold(nth < 100, "raise", "%s fails again and again, and %s raised once each time", op, hook)
    world.finish()
    return bench.spy.raised


def in_pools(case: ComponentCase, beside: Sequence[str], script: Sequence[Op]) -> int:
    """Before each operation every pool in turn is emptied but for 0, 1, 2, ... slots, until there is room enough."""
    refused = 0
    for number, part in enumerate(Bench(case, beside, units=14, coded=False).parts):
        world = Faulty(Bench(case, beside, units=14, coded=False))
        for op in script:
            for left in range(part.capacity + 1):
                before = world.refusals()
                world.apply(("dry", number, left))
                world.apply(op)
                if world.refusals() == before:
                    break
                refused += 1
            world.apply(("flood",))
        world.finish()
    return refused


def in_layers(case: ComponentCase, beside: Sequence[str], script: Sequence[Op]) -> int:
    """Each step fails before its ops have run, and every third one after its layers have written half a state."""
    failed = 0
    steps = [at for at, op in enumerate(script) if op[0] == "step"]
    for at in (-1, *steps[::3]):
        world = Faulty(Bench(case, beside, units=14, coded=False))
        for number, op in enumerate(script):
            for variant in _variants(op, number == at):
                world.apply(variant)
                failed += variant is not op
        world.finish()
    return failed


def _variants(op: Op, spoiled: bool) -> Iterator[Op]:
    if op[0] == "step":
        yield ("step", op[1], 7)
        if spoiled:
            yield ("step", op[1], 8)
    yield op
