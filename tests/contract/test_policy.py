"""Eviction order: every policy against a naive model, custom keys, exactness for inner anchors, flat cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import (
    Buffer,
    Codec,
    Component,
    CompositionError,
    EvictionPolicy,
    InputError,
    Manifest,
    Path,
    Point,
    Reach,
    Window,
    compose,
    hookimpl,
)
from prefixloom.contract.policy import BUILT_IN
from prefixloom.contract.queues import KEPT_TURNS, KeyedQueue, Link, ListQueue, Queue, RankedQueue, Use
from tests.support.helpers import cache_of, finish, held, part, path_cache, run, serve, settle


class Cell(Link):
    """As much of a cell as a queue looks at."""

    def __init__(self, number: int) -> None:
        self.prev = self.next = None
        self.node = SimpleNamespace(parent=SimpleNamespace(end=0), end=number + 1, priority=number % 3)
        self.number = number

    def __repr__(self) -> str:
        return f"cell {self.number}"


class Naive:
    """What a policy promises, said as a sorted list: (rank, order) of every cell that may go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tick = 0
        self.uses: dict[Cell, int] = {}
        self.standing: dict[Cell, tuple[Any, ...]] = {}

    def add(self, cell: Cell) -> None:
        self.tick += 1
        known = cell in self.uses
        self.uses[cell] = self.uses.get(cell, 0) + 1
        rank: dict[str, tuple[Any, ...]] = {
            "lru": (1, self.tick),
            "lfu": (1, self.uses[cell], self.tick),
            "priority": (1, cell.node.priority, self.tick),
            "slru": (1, 1 if known else 0, self.tick),
            "a key": (1, -cell.node.end, self.tick),
        }
        self.standing[cell] = rank[self.name]

    def add_first(self, cell: Cell) -> None:
        self.tick += 1
        self.standing[cell] = (0, -self.tick)

    def remove(self, cell: Cell) -> None:
        del self.standing[cell]

    def pop(self) -> Cell | None:
        if not self.standing:
            return None
        cell = min(self.standing, key=lambda c: self.standing[c])
        self.remove(cell)
        return cell

    def forget(self, cell: Cell) -> None:
        self.uses.pop(cell, None)


def deepest_first() -> KeyedQueue:
    """Its keys are of the same kind as the order among those that go before all others, and often equal to it."""
    return KeyedQueue(lambda use: -use.depth)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*BUILT_IN, "a key"])
def test_a_policy_evicts_in_the_order_of_its_naive_model(name: str, seed: int) -> None:
    draw = random.Random(seed)
    queue = deepest_first() if name == "a key" else BUILT_IN[name].queue()
    model = Naive(name)
    idle = [Cell(i) for i in range(30)]
    for _ in range(3000):
        choice = draw.random()
        if choice < 0.5 and idle:
            cell = idle.pop(draw.randrange(len(idle)))
            first = draw.random() < 0.1
            for side in (queue, model):
                (side.add_first if first else side.add)(cell)  # type: ignore[attr-defined]
            assert cell.next is not None, "a cell in a queue says so"
        elif choice < 0.8 and model.standing:
            cell = draw.choice(list(model.standing))
            queue.remove(cell)
            model.remove(cell)
            idle.append(cell)
            assert cell.next is None
        else:
            cell = queue.pop()
            assert cell is model.pop()
            if cell is None:
                continue
            assert cell.next is None
            idle.append(cell)
            if draw.random() < 0.5:
                queue.forget(cell)
                model.forget(cell)
    while (cell := model.pop()) is not None:
        assert queue.pop() is cell
    assert queue.pop() is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_upper_half_of_a_split_has_the_lower_halfs_history(name: str) -> None:
    queue = BUILT_IN[name].queue()
    cells = [Cell(i * 3) for i in range(4)]
    for cell in cells:
        queue.add(cell)
    upper = Cell(0)
    queue.inherit(upper, cells[1], True)
    order = [queue.pop() for _ in range(5)]
    assert abs(order.index(upper) - order.index(cells[1])) == 1, "it stands beside what it was split off"
    assert set(order) == {upper, *cells}
    assert queue.pop() is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_upper_half_that_may_not_go_is_not_queued_but_keeps_its_history(name: str) -> None:
    queue = BUILT_IN[name].queue()
    lower, upper, other = Cell(3), Cell(0), Cell(6)
    queue.add(lower)
    queue.remove(lower)
    queue.inherit(upper, lower, False)
    assert queue.pop() is None
    queue.add(other)
    queue.add(upper)
    expected = {"lru": other, "lfu": other, "slru": other, "priority": other}
    assert queue.pop() is expected[name]


class Hooked(Component):
    @hookimpl
    def commit_insert(self, walk: object) -> None:
        """It wants all of it kept."""


@pytest.mark.parametrize("reach", [Window(100), Point()], ids=str)
@pytest.mark.parametrize("name", BUILT_IN)
def test_who_goes_does_not_depend_on_whether_a_hook_is_asked(name: str, reach: Reach) -> None:
    left = []
    for kind in (Component, Hooked):
        cache = cache_of(part("full", Path()), part("other", reach, kind), debug=False, policy=name)
        for first in (0, 100, 200):
            sequence = cache.open(range(first, first + 12))
            run(sequence, 8)
            if not first:
                sequence.publish()  # it runs on, and was used once more when it ends
            sequence.close()
        with cache.open(range(100, 112)) as again:
            finish(again)
        cache.evict({"other": 1})
        left.append([held(cache, range(first, first + 8)) for first in (0, 100, 200)])
    assert left[0] == left[1]


def test_priority_keeps_the_higher_and_a_leaf_never_outranks_by_age() -> None:
    cache = path_cache(tokens=64, policy="priority")
    serve(cache, [1] * 16, priority=5)
    for i in range(2, 9):
        serve(cache, [i] * 16)
    assert held(cache, [1] * 16) == 16
    serve(cache, [99] * 16, priority=9)
    cache.evict(48)
    assert held(cache, [99] * 16) == 16
    settle(cache)


def test_a_priority_lapses_after_turns_without_use_and_a_use_renews_it() -> None:
    queue = BUILT_IN["priority"].queue()
    assert isinstance(queue, RankedQueue)
    pinned, used, plain = (Cell(number) for number in (1, 4, 3))
    for cell in (pinned, used, plain):
        queue.add(cell)
    for turn in range(4 * KEPT_TURNS):
        fresh = [Cell(99 + 3 * number) for number in range(queue.standing)]
        for cell in fresh:
            queue.add(cell)
        queue.touch(used)
        for _ in fresh:
            queue.forget(queue.pop())
        assert used.next is not None
        assert pinned.next is not None or turn >= KEPT_TURNS, "its priority keeps it"
    assert pinned.next is None


def test_under_lru_a_prefix_that_is_matched_again_outlives_older_leaves() -> None:
    cache = path_cache()
    serve(cache, [1] * 16, chunk=8)
    serve(cache, [1] * 8 + [2] * 8)
    serve(cache, [3] * 16)
    cache.lease(cache.match([1] * 8)).release()  # the inner boundary alone is used again
    cache.evict(16)
    assert held(cache, [1] * 8) == 8
    cache.evict(16)
    assert held(cache, [1] * 8) == 8, "its leaves and the older prompt went, the anchor stays"
    assert held(cache, [3] * 16) == 0
    settle(cache)


def test_a_parent_left_childless_is_the_next_to_go_by_its_own_last_use() -> None:
    cache = path_cache()
    serve(cache, [1] * 16, chunk=8)
    serve(cache, [3] * 16)
    cache.evict(4)
    assert (held(cache, [1] * 8), held(cache, [1] * 16)) == (8, 8)
    cache.evict(4)
    assert (held(cache, [1] * 8), held(cache, [3] * 16)) == (0, 16)
    settle(cache)


# ---------------------------------------------------------------- somebody else's policy


def test_a_custom_key_decides_and_the_smallest_goes_first() -> None:
    biggest = EvictionPolicy("biggest", key=lambda use: -use.tokens)
    cache = path_cache(policy=biggest)
    for i, length in enumerate([8, 32, 16]):
        serve(cache, [i] * length)
    cache.evict(4)
    assert [held(cache, [i] * 8) for i in range(3)] == [8, 0, 8]
    cache.evict(4)
    assert [held(cache, [i] * 8) for i in range(3)] == [8, 0, 0]
    settle(cache)


def test_a_key_sees_the_use_of_its_cell() -> None:
    seen: list[Use] = []

    def key(use: Use) -> int:
        seen.append(Use(use.born, use.last, use.uses, use.tokens, use.depth, use.priority))
        return use.last

    cache = path_cache(policy=EvictionPolicy("spy", key=key))
    serve(cache, [1] * 16, priority=3)
    serve(cache, [1] * 16)
    serve(cache, [1] * 16 + [2] * 8)
    first, second, third = (seen[0], seen[1], seen[-1])
    assert (first.uses, first.tokens, first.depth, first.priority) == (1, 16, 16, 3)
    assert (second.uses, second.born) == (2, first.born)
    assert second.last > first.last
    assert (third.tokens, third.depth) == (8, 24)
    settle(cache)


class Locking(Component):
    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> None: ...


@pytest.mark.parametrize("kind", [Component, Locking])
@pytest.mark.parametrize("codec", [None, Codec("bfloat16", tolerance=0.01)], ids=["plain", "coded"])
@pytest.mark.parametrize("chunk", [8, 16], ids=["published twice", "closed"])
def test_a_state_that_is_published_counts_as_used_once(kind: type[Component], codec: Codec | None, chunk: int) -> None:
    uses: list[int] = []
    policy = EvictionPolicy("spy", key=lambda use: uses.append(use.uses) or use.last)
    state = kind("state", Manifest([Buffer("h", (4,), "float32")], stored_as=codec), Point())
    cache = compose(None, plugins=[state], page_size=4, capacity={"state": 4}, max_running=2, policy=policy)
    serve(cache, [1] * 16, chunk=chunk)
    assert uses == [1] * (16 // chunk)
    settle(cache)


def test_a_split_divides_what_a_key_knows_by_position() -> None:
    cache = path_cache(policy=EvictionPolicy("spy", key=lambda use: use.last))
    serve(cache, [1] * 16)
    serve(cache, [1] * 4 + [2] * 4)
    watched: Any = cache.core.shape.lanes[0].queue
    queue = watched._queue
    assert isinstance(queue, KeyedQueue)
    assert sorted((use.tokens, use.depth) for use in queue._use.values()) == [(4, 4), (4, 8), (12, 16)]


def test_a_keyed_queue_stays_in_proportion_to_its_cells() -> None:
    queue = KeyedQueue(lambda use: use.last)
    cells = [Cell(i) for i in range(20)]
    for _ in range(500):
        for cell in cells:
            queue.add(cell)
            queue.remove(cell)
    assert len(queue._heap) <= 4 * len(cells) + 65


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_policy_forgets_what_is_gone(name: str) -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), policy=name, tokens=64)
    draw = random.Random(3)
    for _ in range(150):
        serve(cache, [draw.randrange(2) for _ in range(draw.randint(8, 40))], chunk=8)
    cache.evict(64)
    for lane in cache.core.shape.lanes:
        for slot in ("_use", "_kept"):
            assert len(getattr(lane.queue, slot, ())) == 0, (lane.name, slot)
    settle(cache)


def broken(use: Use) -> Any:
    raise LookupError("no idea")


def late(use: Use) -> Any:
    return use.last if use.last < 30 else "late"


def test_a_queue_that_cannot_say_what_goes_next_is_replaced_by_last_use(caplog: pytest.LogCaptureFixture) -> None:
    cache = path_cache(policy=EvictionPolicy("half", make=type("Half", (ListQueue,), {"add_first": Queue.add_first})))
    serve(cache, [1] * 16, chunk=8)
    serve(cache, [2] * 16)
    cache.evict(8)
    assert "going on by last use" in caplog.text
    cache.evict(8)
    assert [held(cache, [number] * 16) for number in (1, 2)] == [0, 16]


@pytest.mark.parametrize("key", [broken, late, lambda use: object()], ids=["raises", "turns", "uncomparable"])
def test_a_policy_whose_key_fails_is_replaced_by_last_use(
    key: Callable[[Use], Any], caplog: pytest.LogCaptureFixture
) -> None:
    cache = path_cache(policy=EvictionPolicy("broken", key=key), tokens=64)
    for i in range(40):
        serve(cache, [i] * 16)
    assert [held(cache, [i] * 16) for i in range(36, 40)] == [16] * 4
    settle(cache)
    cache.evict(64)
    assert cache.stats().components["path"].free == 16
    assert "going on by last use" in caplog.text


def test_a_policy_with_neither_a_key_nor_a_queue_is_refused() -> None:
    with pytest.raises(CompositionError, match="'empty': it has neither a key nor a queue"):
        path_cache(policy=EvictionPolicy("empty"))


def test_an_unknown_policy_is_refused_with_those_that_exist() -> None:
    with pytest.raises(CompositionError, match=r"Built in: lru, slru, lfu, priority"):
        path_cache(policy="newest")


@pytest.mark.parametrize("priority", ["high", None, 1.5, True])
def test_a_priority_that_is_no_whole_number_is_refused(priority: Any) -> None:
    cache = path_cache(policy="priority")
    with pytest.raises(InputError, match="priority"):
        cache.open(range(8), priority=priority)
    settle(cache)
