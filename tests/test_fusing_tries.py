"""Fusing where something raises: what handlers and a ``finally`` see is what they would have seen."""

from __future__ import annotations

from fusing_rules import BOX, both, boxed


def test_a_finally_reads_what_was_there_before_the_result_was_given() -> None:
    source = """
@straight
def last(p, seen):
    try:
        if p:
            return None
        p = 5
    finally:
        seen.append(p)
    return p

@straight
def entry(a, seen):
    x = last(a, seen)
    return x, seen
"""
    both(source, "0, []", "3, []")


def test_a_handler_around_a_finally_that_raises_reads_what_was_there_before_the_result_was_given() -> None:
    source = """
@straight
def last(p, seen):
    p += 1
    try:
        try:
            if p > 1:
                return None
        finally:
            seen.pop()
    except IndexError:
        seen.append(p)
    return p

@straight
def entry(a, seen):
    x = last(a, seen)
    return x, seen
"""
    both(source, "0, [1]", "3, [1]", "0, []", "3, []")


def test_a_local_keeps_its_value_where_a_finally_raises_after_the_result_was_there() -> None:
    source = """
@straight
def last(p, seen):
    try:
        return p + 1
    finally:
        seen.pop()

@straight
def entry(a, seen):
    x = a
    try:
        x = last(a, seen)
    except IndexError:
        seen.append(x)
    return x, seen
"""
    both(source, "3, []", "3, [1]")


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
    text = both(source, "{}", "{'k': (1, 2)}", "{'k': 5}")
    assert "the_pair(d)" in text, "it stands in no call's place"


def test_an_object_whose_init_returns_in_a_try_is_made_by_a_call() -> None:
    source = """
class Held:
    __slots__ = ("what",)
    @straight
    def __init__(self, d, seen):
        try:
            self.what = d["k"]
            return
        finally:
            seen.pop()

@straight
def entry(d, seen):
    x = None
    try:
        x = Held(d, seen)
    except IndexError:
        seen.append(x)
    return x is None, seen
"""
    both(source, "{'k': 1}, []", "{'k': 1}, [2]")


def test_a_handler_where_something_is_returned_sees_nothing_of_the_result() -> None:
    source = """
@straight
def pair(p, d):
    p += 1
    try:
        return p + 1, d["k"]
    except KeyError:
        d["k"] = p
    return p, p

@straight
def entry(a, d):
    x, y = pair(a, d)
    return x, y, d
"""
    both(source, "1, {}", "1, {'k': 5}")


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
