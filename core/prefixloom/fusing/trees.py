"""Questions about syntax trees, and small changes to them. Nothing here knows what is known of values."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from typing import Any

Block = list[ast.stmt]
ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def name(what: str) -> ast.Name:
    return ast.Name(what, ast.Load())


def assign(to: ast.expr | str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(to, ast.Store()) if isinstance(to, str) else to], value)


def forever(body: Block) -> ast.While:
    return ast.While(ast.Constant(True), body, [])


def is_pure(expr: ast.expr) -> bool:
    """Whether it is a name or a constant."""
    return isinstance(expr, ast.Name | ast.Constant)


def is_ours(what: str) -> bool:
    """Whether it is kept for names that stand in no source."""
    return what.startswith("the_") or what in ("_new", "_answer")


def is_row_of_none(expr: ast.expr) -> bool:
    """``[None] * width``"""
    return (
        isinstance(expr, ast.BinOp)
        and isinstance(expr.op, ast.Mult)
        and ast.dump(expr.left) == ast.dump(ast.List([ast.Constant(None)], ast.Load()))
    )


def is_harmless(expr: ast.expr) -> bool:
    """Whether reading it does nothing."""
    if isinstance(expr, ast.Attribute):
        return is_harmless(expr.value)
    if isinstance(expr, ast.Tuple):
        return all(is_harmless(each) for each in expr.elts)
    return is_pure(expr)


def calls(expr: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(expr))


def is_target(to: ast.expr, value: ast.expr) -> bool:
    """Whether assigning ``value`` to ``to`` does nothing."""
    loaded = copy.copy(to)
    loaded.ctx = ast.Load()  # type: ignore[attr-defined]
    return isinstance(value, ast.Name) and ast.dump(loaded) == ast.dump(value)


def ids(*nodes: ast.AST) -> set[str]:
    """The names in these."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def reads(body: Block) -> dict[str, int]:
    """How often each name is read."""
    counts: dict[str, int] = {}
    for node in nodes_of(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            counts[node.id] = counts.get(node.id, 0) + 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            counts[node.target.id] = counts.get(node.target.id, 0) + 1
    return counts


def nodes_of(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)


def stored(body: Block) -> dict[str, int]:
    """The locals that are assigned, and how often; 0 where only loops do it, and each time anew."""
    looped: dict[str, int] = {}
    targets: set[int] = set()
    counts: dict[str, int] = {}
    for node in nodes_of(body):
        if isinstance(node, ast.For):
            for each in ast.walk(node.target):
                targets.add(id(each))
                if isinstance(each, ast.Name):
                    looped[each.id] = looped.get(each.id, 0) + 1
    for node in nodes_of(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in targets:
            counts[node.id] = counts.get(node.id, 0) + 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            counts[node.target.id] = counts.get(node.target.id, 0) + 2
        elif isinstance(node, ast.ExceptHandler) and node.name:
            counts[node.name] = counts.get(node.name, 0) + 2
    return {**dict.fromkeys(looped, 0), **{each: count + looped.get(each, 0) for each, count in counts.items()}}


def caught(body: Block) -> set[str]:
    """The names of which it is seen what they were when something was raised: those that handlers and ``finally`` read,
    and all where it goes on after that.
    """
    found: set[str] = set()
    for node in nodes_of(body):
        if isinstance(node, ast.Try):
            found |= ids(*node.handlers, *node.finalbody)
            leaves = all(isinstance(each.body[-1], ast.Raise | ast.Return) for each in node.handlers)
            stays = any(isinstance(each, ast.Return | ast.Break | ast.Continue) for each in nodes_of(node.finalbody))
            if stays or not leaves or any(jumps(each.body) for each in node.handlers):
                found |= ids(*node.body)
    return found


def handled(body: Block) -> set[str]:
    """The names of errors in handlers, which are deleted where these end."""
    return {node.name for node in nodes_of(body) if isinstance(node, ast.ExceptHandler) and node.name}


def returns_in_a_try(body: Block) -> bool:
    """Whether it does: handlers and a ``finally`` there may see what comes of the result, or run when it was given."""
    return any(isinstance(node, ast.Try) and returns([node]) for node in nodes_of(body))


def ends(body: Block) -> bool:
    """Whether nothing that follows ``body`` is ever reached from its end."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return ends(last.body) and ends(last.orelse)
    if isinstance(last, ast.Try):
        ways = [last.orelse if last.orelse else last.body, *(each.body for each in last.handlers)]
        return ends(last.finalbody) or all(ends(way) for way in ways) or (ends(last.body) and not last.handlers)
    return isinstance(last, ENDS)


def returns(body: Block) -> list[ast.Return]:
    return [node for node in nodes_of(body) if isinstance(node, ast.Return)]


def jumps(body: Block) -> list[ast.stmt]:
    """The breaks and continues of the loop whose body this is."""
    out: Block = []
    for statement in body:
        if isinstance(statement, ast.Break | ast.Continue):
            out.append(statement)
        elif isinstance(statement, ast.For | ast.While):
            out += jumps(statement.orelse)
        else:
            for block in blocks(statement):
                out += jumps(block)
    return out


def blocks(statement: ast.AST) -> list[Block]:
    """The blocks of a statement that are not empty."""
    found = [getattr(statement, field, None) for field in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", ())]
    return [block for block in found if block]


def breaking(body: Block) -> Block:
    """``body`` with a break for each continue of the loop whose body it is."""
    for at, statement in enumerate(body):
        if isinstance(statement, ast.Continue):
            body[at] = ast.Break()
        elif isinstance(statement, ast.For | ast.While):
            breaking(statement.orelse)
        else:
            for block in blocks(statement):
                breaking(block)
    return body


def run_once(body: Block) -> Block:
    """``body``, which runs once and is left by its breaks: in a loop, where branches are not enough."""
    straight = branched(body)
    return [forever(body)] if straight is None else straight


def branched(body: Block) -> Block | None:
    """``body``, which runs once and is left by its breaks, without these: what follows a branch that ends stands in the
    other one. None if that is not enough.
    """
    for at, statement in enumerate(body):
        if isinstance(statement, ast.Break):
            return body[:at]
        if not jumps([statement]):
            continue
        if not isinstance(statement, ast.If):
            return None
        rest = body[at + 1 :]
        if ends(statement.body):
            ways = branched(statement.body), branched([*statement.orelse, *rest])
        elif ends(statement.orelse):
            ways = branched([*statement.body, *rest]), branched(statement.orelse)
        else:
            return None
        yes, no = ways
        return None if yes is None or no is None else [*body[:at], ast.If(statement.test, yes or [ast.Pass()], no)]
    return body


def one_by_one(pairs: list[tuple[ast.expr, ast.expr]], given: bool = True) -> bool:
    """Whether assigning each of these (target, value) after the other comes to the same as all at once: no value reads
    what was assigned before it. ``given``: in this order; otherwise that of values and targets must not matter either.
    """
    bare = all(isinstance(to, ast.Name) for to, _ in pairs)
    values = [expr for _, expr in pairs]
    if not (bare and (given or all(map(is_harmless, values)))) and not (given and all(map(is_pure, values))):
        return False
    return not any(
        isinstance(to, ast.Name) and to.id in ids(*(expr for _, expr in pairs[at + 1 :]))
        for at, (to, _) in enumerate(pairs)
    )


def results(ways: Iterable[ast.Return], into: tuple[str | None, ...], locals_: Iterable[str]) -> dict[str, str]:
    """Locals that returns give to one of the names ``into``, where they give no other local to it."""
    out: dict[str, str] = {}
    for place, target in enumerate(into):
        found: set[str] = set()
        for each in ways:
            value: Any = each.value
            if len(into) > 1:
                value = value.elts[place] if isinstance(value, ast.Tuple) and len(value.elts) == len(into) else None
            if isinstance(value, ast.Name) and value.id in locals_:
                found.add(value.id)
        if len(found) == 1 and target is not None and target not in out.values() and not found & out.keys():
            out[found.pop()] = target
    return out


def without_unread(body: Block) -> Block:
    """``body`` without the assignments of names, constants and attributes to locals that nobody reads."""
    while _clean(body, reads(body)):
        pass
    return body


def _clean(block: Block, read: dict[str, int]) -> bool:
    """Whether there was any."""
    found = False
    for statement in list(block):
        if isinstance(statement, ast.Assign) and is_harmless(statement.value):
            kept = [each for each in statement.targets if not isinstance(each, ast.Name) or each.id in read]
            found = found or len(kept) < len(statement.targets)
            statement.targets = kept
            if not kept:
                block.remove(statement)
        for inner in blocks(statement):
            found = _clean(inner, read) or found
            if not inner:
                inner.append(ast.Pass())
    return found
