"""The sources of functions, if they are what the functions were made from."""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Iterable
from functools import cache
from types import CodeType, FunctionType

import attrs

from . import trees
from .known import Unable
from .trees import Block

FLAGS = __future__.annotations.compiler_flag
PLAIN_NAME = "a_function"
AROUND = ".<locals>."
"""Before Python 3.11 the whole name of a comprehension is a constant of what it stands in."""


@cache
def _definitions(filename: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file, by their first line."""
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): node
        for node in ast.walk(ast.parse("".join(linecache.getlines(filename))))
        if isinstance(node, ast.FunctionDef)
    }


def _checked(code: CodeType) -> ast.FunctionDef:
    """The definition that ``code`` was made from."""
    try:
        definition = _definitions(code.co_filename).get(code.co_firstlineno)
    except (SyntaxError, ValueError):
        definition = None
    if definition is None or definition.name != code.co_name or not _same(code, _compiled(definition, code)):
        raise Unable(f"the source of {code.co_name} is not there, or is another one by now")
    return definition


def _compiled(definition: ast.FunctionDef, code: CodeType) -> CodeType:
    """What the source comes to where the names that ``code`` finds around it are around it."""
    bare = ast.parse("def around(): pass").body[0]
    assert isinstance(bare, ast.FunctionDef)
    bare.args.args = [ast.arg(name) for name in code.co_freevars if name != "__class__"]
    plain = ast.parse(f"def {PLAIN_NAME}(): pass").body[0]  # by its own name it would find itself around it
    assert isinstance(plain, ast.FunctionDef)
    plain.args, plain.body = definition.args, definition.body
    inside: list[ast.stmt] = [plain]
    if "__class__" in code.co_freevars:
        holder = ast.parse("class Around: pass").body[0]
        assert isinstance(holder, ast.ClassDef)
        holder.body = inside
        inside = [holder]
    bare.body = inside
    module = ast.fix_missing_locations(ast.Module([bare], []))
    found: Iterable[object] = (compile(module, code.co_filename, "exec", FLAGS, dont_inherit=True),)
    while True:
        found = [each for one in found if isinstance(one, CodeType) for each in one.co_consts]
        for each in found:
            if isinstance(each, CodeType) and each.co_name == PLAIN_NAME:
                return each


def _same(a: CodeType, b: CodeType) -> bool:
    return (
        (a.co_code, a.co_names, a.co_varnames, _plain(a)) == (b.co_code, b.co_names, b.co_varnames, _plain(b))
        and len(_inside(a)) == len(_inside(b))
        and all(map(_same, _inside(a), _inside(b)))
    )


def _plain(code: CodeType) -> list[str]:
    consts = [each for each in code.co_consts if not isinstance(each, CodeType)]
    return [repr(each if each.__class__ is not str else each.rpartition(AROUND)[2]) for each in consts]


def _inside(code: CodeType) -> list[CodeType]:
    """Of comprehensions."""
    return [each for each in code.co_consts if isinstance(each, CodeType)]


@attrs.frozen(eq=False)
class Source:
    """A function's source, not to be changed, and what there is to know of it."""

    definition: ast.FunctionDef
    body: Block
    """Without the docstring."""
    stored: dict[str, int]
    caught: frozenset[str]
    handled: frozenset[str]
    reads: dict[str, int]
    returns: tuple[ast.Return, ...]
    tries: bool
    """It returns in a ``try``: so it stands in the place of no call."""


@cache
def _source(code: CodeType) -> Source:
    definition = _checked(code)
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return Source(
        definition, body, trees.stored(body), frozenset(trees.caught(body)), frozenset(trees.handled(body)),
        trees.reads(body), tuple(trees.returns(body)), trees.returns_in_a_try(body),
    )  # fmt: skip


def source_of(function: FunctionType) -> Source:
    """Unable: it is not to be had."""
    return _source(function.__code__)
