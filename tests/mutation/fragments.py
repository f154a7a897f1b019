"""Mutants made by hand: in a named function, one piece of code becomes another. Both are found by their structure.

``old`` and ``new`` are expressions, or statements, as they would be typed. Comments, formatting and where a function
stands in its file do not matter. ``at`` says which occurrence is meant, counted from 0 in the order of the source.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.mutation.sites import Place, parsed, units


class Fragment(NamedTuple):
    """One change by hand. ``function`` is as in a site: ``Class.method``, with ``#2`` for a second of that name."""

    name: str
    file: str
    function: str
    old: str
    new: str
    at: int = 0
    why: str = ""
    """Why no test can see it, if it was judged so."""


def changed(fragment: Fragment) -> tuple[ast.Module, tuple[int, int]]:
    """Return the changed module's syntax tree, and the lines that changed. ``LookupError``: it is stale."""
    tree = parsed(fragment.file)
    for unit in units(tree):
        if unit.name == fragment.function:
            break
    else:
        raise LookupError(f"{fragment.name}: {fragment.file} has no {fragment.function}")
    old, new = _code(fragment.old), _code(fragment.new)
    if isinstance(old, ast.expr) and isinstance(new, ast.expr):
        places = [place for place, node in _expressions(unit.node) if ast.dump(node) == ast.dump(old)]
        if len(places) <= fragment.at:
            raise LookupError(f"{fragment.name}: {fragment.function} has no {fragment.old!r}")
        place = places[fragment.at]
        there: Any = getattr(place.parent, place.field)
        there = there if place.index is None else there[place.index]
        lines = there.lineno, there.end_lineno
        _copy_lines(new, lines[0])
        place.put(new)
        return ast.fix_missing_locations(tree), lines
    wanted = [ast.dump(each) for each in _statements(old)]
    found = [each for each in _bodies(unit.node, len(wanted)) if [ast.dump(s) for s in each[2]] == wanted]
    if len(found) <= fragment.at:
        raise LookupError(f"{fragment.name}: {fragment.function} has no {fragment.old!r}")
    body, index, statements = found[fragment.at]
    lines = statements[0].lineno, statements[-1].end_lineno or statements[-1].lineno
    made: list[ast.stmt] = _statements(new) or [ast.Pass()]
    for each in made:
        _copy_lines(each, lines[0])
    body[index : index + len(wanted)] = made
    return ast.fix_missing_locations(tree), lines


def _code(text: str) -> ast.expr | list[ast.stmt]:
    text = textwrap.dedent(text).strip("\n")
    try:
        return ast.parse(text, mode="eval").body if text else []
    except SyntaxError:
        function = ast.parse("async def _():\n while 1:\n" + textwrap.indent(text, "  ")).body[0]
        loop: Any = function.body[0]  # type: ignore[attr-defined]
        statements: list[ast.stmt] = loop.body
        return statements


def _statements(code: ast.expr | list[ast.stmt]) -> list[ast.stmt]:
    return [ast.Expr(code)] if isinstance(code, ast.expr) else code


def _expressions(function: ast.AST) -> Iterator[tuple[Place, ast.expr]]:
    for field, value in ast.iter_fields(function):
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, ast.AST):
                if isinstance(each, ast.expr):
                    yield Place(function, field, index if isinstance(value, list) else None), each
                yield from _expressions(each)


def _bodies(function: ast.AST, count: int) -> Iterator[tuple[list[ast.stmt], int, list[ast.stmt]]]:
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                for index in range(len(body) - count + 1):
                    yield body, index, body[index : index + count]


def _copy_lines(node: ast.AST, line: int) -> None:
    for each in ast.walk(node):
        if hasattr(each, "lineno"):
            each.lineno = line  # type: ignore[attr-defined]
            each.end_lineno = line  # type: ignore[attr-defined]
