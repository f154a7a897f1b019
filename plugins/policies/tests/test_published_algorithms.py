"""On cells of one token and no tree, each queue evicts what a plain model of the published algorithm evicts."""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixloom_policies.arc import ArcQueue
from prefixloom_policies.gdsf import KNEE, GreedyDualQueue
from prefixloom_policies.retention import RetentionQueue
from prefixloom_policies.s3fifo import SmallMainQueue


class Place:
    """A node below the root, whose edge is one token."""

    def __init__(self, name: int, priority: int = 0, until: float = math.inf) -> None:
        self.parent: Any = Top
        self.end, self.key, self.priority, self.until = 1, name.to_bytes(4, "little"), priority, until


class Top:
    parent, end = None, 0


class Block:
    def __init__(self, name: int, **facts: Any) -> None:
        self.name, self.node = name, Place(name, **facts)
        self.prev: Any = None
        self.next: Any = None


def evicted_by(
    queue: Any, names: list[int], room: int, facts: Callable[[int], dict[str, Any]] = lambda _: {}
) -> list[int]:
    """What a pool of ``room`` blocks evicts: a use takes a block off the queue and adds it again."""
    here: dict[int, Block] = {}
    out = []
    for name in names:
        if name in here:
            queue.remove(here[name])
        else:
            if len(here) == room:
                victim = queue.pop()
                queue.forget(victim)
                del here[victim.name]
                out.append(victim.name)
            here[name] = Block(name, **facts(name))
        queue.add(here[name])
    return out


def mixed(seed: int, count: int = 3000) -> list[int]:
    """Popular blocks, scans and loops in turn."""
    chance = random.Random(seed)
    fresh = itertools.count(10_000)
    names: list[int] = []
    while len(names) < count:
        kind = chance.randrange(3)
        if kind == 0:
            names += [int(chance.paretovariate(0.7)) % 200 for _ in range(60)]
        elif kind == 1:
            names += [next(fresh) for _ in range(25)]
        else:
            names += [500 + each for each in range(30)] * 2
    return names


def arc(names: list[int], c: int) -> Iterator[int]:
    t1, t2, b1, b2 = (OrderedDict[int, None]() for _ in range(4))
    p = 0.0
    for name in names:
        if name in t1 or name in t2:
            (t1 if name in t1 else t2).pop(name)
            t2[name] = None
            continue
        if len(t1) + len(t2) == c:
            source, ghosts = (t1, b1) if len(t1) > p or not t2 else (t2, b2)
            victim, _ = source.popitem(last=False)
            ghosts[victim] = None
            yield victim
            while len(b1) > c - len(t1):
                b1.popitem(last=False)
            while len(b2) > 2 * c - len(t1) - len(t2) - len(b1):
                b2.popitem(last=False)
        if name in b1:
            p = min(c, p + max(1, len(b2) / len(b1)))
            del b1[name]
            t2[name] = None
        elif name in b2:
            p = max(0, p - max(1, len(b1) / len(b2)))
            del b2[name]
            t2[name] = None
        else:
            t1[name] = None


def s3fifo(names: list[int], c: int) -> Iterator[int]:
    small, main, ghosts = (OrderedDict[int, None]() for _ in range(3))
    uses: dict[int, int] = {}
    for name in names:
        if name in small or name in main:
            uses[name] = min(3, uses[name] + 1)
            (small if name in small else main).move_to_end(name)
            continue
        while len(small) + len(main) == c:
            if small and (not main or 10 * len(small) >= c):
                first, _ = small.popitem(last=False)
                if uses[first] > 1:
                    uses[first] = 0
                    main[first] = None
                else:
                    ghosts[first] = None
                    yield first
            else:
                first, _ = main.popitem(last=False)
                if uses[first]:
                    uses[first] -= 1
                    main[first] = None
                else:
                    yield first
            while len(ghosts) > c - len(small):
                ghosts.popitem(last=False)
        uses[name] = 0
        if name in ghosts:
            del ghosts[name]
            main[name] = None
        else:
            small[name] = None


def greedy_dual(names: list[int], c: int) -> Iterator[int]:
    ranks: dict[int, tuple[float, int]] = {}
    uses: dict[int, int] = {}
    age = 0.0
    for number, name in enumerate(names):
        if name not in ranks:
            if len(ranks) == c:
                victim = min(ranks, key=lambda each: ranks[each])
                age = ranks.pop(victim)[0]
                yield victim
            uses[name] = 0
        uses[name] += 1
        ranks[name] = (age + uses[name] * (1 + 0.5 / KNEE), number)


@pytest.mark.parametrize(
    ("make", "model"), [(ArcQueue, arc), (SmallMainQueue, s3fifo), (GreedyDualQueue, greedy_dual)],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_a_flat_queue_evicts_what_the_published_algorithm_evicts(make: Any, model: Any) -> None:
    for seed, room in ((1, 10), (2, 40), (3, 100)):
        names = mixed(seed)
        expected = list(model(names, room))
        assert len(expected) > 100
        assert evicted_by(make(), names, room) == expected, (seed, room)


def test_retention_evicts_the_lowest_priority_and_of_equals_what_is_wanted_for_a_shorter_time() -> None:
    chance = random.Random(5)
    facts = {
        name: {"priority": chance.randrange(3), "until": chance.choice((9.0, 99.0, math.inf))} for name in range(60)
    }
    names = [chance.randrange(60) for _ in range(600)]
    order: dict[int, tuple[int, float, int]] = {}
    expected = []
    for number, name in enumerate(names):
        if name not in order and len(order) == 20:
            victim = min(order, key=lambda each: order[each])
            del order[victim]
            expected.append(victim)
        order[name] = (facts[name]["priority"], facts[name]["until"], number)
    assert evicted_by(RetentionQueue(), names, 20, lambda name: facts[name]) == expected
