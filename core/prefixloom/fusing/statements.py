"""Statements: branches whose question is answered, loops over rows, and what is learned of locals."""

from __future__ import annotations

import ast
from typing import Any

from .expressions import Expressions, truth
from .known import Const, Each, Frame, Items, Row, Unable, Use
from .trees import (
    ENDS,
    Block,
    assign,
    breaking,
    ids,
    is_ours,
    is_pure,
    is_row_of_none,
    is_target,
    jumps,
    name,
    one_by_one,
    returns,
    run_once,
    stored,
)

NOTHING = Const(None)


class Statements(Expressions):
    def block(self, frame: Frame, body: Block) -> Block:
        out: Block = []
        for statement in body:
            out += self.statement(frame, statement)
            if out and isinstance(out[-1], ENDS):
                break
        return out

    def statement(self, frame: Frame, node: ast.stmt) -> Block:
        method = getattr(self, f"_st_{type(node).__name__}", None)
        if method is None:
            raise Unable(f"{frame.what} has a {type(node).__name__}")
        return method(frame, node)  # type: ignore[no-any-return]

    def placed(self, frame: Frame, node: ast.expr, use: Use, into: tuple[str | None, ...] = ()) -> Block | None:
        """The statements of the marked function that ``node`` calls, which give what it returns to ``use``; None if
        ``node`` is something else. ``into``: the names that it is to be assigned to.
        """
        raise NotImplementedError

    def fresh(self, frame: Frame, what: str) -> str:
        """A name that nothing has there; it is used from now on."""
        while what in frame.used or is_ours(what):
            what += "_"
        frame.used.add(what)
        return what

    # ------------------------------------------------------------ simple ones
    def _st_Pass(self, frame: Frame, node: ast.stmt) -> Block:
        return []

    _st_Assert = _st_Pass

    def _st_Break(self, frame: Frame, node: ast.stmt) -> Block:
        return [type(node)()]

    _st_Continue = _st_Break

    def _st_Delete(self, frame: Frame, node: ast.Delete) -> Block:
        return [ast.Delete([self.ev(frame, each)[0] for each in node.targets])]

    def _st_Raise(self, frame: Frame, node: ast.Raise) -> Block:
        error, cause = (None if each is None else self.ev(frame, each)[0] for each in (node.exc, node.cause))
        return [ast.Raise(error, cause)]

    def _st_Expr(self, frame: Frame, node: ast.Expr) -> Block:
        def use(expr: ast.expr, _: object) -> Block:
            return [] if is_pure(expr) else [ast.Expr(expr)]

        placed = self.placed(frame, node.value, use)
        return use(*self.ev(frame, node.value)) if placed is None else placed

    def _st_Return(self, frame: Frame, node: ast.Return) -> Block:
        placed: Block | None
        if node.value is None:
            placed = frame.give(ast.Constant(None), NOTHING)
        else:
            frame.over = not frame.tries
            placed = self.placed(frame, node.value, frame.give)
            frame.over = False
            if placed is None:
                placed = frame.give(*self.ev(frame, node.value))
        if not frame.wrapped or (placed and isinstance(placed[-1], ast.Return | ast.Raise)):
            return placed
        return [*placed, ast.Break()]

    # ------------------------------------------------------------ assignments
    def _st_AnnAssign(self, frame: Frame, node: ast.AnnAssign) -> Block:
        return [] if node.value is None else self._st_Assign(frame, ast.Assign([node.target], node.value))

    def _st_AugAssign(self, frame: Frame, node: ast.AugAssign) -> Block:
        def use(value: ast.expr, what: Any) -> Block:
            nothing = isinstance(what, Const) and what.value.__class__ is int and not what.value
            if nothing and isinstance(node.op, ast.Add | ast.Sub):
                return []
            target: Any = self.ev(frame, node.target)[0]
            return [ast.AugAssign(target, node.op, value)]

        # what it had before is read first: of a local that makes no difference, which no other function can change
        placed = self.placed(frame, node.value, use) if isinstance(node.target, ast.Name) else None
        return use(*self.ev(frame, node.value)) if placed is None else placed

    def _st_Assign(self, frame: Frame, node: ast.Assign) -> Block:
        if len(node.targets) == 1:
            target = node.targets[0]
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            read = ids(*(each for each in parts if not isinstance(each, ast.Name)))
            if frame.tries:
                read |= frame.caught
            into = tuple(
                frame.names[each.id] if isinstance(each, ast.Name) and each.id not in read else None for each in parts
            )
            placed = self.placed(frame, node.value, lambda expr, what: self._assigned(frame, target, expr, what), into)
            return self._assigned(frame, target, *self.ev(frame, node.value)) if placed is None else placed
        value, what = self.ev(frame, node.value)
        for target in node.targets:
            self.learn(frame, target, value, what, written=True)
        return [ast.Assign([self.ev(frame, each)[0] for each in node.targets], value)]

    def learn(self, frame: Frame, target: ast.expr, value: ast.expr, what: Any, written: bool = False) -> bool:
        """What is known of a local that is assigned once; whether nothing has to be ``written`` for that."""
        if not isinstance(target, ast.Name):
            return False
        if what is None or frame.once.get(target.id, 0) > 1:
            frame.known.pop(target.id, None)
            return False
        bare = not written and not frame.depth and is_pure(value) and (isinstance(what, Const) or self.lasts(value))
        frame.known[target.id] = value if bare else None, what
        return bare

    def _assigned(self, frame: Frame, target: ast.expr, value: ast.expr, what: Any) -> Block:
        if isinstance(target, ast.Tuple):
            return self._assigned_all(frame, target, value, what)
        if self.learn(frame, target, value, what):
            return []
        if isinstance(target, ast.Attribute) and target.attr in self.spread:
            if not is_row_of_none(value):
                raise Unable(f"{frame.what} puts something into a row that is spread")
            owner = self.ev(frame, target.value)[0]
            places = [ast.Attribute(owner, place, ast.Store()) for place in self.spread[target.attr]]
            return [ast.Assign(list(places), ast.Constant(None))]
        to = self.ev(frame, target)[0]
        return [] if is_target(to, value) else [assign(to, value)]

    def _assigned_all(self, frame: Frame, target: ast.Tuple, value: ast.expr, what: Any) -> Block:
        count = len(target.elts)
        there = value.elts if isinstance(value, ast.Tuple) else []
        if any(isinstance(each, ast.Starred) for each in (*target.elts, *there)):
            what, there = None, []
        parts = what.items if isinstance(what, Items) and len(what.items) == count else (None,) * count
        if len(there) != count:
            for each, part in zip(target.elts, parts, strict=True):
                self.learn(frame, each, value, part, written=True)
            return [assign(self.ev(frame, target)[0], value)]
        left = [each.id for each in target.elts if isinstance(each, ast.Name)]
        twice: set[str] = set()
        pairs = []
        for each, expr, part in zip(target.elts, there, parts, strict=True):
            if not self.learn(frame, each, expr, part):
                to = self.ev(frame, each)[0]
                if isinstance(each, ast.Name) and left.count(each.id) > 1:  # the last of them counts
                    left.remove(each.id)
                    if is_pure(expr):
                        continue
                    twice.add(each.id)
                if not is_target(to, expr) or ids(each) & twice:
                    pairs.append((to, expr))
        seen = frame.tries and not all(is_pure(expr) for _, expr in pairs)
        for given, order in ((True, pairs), (False, pairs[::-1])):
            if not seen and (given or not twice) and one_by_one(order, given):
                return [assign(to, expr) for to, expr in order]
        to_all, all_of = [to for to, _ in pairs], [expr for _, expr in pairs]
        return [assign(ast.Tuple(to_all, ast.Store()), ast.Tuple(all_of, ast.Load()))]

    # ------------------------------------------------------------ branches and loops
    def _st_If(self, frame: Frame, node: ast.If) -> Block:
        test, what = self.ev(frame, node.test)
        known = truth(test, what)
        if known is not None:
            return self.block(frame, node.body if known else node.orelse)
        before = self.placed(frame, node.test, lambda expr, _: [assign("_answer", expr)]) or []
        if before:
            test = name("_answer")
        elif isinstance(test, ast.BoolOp):
            last, both = test.values[-1], isinstance(test.op, ast.And)
            if isinstance(last, ast.Constant) and bool(last.value) is both:  # it decides nothing
                test = ast.BoolOp(test.op, test.values[:-1]) if len(test.values) > 2 else test.values[0]
        body = self._branch(frame, node.body, rare=isinstance(node.body[-1], ast.Raise)) or [ast.Pass()]
        orelse = self._branch(frame, node.orelse)
        if not orelse and isinstance(body[0], ast.Pass):
            return before if is_pure(test) else [*before, ast.Expr(test)]
        return [*before, ast.If(test, body, orelse)]

    def _branch(self, frame: Frame, body: Block, rare: bool = False) -> Block:
        """One that may run or not: what is learned in it does not hold after it."""
        kept = dict(frame.known)
        frame.depth += 1
        frame.rare += rare
        out = self.block(frame, body)
        frame.rare -= rare
        frame.depth -= 1
        frame.known = kept
        return out

    def _st_While(self, frame: Frame, node: ast.While) -> Block:
        test, what = self.ev(frame, node.test)
        known = truth(test, what)
        if known is False:
            return self.block(frame, node.orelse)
        body = self._looped(frame, node.body)
        if known:
            if isinstance(body[-1], ast.Break) and not jumps(body[:-1]):
                return body[:-1]
            test = ast.Constant(True)
        return [ast.While(test, body, self._branch(frame, node.orelse))]

    def _looped(self, frame: Frame, body: Block) -> Block:
        if frame.wrapped and returns(body):
            raise Unable(f"{frame.what} returns from inside of a loop")
        return self._branch(frame, body) or [ast.Pass()]

    def _st_For(self, frame: Frame, node: ast.For) -> Block:
        over, what = self.ev(frame, node.iter)
        if isinstance(what, Row) and isinstance(node.target, ast.Name):
            return self._unrolled(frame, node, node.target.id, what)
        for local in ids(node.target):
            frame.known.pop(local, None)
        if isinstance(what, Each):
            if isinstance(node.target, ast.Tuple) and isinstance(what.item, Items):
                for each, part in zip(node.target.elts, what.item.items, strict=True):
                    self.learn(frame, each, over, part, written=True)
            else:
                self.learn(frame, node.target, over, what.item, written=True)
        target = self.ev(frame, node.target)[0]
        body = self._looped(frame, node.body)
        for local in ids(node.target):  # there may have been no item
            frame.known.pop(local, None)
        return [ast.For(target, over, body, self._branch(frame, node.orelse))]

    def _unrolled(self, frame: Frame, node: ast.For, local: str, row: Row) -> Block:
        """The body once for each thing of a row; a ``continue`` leaves that once."""
        inside = jumps(node.body)
        if node.orelse or any(isinstance(each, ast.Break) for each in inside):
            raise Unable(f"{frame.what} breaks out of a loop over a row")
        if inside and frame.wrapped and returns(node.body):
            raise Unable(f"{frame.what} returns from a loop over a row in which it goes on, too")
        if local in stored(node.body):
            raise Unable(f"{frame.what} assigns to what goes over a row")
        out: Block = []
        for held, item in row.items:
            frame.known[local] = name(held), item
            body = self._branch(frame, node.body) if inside else self.block(frame, node.body)
            out += run_once([*breaking(body), ast.Break()]) if inside else body
            if not inside and out and isinstance(out[-1], ENDS):
                break
        return out

    def _st_Try(self, frame: Frame, node: ast.Try) -> Block:
        at_last = bool(node.finalbody)
        frame.tries += 1
        body = self._branch(frame, node.body)
        frame.tries += at_last - 1
        handlers = []
        for each in node.handlers:
            kind = None if each.type is None else self.ev(frame, each.type)[0]
            caught = None if each.name is None else frame.names[each.name]
            handlers.append(ast.ExceptHandler(kind, caught, self._branch(frame, each.body, rare=True) or [ast.Pass()]))
        orelse = self._branch(frame, node.orelse)
        frame.tries -= at_last
        final = self._branch(frame, node.finalbody)
        if not body or (not handlers and not final):
            return body + orelse + final
        return [ast.Try(body, handlers, orelse, final)]
