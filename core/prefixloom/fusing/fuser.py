"""Making functions: marked functions in place of the calls to them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from .known import Frame, Thing, Told, Unable, Use
from .sources import Source, source_of
from .statements import NOTHING, Statements
from .trees import (
    Block,
    assign,
    ends,
    ids,
    is_ours,
    is_pure,
    name,
    results,
    run_once,
    without_unread,
)


class Fuser(Statements):
    """``lasting``: names that hold the same from the beginning of a function to its end."""

    def __init__(self, spread: dict[str, tuple[str, ...]], instead: dict[type, type], lasting: tuple[str, ...]) -> None:
        super().__init__(spread, instead)
        self.lasting = lasting

    def lasts(self, expr: ast.expr) -> bool:
        """Of a thing of a row, whatever is known to be a thing as well."""
        if isinstance(expr, ast.Attribute):
            return isinstance(expr.value, ast.Name) and expr.value.id in self.lasting
        return isinstance(expr, ast.Name) and expr.id in self.lasting

    def entry(self, function: FunctionType, known: dict[str, Any], held: str) -> str:
        """The text of ``function`` with all in place. ``known``: of its parameters. ``held``: what the lasting names
        are the items of.
        """
        source = source_of(function)
        definition = copy.copy(source.definition)
        args = definition.args = copy.deepcopy(definition.args)
        rest = [each for each in (args.vararg, args.kwarg) if each is not None]
        parameters = [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest]
        once = dict(source.stored)
        names = {local: local for local in [*(each.arg for each in parameters), *once]}
        for each in parameters:
            once[each.arg] = once.get(each.arg, 0) + 1
            each.annotation = None
        if any(is_ours(local) or local in self.lasting for local in names):
            raise Unable(f"{function.__qualname__} has a local by a name that is kept for others")
        self.inside = []
        frame = Frame(
            function, names, {*names, *self.lasting}, {local: (None, what) for local, what in known.items()}, once,
            lambda expr, _: [ast.Return(expr)], source.caught,
        )  # fmt: skip
        out = without_unread(self.block(frame, source.body))
        out = [*self._prelude(ids(*out), held), *out]
        args.defaults = [self.written("default", value) for value in function.__defaults__ or ()]
        kwdefaults = function.__kwdefaults__ or {}
        args.kw_defaults = [
            self.written(each.arg, kwdefaults[each.arg]) if each.arg in kwdefaults else None for each in args.kwonlyargs
        ]
        definition.decorator_list, definition.returns, definition.body = [], None, out or [ast.Pass()]
        return ast.unparse(ast.fix_missing_locations(definition))

    def _prelude(self, used: set[str], held: str) -> Block:
        """What gives the lasting names that are used what they hold."""
        needed = [each for each in self.lasting if each in used]
        if not needed:
            return []
        if len(needed) == 1 < len(self.lasting):
            return ast.parse(f"{needed[0]} = {held}[{self.lasting.index(needed[0])}]").body
        return ast.parse(f"{''.join(f'{each}, ' for each in self.lasting)} = {held}").body

    # ------------------------------------------------------------ in place of a call
    def placed(self, frame: Frame, node: ast.expr, use: Use, into: tuple[str | None, ...] = ()) -> Block | None:
        if not isinstance(node, ast.Call) or frame.rare:
            return None
        target = self.target(frame, node)
        if target is None:
            return None
        function, mine = target
        if source_of(self.member(function, "__init__") if isinstance(function, type) else function).tries:
            return None
        if isinstance(function, type):
            return self._made(frame, node, function, use, into)
        told = self.as_expression(frame, node, function, mine)
        if told is not None and not isinstance(told[0], ast.Call):
            return use(*told)
        return self._body(frame, node, function, mine, use, into)

    def _made(self, frame: Frame, node: ast.Call, cls: type, use: Use, into: tuple[str | None, ...]) -> Block:
        """An object is made bare, and what ``__init__`` does is done to it."""
        given = [self.ev(frame, each)[0] for each in (*node.args, *(each.value for each in node.keywords))]
        me = into[0] if len(into) == 1 else None
        own = me is None or me in ids(*given)
        if own:
            me = self.fresh(frame, f"new_{cls.__name__.lower()}")
        assert me is not None
        thing = name(me), Thing(cls, {})
        out: Block = [assign(me, ast.Call(name("_new"), [self.shared(cls.__name__, cls)], []))]
        out += self._body(frame, node, self.member(cls, "__init__"), [thing], lambda *_: [], ())
        out += use(*thing)
        if own:
            frame.used.discard(me)
        return out

    def _body(
        self, frame: Frame, node: ast.Call, function: FunctionType, mine: list[Told], use: Use,
        into: tuple[str | None, ...],
    ) -> Block:  # fmt: skip
        source = source_of(function)
        given = self.arguments(frame, node, function, mine)
        inner = Frame(function, {}, set(frame.used), {}, dict(source.stored), use, source.caught)
        self.enter(function)
        out = self._in_place(frame, inner, given, into)
        self.inside.pop()
        return out

    def _in_place(self, frame: Frame, inner: Frame, given: dict[str, Told], into: tuple[str | None, ...]) -> Block:
        source = source_of(inner.function)
        body, ways, use = source.body, source.returns, inner.give
        self._borrow(frame, inner, ways, given, into)
        for local in [*given, *sorted(source.stored)]:
            if local not in inner.names:
                inner.names[local] = self.fresh(inner, local)
        out = self._given(inner, given, source)
        if not ways or (len(ways) == 1 and body[-1] is ways[0]):
            return out + self._to_the_end(inner, body, use)
        inner.wrapped = True
        inner.give = lambda expr, _: use(expr, None)  # what is known of one way's result is not known of another's
        placed = self.block(inner, body)
        if not ends(placed):
            placed += [*inner.give(ast.Constant(None), NOTHING), ast.Break()]
        return out + run_once(placed)

    def _borrow(
        self, frame: Frame, inner: Frame, ways: Iterable[ast.Return], given: dict[str, Told],
        into: tuple[str | None, ...],
    ) -> None:  # fmt: skip
        """Locals of ``inner`` that are called as what they are given to, or were given from where that is over.

        So nobody may read the one whose name is borrowed before it is given the result: no other argument, no handler
        does, and of a frame that is over nothing is read at all.
        """
        handled = source_of(inner.function).handled
        for local, target in results(ways, into, inner.once.keys() - handled).items():
            others = ids(*(expr for each, (expr, _) in given.items() if each != local))
            mine = given[local][0] if local in given else None
            if target not in others and (mine is None or isinstance(mine, ast.Name) or target not in ids(mine)):
                inner.names[local] = target
        if not frame.over:
            return
        lent = [expr.id for expr, _ in given.values() if isinstance(expr, ast.Name)]
        own = {there for local, there in frame.names.items() if frame.known.get(local, (None,))[0] is None}
        for local, (expr, _) in given.items():
            if local not in inner.once or local in inner.names or local in handled or not isinstance(expr, ast.Name):
                continue
            if expr.id in own and lent.count(expr.id) == 1 and expr.id not in inner.names.values():
                inner.names[local] = expr.id

    def _given(self, inner: Frame, given: dict[str, Told], source: Source) -> Block:
        """Assign the arguments to parameters that are written; the others stand for what they are given."""
        out: Block = []
        for local, (expr, what) in given.items():
            inner.once[local] = inner.once.get(local, 0) + 1
            there = inner.names[local]
            if local in source.stored:
                if not (isinstance(expr, ast.Name) and expr.id == there):
                    out.append(assign(there, expr))
            elif is_pure(expr) or (isinstance(what, Thing) and source.reads.get(local, 0) < 2 and self.lasts(expr)):
                inner.known[local] = expr, what
            else:
                out.append(assign(there, expr))
                inner.known[local] = None, what
        return out

    def _to_the_end(self, inner: Frame, body: Block, use: Use) -> Block:
        """A body that returns at its end, if at all: what is known of the result is passed on."""
        last = body[-1] if body and isinstance(body[-1], ast.Return) else None
        if last is None or last.value is None:
            out = self.block(inner, body if last is None else body[:-1])
            return out if out and isinstance(out[-1], ast.Raise) else out + use(ast.Constant(None), NOTHING)
        out = self.block(inner, body[:-1])
        if out and isinstance(out[-1], ast.Raise):
            return out
        inner.over = True
        placed = self.placed(inner, last.value, use)
        inner.over = False
        return out + (use(*self.ev(inner, last.value)) if placed is None else placed)
