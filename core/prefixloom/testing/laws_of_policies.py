"""Laws of an eviction policy: whatever its order is, it is an order, and loses nothing."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .case import LawBroken, NotApplicable
from .policies import Crowd, Piece, PolicyCase, uses

TURNS = 1500


def drained(crowd: Crowd) -> list[int]:
    """Everything that comes out."""
    out = []
    while (piece := crowd.queue.pop()) is not None:
        out.append(piece.number)
        if len(out) > 10 * TURNS:
            raise LawBroken("what comes out never ends")
    return out


def law_every_piece_comes_out_exactly_once(case: PolicyCase) -> None:
    """Whatever stands in the queue comes out once, and then there is None.

    Clauses: O15.
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
        raise LawBroken(f"of {len(wanted)} pieces {lost[:9]} never came out, and {more[:9]} once too often")


def law_what_is_protected_is_never_evicted(case: PolicyCase) -> None:
    """A piece that was removed, since a lease covers it, does not come out before it is added again.

    Clauses: O15, E1.
    """
    crowd = case.crowd("protected")
    pieces = [crowd.add() for _ in range(60)]
    held = [piece for piece in pieces if piece.number % 3 == 0]
    for piece in held:
        crowd.queue.touch(piece)
        crowd.remove(piece)
    out = drained(crowd)
    wrong = [piece.number for piece in held if piece.number in out]
    if wrong:
        raise LawBroken(f"the pieces {wrong[:9]} were removed from the queue, and came out of it")
    for piece in held:
        crowd.add(piece)
    if sorted(drained(crowd)) != sorted(piece.number for piece in held):
        raise LawBroken("what was removed and added again does not come out")


def law_a_piece_says_whether_it_stands_in_the_queue(case: PolicyCase) -> None:
    """``cell.next`` is None exactly while the cell is in no queue: of the built-in ones the core asks nothing else.

    Clauses: O15.
    """
    crowd = case.crowd("says")
    known: dict[int, Piece] = {}
    for _ in range(TURNS // 3):
        known.update(crowd.linked)
        crowd.turn()
        known.update(crowd.linked)
        for piece in known.values():
            if piece.linked is not (piece.number in crowd.linked):
                stands = "stands in the queue" if piece.number in crowd.linked else "was taken off"
                raise LawBroken(f"{piece} {stands}, and its next is {'set' if piece.linked else 'None'}")


def law_what_is_put_first_goes_first(case: PolicyCase) -> None:
    """What nothing can use any more (``add_first``) goes before everything else, the newest first.

    Clauses: O15, E2.
    """
    crowd = case.crowd("first")
    for _ in range(50):
        crowd.add()
    first = [crowd.add(crowd.piece(), first=True).number for _ in range(5)]
    out = drained(crowd)[:5]
    if out != first[::-1]:
        raise LawBroken(f"{first} were put first one after the other, and what came out first is {out}")


def law_the_same_calls_give_the_same_order(case: PolicyCase) -> None:
    """Ranks that do the same evict the same: no clock, no random number, no address decides.

    Clauses: H6, O15.
    """
    state = random.getstate()
    try:
        orders = []
        for seed in (1, 2):
            padding = [Piece(-1, Crowd(case.crowd().queue).root) for _ in range(7 * seed)]  # other addresses
            crowd = case.crowd("same")
            random.seed(seed)
            with clocks_off_by(seed * 1e9):
                out = [found.number if found else -1 for found in (crowd.turn() for _ in range(TURNS // 2))]
                orders.append(out + drained(crowd))
            del padding
    finally:
        random.setstate(state)
    if orders[0] != orders[1]:
        at = next(number for number, (a, b) in enumerate(zip(*orders, strict=False)) if a != b)
        raise LawBroken(f"two queues that were asked the same gave {orders[0][at]} and {orders[1][at]} at {at}")


@contextmanager
def clocks_off_by(seconds: float) -> Iterator[None]:
    """Another time of day, for who asks."""
    names = ("time", "monotonic", "perf_counter")
    honest = {name: getattr(time, name) for name in names}
    try:
        for name, clock in honest.items():
            setattr(time, name, lambda clock=clock: clock() + seconds)
        yield
    finally:
        for name, clock in honest.items():
            setattr(time, name, clock)


def law_a_split_loses_neither_half(case: PolicyCase) -> None:
    """Where an edge is split, both halves come out; of one that does not stand in the queue, neither does.

    Clauses: O15, S2.
    """
    crowd = case.crowd("split")
    for _ in range(40):
        crowd.add()
    away = [piece for piece in list(crowd.linked.values()) if piece.number % 4 == 0]
    for piece in away:
        crowd.remove(piece)
    uppers = [crowd.split(piece) for piece in [*list(crowd.linked.values())[:15], *away]]
    out = drained(crowd)
    if sorted(out) != sorted(crowd.linked):
        raise LawBroken(
            f"after {len(uppers)} splits {sorted(crowd.linked)} stand in the queue, and {sorted(out)} came out"
        )


def law_nothing_is_kept_of_what_is_gone(case: PolicyCase) -> None:
    """After ``forget`` the queue knows nothing of a cell: a server runs for months.

    Clauses: O15.
    """
    crowd = case.crowd("gone")
    kept = [weakref.ref(piece) for piece in (_come_and_gone(crowd, number) for number in range(300))]
    for _ in range(200):  # a queue may tidy up late
        crowd.add(crowd.piece())
        _forget(crowd, crowd.pop())
    gc.collect()
    alive = sum(ref() is not None for ref in kept)
    if alive > 10:
        raise LawBroken(f"of {len(kept)} pieces that were forgotten the queue holds {alive} still")


def _come_and_gone(crowd: Crowd, number: int) -> Piece:
    piece = crowd.add(crowd.piece())
    crowd.queue.touch(piece)
    if number % 2:
        crowd.remove(piece)
        crowd.queue.forget(piece)
    while number % 2 == 0 and piece.linked:
        _forget(crowd, crowd.pop())
    return piece


def _forget(crowd: Crowd, piece: Piece | None) -> None:
    if piece is None:
        raise LawBroken("a piece was added to the queue, and nothing comes out of it")
    crowd.queue.forget(piece)


def law_the_smallest_key_goes_first(case: PolicyCase) -> None:
    """A policy that is a key gives keys that can be compared, without raising, the same for the same use.

    Clauses: O15, O16.
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
    """Adding, touching, removing and evicting take as many lines of Python in a queue of 4,000 as in one of 60.

    Clauses: O15.
    """
    small, large = (_lines(case, size) for size in (60, 4000))
    for what, lines in large.items():
        if lines > 3 * small[what] + 20:
            raise LawBroken(f"{what} takes {small[what]:.0f} lines among 60 pieces and {lines:.0f} among 4,000")


def _lines(case: PolicyCase, size: int) -> dict[str, float]:
    crowd = case.crowd("lines")
    pieces = [crowd.add(crowd.piece()) for _ in range(size)]
    count = 40
    some = [pieces[number * size // count] for number in range(count)]

    def popped() -> None:
        for piece in [crowd.queue.pop() for _ in range(count)]:
            crowd.queue.add(piece)

    def touched() -> None:
        for piece in some:
            crowd.queue.touch(piece)

    def removed() -> None:
        for piece in some:
            crowd.queue.remove(piece)
            crowd.queue.add(piece)

    work = {"touching": touched, "removing and adding": removed, "evicting and adding": popped}
    return {what: counted(done) / count for what, done in work.items()}


def counted(work: Callable[[], Any]) -> int:
    """Lines of Python that run in ``work``."""
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
