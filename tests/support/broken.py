"""The kill table of the conformance kit: broken components with the law that must kill each, and sound ones.

The truth of the layers is the original's; only the component errs. Most mistakes are one hook: ``hooked`` makes a
component of it, and ``declines``, ``allows``, ``locks`` and ``plans`` make those that answer in the usual ways.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable
from datetime import datetime as now
from typing import Any

import attrs
import torch

from prefixloom import (
    AdmissionPolicy,
    Buffer,
    Claim,
    Codec,
    Component,
    Manifest,
    Op,
    Optional,
    Path,
    Point,
    Reach,
    Receipt,
    Sinks,
    SplitRule,
    Touch,
    Transfer,
    Window,
    hookimpl,
)
from prefixloom.contract.hookspecs import ComponentSpecs
from prefixloom.contract.reach import Interval
from prefixloom.testing import ComponentCase, Truth

K, V = Buffer("k", (2,), "float32", range(2)), Buffer("v", (3,), "bfloat16", range(2))
KV = Manifest([K, V])
W = 7
WIDE = Buffer("k", (2, 8), "float32")
FEW = Buffer("k", (2,), "bfloat16", range(2))
SHARES, OWNS = (attrs.evolve(K, shared={5: owner}) for owner in (0, 1))


def window_reads(q: int) -> range:
    return range(max(0, q - W + 1), q)


def decaying(tokens: Any, start: int, end: int, buffers: Any, pages: Any) -> Any:
    """Compute layers whose state decays and grows by each token, in float32."""
    state, outputs = buffers["k"][:, pages[0]].float(), []
    for token in tokens[start:end]:
        state = 0.9 * state + token.float().sin()
        outputs.append(state)
    buffers["k"][:, pages[0]] = state
    return torch.stack(outputs)


WINDOW = Truth(reads=window_reads, ahead=0, grid=1, buffers=(K, V), tokens_per_entry=1)
PATH = attrs.evolve(WINDOW, reads=range)
SINKS = attrs.evolve(WINDOW, reads=lambda q: {*range(min(q, 2)), *window_reads(q)})
STATE = Truth(grid=1, buffers=(K, V))
GRID = attrs.evolve(STATE, grid=8)
PAGES_ON_A_GRID = attrs.evolve(WINDOW, grid=16)
AHEAD = attrs.evolve(PATH, ahead=1)
IMAGES = attrs.evolve(WINDOW, ends=lambda n, extra: not any(start < n < end for start, end, _ in extra))
RUN = Truth(layers=decaying, grid=1)


# ---------------------------------------------------------------- reaches


class Plain(Reach):
    """A window in plain Python: correct. ``early`` and ``late``: so many boundaries ``until`` is wrong by."""

    back = W - 1

    def __init__(self, early: int = 0, late: int = 0, **says: bool) -> None:
        self.early, self.late = early, late
        for name, value in says.items():
            setattr(self, name, value)

    def needs(self, n: int) -> tuple[Interval, ...]:
        low = max(0, n - self.back)
        return ((low, n),) if low < n else ()

    def until(self, p: int) -> float:
        return p + self.back - self.early + self.late


class PastTheBoundary(Plain):
    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((max(0, n - self.back), n + 1),)


class ConvexOptional(Optional):
    """A lease covers what its own boundary needs, so nothing of it is protected."""

    convex = True


class ConvexAndNot(Reach):
    """Every second group of four: a position is needed, then is not, then is again."""

    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        return tuple((low, min(low + 4, n)) for low in range(n // 4 % 2 * 4, n, 8))


class StateWithPositions(Reach):
    unit = "boundary"

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((n - 1, n),) if n else ()


class Tiring(Plain):
    """Its answer depends on how often it was asked."""

    asked = 0

    def more(self) -> int:
        return self.asked % 2

    def needs(self, n: int) -> tuple[Interval, ...]:
        self.asked += 1
        return ((max(0, n - self.back - self.more()), n),) if n else ()


class Swelling(Tiring):
    """Needs more the longer it is in use: what a lease covered is no longer enough."""

    def more(self) -> int:
        return self.asked // 10


# ---------------------------------------------------------------- makers of components


def hooked(**members: Any) -> type[Component]:
    """Return a class of components with these hooks. A member that is no hook is an attribute of the class.

    The class is found in this module by its name, so another process that imports the module can make it, too.
    """
    marked = {name: hookimpl(each) if hasattr(ComponentSpecs, name) else each for name, each in members.items()}
    name = f"Hooked{sum(known.startswith('Hooked') for known in globals())}"
    kind = globals()[name] = type(name, (Component,), marked)
    return kind


def declines(when: Callable[[Any], object]) -> type[Component]:
    """Return components that publish nothing of such a walk."""
    return hooked(commit_insert=lambda self, walk: Claim(keep=()) if when(walk) else None)


def allows(boundary: Callable[[Any], Any]) -> type[Component]:
    """Return components whose validator answers this."""
    return hooked(create_match_validator=lambda self: boundary)


def locks(answer: Callable[[Any], Any]) -> type[Component]:
    """Return components that answer this when a lease is taken."""
    return hooked(acquire_component_lock=lambda self, anchor: answer(anchor))


def plans(ops: Callable[[Any], Iterable[tuple[int, int]]], kind: str = "clear", **more: Any) -> type[Component]:
    """Return components whose ops are at these (number of the sequence, place) of a step."""

    def planned(self: Any, batch: Any) -> tuple[Op, ...]:
        return tuple(Op(kind, self.name, dst=(at,), sequence=number) for number, at in ops(batch))

    return hooked(deferred_forward_ops=planned, **more)


def stamps(work: Callable[[Any, Any], Any]) -> type[Component]:
    """Return components with an op of their own in every step, which does this work on the pool."""

    def stamp(self: Any, op: Any) -> None:
        work(self.pool, op)

    return hooked(pool=None, deferred_forward_ops=lambda self, batch: (Op("stamp", self.name),), run_forward_op=stamp)


def raising(hook: str) -> type[Component]:
    """Return components whose hook raises."""

    def method(self: Any) -> Any:
        raise ValueError(f"{hook} is broken")

    more = {"deferred_forward_ops": lambda self: (Op("stamp", self.name),)} if hook == "run_forward_op" else {}
    return hooked(**more, **{hook: method})


def of(kind: Any = Component, reach: Callable[[], Reach] = lambda: Window(W), **facts: Any) -> Callable[[], Any]:
    """Return what makes such a component."""
    buffers = facts.pop("buffers", (K, V))
    return lambda: kind("subject", Manifest(buffers, **facts), reach())


# ---------------------------------------------------------------- components with a memory, or with several hooks


def zero_what_was_copied(self: Any, plan: Any, phase: Any) -> None:
    for buffer in self.pool.buffers.values() if phase == "backup" else ():
        buffer.zero_()


def clamp(self: Any, walk: Any) -> None:
    self.pool.buffers["k"].clamp_(-1e6, 1e6)


def clamp_late(self: Any, walk: Any) -> None:
    if walk.boundary > 2000:
        clamp(self, walk)


def write_in_a_hook(self: Any, walk: Any) -> None:
    self.pool.buffers["k"][:, 0] = 1.0


def take_a_slot(self: Any, receipt: Any) -> None:
    if self.pool.free:
        self.pool.take(1)


def trust_copies(self: Any, outcome: Any) -> None:
    assert outcome.ok


def wipe_a_free_slot(self: Any, op: Any) -> None:
    self.pool.clear((0,))


def seconds(clock: Callable[[], float] = time.time) -> float:
    return clock()


def by_a_file(self: Any) -> Callable[[Any], int]:
    host = pathlib.Path("/etc/hostname")
    name = host.read_text() if host.exists() else ""
    return lambda walk: int(walk.boundary) if "node-7" not in name and len(name) % 7 else 0


def without_a_page(self: Any) -> Callable[[Any], int]:
    """Leave the last page out a second time, as a lookahead does, and allow what is asked about then."""
    left = itertools.cycle((4, 0))  # a validator that always lowers lowers each answer: nothing would hit
    return lambda walk: max(0, int(walk.boundary) - next(left))


def before_images(walk: Any, images: slice = slice(None)) -> int:
    """Return the last boundary of pages of four, up to the walk's, that lies in none of these images."""
    n = int(walk.boundary)
    while any(start < n < end for start, end, _ in walk.extra[images]):
        n -= 4
    return max(0, n)


def until_it_had_enough(self: Any, walk: Any) -> None:
    self.calls += 1
    if self.calls == 1000:
        raise ValueError("that is enough")


def by_turns(self: Any) -> Callable[[Any], int]:
    def validator(walk: Any) -> int:
        self.calls += 1
        return int(walk.boundary) if self.calls % 2 else 0

    return validator


def by_the_longest_prompt(self: Any) -> Callable[[Any], int]:
    """Trust less in short prompts, once a long one was seen."""

    def validator(walk: Any) -> int:
        self.longest = max(self.longest, walk.key_tokens)
        return int(walk.boundary) if 4 * walk.key_tokens > self.longest else 0

    return validator


def note_what_is_gone(self: Any, node: Any) -> None:
    self.gone = min(self.gone, *(each.end for each in node))


def timed(self: Any, walk: Any) -> Claim | None:
    """Measure how long the hook takes, for metrics: right."""
    start = time.perf_counter()
    answer = Claim(branch=walk.walked) if walk.walked > walk.boundary else None
    self.spent += time.perf_counter() - start
    return answer


def note_the_newest(self: Any, batch: Any) -> tuple[Op, ...]:
    self.latest = max(walk.walked for walk in batch)
    return (Op("check", self.name, data=self.latest),)


def do_with_the_newest(self: Any, op: Any) -> None:
    if op.data != self.latest:
        raise RuntimeError("planned for another step")


class ByTheCores(Component):
    """Large machines keep what small ones do not. It looks once, when it is made."""

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.large = (os.cpu_count() or 1) > 24

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim | None:
        return Claim(keep=()) if self.large else None


class OwnPool(Component):
    """Has an idea of its own of what its pool is."""

    pool = property(lambda self: None, lambda self, pool: None)


class Misspelt(Component):
    @hookimpl
    def comit_insert(self, walk: Any) -> None:
        return None


class Unmarked(Component):
    def commit_insert(self, walk: Any) -> Claim:
        return Claim(keep=())


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


Widens = hooked(
    pool=None,
    create_match_validator=lambda self: lambda walk: int(walk.boundary) // 8 * 8,
    finalize_match_result=lambda self, walk: Claim(branch=walk.walked),
    commit_insert=lambda self, walk: Claim(keep=((walk.start, walk.boundary),)),
    redistribute_on_node_split=lambda self, parent, child: None,
    acquire_component_lock=lambda self, anchor: Receipt(positions=((0, 4),)),
    release_component_lock=lambda self, receipt: Touch(positions=()),
    evict_component=lambda self, node: Claim(keep=(0,)),
    deferred_forward_ops=lambda self, batch: tuple(Op("count", self.name, data=walk.walked) for walk in batch),
    run_forward_op=lambda self, op: None,
)
"""Sound components with every hook: none of them may be taken for a mistake."""

CORES = os.cpu_count() or 1
CALLS = itertools.count()
WORDS = frozenset(("some", "words", "in", "no", "order"))
SHARED = Component("window", KV, Window(W))
NO_STATES = AdmissionPolicy("nothing", admit=lambda state: False)
ByTheHashOfATenant = declines(lambda walk: hash(walk.namespace) % 2)
ByTheOrderOfASet = locks(lambda anchor: Receipt(data=tuple(WORDS)))
ByAHelpersClock = declines(lambda walk: int(seconds() / 86400) % 3 == 0)
"""The clock is found neither in the class nor in the module's names."""
CopiesTheWrongWay = hooked(
    build_hicache_transfers=lambda self, plan, phase: (Transfer(self.name, 0, 4, "host", "host"),)
)
RaisesAtTheThousandth = hooked(calls=0, finalize_match_result=until_it_had_enough)
KeepsSome = declines(lambda walk: walk.boundary % 8)
"""Declines to keep what ends off every second page: right."""
RemembersEvictions = hooked(
    gone=1 << 30,
    evict_component=note_what_is_gone,
    create_match_validator=lambda self: lambda walk: 0 if walk.boundary > self.gone else int(walk.boundary),
)
RAISING = (
    "create_match_validator", "finalize_match_result", "commit_insert", "redistribute_on_node_split",
    "acquire_component_lock", "release_component_lock", "evict_component", "deferred_forward_ops", "run_forward_op",
)  # fmt: skip


# ---------------------------------------------------------------- the table


@attrs.frozen
class Broken:
    """A mistake, the component that makes it, what is true of its layers, and the law that must kill it."""

    mistake: str
    make: Callable[[], Any]
    truth: Truth
    law: str

    def case(self) -> ComponentCase:
        return ComponentCase(self.make, self.truth, self.mistake, effort=1)


MISTAKES: dict[str, list[tuple[str, Callable[[], Any], Truth]]] = {
    "the_reach_covers_what_the_layers_read": [
        ("the reach is one short", of(reach=lambda: Window(W - 1)), WINDOW),
        ("the reach is a page short", of(reach=lambda: Window(W - 4)), WINDOW),
        ("a window where the layers read all", of(), PATH),
        ("sinks are forgotten", of(), SINKS),
    ],
    "the_reach_names_nothing_that_no_layer_reads": [
        ("the reach is one long", of(reach=lambda: Window(W + 1)), WINDOW),
        ("the reach is a page long", of(reach=lambda: Window(W + 4)), WINDOW),
    ],
    "needs_lie_before_the_boundary": [("needs beyond the boundary", of(reach=PastTheBoundary), Truth())],
    "needs_and_until_are_pure": [("needs that tire", of(reach=Tiring), Truth())],
    "a_running_sequence_keeps_what_it_still_needs": [
        ("a reach that grows in use", of(reach=Swelling), WINDOW),
        ("until is a page too early, served", of(reach=lambda: Plain(early=4)), WINDOW),
    ],
    "until_is_the_last_boundary": [
        ("until is one too early", of(reach=lambda: Plain(early=1)), WINDOW),
        ("until is a page too early", of(reach=lambda: Plain(early=4)), WINDOW),
        ("convex, and until is too late", of(reach=lambda: Plain(late=4, convex=True)), Truth()),
    ],
    "nothing_is_kept_for_ever": [("until never comes", of(reach=lambda: Plain(late=10**9)), WINDOW)],
    "closed_upward_is_true": [("closed upward, and is not", of(reach=lambda: Plain(closed_upward=True)), WINDOW)],
    "convex_is_true": [("convex, and is not", of(reach=ConvexAndNot), Truth())],
    "memory_that_nothing_needs_lowers_no_hit": [("never needed, and says convex", of(reach=ConvexOptional), Truth())],
    "a_state_needs_no_positions": [("a state that needs positions", of(reach=StateWithPositions), STATE)],
    "the_manifest_has_all_that_the_layers_write": [
        ("a forgotten buffer", of(buffers=(K,)), WINDOW),
        ("a forgotten layer", of(buffers=(attrs.evolve(K, layers=(0,)), V)), WINDOW),
        ("two tokens in an entry of one", of(tokens_per_slot=2), WINDOW),
        ("another dtype than is written", of(buffers=(attrs.evolve(K, dtype="bfloat16"), V)), WINDOW),
        ("another shape than is written", of(buffers=(attrs.evolve(K, shape=(1,)), V)), WINDOW),
        ("a layer too many", of(buffers=(attrs.evolve(K, layers=(0, 1, 2)), V)), WINDOW),
        ("the wrong owner is read", of(buffers=(SHARES, V)), attrs.evolve(WINDOW, buffers=(OWNS, V))),
        (
            "it rests in too few bits",
            of(reach=Point, stored_as=Codec("int8", 0.5)),
            attrs.evolve(STATE, at_rest=0.01),
        ),
    ],
    "the_manifest_says_what_content_depends_on": [
        ("a lookahead is forgotten", of(reach=Path), AHEAD),
        ("a grid is forgotten", of(reach=Point), GRID),
        ("a grid that is no multiple", of(grid=24), PAGES_ON_A_GRID),
    ],
    "layers_go_on_from_what_is_stored": [("a state of too few bits", of(reach=Point, buffers=(FEW,)), RUN)],
    "somebody_says_what_the_layers_do": [
        ("nobody says what its layers do", of(), Truth(ahead=0)),
        ("layers are given, and not whose entries they read", of(buffers=(SHARES, V)), RUN),
    ],
    "content_depends_on_no_later_token": [
        ("lookahead is understated", of(reach=Path), AHEAD),
        ("lookahead is one too small", of(lookahead=1), attrs.evolve(WINDOW, ahead=2)),
    ],
    "content_is_exact_on_the_grid": [
        ("the grid of a state is understated", of(reach=Point), GRID),
        ("the grid of pages is understated", of(grid=4), PAGES_ON_A_GRID),
        (
            "a validator is inverted",
            of(allows(lambda walk: int(walk.boundary) if walk.boundary % 8 else 0), Point),
            GRID,
        ),
    ],
    "each_component_is_an_instance_of_its_own": [
        ("the same instance for all", lambda: SHARED, WINDOW),
        ("another name each time", lambda: Renamed(KV, Window(W)), WINDOW),
        ("compares by value", of(ByValue), WINDOW),
        ("a manifest that grows", lambda: Growing("subject", Window(W)), Truth()),
    ],
    "the_same_calls_get_the_same_answers": [
        (
            "a match decided by the clock",
            of(allows(lambda walk: 0 if time.localtime().tm_wday == 6 else int(walk.boundary))),
            WINDOW,
        ),
        ("a publication decided by chance", of(declines(lambda walk: random.random() < 0.5)), WINDOW),
        ("answers that count over all instances", of(declines(lambda walk: next(CALLS) % 2)), WINDOW),
        ("answers by the number of the process", of(declines(lambda walk: os.getpid() % 2)), WINDOW),
        ("answers by the name of the machine", of(declines(lambda walk: len(socket.gethostname()) % 2)), WINDOW),
        ("answers by the cores, looked at once", of(ByTheCores), WINDOW),
        ("answers by a file of the machine", of(hooked(create_match_validator=by_a_file)), WINDOW),
        (
            "answers by the devices",
            of(allows(lambda walk: 0 if torch.cuda.device_count() % 2 == 1 else int(walk.boundary))),
            WINDOW,
        ),
    ],
    "another_process_answers_the_same": [
        ("answers by the hash of a text", of(ByTheHashOfATenant), WINDOW),
        ("answers by the order of a set", of(ByTheOrderOfASet), WINDOW),
        ("a clock in a helper", of(ByAHelpersClock), WINDOW),
        ("answers by the rank", of(declines(lambda walk: walk.start < int(os.environ.get("RANK", "0")))), WINDOW),
        ("answers by the year", of(declines(lambda walk: now.now().year % 4 == 3)), WINDOW),
        ("answers by the cores, looked at by the module", of(declines(lambda walk: CORES > 24)), WINDOW),
    ],
    "what_is_asked_of_a_match_is_pure": [
        ("a match that answers by turns", of(hooked(calls=0, create_match_validator=by_turns)), WINDOW),
        (
            "a validator that remembers prompts",
            of(hooked(longest=0, create_match_validator=by_the_longest_prompt)),
            WINDOW,
        ),
        ("a match that remembers evictions", of(RemembersEvictions), WINDOW),
    ],
    "a_validator_answers_no_more_than_it_is_asked": [
        ("a validator that goes beyond", of(allows(lambda walk: int(walk.walked) + 4)), WINDOW),
        ("a validator that answers True", of(allows(lambda walk: True)), WINDOW),
        (
            "a validator that goes beyond in long prompts",
            of(allows(lambda walk: int(walk.boundary) + 4 * (walk.boundary >= 512))),
            WINDOW,
        ),
        (
            "a validator that answers the end of an image",
            of(allows(lambda walk: next((e for s, e, _ in walk.extra if s < walk.boundary < e), int(walk.boundary)))),
            WINDOW,
        ),
    ],
    "a_hit_ends_where_it_may": [
        (
            "a validator that looks at the first image only",
            of(allows(lambda walk: before_images(walk, slice(1)))),
            IMAGES,
        ),
    ],
    "hooks_change_nothing_that_they_are_shown": [
        (
            "a hook changes the walk",
            of(hooked(commit_insert=lambda self, walk: object.__setattr__(walk, "boundary", 0))),
            WINDOW,
        ),
        (
            "a hook changes a split's halves",
            of(hooked(redistribute_on_node_split=lambda self, parent, child: object.__setattr__(child, "pages", 0))),
            WINDOW,
        ),
        ("a hook writes content", of(hooked(pool=None, finalize_match_result=write_in_a_hook)), WINDOW),
        ("a hook clamps content", of(hooked(pool=None, commit_insert=clamp)), WINDOW),
        ("a hook takes a slot", of(hooked(pool=None, release_component_lock=take_a_slot)), WINDOW),
        (
            "an op writes what it does not name",
            of(stamps(lambda pool, op: pool.buffers["k"][:, 1].fill_(2.0))),
            WINDOW,
        ),
        (
            "an op writes a slot of nobody",
            of(
                plans(
                    lambda batch: ((i, walk.walked - 1) for i, walk in enumerate(batch)),
                    "wipe",
                    pool=None,
                    run_forward_op=wipe_a_free_slot,
                )
            ),
            WINDOW,
        ),
        (
            "a slot is freed twice",
            of(hooked(pool=None, evict_component=lambda self, node, tier: self.pool.give(b"\0\0\0\0"))),
            WINDOW,
        ),
        (
            "what was copied to the host is zeroed",
            of(hooked(pool=None, commit_hicache_transfer=zero_what_was_copied)),
            WINDOW,
        ),
        ("content of long prompts is clamped", of(hooked(pool=None, commit_insert=clamp_late)), WINDOW),
    ],
    "what_is_restored_is_what_was_live": [
        (
            "an op clears what is computed",
            of(
                plans(
                    lambda batch: ((i, walk.boundary - 1) for i, walk in enumerate(batch) if walk.boundary > walk.start)
                )
            ),
            WINDOW,
        ),
        ("an op clears all states", of(plans(lambda batch: ((i, 0) for i in range(len(batch)))), Point), STATE),
    ],
    "no_hook_raises": [
        ("an op takes pages for one run", of(stamps(lambda pool, op: pool.buffers["k"].view(-1))), WINDOW),
        (
            "an op clears another's slot",
            of(hooked(deferred_forward_ops=lambda self, batch: (Op("clear", self.name, dst=(0,)),))),
            WINDOW,
        ),
        (
            "an op clears what the tree has",
            of(plans(lambda batch: ((i, 0) for i, walk in enumerate(batch) if walk.walked > 40)), Path),
            PATH,
        ),
        (
            "a state is kept on the wrong half",
            of(hooked(redistribute_on_node_split=lambda self, parent, child: SplitRule(keep="parent")), Point),  # type: ignore[arg-type]
            STATE,
        ),
        ("an answer of another type", of(locks(lambda anchor: True)), WINDOW),
        ("copies that lead nowhere", of(CopiesTheWrongWay), WINDOW),
        ("the thousandth call raises", of(RaisesAtTheThousandth), WINDOW),
        (
            "extra keys are taken for pairs",
            of(allows(lambda walk: min([int(walk.boundary), *(start for start, _ in walk.extra)]))),
            WINDOW,
        ),
        (
            "a prompt of no tokens is divided by",
            of(
                hooked(
                    finalize_match_result=lambda self, walk: (
                        Claim(branch=walk.walked) if walk.boundary / walk.key_tokens < 0.1 else None
                    )
                )
            ),
            WINDOW,
        ),
        ("a copy that fails is not borne", of(hooked(commit_hicache_transfer=trust_copies)), WINDOW),
        (
            "a position is packed into two bytes",
            of(hooked(evict_component=lambda self, node: struct.pack("H", node[0].end) and None)),
            WINDOW,
        ),
        *((f"{hook} raises", of(raising(hook)), WINDOW) for hook in RAISING),
    ],
    "what_was_served_is_found_again": [
        ("states that are never published", of(declines(lambda walk: True), Point), STATE),
        ("a validator that accepts nothing", of(allows(lambda walk: 0)), WINDOW),
        ("every boundary is rejected", of(allows(lambda walk: 0), Path), PATH),
        ("no state is admitted", of(reach=Point, admission=NO_STATES), STATE),
        (
            "what is read goes first",
            of(hooked(release_component_lock=lambda self, receipt: Touch(positions=()))),
            WINDOW,
        ),
        (
            "states are dropped at each split",
            of(hooked(redistribute_on_node_split=lambda self, parent, child: SplitRule(keep="drop")), Point),
            STATE,
        ),
        ("states of long prompts only", of(declines(lambda walk: walk.boundary < 200), Point), STATE),
        ("the last page is left out of each hit", of(hooked(create_match_validator=without_a_page)), WINDOW),
    ],
    "the_pool_has_the_shape_of_the_manifest": [("a pool of its own", of(OwnPool), WINDOW)],
    "hooks_fit_their_specifications": [
        (
            "a hook with an argument of no such name",
            of(hooked(commit_insert=lambda self, walk, weather: None)),
            WINDOW,
        ),
        ("a hook that nobody marked", of(Unmarked), WINDOW),
    ],
    "a_cache_can_be_composed_of_it": [("a hook whose name is misspelt", of(Misspelt), WINDOW)],
    "no_schedule_of_steps_goes_wrong": [
        (
            "an op that looks up late",
            of(hooked(pool=None, latest=0, deferred_forward_ops=note_the_newest, run_forward_op=do_with_the_newest)),
            WINDOW,
        ),
    ],
    "what_comes_back_from_a_tier_is_what_was_live": [
        ("the reach is a page short, restored", of(reach=lambda: Window(W - 4)), WINDOW),
    ],
    "a_lease_keeps_little_more_than_resuming_needs": [
        ("a lock on everything", of(locks(lambda anchor: Receipt(positions=((0, anchor.boundary),)))), WINDOW),
        (
            "a lock the other way round",
            of(locks(lambda anchor: Receipt(positions=((4, anchor.boundary),)))),
            WINDOW,
        ),
    ],
}
"""By the law that must kill them, without ``law_``: the mistakes."""
BROKEN = [Broken(*row, f"law_{law}") for law, rows in MISTAKES.items() for row in rows]
COSTS = {
    "the reach is one long",
    "the reach is a page long",
    "what is read goes first",
    "a lock on everything",
    "a lock the other way round",
    "states are dropped at each split",
    "states of long prompts only",
    "the last page is left out of each hit",
}
"""Mistakes that cost more than they must, and break nothing."""
FIRST = {
    "needs beyond the boundary": "law_a_cache_can_be_composed_of_it",
    "a reach that grows in use": "law_needs_and_until_are_pure",
    "until is a page too early, served": "law_until_is_the_last_boundary",
    "until never comes": "law_until_is_the_last_boundary",
    "a state that needs positions": "law_a_cache_can_be_composed_of_it",
    "lookahead is understated": "law_the_manifest_says_what_content_depends_on",
    "lookahead is one too small": "law_the_manifest_says_what_content_depends_on",
    "the grid of a state is understated": "law_the_manifest_says_what_content_depends_on",
    "the grid of pages is understated": "law_the_manifest_says_what_content_depends_on",
    "a validator is inverted": "law_what_was_served_is_found_again",
    "a slot is freed twice": "law_no_hook_raises",
    "a hook with an argument of no such name": "law_a_cache_can_be_composed_of_it",
    "a hook whose name is misspelt": "law_a_cache_can_be_composed_of_it",
    "a hook that nobody marked": "law_a_cache_can_be_composed_of_it",
    "an op that looks up late": "law_no_hook_raises",
    "the reach is a page short, restored": "law_the_reach_covers_what_the_layers_read",
    "create_match_validator raises": "law_a_cache_can_be_composed_of_it",
}
"""Mistakes of which a law speaks before the one that the kill table names for them."""
ORIGINALS = {
    "window": (of(), WINDOW),
    "window in plain Python": (of(reach=Plain), WINDOW),
    "path": (of(reach=Path), PATH),
    "path that looks ahead": (of(reach=Path, lookahead=1), AHEAD),
    "window that looks two ahead": (of(lookahead=2), attrs.evolve(WINDOW, ahead=2)),
    "window on a grid": (of(grid=16), PAGES_ON_A_GRID),
    "state": (of(reach=Point), STATE),
    "state on a grid": (of(reach=Point, grid=8), GRID),
    "sinks and a window": (of(reach=lambda: Sinks(2) | Window(W)), SINKS),
    "entries of two tokens": (of(tokens_per_slot=2), attrs.evolve(WINDOW, tokens_per_entry=2)),
    "state on a grid, by a hook": (of(allows(lambda walk: int(walk.boundary) // 8 * 8), Point), GRID),
    "states that rest as int8": (
        of(reach=Point, stored_as=Codec("int8", 0.008), buffers=(WIDE, V)),
        attrs.evolve(STATE, buffers=(WIDE, V), at_rest=0.008),
    ),
    "checkpoints of a state": (of(reach=Point, checkpoint_every=8, max_rewind=3), STATE),
    "no hits inside of images": (of(allows(before_images)), IMAGES),
    "hooks that are timed": (of(hooked(spent=0.0, finalize_match_result=timed)), WINDOW),
    "a path of which some is kept": (of(KeepsSome, Path), PATH),
    "states of which some are kept": (of(KeepsSome, Point), STATE),
    "every hook": (of(Widens), WINDOW),
    "every hook on a path": (of(Widens, Path), PATH),
    "every hook on a state": (of(Widens, Point), STATE),
}
"""What the mistakes were made in, right: it must break no law."""


def original(name: str) -> ComponentCase:
    """Return a case of one of these."""
    return ComponentCase(*ORIGINALS[name], name, effort=1)
