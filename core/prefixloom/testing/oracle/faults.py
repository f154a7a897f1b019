"""Faults at every step: each point of each operation that can fail does so once, before the operation succeeds.

After a failed operation the state must be the one before it, which the model states exactly. After an error that is
only counted, the state must be the one after it. Then the operation is done again and the script goes on; at its end
every slot must be free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import PluginError
from ...script import Op, require, text_of
from ..inside import backdoor
from ..kit.bench import Bench
from .comparison import Allowances
from .operations import Operations
from .sequence_operations import BOOK
from .writer import Pit


def walkthrough(unit: int) -> list[Op]:
    """Return a script with everything that can fail: misses, hits, splits, publications, leases and evictions.

    ``unit``: how many tokens a page of the tree has; a state is kept where a step ends on a multiple of it.
    """

    def turn(number: int, pages: int, *between: Op) -> list[Op]:
        asked = ("open", "", text_of(number, BOOK)[: pages * unit], 1, (), 0, number)
        steps: list[Op] = [("grow", -1, pages // 2 * unit), ("step", 31, 0), ("publish", -1, -1), ("grow", -1, -1)]
        return [asked, *steps, ("step", 31, 0), *between, ("close", -1, 0)]

    decode: list[Op] = [("append", -1, 3), ("grow", -1, 3), ("step", 31, 0), ("rewind", -1, 1, 1), ("publish", -1, -1)]
    held: list[Op] = [("plan", "", text_of(0, BOOK)[: 8 * unit], 0, ()), ("lease", -1)]
    return [
        *turn(0, 8),
        *turn(1, 6, *decode),
        *held,
        ("evict", 1, 3),
        *turn(0, 8, *decode),
        ("plan", "", text_of(1, BOOK)[: 8 * unit], 0, ()),
        ("lease", -1),
        *turn(2, 8),
        *[("release", 0)] * 2,
        *[("evict", number, 1) for number in (1, 2, 1, 2, 1)],
        *turn(3, 4),
        ("evict", 0, 16 * unit),
    ]


REFUSED = ("grow refused", "arrive refused", "open refused")


class FaultInjector(Operations):
    """Operations on a cache whose component is a spy that can raise."""

    def __init__(self, bench: Bench, raising: str = "") -> None:
        """Wrap the cache of ``bench``. ``raising``: the hook that is overridden only to raise."""
        self.raising = raising
        own = set(bench.spy.overridden)
        allowances = Allowances.of(bench.parts, backdoor.has_admission(bench.cache))
        if not own:  # a hook that is only overridden to raise leaves nothing open
            allowances = Allowances(keeps=frozenset(name for name in allowances.keeps if _admits(bench, name)))
        super().__init__(bench.cache, allowances)
        self.spy = bench.spy

    def compare(self, *args: object, **options: object) -> None:
        self.spy.arm(0)  # the comparison calls hooks, and they must not raise now
        super().compare(*args, **options)  # type: ignore[arg-type]

    @property
    def room_is_exact(self) -> bool:
        """Not where the hook of locks is overridden, be it only to raise: then nothing goes that a lease covers."""
        return super().room_is_exact and self.raising != "acquire_component_lock"

    def attempt(self, op: Op) -> bool:
        """Do an operation and return whether it succeeded; if not, check that nothing has changed."""
        try:
            self.apply(op)
        except PluginError:
            self.compare("failed")
            return False
        return True

    def refusals(self) -> int:
        return sum(self.counts.get(what, 0) for what in REFUSED)


def _admits(bench: Bench, name: str) -> bool:
    return any(part.name == name and part.manifest.admission is not None for part in bench.parts)


def in_hook(pit: Pit, hook: str, script: Sequence[Op]) -> int:
    """Play a script in which each call of ``hook`` raises once. Return how often it raised."""
    bench = pit.bench(hook)
    bench.spy.arm(0)
    world = FaultInjector(bench, hook)
    for op in script:
        nth = 1
        while True:
            bench.spy.arm(nth)
            if world.attempt(op):
                break
            nth += 1
            require(nth < 100, "raise", "%s fails again and again, and %s raised once each time", op, hook)
    world.finish()
    return bench.spy.raised


def in_pools(pit: Pit, script: Sequence[Op]) -> int:
    """Play a script in which each operation starts with 0, 1, 2, ... free slots, until it has enough.

    This is done for each pool in turn. Return how often an operation was refused.
    """
    refused = 0
    for number, part in enumerate(pit.bench().parts):
        world = FaultInjector(pit.bench())
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


def in_layers(pit: Pit, script: Sequence[Op]) -> int:
    """Play a script in which each step first fails before its ops, and every third also after half a state is written.

    Return how many steps failed.
    """
    failed = 0
    steps = [at for at, op in enumerate(script) if op[0] == "step"]
    for at in (-1, *steps[::3]):
        world = FaultInjector(pit.bench())
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
