"""Where a function can be changed, and the changed function: mutants by structure.

A *site* is one change of one node of a function's syntax tree. It is named by the module, the function, the operator
and its ordinal among that operator's sites in the function, never by a line or a text. So a name outlives formatting,
comments and moves. What stands outside of functions (constants, defaults, decorators, annotations) has no site.
"""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.support.places import ROOT

Change = Callable[[], ast.AST]
"""Makes the node that stands in the place of another."""

EDGES: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITES: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
IN_ANY_ORDER = {"sorted", "reversed"}
UNTOUCHED = {"__repr__", "__str__", "__format__"}
"""Functions that only make text for people."""
UNTOUCHED_ARGUMENTS = {"strict", "metavar"}
"""What only asserts, as that of ``zip``, or only stands in a help text."""
REQUIRE = "require"
"""A function that asserts: its first argument is the condition, and the others are a message."""
NO_WHOLE_NUMBERS = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.Set)


class Place(NamedTuple):
    """Where a node hangs in its parent."""

    parent: ast.AST
    field: str
    index: int | None

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


class Site(NamedTuple):
    """One change of one function. ``lines`` are those of which one runs where the change matters."""

    file: str
    function: str
    operator: str
    ordinal: int
    digest: str
    lines: tuple[int, int]

    @property
    def name(self) -> str:
        """What names this site as long as its function is the same."""
        return f"{self.file}::{self.function} {self.operator} {self.ordinal} {self.digest}"


class Found(NamedTuple):
    """A change in a syntax tree that was just parsed: made, it cannot be taken back."""

    site: Site
    place: Place
    change: Change


class Unit(NamedTuple):
    """A function that stands in a module or a class, with all that is nested in it."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


def units(tree: ast.AST, prefix: str = "") -> Iterator[Unit]:
    """Yield the outermost functions of a module; a second one of the same name has a number."""
    seen: dict[str, int] = {}
    for unit in _units(tree, prefix):
        count = seen[unit.name] = seen.get(unit.name, 0) + 1
        yield unit if count == 1 else Unit(f"{unit.name}#{count}", unit.node)


def _units(tree: ast.AST, prefix: str) -> Iterator[Unit]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Unit(prefix + node.name, node)
        elif isinstance(node, ast.ClassDef):
            yield from _units(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _units(node, prefix)


def digest(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a digest of a function's structure, whatever its docstring, comments, lines and formatting are."""
    bare = copy.copy(node)
    bare.body = [each for each in node.body if not _is_text(each)]
    return hashlib.sha256(ast.dump(bare).encode()).hexdigest()[:12]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_logged(node: ast.AST) -> bool:
    """Return whether a statement only tells people something."""
    return (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func)[:4] == "log."
    )


def found_in(file: str, tree: ast.AST) -> Iterator[Found]:
    """Yield every site of a module, in the order of its source."""
    for unit in units(tree):
        if unit.node.name in UNTOUCHED:
            continue
        counts: dict[str, int] = {}
        told = digest(unit.node)
        for operator, place, change, at in _edits(unit.node):
            ordinal = counts[operator] = counts.get(operator, -1) + 1
            yield Found(Site(file, unit.name, operator, ordinal, told, _lines(at)), place, change)


def _lines(node: Any) -> tuple[int, int]:
    first = node.lineno
    if isinstance(node, ast.For | ast.While | ast.If | ast.Try | ast.With | ast.FunctionDef):
        return first, first
    return first, node.end_lineno or first


Edit = tuple[str, Place, Change, ast.AST]


def _edits(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Edit]:
    bound = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    for index, node in enumerate(function.body):
        last = index == len(function.body) - 1
        yield from _walk(node, Place(function, "body", index), bound, last)


def _walk(node: ast.AST, place: Place, bound: set[str], last: bool) -> Iterator[Edit]:
    """Yield the edits of a node and of all below it. ``last`` is the statement after which its function ends anyway."""
    if _is_text(node) or _is_logged(node) or (isinstance(node, ast.keyword) and node.arg in UNTOUCHED_ARGUMENTS):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == REQUIRE:
        yield from _walk(node.args[0], Place(node, "args", 0), bound, False)
        return
    yield from ((name, there, change, at) for name, there, change, at in _at(node, place, bound, last))
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        if isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, ast.AST):
                    ends = isinstance(node, ast.If) and last and index == len(value) - 1
                    ends |= isinstance(node, ast.FunctionDef) and index == len(value) - 1
                    yield from _walk(each, Place(node, field, index), bound, ends)
        elif isinstance(value, ast.AST):
            yield from _walk(value, Place(node, field, None), bound, False)
    if isinstance(node, ast.Assign):
        bound |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _at(node: ast.AST, place: Place, bound: set[str], last: bool) -> Iterator[Edit]:
    if isinstance(node, ast.expr):
        yield from _of_expression(node, place)
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node, place, bound, last)
    elif isinstance(node, ast.comprehension):
        for index, test in enumerate(node.ifs):
            yield "condition_negated", Place(node, "ifs", index), _negation(test), test
            yield "filter_dropped", Place(node, "ifs", index), lambda: ast.Constant(True), test
    elif isinstance(node, ast.ExceptHandler) and not (len(node.body) == 1 and isinstance(node.body[0], ast.Raise)):
        yield "handler_dropped", place, lambda: _with(node, body=[ast.Raise()]), node.body[0]


def _of_expression(node: ast.expr, place: Place) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for name, table in (("comparison_edge", EDGES), ("comparison_negated", OPPOSITES)):
                if type(operator) in table:
                    yield name, Place(node, "ops", index), _made(table[type(operator)]), node
    elif isinstance(node, ast.BoolOp):
        other: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and_or", place, lambda: _with(node, op=other), node
        for index in range(len(node.values)):
            left = node.values[:index] + node.values[index + 1 :]
            yield "operand_dropped", place, _joined(node, left), node
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not_dropped", place, lambda: node.operand, node
    elif isinstance(node, ast.IfExp):
        yield "condition_negated", Place(node, "test", None), _negation(node.test), node
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not any(isinstance(each, NO_WHOLE_NUMBERS) or _is_string(each) for each in (node.left, node.right)):
            yield "arithmetic", Place(node, "op", None), _made(ARITHMETIC[type(node.op)]), node
            if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod):
                yield "off_by_one", place, _plus(node, 1), node
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
        name = "constant_flipped" if isinstance(value, bool) else "constant_changed"
        new = not value if isinstance(value, bool) else value + 1
        yield name, place, lambda: ast.Constant(new), node
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        edges = node.slice
        for field, by in (("lower", 1), ("upper", -1)):
            edge = getattr(edges, field)
            if edge is not None:
                yield "slice_edge_moved", Place(edges, field, None), _plus(edge, by), node
                yield "slice_edge_dropped", Place(edges, field, None), lambda: None, node  # type: ignore[arg-type,return-value]
    elif isinstance(node, ast.Call):
        yield from _of_call(node, place)


def _of_call(node: ast.Call, place: Place) -> Iterator[Edit]:
    if isinstance(node.func, ast.Name):
        name = node.func.id
        if name in ("isinstance", "cast", "super"):
            return
        if name in NAMES:
            yield "min_max_any_all", Place(node, "func", None), lambda: ast.Name(NAMES[name], ast.Load()), node
        if name in IN_ANY_ORDER:
            listed = ast.Call(ast.Name("list", ast.Load()), node.args[:1], [])
            yield "order_dropped", place, lambda: listed, node
    for index in range(len(node.args) - 1):
        one, other = node.args[index : index + 2]
        starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        commutes = isinstance(node.func, ast.Name) and node.func.id in NAMES
        if not starred and not commutes and ast.dump(one) != ast.dump(other):
            swapped = [*node.args[:index], other, one, *node.args[index + 2 :]]
            yield "arguments_swapped", place, _changed(node, args=swapped), node
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in UNTOUCHED_ARGUMENTS:
            left = node.keywords[:index] + node.keywords[index + 1 :]
            yield "keyword_dropped", place, _changed(node, keywords=left), node
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop") and len(node.args) == 2:
        yield "default_dropped", place, lambda: _with(node, args=node.args[:1]), node


def _of_statement(node: ast.stmt, place: Place, bound: set[str], last: bool) -> Iterator[Edit]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call_dropped", place, ast.Pass, node
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        plain = any(isinstance(each, ast.Tuple | ast.List) for each in targets)
        if isinstance(node, ast.AugAssign) or (not plain and names <= bound):
            yield "assignment_dropped", place, ast.Pass, node
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            yield "arithmetic", Place(node, "op", None), _made(ARITHMETIC[type(node.op)]), node
    elif isinstance(node, ast.Raise):
        yield "raise_dropped", place, ast.Pass, node
    elif isinstance(node, ast.Return):
        if not last:
            yield "return_dropped", place, ast.Pass, node
        if node.value is not None and not isinstance(node.value, ast.Constant):
            yield "return_changed", place, lambda: ast.Return(ast.Constant(None)), node
    elif isinstance(node, ast.Break | ast.Continue):
        yield "loop_exit", place, ast.Continue if isinstance(node, ast.Break) else ast.Break, node
        yield "loop_exit_dropped", place, ast.Pass, node
    elif isinstance(node, ast.If | ast.While):
        if not isinstance(node.test, ast.Constant | ast.UnaryOp):
            yield "condition_negated", Place(node, "test", None), _negation(node.test), node
        if isinstance(node, ast.If) and node.orelse and not isinstance(node.orelse[0], ast.If):
            yield "else_dropped", place, lambda: _with(node, orelse=[]), node.orelse[0]
    elif isinstance(node, ast.Try) and node.finalbody:
        yield "finally_dropped", place, lambda: _with(node, finalbody=[ast.Pass()]), node.finalbody[0]
    if isinstance(node, ast.For | ast.While) and not isinstance(
        node.body[-1], ast.Break | ast.Continue | ast.Return | ast.Raise
    ):
        yield "loop_once", place, lambda: _with(node, body=[*node.body, ast.Break()]), node.body[0]


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, int | float)


def _negation(test: ast.expr) -> Change:
    return lambda: ast.UnaryOp(ast.Not(), test)


def _plus(node: ast.expr, by: int) -> Change:
    operator: ast.operator = ast.Add() if by > 0 else ast.Sub()
    return lambda: ast.BinOp(node, operator, ast.Constant(abs(by)))


def _made(kind: type) -> Change:
    return lambda: kind()


def _joined(node: ast.BoolOp, left: list[ast.expr]) -> Change:
    return lambda: left[0] if len(left) == 1 else _with(node, values=left)


def _changed(node: ast.AST, **fields: Any) -> Change:
    return lambda: _with(node, **fields)


Node = TypeVar("Node", bound=ast.AST)


def _with(node: Node, **fields: Any) -> Node:
    """Return the same node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def sites(file: str) -> list[Site]:
    """Return every site of a file of the product, whose path is from the repository's root."""
    return [found.site for found in found_in(file, parsed(file))]


def mutate(site: Site) -> ast.Module:
    """Return the module's syntax tree with that one change."""
    tree = parsed(site.file)
    for found in found_in(site.file, tree):
        if found.site == site:
            new = found.change()
            if isinstance(new, ast.stmt | ast.expr | ast.ExceptHandler):
                _put_lines(new, getattr(found.place.parent, "lineno", 1), site.lines[0])
            found.place.put(new)
            return ast.fix_missing_locations(tree)
    raise LookupError(f"there is no {site.name}")


def _put_lines(node: ast.AST, parent: int, line: int) -> None:
    for each in ast.walk(node):
        if isinstance(each, ast.stmt | ast.expr | ast.ExceptHandler) and not hasattr(each, "lineno"):
            each.lineno = each.end_lineno = line
            each.col_offset = each.end_col_offset = 0


def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def difference(site: Site) -> str:
    """Return a unified diff of the function, both sides printed by ``ast.unparse``; the real line is on top."""
    old, new = (_text(tree, site.function) for tree in (parsed(site.file), mutate(site)))
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2))[2:]
    return "\n".join([f"{site.file}:{site.lines[0]} {site.function}", *lines])


def _text(tree: ast.Module, function: str) -> str:
    (unit,) = [unit for unit in units(tree) if unit.name == function]
    return ast.unparse(unit.node)


def product_files() -> list[str]:
    """Return every source file of core, plugins and engine, from the repository's root."""
    folders = [ROOT / "core/prefixloom", *ROOT.glob("plugins/*/prefixloom_*"), ROOT / "engine/prefixloom_engine"]
    found: list[Path] = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)
