"""Fusing: names, arguments and values are what they are in the source, and the source is what it was."""

from __future__ import annotations

from typing import Any

import pytest

from fusing_programs import made
from fusing_rules import HEAD, LANES, both
from prefixloom.fusing import Fuser, Row, Thing, Unable


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
