"""Fusing: what is made of marked functions does what they do: programs at random, and what happens in which order."""

from __future__ import annotations

import linecache

import pytest

from fusing_programs import Writer, fused, made, outcome
from fusing_rules import BOX, both, boxed
from prefixloom.fusing import Const, Each, Thing, Unable


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_programs_at_random_do_the_same_and_leave_the_same_wherever_something_raises(first: int) -> None:
    stayed = 0
    for seed in range(first, first + 40):
        filename = f"<program {seed}>"
        source = Writer(seed).program()
        space = made(source, filename)
        try:
            entry, text = fused(space)
        except Unable:
            stayed += 1
            continue
        finally:
            del linecache.cache[filename]
        for given in ((0, 1), (2, 1)):
            heard = len(outcome(space, space["entry"], 0, given)[1])
            for fails in range(min(heard, 12) + 1):
                want, got = (outcome(space, each, fails, given) for each in (space["entry"], entry))
                assert want == got, f"program {seed}, {given}, call {fails} raises\n{source}\n{text}"
    assert stayed < 8


def test_what_one_way_returns_is_not_taken_for_what_another_does() -> None:
    source = """
@straight
def one_or_two(c):
    if c:
        return 1
    return 2

@straight
def entry(c):
    x = one_or_two(c)
    return x + 10
"""
    both(source, "0", "1")


def test_a_result_that_may_be_none_is_asked_whether_it_is() -> None:
    source = """
class Made:
    __module__ = "prefixloom.here"

@straight
def some(c):
    if c:
        return None
    return Made()

@straight
def entry(c):
    x = some(c)
    return "none" if x is None else "some"
"""
    both(source, "0", "1")


def test_where_branches_end_what_is_in_place_needs_no_loop() -> None:
    source = """
@straight
def kind(a, b):
    if not a:
        return "none"
    if b:
        x = a + b
    else:
        return "few"
    x += 1
    if x > 7:
        x += 100
    else:
        return x
    return -x

@straight
def entry(a, b):
    x = kind(a, b)
    return [x]
"""
    assert "while" not in both(source, "0, 0", "1, 0", "1, 1", "9, 9")


def test_where_two_ways_go_on_what_is_in_place_stays_in_a_loop_that_runs_once() -> None:
    source = """
@straight
def kind(a, b):
    if a:
        if b:
            return "both"
        a += 1
    return a

@straight
def entry(a, b):
    x = kind(a, b)
    return [x]
"""
    text = both(source, "0, 0", "1, 0", "1, 1", "0, 1")
    assert "while True:" in text and "break" in text, "what follows is written once"


def test_what_is_added_to_a_local_may_be_a_call_that_is_in_place() -> None:
    source = """
@straight
def told(out, c):
    out.append(c)
    return c * 2

@straight
def some(out, c):
    if c:
        return told(out, c)
    return 7

@straight
def entry(out, c):
    x = 1
    x += told(out, c)
    x -= some(out, c)
    out[0] += told(out, 3)
    return x
"""
    text = both(source, "[5], 0", "[5], 4")
    assert "told(out, c)" not in text, "of locals it is in place"
    assert "told(out, 3)" in text, "what is read first could be changed by it"


def test_several_names_are_assigned_in_their_order_from_values_in_theirs() -> None:
    both("@straight\ndef entry(a):\n    i = 0\n    i, a[i] = 1, 5\n    return i, a\n", "[0, 0]")
    both("@straight\ndef entry(a, x):\n    x, y = a.pop(), a.pop(x)\n    return x, y, a\n", "[1, 2, 3, 4], 0")
    both("@straight\ndef entry(a):\n    a, a = a + 1, a\n    return a\n", "3")
    both("@straight\ndef entry(a):\n    x, *y = 1, 2, 3\n    p, q = (1, *a)\n    return x, y, p, q\n", "[1]")


def test_a_target_reads_what_its_neighbour_was_before() -> None:
    source = """
@straight
def two(d):
    b = d["k"]
    return 1, b

@straight
def entry(d, a):
    x = 0
    a[x], x = two(d)
    return x, a
"""
    both(source, "{'k': 1}, [7, 8]")


def test_a_continue_in_the_else_of_a_loop_goes_on_with_the_next_thing() -> None:
    source = f"""{BOX}
@straight
def entry(box, log):
    for lane in box.lanes:
        for each in log:
            if each == 3:
                break
        else:
            log.append(lane)
            if len(log) > 20:
                raise ValueError
            continue
        log.append(0)
    return log
"""
    both(source, "Box(), []", "Box(), [3]", known={"box": boxed})


@pytest.mark.parametrize("value", ["lane", "lane.numerator"])
def test_what_a_thing_was_skipped_before_is_not_learned_of_it(value: str) -> None:
    source = f"""{BOX}
@straight
def entry(box, c):
    for lane in box.lanes:
        if lane == c:
            continue
        x = {value}
    return x
"""
    both(source, "Box(), 0", "Box(), 1", "Box(), 2", known={"box": boxed})


def test_what_goes_over_a_row_and_is_assigned_there_is_left_as_it_is() -> None:
    source = f"{BOX}\n@straight\ndef entry(box):\n    for lane in box.lanes:\n        lane += 1\n    return lane\n"
    with pytest.raises(Unable, match="assigns to what goes over a row"):
        both(source, known={"box": boxed})


def test_a_loop_without_items_says_nothing_of_its_target() -> None:
    source = """
class Box:
    ones, twos = [1], []

    def __repr__(self):
        return "Box"

@straight
def entry(box):
    for x in box.ones:
        pass
    for x in box.twos:
        pass
    return x.numerator
"""
    items = {name: Each(Thing(int, {"numerator": Const(at)})) for at, name in enumerate(("ones", "twos"), 1)}
    both(source, "Box()", known={"box": lambda space: Thing(space["Box"], items)})
