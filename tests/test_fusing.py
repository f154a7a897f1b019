"""Fusing: what is made of marked functions does what they do, rule by rule and for programs at random."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import pytest

from fusing_programs import Writer, fused, made, outcome
from prefixloom.fusing import Const, Each, Fuser, Row, Thing, Unable

COUNT = itertools.count()
HEAD = "from __future__ import annotations\nfrom prefixloom.straight import straight\n\n"
LANES = ("lane_0", "lane_1")


def both(source: str, *given: str, known: dict[str, Any] | None = None) -> str:
    """The text made of ``entry``, after it has done for what is ``given`` (each time anew) what the source does."""
    space = made(HEAD + source, f"<rule {next(COUNT)}>")
    fuser = Fuser({"cells": ("cell_0", "cell_1")}, {}, LANES)
    told = {name: thing(space) if callable(thing) else thing for name, thing in (known or {}).items()}
    text = fuser.entry(space["entry"], told, "box.lanes")
    exec(compile(text, "<made>", "exec"), fuser.scope)
    for each in given:
        seen = []
        for entry in (space["entry"], fuser.scope["entry"]):
            arguments = eval(f"({each},)", space)
            try:
                seen.append((repr(entry(*arguments)), [repr(one) for one in arguments]))
            except Exception as error:
                seen.append((repr(error), [repr(one) for one in arguments]))
        assert seen[0] == seen[1], text
    return text


def boxed(space: dict[str, Any]) -> Thing:
    """A ``Box`` of two lanes that are ints, of which the numerators are known."""
    row = tuple((name, Thing(int, {"numerator": Const(at + 1)})) for at, name in enumerate(LANES))
    return Thing(space["Box"], {"lanes": Row(row)})


BOX = """
class Box:
    def __init__(self):
        self.lanes = 1, 2

    def __repr__(self):
        return str(self.lanes)
"""


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


def test_nothing_is_known_of_a_result_after_a_finally() -> None:
    source = """
@straight
def last(a):
    try:
        return a.pop()
    finally:
        a.append(3)

@straight
def entry(a):
    x = last(a)
    return x, a
"""
    both(source, "[1, 2]", "[]")


def test_a_local_keeps_its_value_where_what_was_to_give_it_another_raises() -> None:
    source = """
@straight
def got(d):
    y = d.get("z")
    d["k"]
    return y

@straight
def entry(d):
    x = 1
    try:
        x = got(d)
    except KeyError:
        pass
    return x
"""
    both(source, "{}", "{'k': 1}")


def test_what_raises_where_a_result_is_used_is_not_caught_where_it_was_returned() -> None:
    source = """
@straight
def pair(d):
    try:
        return d["k"]
    except (KeyError, TypeError):
        return 7, 8

@straight
def entry(d):
    a, b = pair(d)
    return a, b
"""
    with pytest.raises(Unable, match="returns out of a try"):
        both(source)


def test_an_error_that_is_returned_outlives_its_handler() -> None:
    source = """
@straight
def failed(d):
    try:
        d["k"]
    except KeyError as error:
        return error
    return None

@straight
def entry(d):
    x = failed(d)
    return x
"""
    both(source, "{}", "{'k': 1}")


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


def test_what_is_assigned_in_a_try_is_not_known_after_it() -> None:
    source = f"""{BOX}
@straight
def entry(box, d):
    out = []
    for lane in box.lanes:
        try:
            d[lane]
            x = lane.numerator
        except KeyError:
            pass
        out.append(x == 1)
    return out
"""
    both(source, "Box(), {1: 1}", "Box(), {1: 1, 2: 2}", known={"box": boxed})


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


def test_a_local_hides_no_builtin_and_no_name_of_a_comprehension_from_what_stands_there() -> None:
    source = """
@straight
def size(a, p):
    n = len(a)
    return n, [p + k for k in a]

@straight
def popped(a):
    r = a.pop()
    out = [r + k for k in a]
    return r

@straight
def entry(a):
    len = 3
    k = 10
    x, y = size(a, k)
    k = popped(a)
    return len, x, y, k, [k for k in a], [a for a in a]
"""
    both(source, "[1, 2]")


def test_displays_with_stars_read_the_locals_that_they_name() -> None:
    source = """
@straight
def more(a):
    b = a.get(1)
    c = {**a, b: 2}
    return c, [*a, b]

@straight
def entry(a):
    b = 9
    x = more(a)
    return x, b
"""
    both(source, "{1: 2}")


def test_a_number_below_zero_stays_in_one_piece() -> None:
    both("@straight\ndef entry(a):\n    n = -2\n    return n ** a, n.bit_length(), a - n\n", "2")


def test_defaults_are_the_objects_that_they_are() -> None:
    source = """
MARK = object()

@straight
def is_mark(a, mark=MARK):
    return mark is MARK, a

@straight
def entry(a, /, *more, mark=MARK, **named):
    x = is_mark(a)
    return x, mark is MARK, more, named
"""
    both(source, "1", "1, 2")


def test_what_calls_itself_is_left_as_it_is() -> None:
    source = "@straight\ndef entry(a):\n    x = 0\n    if a:\n        x = entry(a - 1)\n    return x + 1\n"
    with pytest.raises(Unable, match="calls itself"):
        both(source)


def test_a_question_whose_answer_is_known_is_asked_if_asking_does_something() -> None:
    source = """
class Made:
    __module__ = "prefixloom.here"

    def __init__(self, a):
        a.append(1)

@straight
def entry(a):
    if Made(a) and Made(a) is not None and not Made(a):
        return 0
    return len(a)
"""
    both(source, "[]")


def test_what_a_class_says_may_be_otherwise_in_its_instances() -> None:
    source = """
class Lane:
    kind = 1

    def __repr__(self):
        return str(self.kind)

@straight
def entry(a):
    a.kind += 1
    return a.kind
"""
    both(source, "Lane()", known={"a": lambda space: Thing(space["Lane"], {})})


def test_an_argument_is_what_it_was_before_the_function_did_anything() -> None:
    source = """
class Lane:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def up(self):
        self.count += 1
        return 0

class Box:
    def __init__(self):
        self.lanes = Lane(), Lane()

    def __repr__(self):
        return str([lane.count for lane in self.lanes])

@straight
def after(lane, count):
    return lane.up() + count

@straight
def entry(box):
    out = []
    for lane in box.lanes:
        out.append(after(lane, lane.count))
    return out
"""

    def rows(space: dict[str, Any]) -> Thing:
        return Thing(space["Box"], {"lanes": Row(tuple((name, Thing(space["Lane"], {})) for name in LANES))})

    both(source, "Box()", known={"box": rows})


def test_only_a_row_of_nothing_is_assigned_to_a_row_that_is_spread() -> None:
    class_ = "class Box:\n    pass\n\n"
    assert "cell_0 = a.cell_1" in both(f"{class_}@straight\ndef entry(a):\n    a.cells = [None] * 2\n")
    with pytest.raises(Unable, match="row that is spread"):
        both(f"{class_}@straight\ndef entry(a, cells):\n    a.cells = cells\n")


def test_a_source_that_differs_only_inside_of_a_comprehension_is_another_one() -> None:
    source = HEAD + "@straight\ndef entry(a):\n    return [each + 1 for each in a]\n"
    space = made(source, "<changed>")
    made(source.replace("+ 1", "+ 2"), "<changed>")
    with pytest.raises(Unable, match="another one by now"):
        Fuser({}, {}, ()).entry(space["entry"], {}, "")


def test_what_hides_a_name_that_was_read_is_noticed() -> None:
    source = """
class Base:
    @straight
    def one(self):
        return 1

class Mine(Base):
    pass

@straight
def entry(a, b):
    x = a.one()
    return x + len(b)
"""
    space = made(HEAD + source, "<hidden>")
    fuser = Fuser({}, {}, ())
    fuser.entry(space["entry"], {"a": Thing(space["Mine"], {})}, "")
    assert fuser.holds
    space["Mine"].one = lambda self: 2
    assert not fuser.holds
    del space["Mine"].one
    assert fuser.holds
    space["len"] = lambda b: 7
    assert not fuser.holds
