"""The shape of costs: what must not grow, and what must stay in proportion. Bytecodes are counted, no time is measured.

A count of bytecodes is the same in every run, whatever else the machine does. No test here holds an absolute number: a
change may make a call dearer, but it may not make its cost depend on the size of the tree or on the cached length.
``python -m bench --against REV`` compares absolute costs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest

from prefixloom import (
    Buffer,
    Cache,
    Chunk,
    Component,
    Manifest,
    Path,
    Point,
    Reach,
    Sequence,
    Sinks,
    TierManifest,
    Window,
    compose,
    encode,
)
from prefixloom_full import FullComponent
from prefixloom_hicache import HostTier
from prefixloom_mamba import MambaComponent
from prefixloom_swa import SwaComponent

COMPOSITIONS = ("F", "FSM", "FSM+tier")
PAGE = 16
WINDOW = 256
SHARED = LEAF = ASKED = ANSWER = 64
HISTORY = 1024
SPARE = 2 * HISTORY
FLAT = 1.05
"""How much more a call may cost when there is much more data. Loops over victims differ by one or two of them."""


def executed(call: Callable[[], object]) -> int:
    """The bytecodes that the interpreter executes for a call."""
    count = 0

    def follow(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return follow

    before = sys.gettrace()
    gc.disable()  # a collection would count the finalizers of other tests
    sys.settrace(follow)
    (lambda: None)()  # Python 3.12 sends no opcodes the first time that any frame asks for them
    sys.settrace(follow)
    count = 0
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def installed(letter: str) -> Component:
    kv: dict[str, Any] = {"layers": (0,), "kv_heads": 1, "k_dim": 1, "v_dim": 1}
    if letter == "F":
        return FullComponent(**kv)
    return SwaComponent(**kv, window=WINDOW) if letter == "S" else MambaComponent(conv=(1, 1), recurrent=(1,))


class ComponentFromOutside(Component):
    """A component of a package that prefixloom does not know."""


def foreign(letter: str) -> Component:
    name, reach = {"F": ("full", Path()), "S": ("swa", Window(WINDOW)), "M": ("mamba", Point())}[letter]
    return ComponentFromOutside(name, Manifest([Buffer("k", (1, 1)), Buffer("v", (1, 1))]), reach)


class ServedCache:
    """A cache, and requests that it serves."""

    def __init__(self, comps: str, tokens: int, states: int, make: Callable[[str], Component] = installed) -> None:
        letters, _, tier = comps.partition("+")
        parts = [make(letter) for letter in letters]
        idle = [HostTier(TierManifest(capacity=tokens, write="selective", hits=1 << 30))] if tier else []
        self.cache: Cache = compose(
            None,
            plugins=[*parts, *idle],
            page_size=PAGE,
            capacity={part.name: states if part.name == "mamba" else tokens for part in parts},
            debug=False,
        )
        self.next = 0

    def text(self, count: int) -> list[int]:
        """Tokens that no earlier text has."""
        self.next += count
        return list(range(self.next - count, self.next))

    def compute(self, sequence: Sequence, count: int) -> None:
        sequence.grow(count)
        with self.cache.step((sequence,)) as step:
            step.run_ops()

    def chunk(self, sequence: Sequence, count: int) -> None:
        self.compute(sequence, count)
        sequence.publish()

    def serve(self, tokens: list[int], chunk: int = 1 << 30) -> None:
        with self.cache.open(tokens) as sequence:
            while sequence.reserved < sequence.named:
                self.chunk(sequence, min(chunk, sequence.named - sequence.reserved))


class Chat(ServedCache):
    """A cache full of leaves behind a shared prefix, and a conversation that continues again and again."""

    def __init__(self, comps: str, leaves: int, make: Callable[[str], Component] = installed) -> None:
        super().__init__(comps, leaves * LEAF + SPARE, leaves, make)
        shared = self.text(SHARED)
        for _ in range(leaves + SPARE // LEAF):
            self.serve([*shared, *self.text(LEAF)])
        self.history = [*shared, *self.text(HISTORY - SHARED)]
        self.serve(self.history, HISTORY // 2)
        for _ in range(SPARE // (ASKED + ANSWER)):
            self.turn()
        assert all(figures.evicted for figures in self.cache.stats().components.values())

    def turn(self) -> None:
        asked, answer = encode([*self.history, *self.text(ASKED)]), encode(self.text(ANSWER))
        sequence = self.cache.open(asked)
        sequence.grow(ASKED)
        sequence.append(answer)
        self.compute(sequence, ANSWER)
        sequence.close()

    def turns(self) -> None:
        for _ in range(8):
            self.turn()


@cache
def cost_of_turns(comps: str, leaves: int = 64, make: Callable[[str], Component] = installed) -> int:
    return executed(Chat(comps, leaves, make).turns)


# ---------------------------------------------------------------- what must not grow


@pytest.mark.parametrize("comps", COMPOSITIONS)
def test_a_turn_does_not_depend_on_the_number_of_cached_leaves(comps: str) -> None:
    assert cost_of_turns(comps, 1024) <= FLAT * cost_of_turns(comps, 64)


@pytest.mark.parametrize("comps", COMPOSITIONS)
def test_an_eviction_depends_on_what_it_frees_and_not_on_the_size_of_the_tree(comps: str) -> None:
    def cost(leaves: int, victims: int) -> int:
        cache = Chat(comps, leaves).cache
        cache.evict(16 * LEAF)  # the first eviction also frees what windows kept of long nodes for no boundary
        return executed(lambda: cache.evict(victims * LEAF))

    small = cost(128, 8)
    assert cost(1024, 8) <= FLAT * small
    assert cost(128, 64) <= FLAT * 8 * small


@pytest.mark.parametrize("comps", COMPOSITIONS)
def test_a_chunk_does_not_depend_on_the_length_that_is_cached_before_it(comps: str) -> None:
    length, chunk = 16384, 256
    served = ServedCache(comps, 2 * length, 2 * length // chunk)  # with room to spare: no chunk evicts
    costs = []
    with served.cache.open(served.text(length)) as sequence:
        while sequence.reserved < length:
            costs.append(executed(lambda: served.chunk(sequence, chunk)))
    assert max(costs[8:]) <= FLAT * max(costs[2:8])  # a window is full after the first chunk


@pytest.mark.parametrize("comps", COMPOSITIONS)
def test_a_match_depends_on_the_number_of_nodes_and_not_on_their_length(comps: str) -> None:
    def cost(length: int, nodes: int) -> int:
        served = ServedCache(comps, 2 * length, 2 * nodes)
        prompt = served.text(length)
        served.serve(prompt, length // nodes)
        asked = encode([*prompt, *served.text(PAGE)])
        return executed(lambda: served.cache.match(asked))

    assert cost(16384, 4) <= FLAT * cost(1024, 4)
    assert cost(4096, 64) - cost(4096, 32) <= FLAT * 2 * (cost(4096, 32) - cost(4096, 16))


@pytest.mark.parametrize("comps", COMPOSITIONS)
def test_requests_under_eviction_leave_no_garbage_to_the_collector(comps: str) -> None:
    chat = Chat(comps, 64)
    gc.collect()
    gc.disable()
    try:
        chat.turns()
        assert gc.collect() == 0
    finally:
        gc.enable()


# ---------------------------------------------------------------- what must stay in proportion


def test_a_window_and_a_state_cost_little_more_than_full_attention_again() -> None:
    assert cost_of_turns("FSM") <= 2.2 * cost_of_turns("F")


@pytest.mark.parametrize("comps", ["F", "FSM"])
def test_an_idle_host_tier_costs_at_most_a_quarter_of_a_turn(comps: str) -> None:
    assert cost_of_turns(f"{comps}+tier") <= 1.25 * cost_of_turns(comps)


@pytest.mark.parametrize("comps", ["F", "FSM"])
def test_a_component_from_outside_costs_as_much_as_an_installed_one(comps: str) -> None:
    assert cost_of_turns(comps, make=foreign) <= 1.02 * cost_of_turns(comps)


# ---------------------------------------------------------------- what a reach costs


class PlainWindow(Reach):
    """``Window(WINDOW)`` in plain Python. It counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        self.asked += 1
        return ((max(0, n - WINDOW + 1), n),) if n else ()

    def until(self, p: int) -> float:
        self.asked += 1
        return p + WINDOW - 1


class PlainPath(Reach):
    """``Path()`` in plain Python, which does not say that it is closed upward."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((0, n),) if n else ()


class PlainLandmarks(PlainWindow):
    """The same window, and one position in 64 for good."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return (*((p, p + 1) for p in range(0, n, 64)), *super().needs(n))

    def until(self, p: int) -> float:
        return super().until(p) if p % 64 else float("inf")


def only(reach: Reach) -> Callable[[str], Component]:
    return lambda _: ComponentFromOutside("kept", Manifest([Buffer("k", (1, 1))]), reach)


@pytest.mark.parametrize(
    ("reach", "built_in", "times"),
    [
        (Sinks(4) | Window(WINDOW), Window(WINDOW), 1.3),
        (Window(WINDOW) | Chunk(WINDOW), Window(WINDOW), 1.3),
        (PlainWindow(), Window(WINDOW), 2),
        (PlainPath(), Path(), 2),
        (PlainLandmarks(), Window(WINDOW), 2),
    ],
    ids=["sinks and window", "window and chunk", "plain window", "plain path", "plain landmarks"],
)
def test_a_reach_costs_little_more_than_the_built_in_one_of_its_shape(
    reach: Reach, built_in: Reach, times: float
) -> None:
    ours, theirs = (Chat("S", 64, only(each)) for each in (reach, built_in))
    for chat in (ours, theirs):
        chat.turns()
    assert executed(ours.turns) <= times * executed(theirs.turns)


def test_a_reach_in_plain_python_is_asked_once_for_each_boundary_and_each_position() -> None:
    reach = PlainWindow()
    served = ServedCache("S", 4 * HISTORY, 0, only(reach))
    served.serve(served.text(HISTORY), LEAF)
    asked = reach.asked
    assert HISTORY <= asked <= HISTORY + HISTORY // PAGE + 1
    served.serve(served.text(HISTORY), LEAF)
    assert reach.asked == asked


class EveryOther(PlainWindow):
    """Every other position: half as many intervals as a prompt has tokens, in pages of one token."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        self.asked += 1
        return tuple((p, p + 1) for p in range(0, n, 2))

    def until(self, p: int) -> float:
        self.asked += 1
        return p if p % 2 else float("inf")


def test_what_is_remembered_of_a_reach_is_bounded() -> None:
    """The boundaries of a prompt of 640 tokens have a hundred thousand intervals together, and are forgotten."""
    reach = EveryOther()
    cache = compose(None, plugins=[only(reach)("")], page_size=1, capacity={"kept": 2048}, device="meta", debug=False)

    def serve(first: int, length: int) -> int:
        asked = reach.asked
        with cache.open([first, *range(1, length)]) as sequence:
            for _ in range(length):
                sequence.grow(1)
                with cache.step((sequence,)) as step:
                    step.run_ops()
                sequence.publish()
        return reach.asked - asked

    assert serve(10_000, 320) > 320
    assert serve(20_000, 320) == 0, "these few are remembered"
    serve(30_000, 640)
    assert serve(40_000, 320) > 0
