"""An eviction policy under test: the case, the queue operations that the core performs on it, and its laws.

from prefixloom.testing import PolicyCase, parametrize_with_laws

@parametrize_with_laws(PolicyCase(lambda: EvictionPolicy("shortest", key=lambda use: use.tokens)))
def test_conformance(case, law):
    law(case)
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs

from ...compose.registry import default_registry
from ...contract.policy import BUILT_IN, EvictionPolicy
from ...contract.queues import Queue, Use
from ...errors import CompositionError
from ..kit.case import LawBroken, NotApplicable
from ..kit.machines import Machine, on_machine


class Edge:
    """A node as a queue sees it: where its edge ends, its parent, and its priority."""

    def __init__(self, parent: Edge | None, end: int, priority: int = 0) -> None:
        self.parent, self.end, self.priority = parent, end, priority


class QueuedCell:
    """A cell as a queue sees it, with a number that identifies it."""

    __slots__ = ("__weakref__", "next", "node", "number", "prev")

    def __init__(self, number: int, node: Edge) -> None:
        self.number, self.node = number, node
        self.prev: Any = None
        self.next: Any = None

    @property
    def linked(self) -> bool:
        return self.next is not None

    def __repr__(self) -> str:
        return f"<cell {self.number}, {self.node.end} tokens deep>"


class Crowd:
    """A queue, the cells that were made for it, and which of them are in the queue."""

    def __init__(self, queue: Queue, seed: object = 0) -> None:
        self.queue = queue
        self.chance = random.Random(f"crowd {seed}")
        self.root = Edge(None, 0)
        self.linked: dict[int, QueuedCell] = {}
        self.idle: list[QueuedCell] = []
        self.numbers = itertools.count()

    def new_cell(self) -> QueuedCell:
        depth = self.chance.randrange(4)
        above = Edge(self.root, 16 * depth) if depth else self.root
        edge = Edge(above, above.end + 16 * self.chance.randrange(1, 5), self.chance.randrange(3))
        return QueuedCell(next(self.numbers), edge)

    def add(self, cell: QueuedCell | None = None, first: bool = False) -> QueuedCell:
        cell = cell or (self.idle.pop() if self.idle and self.chance.randrange(2) else self.new_cell())
        (self.queue.add_first if first else self.queue.add)(cell)
        self.linked[cell.number] = cell
        return cell

    def some(self) -> QueuedCell | None:
        """Return one of the cells in the queue; None if it is empty."""
        return self.chance.choice(list(self.linked.values())) if self.linked else None

    def remove(self, cell: QueuedCell) -> None:
        self.queue.remove(cell)
        del self.linked[cell.number]

    def pop(self) -> QueuedCell | None:
        found: QueuedCell | None = self.queue.pop()
        if found is not None:
            self.linked.pop(found.number, None)
        return found

    def split(self, lower: QueuedCell) -> QueuedCell:
        """Split a cell's edge as the tree does: the upper half becomes a new cell, which is returned."""
        above = lower.node.parent
        assert above is not None
        upper = QueuedCell(next(self.numbers), Edge(above, (above.end + lower.node.end) // 2, lower.node.priority))
        lower.node.parent = upper.node
        linked = lower.number in self.linked
        self.queue.inherit(upper, lower, linked)
        if linked:
            self.linked[upper.number] = upper
        return upper

    def turn(self) -> QueuedCell | None:
        """Do a random operation that the core performs. Return the cell that came out of the queue, if one did."""
        kind, cell = self.chance.randrange(12), self.some()
        if kind < 5 or cell is None:
            self.add(first=kind == 0)
        elif kind < 7:
            self.queue.touch(cell)
        elif kind < 9:
            self.remove(cell)  # a lease covers it
            self.idle.append(cell)
        elif kind == 9:
            self.split(cell)
        elif kind == 10:
            self.remove(cell)
            self.queue.forget(cell)
        else:
            return self.pop()
        return None


@attrs.define(eq=False)
class PolicyCase:
    """An eviction policy to be tested; ``make()`` returns it."""

    make: Callable[[], EvictionPolicy]
    label: str = "policy"
    seed: int = 0
    untested: ClassVar = ("whether its order is a good one: how many tokens hit with it",)

    @classmethod
    def installed(cls, name: str) -> PolicyCase:
        return cls(lambda: BUILT_IN.get(name) or default_registry().policy(name), label=f"policy:{name}")

    @property
    def laws(self) -> tuple[Any, ...]:
        return tuple(law for name, law in globals().items() if name.startswith("law_"))

    def policy(self) -> EvictionPolicy:
        policy = self.make()
        if not isinstance(policy, EvictionPolicy):
            raise CompositionError(f"{self.label}: what was made is {policy!r}, and must be an EvictionPolicy")
        return policy

    def crowd(self, seed: object = 0) -> Crowd:
        return Crowd(self.policy().queue(), f"{self.seed} {seed}")

    def __str__(self) -> str:
        return self.label


def uses(seed: object) -> Iterator[Use]:
    """Yield values that a policy's key may be called with."""
    chance = random.Random(f"uses {seed}")
    for _ in range(200):
        born = chance.randrange(1, 1000)
        last = born + chance.randrange(1000)
        yield Use(
            born,
            last,
            1 + chance.randrange(50),
            1 + chance.randrange(4096),
            1 + chance.randrange(1 << 20),
            chance.randrange(-3, 9),
        )


TURNS = 1500


def drained(crowd: Crowd) -> list[int]:
    """Empty the queue; return the numbers of the cells in the order in which they came out."""
    out = []
    while (cell := crowd.queue.pop()) is not None:
        out.append(cell.number)
        if len(out) > 10 * TURNS:
            raise LawBroken("what comes out never ends")
    return out


def law_every_piece_comes_out_exactly_once(case: PolicyCase) -> None:
    """Everything in the queue comes out exactly once; after that the queue returns None.

    Clauses: O12.
    """
    crowd = case.crowd("once")
    for _ in range(TURNS):
        before = set(crowd.linked)
        found = crowd.turn()
        if found is not None and found.number not in before:
            raise LawBroken(f"{found} came out, and does not stand in the queue: {sorted(before)[:9]} ... do")
    wanted, out = sorted(crowd.linked), drained(crowd)
    if sorted(out) != wanted:
        lost, more = (
            sorted(set(wanted) - set(out)),
            sorted(set(out) - set(wanted)) or [n for n in out if out.count(n) > 1],
        )
        raise LawBroken(f"of {len(wanted)} cells {lost[:9]} never came out, and {more[:9]} once too often")


def law_what_is_protected_is_never_evicted(case: PolicyCase) -> None:
    """A cell that was removed because a lease covers it does not come out until it is added again.

    Clauses: O12, E1.
    """
    crowd = case.crowd("protected")
    cells = [crowd.add() for _ in range(60)]
    held = [cell for cell in cells if cell.number % 3 == 0]
    for cell in held:
        crowd.queue.touch(cell)
        crowd.remove(cell)
    out = drained(crowd)
    wrong = [cell.number for cell in held if cell.number in out]
    if wrong:
        raise LawBroken(f"the cells {wrong[:9]} were removed from the queue, and came out of it")
    for cell in held:
        crowd.add(cell)
    if sorted(drained(crowd)) != sorted(cell.number for cell in held):
        raise LawBroken("what was removed and added again does not come out")


def law_a_piece_says_whether_it_stands_in_the_queue(case: PolicyCase) -> None:
    """``cell.next`` is None exactly while the cell is in no queue. The core relies on nothing else of built-in queues.

    Clauses: O12.
    """
    crowd = case.crowd("says")
    known: dict[int, QueuedCell] = {}
    for _ in range(TURNS // 3):
        known.update(crowd.linked)
        crowd.turn()
        known.update(crowd.linked)
        for cell in known.values():
            if cell.linked is not (cell.number in crowd.linked):
                stands = "stands in the queue" if cell.number in crowd.linked else "was taken off"
                raise LawBroken(f"{cell} {stands}, and its next is {'set' if cell.linked else 'None'}")


def law_what_is_put_first_goes_first(case: PolicyCase) -> None:
    """Cells that nothing can use any more (``add_first``) come out before all others, the newest first.

    Clauses: O12, E2.
    """
    crowd = case.crowd("first")
    for _ in range(50):
        crowd.add()
    first = [crowd.add(crowd.new_cell(), first=True).number for _ in range(5)]
    out = drained(crowd)[:5]
    if out != first[::-1]:
        raise LawBroken(f"{first} were put first one after the other, and what came out first is {out}")


def law_the_same_calls_give_the_same_order(case: PolicyCase) -> None:
    """Ranks that make the same calls evict the same cells: the order depends on no clock, random number or address.

    Clauses: H6, O12.
    """
    state = random.getstate()
    try:
        orders = []
        for seed, machine in ((1, None), (2, Machine(2))):
            padding = [
                QueuedCell(-1, Crowd(case.crowd().queue).root) for _ in range(7 * seed)
            ]  # so that objects have other addresses
            crowd = case.crowd("same")
            random.seed(seed)
            with on_machine(machine):
                out = [found.number if found else -1 for found in (crowd.turn() for _ in range(TURNS // 2))]
                orders.append(out + drained(crowd))
            del padding
    finally:
        random.setstate(state)
    if orders[0] != orders[1]:
        at = next(number for number, (a, b) in enumerate(zip(*orders, strict=False)) if a != b)
        raise LawBroken(f"two queues that were asked the same gave {orders[0][at]} and {orders[1][at]} at {at}")


def law_a_split_loses_neither_half(case: PolicyCase) -> None:
    """After a split, both halves of a cell in the queue come out; if the cell was not in the queue, neither does.

    Clauses: O12, S2.
    """
    crowd = case.crowd("split")
    for _ in range(40):
        crowd.add()
    away = [cell for cell in list(crowd.linked.values()) if cell.number % 4 == 0]
    for cell in away:
        crowd.remove(cell)
    uppers = [crowd.split(cell) for cell in [*list(crowd.linked.values())[:15], *away]]
    out = drained(crowd)
    if sorted(out) != sorted(crowd.linked):
        raise LawBroken(
            f"after {len(uppers)} splits {sorted(crowd.linked)} stand in the queue, and {sorted(out)} came out"
        )


def law_nothing_is_kept_of_what_is_gone(case: PolicyCase) -> None:
    """After ``forget`` the queue keeps no reference to a cell, because a server runs for months.

    Clauses: O12.
    """
    crowd = case.crowd("gone")
    kept = [weakref.ref(cell) for cell in (_come_and_gone(crowd, number) for number in range(300))]
    for _ in range(200):  # a queue may clean up later
        crowd.add(crowd.new_cell())
        _forget(crowd, crowd.pop())
    gc.collect()
    alive = sum(ref() is not None for ref in kept)
    if alive > 10:
        raise LawBroken(f"of {len(kept)} cells that were forgotten the queue holds {alive} still")


def _come_and_gone(crowd: Crowd, number: int) -> QueuedCell:
    cell = crowd.add(crowd.new_cell())
    crowd.queue.touch(cell)
    if number % 2:
        crowd.remove(cell)
        crowd.queue.forget(cell)
    while number % 2 == 0 and cell.linked:
        _forget(crowd, crowd.pop())
    return cell


def _forget(crowd: Crowd, cell: QueuedCell | None) -> None:
    if cell is None:
        raise LawBroken("a cell was added to the queue, and nothing comes out of it")
    crowd.queue.forget(cell)


def law_the_smallest_key_goes_first(case: PolicyCase) -> None:
    """A policy's key never raises, returns values that can be compared, and returns the same for the same use.

    Clauses: O12, O13.
    """
    key = case.make().key
    if key is None:
        raise NotApplicable("it makes a queue of its own")
    known = []
    for use in uses(case.seed):
        try:
            one, other = key(use), key(use)
        except Exception as error:
            raise LawBroken(f"its key of {use} raises {type(error).__name__}: {error}") from error
        if one != other:
            raise LawBroken(f"its key of {use} is {one!r}, and asked again {other!r}")
        known.append(one)
    try:
        ordered = sorted(known)
        for a, b in itertools.pairwise(ordered):
            if b < a or a != a:
                raise LawBroken(f"its keys are in no order: {a!r} and {b!r}")
    except TypeError as error:
        raise LawBroken(f"its keys cannot be compared: {error}") from error


def law_a_large_queue_costs_what_a_small_one_does(case: PolicyCase) -> None:
    """Adding, touching, removing and evicting run about as many lines of Python in a queue of 4,000 as in one of 60.

    Clauses: O12.
    """
    small, large = (_lines(case, size) for size in (60, 4000))
    for what, lines in large.items():
        if lines > 3 * small[what] + 20:
            raise LawBroken(f"{what} takes {small[what]:.0f} lines among 60 cells and {lines:.0f} among 4,000")


def _lines(case: PolicyCase, size: int) -> dict[str, float]:
    crowd = case.crowd("lines")
    cells = [crowd.add(crowd.new_cell()) for _ in range(size)]
    count = 40
    some = [cells[number * size // count] for number in range(count)]

    def popped() -> None:
        for cell in [crowd.queue.pop() for _ in range(count)]:
            crowd.queue.add(cell)

    def touched() -> None:
        for cell in some:
            crowd.queue.touch(cell)

    def removed() -> None:
        for cell in some:
            crowd.queue.remove(cell)
            crowd.queue.add(cell)

    work = {"touching": touched, "removing and adding": removed, "evicting and adding": popped}
    return {what: counted(done) / count for what, done in work.items()}


def counted(work: Callable[[], Any]) -> int:
    """Count the lines of Python that run in ``work``."""
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
