"""Expressions: what is known is written in, and a marked function that is one expression stands for its call."""

from __future__ import annotations

import ast
import builtins
import copy
import operator
from types import FunctionType
from typing import Any

import attrs

from ..straight import is_straight
from .known import Const, Frame, Items, Row, Thing, Told, Unable
from .sources import source_of
from .trees import calls, ids, is_ours, is_pure, name

COMPARED = {
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le, ast.GtE: operator.ge,
}  # fmt: skip
COUNTED = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
NOWHERE: Any = object()
"""In place of what is not there."""
DEEPEST = 8
"""How often a function may stand in itself, of other things each time."""
EMPTY: Any = ast.Constant(())  # type: ignore[arg-type]
Mine = list[Told]
"""Who a method is called on, if it is one."""


class Expressions:
    """``scope``: what the functions that are made refer to. ``seen``, ``read``: what they were made from."""

    def __init__(self, spread: dict[str, tuple[str, ...]], instead: dict[type, type]) -> None:
        """``spread``: attributes that are rows, and what their items are called as attributes of their own.
        ``instead``: classes that others stand for.
        """
        self.spread = spread
        self.instead = instead
        self.scope: dict[str, Any] = {"__builtins__": builtins, "_new": object.__new__}
        self.seen: dict[tuple[type, str], Any] = {}
        self.read: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self.inside: list[FunctionType] = []

    @property
    def holds(self) -> bool:
        """Whether all that was read is as it was."""
        return all(vars(cls).get(what, NOWHERE) is found for (cls, what), found in self.seen.items()) and all(
            module.get(what, NOWHERE) is found for (_, what), (module, found) in self.read.items()
        )

    def member(self, cls: type, what: str) -> Any:
        """What a class says of ``what``; Unable if nothing."""
        for each in cls.__mro__:
            found = self.seen[each, what] = vars(each).get(what, NOWHERE)
            if found is not NOWHERE:
                return found
        return Unable

    def shared(self, what: str, value: Any) -> ast.Name:
        """The name of ``value``, which is no local."""
        if isinstance(value, type):
            value = self.instead.get(value, value)
        what = mine = f"the_{what}"
        count = 1
        while self.scope.get(mine, value) is not value:
            count += 1
            mine = f"{what}_{count}"
        self.scope[mine] = value
        return name(mine)

    def looked_up(self, frame: Frame, what: str) -> Told:
        if what in frame.names:
            written, known = frame.known.get(what, (None, None))
            return name(frame.names[what]) if written is None else copy.deepcopy(written), known
        function = frame.function
        if what in function.__code__.co_freevars:
            found = Const(_around(function, what))
        elif what in function.__globals__:
            value = function.__globals__[what]
            self.read[id(function.__globals__), what] = function.__globals__, value
            if isinstance(value, list | dict | set):
                return self.shared(what, value), None
            found = Const(value)
        else:
            self.read[id(function.__globals__), what] = function.__globals__, NOWHERE
            if not hasattr(builtins, what):
                return name(what), None
            found = Const(getattr(builtins, what))
            return self.shared(what, found.value) if what in frame.used else name(what), found
        return ast.Constant(found.value) if found.plain else self.shared(what, found.value), found

    # ------------------------------------------------------------ each kind
    def ev(self, frame: Frame, node: ast.expr) -> Told:
        """``node`` as it is written there, and what is known of its value."""
        method = getattr(self, f"_ev_{type(node).__name__}", None)
        if method is not None:
            return method(frame, node)  # type: ignore[no-any-return]
        out = copy.copy(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(out, field, self.ev(frame, value)[0])
            elif isinstance(value, list):
                told = [self.ev(frame, each)[0] if isinstance(each, ast.expr) else each for each in value]
                setattr(out, field, told)
        return out, None

    def _ev_Constant(self, frame: Frame, node: ast.Constant) -> Told:
        return node, Const(node.value)

    def _ev_Name(self, frame: Frame, node: ast.Name) -> Told:
        if isinstance(node.ctx, ast.Load):
            return self.looked_up(frame, node.id)
        return ast.Name(frame.names[node.id], node.ctx), None

    def _ev_Attribute(self, frame: Frame, node: ast.Attribute) -> Told:
        value, what = self.ev(frame, node.value)
        out = ast.Attribute(bracketed(value), node.attr, node.ctx)
        if not isinstance(node.ctx, ast.Load) or not isinstance(what, Thing):
            return out, None
        if node.attr in what.known:
            found = what.known[node.attr]
        elif node.attr == "__class__":
            found = None if what.maybe else Const(what.cls)
        else:
            member = self.member(what.cls, node.attr)
            if isinstance(member, property) and isinstance(member.fget, FunctionType) and is_straight(member.fget):
                call = ast.Call(name(node.attr), [], [])
                return self.as_expression(frame, call, member.fget, [(value, what)]) or (out, None)
            own = what.cls.__dictoffset__ != 0  # what a class says, one of its instances may say otherwise
            found = Const(member) if Const(member).plain and not own else None
        if isinstance(found, Const) and found.plain:
            return ast.Constant(found.value), found
        if isinstance(found, Const) and isinstance(found.value, type):
            return self.shared(found.value.__name__, found.value), found
        return out, found

    def _ev_ListComp(self, frame: Frame, node: Any) -> Told:
        """Its own names are its own, and hide none that it reads."""
        out = copy.deepcopy(node)
        own = {}
        used = set(frame.used)
        for each in sorted(ids(*(part.target for part in out.generators))):
            own[each] = each
            while own[each] in used or is_ours(own[each]):
                own[each] += "_"
            used.add(own[each])
        inner = attrs.evolve(
            frame,
            names={**frame.names, **own},
            known={local: known for local, known in frame.known.items() if local not in own},
            used=used,
        )
        for part in out.generators:
            part.iter = self.ev(frame if part is out.generators[0] else inner, part.iter)[0]
            part.target = self.ev(inner, part.target)[0]
            part.ifs = [self.ev(inner, each)[0] for each in part.ifs]
        for field in ("elt", "key", "value"):
            if hasattr(out, field):
                setattr(out, field, self.ev(inner, getattr(out, field))[0])
        return out, None

    _ev_GeneratorExp = _ev_SetComp = _ev_DictComp = _ev_ListComp

    def _ev_Lambda(self, frame: Frame, node: ast.Lambda) -> Told:
        raise Unable(f"{frame.what} makes a function")

    _ev_NamedExpr = _ev_Yield = _ev_YieldFrom = _ev_Await = _ev_Lambda

    def _ev_Subscript(self, frame: Frame, node: ast.Subscript) -> Told:
        value, what = self.ev(frame, node.value)
        at, which = self.ev(frame, node.slice)
        if isinstance(which, Const):
            if isinstance(value, ast.Attribute) and value.attr in self.spread:
                return ast.Attribute(value.value, self.spread[value.attr][which.value], node.ctx), None
            if isinstance(what, Items):
                return ast.Subscript(value, at, node.ctx), what.items[which.value]
        return ast.Subscript(value, at, node.ctx), None

    def _ev_Tuple(self, frame: Frame, node: ast.Tuple) -> Told:
        items = [self.ev(frame, each) for each in node.elts]
        if not items:
            return EMPTY, Const(())
        if any(isinstance(expr, ast.Starred) for expr, _ in items):
            return ast.Tuple([expr for expr, _ in items], node.ctx), None
        return ast.Tuple([expr for expr, _ in items], node.ctx), Items(tuple(what for _, what in items))

    def _ev_BoolOp(self, frame: Frame, node: ast.BoolOp) -> Told:
        decides = isinstance(node.op, ast.Or)
        left: list[Told] = []
        for value in node.values:
            expr, what = self.ev(frame, value)
            known = truth(expr, what)
            if known is decides:
                left.append((expr, what))
                break
            if known is None or value is node.values[-1]:
                left.append((expr, what))
        return left[0] if len(left) == 1 else (ast.BoolOp(node.op, [expr for expr, _ in left]), None)

    def _ev_UnaryOp(self, frame: Frame, node: ast.UnaryOp) -> Told:
        expr, what = self.ev(frame, node.operand)
        known = truth(expr, what)
        if isinstance(node.op, ast.Not) and known is not None:
            return ast.Constant(not known), Const(not known)
        if isinstance(node.op, ast.USub) and isinstance(what, Const):
            return ast.Constant(-what.value), Const(-what.value)
        return ast.UnaryOp(node.op, expr), None

    def _ev_BinOp(self, frame: Frame, node: ast.BinOp) -> Told:
        left, a = self.ev(frame, node.left)
        right, b = self.ev(frame, node.right)
        if isinstance(b, Const) and b.value.__class__ is int:
            if isinstance(a, Const) and a.value.__class__ is int and type(node.op) in COUNTED:
                value = COUNTED[type(node.op)](a.value, b.value)
                return ast.Constant(value), Const(value)
            if not b.value and isinstance(node.op, ast.Add | ast.Sub):
                return left, a
        return ast.BinOp(bracketed(left) if isinstance(node.op, ast.Pow) else left, node.op, right), None

    def _ev_Compare(self, frame: Frame, node: ast.Compare) -> Told:
        left, a = self.ev(frame, node.left)
        rest = [self.ev(frame, each) for each in node.comparators]
        op, b = node.ops[0], rest[0][1]
        if len(rest) == 1:
            if isinstance(a, Const) and isinstance(b, Const) and type(op) in COMPARED:
                answer = bool(COMPARED[type(op)](a.value, b.value))
                return ast.Constant(answer), Const(answer)
            there = isinstance(a, Row) or (isinstance(a, Thing) and not a.maybe)
            if there and not calls(left) and b == Const(None) and isinstance(op, ast.Is | ast.IsNot):
                return ast.Constant(isinstance(op, ast.IsNot)), Const(isinstance(op, ast.IsNot))
            bare = self._counted(left, op, b)
            if bare is not None:
                return bare, None
        return ast.Compare(left, node.ops, [expr for expr, _ in rest]), None

    def _counted(self, left: ast.expr, op: ast.cmpop, count: Any) -> ast.expr | None:
        """``x.row.count(None) == all`` and ``!= all`` of a row that is spread: a question to each item."""
        if not (isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute) and left.func.attr == "count"):
            return None
        row = left.func.value
        if not (isinstance(row, ast.Attribute) and row.attr in self.spread and isinstance(count, Const)):
            return None
        places = self.spread[row.attr]
        if count.value != len(places) or not isinstance(op, ast.Eq | ast.NotEq) or not is_pure(row.value):
            return None
        asked: ast.cmpop = ast.Is() if isinstance(op, ast.Eq) else ast.IsNot()
        parts: list[ast.expr] = [
            ast.Compare(ast.Attribute(copy.copy(row.value), place, ast.Load()), [asked], [ast.Constant(None)])
            for place in places
        ]
        return parts[0] if len(parts) == 1 else ast.BoolOp(ast.And() if isinstance(op, ast.Eq) else ast.Or(), parts)

    def _ev_IfExp(self, frame: Frame, node: ast.IfExp) -> Told:
        test, what = self.ev(frame, node.test)
        known = truth(test, what)
        if known is not None:
            return self.ev(frame, node.body if known else node.orelse)
        return ast.IfExp(test, self.ev(frame, node.body)[0], self.ev(frame, node.orelse)[0]), None

    # ------------------------------------------------------------ calls
    def _ev_Call(self, frame: Frame, node: ast.Call) -> Told:
        target = self.target(frame, node)
        if target is not None and not isinstance(target[0], type):
            inlined = self.as_expression(frame, node, *target)
            if inlined is not None:
                return inlined
        args = [self.ev(frame, each)[0] for each in node.args]
        keywords = [ast.keyword(each.arg, self.ev(frame, each.value)[0]) for each in node.keywords]
        above = self._above(frame, node)
        if above is not None:
            own = self.looked_up(frame, "self")[0]
            return ast.Call(self.shared(f"{above.__name__}_above", above), [own, *args], keywords), None
        func, what = self.ev(frame, node.func)
        made = what.value if isinstance(what, Const) else None
        known = Thing(made, {}) if isinstance(made, type) and made.__module__.startswith("prefixloom") else None
        return ast.Call(func, args, keywords), known

    def _above(self, frame: Frame, node: ast.Call) -> Any:
        """The function that ``super().what`` is; None if it is something else that is called."""
        func = node.func
        if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call)):
            return None
        if not (isinstance(func.value.func, ast.Name) and func.value.func.id == "super"):
            return None
        own = self.looked_up(frame, "self")[1]
        if not isinstance(own, Thing) or func.value.args:
            raise Unable(f"{frame.what}: whose super() is not known")
        order = own.cls.__mro__
        place = order.index(_around(frame.function, "__class__"))
        found = next((cls for cls in order[place + 1 :] if func.attr in vars(cls)), None)
        return None if found is None else self.member(found, func.attr)

    def target(self, frame: Frame, node: ast.Call) -> tuple[Any, Mine] | None:
        """The marked function, or class with a marked ``__init__``, that is called, and who it is called on."""
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            return None
        mine: Mine = []
        above = self._above(frame, node)
        if above is not None:
            found = above
            mine = [self.looked_up(frame, "self")]
        elif isinstance(node.func, ast.Attribute):
            value, what = self.ev(frame, node.func.value)
            if not isinstance(what, Thing):
                return None
            told = what.known.get(node.func.attr)
            if isinstance(told, Const):
                found = told.value
            else:
                found = self.member(what.cls, node.func.attr)
                mine = [(value, what)]
        else:
            _, what = self.ev(frame, node.func)
            found = what.value if isinstance(what, Const) else None
        if isinstance(found, type):
            return (found, []) if is_straight(self.member(found, "__init__")) else None
        return (found, mine) if isinstance(found, FunctionType) and is_straight(found) else None

    def as_expression(self, frame: Frame, node: ast.Call, function: FunctionType, mine: Mine) -> Told | None:
        """A function that is one expression, with its arguments written in; None if that cannot be."""
        source = source_of(function)
        body = source.body
        if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
            return None
        given = self.arguments(frame, node, function, mine)
        acts = calls(body[0].value)
        for each, (expr, what) in given.items():
            often = source.reads.get(each, 0) > 1
            same = isinstance(what, Thing) and self.lasts(expr)
            if not is_pure(expr) and (calls(expr) or often or (acts and not same)):
                return None
        self.enter(function)
        own = {each: each for each in given}
        inner = Frame(function, own, frame.used, dict(given), {}, frame.give, source.caught)
        told = self.ev(inner, body[0].value)
        self.inside.pop()
        return told

    def enter(self, function: FunctionType) -> None:
        """It is put in place from now on, until it is taken off ``inside``."""
        self.inside.append(function)
        if self.inside.count(function) > DEEPEST:
            raise Unable(f"{function.__qualname__} calls itself")

    def lasts(self, expr: ast.expr) -> bool:
        """Whether it is what it is from the beginning to the end."""
        raise NotImplementedError

    def arguments(self, frame: Frame, node: ast.Call, function: FunctionType, mine: Mine) -> dict[str, Told]:
        """What each parameter is given, in the order in which that is evaluated."""
        args = source_of(function).definition.args
        if args.vararg or args.kwarg or args.posonlyargs:
            raise Unable(f"{function.__qualname__} takes any arguments")
        names = [arg.arg for arg in args.args]
        given = dict(zip(names, [*mine, *(self.ev(frame, each) for each in node.args)], strict=False))
        for keyword in node.keywords:
            given[str(keyword.arg)] = self.ev(frame, keyword.value)
        values = function.__defaults__ or ()
        defaults = dict(zip(names[len(names) - len(values) :], values, strict=True))
        for each, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
            if each not in given:
                given[each] = self.written(each, value), Const(value)
        return given

    def written(self, what: str, value: Any) -> ast.expr:
        return ast.Constant(value) if Const(value).plain else self.shared(what, value)


def bracketed(expr: ast.expr) -> ast.expr:
    """A number below 0 is an expression where it is written out."""
    below = isinstance(expr, ast.Constant) and isinstance(expr.value, int | float) and expr.value < 0
    return ast.UnaryOp(ast.USub(), ast.Constant(-expr.value)) if below else expr  # type: ignore


def truth(expr: ast.expr, what: Any) -> bool | None:
    """Whether it counts as true, if that is known and nothing has to be called for it."""
    if calls(expr):
        return None
    if isinstance(what, Const):
        return bool(what.value)
    if isinstance(what, Row):
        return bool(what.items)
    if isinstance(what, Thing) and not what.maybe and not hasattr(what.cls, "__len__"):
        return None if hasattr(what.cls, "__bool__") else True
    return None


def _around(function: FunctionType, what: str) -> Any:
    """What a function finds around it."""
    return (function.__closure__ or ())[function.__code__.co_freevars.index(what)].cell_contents
