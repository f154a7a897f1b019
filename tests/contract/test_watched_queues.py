"""A queue of somebody else's that raises, or answers what cannot be: a cache goes on by last use, and loses nothing.

Which call of which verb fails, before its effect or after it, while conversations come, share, rewind and go.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from prefixloom import Cache, CapacityError, CompositionError, Path, Point, Reach, Sinks, Window
from prefixloom.contract.policy import BUILT_IN, EvictionPolicy, WatchedQueue, serving
from prefixloom.contract.queues import KeyedQueue, ListQueue, Queue
from tests.support.helpers import (
    Keeping,
    cache_of,
    held,
    locks,
    owners,
    part,
    path_cache,
    run,
    serve,
    settle,
    unprotected,
)

COMPOSITIONS: dict[str, dict[str, Reach]] = {
    "paths": {"path": Path(), "other": Path(), "state": Point()},
    "hybrid": {"path": Path(), "window": Window(10), "state": Point()},
    "windows": {"window": Window(10), "sinks": Sinks(6) | Window(10)},
}
VERBS = ("add", "add_first", "remove", "touch", "pop", "forget", "inherit")


class Failing:
    """Makes queues that raise at the call of that number of one verb, before its effect or after it."""

    def __init__(self, verb: str, calls: int, late: bool, kind: type[BaseException] = LookupError) -> None:
        self.verb, self.left, self.late, self.kind = verb, calls, late, kind
        self.raised = 0

    def policy(self, base: type[Queue] = ListQueue) -> EvictionPolicy:
        space = {verb: self.failing(getattr(base, verb)) for verb in (self.verb,)}
        return EvictionPolicy("failing", make=type("Failing", (base,), space))

    def failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left:
                return function(*arguments)
            self.raised += 1
            if self.late:
                function(*arguments)
            raise self.kind("no idea")

        return call


def play(cache: Cache, draw: random.Random, moves: int) -> None:
    """Conversations that share beginnings, take turns, rewind and fail, in pools that are too small for them."""
    running: list[Any] = []
    for _ in range(moves):
        roll = draw.random()
        if (roll < 0.4 and len(running) < 3) or not running:
            prompt = [draw.randrange(2)] * draw.randint(1, 3) * 4 + [draw.randrange(3)] * draw.choice((1, 8, 12, 19))
            running += [cache.open(prompt) for _ in range(draw.choice((1, 1, 2)))]
        sequence = draw.choice(running)
        if roll < 0.7 and sequence.reserved < sequence.named:
            with suppress(CapacityError):  # what runs has all of it
                run(sequence, draw.randint(1, sequence.named - sequence.reserved))
        elif roll < 0.8:
            sequence.publish()
        elif roll < 0.9:
            (sequence.close if draw.random() < 0.8 else sequence.abort)()
            running.remove(sequence)
        else:
            cache.evict(draw.randint(1, 24))
        owners(cache, running)
        assert unprotected(cache) == []
    for sequence in running:
        sequence.close()


def all_may_go(cache: Cache) -> None:
    settle(cache)
    covered = [where for where, count in locks(cache).items() if count and where[2]]  # but for a root
    assert covered == [], "covered, and by nobody"
    components = cache.stats().components
    cache.evict(dict.fromkeys(components, 256))
    assert not any(figures.cached for figures in cache.stats().components.values()), "all may go"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("calls", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kinds", COMPOSITIONS)
def test_a_queue_that_raises_anywhere_is_dismissed_and_nothing_is_lost(
    kinds: str, verb: str, calls: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reaches = COMPOSITIONS[kinds]
    failing = Failing(verb, calls, late)
    parts = [part(name, reach) for name, reach in reaches.items()]
    cache = cache_of(*parts, policy=failing.policy(), tokens=96, slots=12, debug=calls % 2 == 0)
    play(cache, random.Random(f"{kinds} {verb} {calls}"), 120)
    assert ("going on by last use" in caplog.text) == (failing.raised > 0)
    all_may_go(cache)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_told_to_a_queue_in_such_traffic(verb: str) -> None:
    failing = Failing(verb, 1, late=True)
    cache = cache_of(
        *(part(name, reach) for name, reach in COMPOSITIONS["hybrid"].items()),
        policy=failing.policy(),
        slots=12,
        tokens=96,
    )
    play(cache, random.Random(6), 120)
    assert failing.raised


def lost(queue: Keeping) -> Any:
    ListQueue.pop(queue)
    return None


def two(queue: Keeping) -> Any:
    cell = ListQueue.pop(queue)
    ListQueue.pop(queue)
    return cell


def any_at_all(queue: Keeping) -> Any:
    return queue.known[-1] if queue.known else None


def of_the_core(queue: Keeping) -> Any:
    return any_at_all(queue).cell


class Alike:
    """It pretends to be another."""

    def __init__(self, other: Any) -> None:
        self.cell = other.cell

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(self.cell)


WRONG = {
    "lost": lost,
    "two": two,
    "any": any_at_all,
    "cell": of_the_core,
    "alike": lambda queue: Alike(ListQueue.pop(queue)),
    "other": lambda queue: "none",
    "unhashable": lambda queue: [],
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("pop", WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("kinds", COMPOSITIONS)
def test_a_queue_that_hands_out_what_it_likes_takes_nothing_from_who_reads_it(
    kinds: str, pop: Any, debug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kind: Any = type("Wrong", (Keeping,), {"pop": pop})
    parts = [part(name, reach) for name, reach in COMPOSITIONS[kinds].items()]
    cache = cache_of(*parts, policy=EvictionPolicy("wrong", make=kind), tokens=96, slots=12, debug=debug)
    play(cache, random.Random(kinds), 120)
    all_may_go(cache)
    assert "eviction policy 'wrong' failed" in caplog.text


class Blind(ListQueue):
    """It puts upper halves in, whether they may go or not."""

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        self.add_first(upper)


class Half(ListQueue):
    """It unlinks to one side only."""

    def remove(self, cell: Any) -> None:
        cell.prev.next = cell.next


class Bare(ListQueue):
    """It leaves no mark at what it was given."""

    def add(self, cell: Any) -> None:
        super().add(cell)
        self.remove(cell)


class Wiping(Keeping):
    """It breaks with all that it was given, when it is gone and before."""

    def touch(self, cell: Any) -> None:
        self.__del__()

    def __del__(self) -> None:
        for cell in self.known:
            cell.prev = cell.next = None
        self.known = []


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", [Blind, Half, Bare, Wiping])
@pytest.mark.parametrize("kinds", COMPOSITIONS)
def test_a_queue_whose_links_are_wrong_does_no_harm(kinds: str, kind: Any, debug: bool) -> None:
    parts = [part(name, reach) for name, reach in COMPOSITIONS[kinds].items()]
    cache = cache_of(*parts, policy=EvictionPolicy("wrong", make=kind), tokens=96, slots=12, debug=debug)
    for seed in range(2):
        play(cache, random.Random(seed), 80)
    all_may_go(cache)


class NewestFirst(KeyedQueue):
    def __init__(self) -> None:
        super().__init__(lambda use: -use.last)


def test_once_it_is_dismissed_what_was_used_last_goes_last() -> None:
    """And what was to go first is still the first."""
    failing = Failing("pop", 1, late=False)
    queue = WatchedQueue("backwards", failing.policy(NewestFirst).queue())
    cells = [Cell(number) for number in range(5)]
    for cell in cells:
        queue.add(cell)
    queue.touch(cells[1])
    queue.remove(cells[3])
    queue.add_first(cells[3])
    assert [queue.pop() for _ in range(6)] == [cells[3], cells[0], cells[2], cells[4], cells[1], None]
    assert all(cell.next is None for cell in cells)
    queue.add(cells[0])
    assert queue.pop() is cells[0]


class Cell:
    def __init__(self, number: int) -> None:
        self.number = number
        self.node = None
        self.prev = self.next = None


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", ["add", "add_first", "remove", "touch", "pop"])
def test_an_interrupt_passes_through_and_the_call_has_had_its_effect(verb: str, late: bool) -> None:
    failing = Failing(verb, 2, late, KeyboardInterrupt)
    queue = WatchedQueue("interrupted", failing.policy().queue())
    cells = [Cell(number) for number in range(4)]
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: queue.add(cells[3]),
        "add_first": lambda: queue.add_first(cells[3]),
        "remove": lambda: queue.remove(cells[1]),
        "touch": lambda: queue.touch(cells[1]),
        "pop": queue.pop,
    }
    failing.left += 3 if verb == "add" else 1
    for cell in cells[:3]:
        queue.add(cell)
    failing.left = 1
    with pytest.raises(KeyboardInterrupt):
        calls[verb]()
    order = {"add": [0, 1, 2, 3], "add_first": [3, 0, 1, 2], "remove": [0, 2], "touch": [0, 2, 1], "pop": [0, 1, 2]}[
        verb
    ]
    assert [cell.number for cell in cells if cell.next is not None] == sorted(order)
    assert [queue.pop().number for _ in order] == order
    assert queue.pop() is None


def test_ours_are_not_watched() -> None:
    """They are as fast as they are, and what a cell's fast way asks is their class."""
    for policy in BUILT_IN.values():
        assert not isinstance(serving(policy), WatchedQueue)
    assert type(serving(EvictionPolicy("plain", make=ListQueue))) is ListQueue
    assert type(serving(EvictionPolicy("lru", make=lambda: KeyedQueue(lambda use: 1 // 0)))) is WatchedQueue


class Tired:
    """It makes queues, and from a flush on something else."""

    def __init__(self, instead: Callable[[], Any], of: int) -> None:
        self.instead, self.left = instead, of

    def __call__(self) -> Any:
        self.left -= 1
        return ListQueue() if self.left >= 0 else self.instead()


class Vague(ListQueue):
    @property
    def forget(self) -> Any:
        raise LookupError("no idea")


@pytest.mark.parametrize(
    "instead", [lambda: 1 // 0, lambda: None, Vague, object], ids=["raises", "none", "vague", "any"]
)
def test_a_flush_goes_on_where_a_policy_makes_no_queue_any_more(
    instead: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    cache = path_cache(policy=EvictionPolicy("tired", make=Tired(instead, 2)), tokens=64)
    serve(cache, [1] * 16)
    cache.flush()
    assert "eviction policy 'tired' makes no queue" in caplog.text
    for number in range(8):
        serve(cache, [number] * 16)
    assert held(cache, [7] * 16) == 16
    settle(cache)


def interrupt() -> Any:
    raise KeyboardInterrupt


def test_a_flush_that_is_interrupted_while_queues_are_made_has_not_begun() -> None:
    parts = part("path", Path()), part("window", Window(10))
    cache = cache_of(*parts, policy=EvictionPolicy("tired", make=Tired(interrupt, 4)))
    serve(cache, [1] * 16)
    with pytest.raises(KeyboardInterrupt):
        cache.flush()
    owners(cache, [])
    assert held(cache, [1] * 16) == 16


def test_a_queue_of_our_kind_that_is_given_to_everybody_is_given_to_nobody() -> None:
    one = ListQueue()
    parts = part("path", Path()), part("state", Point())
    cache = cache_of(*parts, policy=EvictionPolicy("one", make=lambda: one))
    for _ in range(2):
        serve(cache, [1] * 16)
        all_may_go(cache)
        cache.flush()
    assert one.empty


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kinds", COMPOSITIONS)
def test_a_queue_that_all_components_share_hands_nobody_what_is_anothers(
    kinds: str, debug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = Keeping()
    parts = [part(name, reach) for name, reach in COMPOSITIONS[kinds].items()]
    cache = cache_of(*parts, policy=EvictionPolicy("one", make=lambda: one), tokens=96, slots=12, debug=debug)
    for seed in range(2):
        play(cache, random.Random(seed), 80)
    all_may_go(cache)
    assert "eviction policy 'one' failed" in caplog.text


def test_of_a_split_a_queue_hears_whether_or_not_it_has_the_piece() -> None:
    """What it knows of the whole is true of both halves."""
    told: list[tuple[int, int, bool]] = []

    class Hearing(ListQueue):
        def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
            told.append((upper.node.end, lower.node.end, linked))
            super().inherit(upper, lower, linked)

    cache = cache_of(part("window", Window(20)), policy=EvictionPolicy("hearing", make=Hearing))
    serve(cache, [1] * 16)
    with cache.open([1] * 16):
        serve(cache, [1] * 8 + [2] * 8)
    serve(cache, [1] * 4 + [2] * 8)
    assert told == [(8, 16, False), (4, 8, True)]


def test_a_queue_that_cannot_be_told_of_a_use_is_refused() -> None:
    class Deaf:
        add = add_first = remove = pop = forget = inherit = lambda self, *_: None

    with pytest.raises(CompositionError, match="has no touch"):
        path_cache(policy=EvictionPolicy("deaf", make=Deaf))  # type: ignore[arg-type]
