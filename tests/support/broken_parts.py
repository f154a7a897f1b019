"""Reaches and components that are broken on purpose, one mistake each; ``broken.py`` has the laws that kill them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch

from prefixloom import (
    Buffer,
    Claim,
    Component,
    Manifest,
    Op,
    Optional,
    Reach,
    SplitRule,
    Window,
    hookimpl,
)
from prefixloom.contract.reach import Interval
from prefixloom.testing import Truth

K, V = Buffer("k", (2,), "float32", range(2)), Buffer("v", (3,), "bfloat16", range(2))
KV = Manifest([K, V])
W = 7


def window_reads(q: int) -> range:
    return range(max(0, q - W + 1), q)


WINDOW = Truth(reads=window_reads, ahead=0, grid=1, buffers=(K, V), tokens_per_entry=1)
PATH = attrs.evolve(WINDOW, reads=range)
SINKS = attrs.evolve(WINDOW, reads=lambda q: {*range(min(q, 2)), *window_reads(q)})
STATE = Truth(grid=1, buffers=(K, V))


def decaying(tokens: Any, start: int, end: int, buffers: Any, pages: Any) -> Any:
    """Layers whose state decays and grows by each token, computed in float32."""
    state, outputs = buffers["k"][:, pages[0]].float(), []
    for token in tokens[start:end]:
        state = 0.9 * state + token.float().sin()
        outputs.append(state)
    buffers["k"][:, pages[0]] = state
    return torch.stack(outputs)


# ---------------------------------------------------------------- reaches


class Plain(Reach):
    """A window in plain Python: correct."""

    back, early, late = W - 1, 0, 0

    def needs(self, n: int) -> tuple[Interval, ...]:
        low = max(0, n - self.back)
        return ((low, n),) if low < n else ()

    def until(self, p: int) -> float:
        return p + self.back - self.early + self.late


class EarlyByOne(Plain):
    early = 1


class EarlyByAPage(Plain):
    early = 4


class ForEver(Plain):
    late = 10**9


class PastTheBoundary(Plain):
    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((max(0, n - self.back), n + 1),)


class ClosedUpward(Plain):
    closed_upward = True


class ConvexOptional(Optional):
    """A lease covers what its own boundary needs, so nothing of it is protected."""

    convex = True


class ConvexAndNot(Reach):
    """Every second group of four: a position is needed, then is not, then is again."""

    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        return tuple((low, min(low + 4, n)) for low in range(n // 4 % 2 * 4, n, 8))


class ConvexAndLate(Plain):
    convex, late = True, 4


class StateWithPositions(Reach):
    unit = "boundary"

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((n - 1, n),) if n else ()


class Tiring(Plain):
    """Its answer depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def needs(self, n: int) -> tuple[Interval, ...]:
        self.asked += 1
        return ((max(0, n - self.back - self.asked % 2), n),) if n else ()


class Swelling(Tiring):
    """Needs more the longer it is in use: what a lease covered is no longer enough."""

    def needs(self, n: int) -> tuple[Interval, ...]:
        self.asked += 1
        return ((max(0, n - self.back - self.asked // 10), n),) if n else ()


# ---------------------------------------------------------------- components


class ByTheClock(Component):
    """Nothing hits on Sundays."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: 0 if time.localtime().tm_wday == 6 else int(walk.boundary)


class ByChance(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if random.random() < 0.5 else None


class ByAddress(Component):
    """Counts over all instances of the process: two ranks would not agree."""

    calls = itertools.count()

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if next(self.calls) % 2 else None


class Fickle(Component):
    calls = 0

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        def validator(walk: Any) -> int:
            self.calls += 1
            return int(walk.boundary) if self.calls % 2 else 0

        return validator


class Widening(Component):
    @hookimpl
    def create_match_validator(self, tiers: Any) -> Callable[[Any], int]:
        return lambda walk: int(walk.walked) + 4


class NoNumber(Component):
    @hookimpl
    def create_match_validator(self, tiers: Any) -> Callable[[Any], Any]:
        return lambda walk: True


class MutatesTheWalk(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> None:
        object.__setattr__(walk, "boundary", 0)


class MutatesTheSplit(Component):
    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> None:
        object.__setattr__(child, "pages", 0)


class WritesInAHook(Component):
    pool: Any = None

    @hookimpl
    def finalize_match_result(self, walk: Any) -> None:
        self.pool.buffers["k"][:, 0] = 1.0


class Clamps(Component):
    """Takes care that no value is too large, which most are not."""

    pool: Any = None

    @hookimpl
    def commit_insert(self, walk: Any) -> None:
        self.pool.buffers["k"].clamp_(-1e6, 1e6)


class OnAGrid(Component):
    """Exact at every eighth boundary, and says so by a hook in place of the manifest: right."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: int(walk.boundary) // 8 * 8


class OffTheGrid(Component):
    """Accepts what it was to refuse."""

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: int(walk.boundary) if walk.boundary % 8 else 0


class TakesASlot(Component):
    pool: Any = None

    @hookimpl
    def release_component_lock(self, receipt: Any) -> None:
        if self.pool.free:
            self.pool.take(1)


class ClearsAnothersSlot(Component):
    """Its op wipes a slot that may be anybody's."""

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        return (Op("clear", self.name, dst=(0,)),)


class ClearsWhatIsPublished(Component):
    """Its op wipes what the tree owns by then."""

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        return tuple(Op("clear", self.name, dst=(0,), sequence=i) for i, walk in enumerate(batch) if walk.walked > 40)


class ClearsWhatIsComputed(Component):
    """Its op wipes the page in which its sequence goes on."""

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        pages = [(i, walk.boundary - 1) for i, walk in enumerate(batch) if walk.boundary > walk.start]
        return tuple(Op("clear", self.name, dst=(at,), sequence=i) for i, at in pages)


class ClearsAll(Component):
    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        return tuple(Op("clear", self.name, dst=(0,), sequence=i) for i in range(len(batch)))


class OpWritesAFreeSlot(Component):
    """Its op writes a slot that it does not name and that mostly nobody has."""

    pool: Any = None

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        return tuple(Op("wipe", self.name, dst=(walk.walked - 1,), sequence=i) for i, walk in enumerate(batch))

    @hookimpl
    def run_forward_op(self, op: Any) -> None:
        self.pool.clear((0,))


class Stamping(Component):
    """Has an op of its own in every step."""

    pool: Any = None

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        return (Op("stamp", self.name),)


class OpWritesElsewhere(Stamping):
    @hookimpl
    def run_forward_op(self, op: Any) -> None:
        self.pool.buffers["k"][:, 1] = 2.0


class SeesOneRun(Stamping):
    """Takes the pages of a buffer for one run of entries, which they need not be."""

    @hookimpl
    def run_forward_op(self, op: Any) -> None:
        self.pool.buffers["k"].view(-1)


class KeepsNothing(Component):
    """States that are never handed to the tree, where one is asked to keep them."""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim:
        return Claim(keep=())


class DropsOnSplit(Component):
    """Wants a word that the core has not: the wrong half."""

    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> SplitRule:
        return SplitRule(keep="parent")  # type: ignore[arg-type]


class AnswersTrue(Component):
    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> Any:
        return True


class OwnPool(Component):
    """Has an idea of its own of what its pool is."""

    @property
    def pool(self) -> None:
        return None

    @pool.setter
    def pool(self, pool: Any) -> None:
        pass


class FreesTwice(Component):
    """Gives back what is not its own any more."""

    pool: Any = None

    @hookimpl
    def evict_component(self, node: Any, tier: Any) -> None:
        self.pool.give(b"\0\0\0\0")


class StrangeArgument(Component):
    @hookimpl
    def commit_insert(self, walk: Any, weather: Any) -> None:
        return None


class Misspelt(Component):
    @hookimpl
    def comit_insert(self, walk: Any) -> None:
        return None


class Unmarked(Component):
    def commit_insert(self, walk: Any) -> Claim:
        return Claim(keep=())


class OpBefore(Component):
    """Remembers between the plan of a step and its run, and does with the newest what belongs to an older one."""

    pool: Any = None
    latest = 0

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        self.latest = max(walk.walked for walk in batch)
        return (Op("check", self.name, data=self.latest),)

    @hookimpl
    def run_forward_op(self, op: Any) -> None:
        if op.data != self.latest:
            raise RuntimeError("planned for another step")


class Renamed(Component):
    """Each instance under another name."""

    numbers = itertools.count()

    def __init__(self, manifest: Manifest, reach: Reach) -> None:
        super().__init__(f"window{next(self.numbers)}", manifest, reach)


class ByValue(Component):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue)

    __hash__ = None  # type: ignore[assignment]


class Growing(Component):
    """Its manifest is made anew, and wider, each time it is looked at."""

    def __init__(self, name: str, reach: Reach) -> None:
        self.looked = 0
        super().__init__(name, KV, reach)

    @property  # type: ignore[override]
    def manifest(self) -> Manifest:
        self.looked += 1
        return Manifest([Buffer("k", (1 + self.looked,), "float32")])

    @manifest.setter
    def manifest(self, value: Manifest) -> None:
        pass


def raising(hook: str) -> type[Component]:
    """A component whose hook raises."""
    from prefixloom.contract.hookspecs import ComponentSpecs

    def method(self: Any) -> Any:
        raise ValueError(f"{hook} is broken")

    members: dict[str, Any] = {hook: hookimpl(method)}
    if hook == "run_forward_op":
        members["deferred_forward_ops"] = hookimpl(lambda self: (Op("stamp", self.name),))
    assert hasattr(ComponentSpecs, hook)
    return type("Raising", (Component,), members)


RAISING = (
    "create_match_validator", "finalize_match_result", "commit_insert", "redistribute_on_node_split",
    "acquire_component_lock", "release_component_lock", "evict_component", "deferred_forward_ops", "run_forward_op",
)  # fmt: skip
SHARED = Component("window", KV, Window(W))
