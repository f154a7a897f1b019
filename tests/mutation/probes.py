"""Probes: functions that note which of their blocks run. This shows which test runs which line, at little cost.

A probe is a statement that sets one byte. There is one at the beginning of each block of a function, and one behind
each statement that has blocks of its own, because such a statement may leave the block. The living functions get the
code with probes (``__code__``), so nothing is imported again.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Iterator

from tests.mutation.sites import parsed, product_files
from tests.mutation.workshop import Workshop
from tests.support.places import ROOT

NAME = "_ran_of_a_mutation_map"
"""The array of bytes, as the functions find it among the builtins."""


class Probes:
    """The probes of all functions of the product that the workshop has imported, in one array of bytes."""

    def __init__(self, workshop: Workshop) -> None:
        self.places: list[tuple[str, list[int]]] = []
        """By probe: its file, and the lines that run when it does."""
        self._swaps: list[tuple[types.FunctionType, types.CodeType]] = []
        for file in filter(workshop.has_imported, product_files()):
            tree = parsed(file)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    node.body = self._with_probes(file, node.body)
            whole = compile(ast.fix_missing_locations(tree), str(ROOT / file), "exec", dont_inherit=True)
            for code in functions_in(whole):
                for function in workshop.functions(file, code.co_qualname, code.co_firstlineno):
                    if function.__code__.co_freevars == code.co_freevars:
                        self._swaps.append((function, code))
        self._ran = bytearray(len(self.places))

    def _with_probes(self, file: str, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return a block with probes, in it and in the blocks of its statements, but not in its functions."""
        out: list[ast.stmt] = []
        lines: list[int] = []
        wanted = True
        for at, node in enumerate(body):
            if not at and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                out.append(node)  # the docstring stays the first
                continue
            if wanted:
                lines = []
                out.append(ast.copy_location(_probe(len(self.places)), node))
                self.places.append((file, lines))
            out.append(node)
            blocks = [*_blocks(node)]
            inside = {line for block in blocks for line in range(block[0].lineno, (block[-1].end_lineno or 0) + 1)}
            lines += sorted({*range(node.lineno, (node.end_lineno or 0) + 1)} - inside)
            wanted = bool(blocks)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for block in blocks:
                    block[:] = self._with_probes(file, block)
        return out

    def put_in(self) -> None:
        """Give the living functions their probes, in this process."""
        setattr(builtins, NAME, self._ran)
        for function, code in self._swaps:
            function.__code__ = code

    def taken(self) -> list[int]:
        """Return which probes were passed since the last call."""
        found = []
        at = self._ran.find(1)
        while at >= 0:
            found.append(at)
            at = self._ran.find(1, at + 1)
        self._ran[:] = bytes(len(self._ran))
        return found


def _probe(number: int) -> ast.stmt:
    (made,) = ast.parse(f"{NAME}[{number}] = 1").body
    return made


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a statement, also those of its handlers and cases."""
    for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(part, field, None)
            if block:
                yield block


def functions_in(module: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of each function that has a name, also of those inside of others."""
    for each in module.co_consts:
        if isinstance(each, types.CodeType):
            if not each.co_name.startswith("<"):
                yield each
            yield from functions_in(each)
