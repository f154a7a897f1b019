"""Random small programs of marked functions, to be run as they are written and as they are fused.

A program has rows of things of two classes, functions that call those before them, and an ``entry``. All that it does
is heard by ``box.hear``, which may raise at any one call, so order and what is left behind are compared as well.
"""

from __future__ import annotations

import linecache
import random
from typing import Any

from prefixloom.fusing import Const, Fuser, Row, Thing

HEAD = """\
from __future__ import annotations
from prefixloom.straight import straight


class Oops(Exception):
    pass


class Box:
    def __init__(self, lanes, fails):
        self.lanes = lanes
        self.heard = []
        self.fails = fails
        self.at = 0

    def hear(self, what):
        self.heard.append(what)
        if len(self.heard) == self.fails:
            raise Oops(what)
        if len(self.heard) > 400:
            raise MemoryError
        return what


class Even:
    __slots__ = ("count", "fixed", "mine")
    kind = 2

    def __init__(self, fixed):
        self.fixed = fixed
        self.count = 0
        self.mine = None

    def up(self, box):
        self.count += 1
        return box.hear(self.count)

{even}

class Odd(Even):
    __slots__ = ()
    kind = 3

{odd}

class Pair:
    __slots__ = ("left", "right")

    @straight
    def __init__(self, left, right=4):
        self.left = left
        self.right = right

"""
LASTING = ("lane_0", "lane_1", "lane_2")
KINDS = ("Even", "Odd", "Even")


class Writer:
    """``number``, ``maybe``, ``pair``: functions so far that return an int, an int or None, and two ints."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: dict[str, list[tuple[str, int]]] = {"number": [], "maybe": [], "pair": []}
        self.names = 0
        self.above = ""

    def program(self) -> str:
        even = self.method("m", "number", "") + self.method("n", "maybe", "")
        odd = self.method("m", "number", "super().m(box, {0})")
        out = []
        for i in range(self.random.randint(2, 5)):
            kind = self.random.choice(("number", "number", "maybe", "pair"))
            parameters = [f"p{j}" for j in range(self.random.randint(0, 2))]
            out.append(self.function(f"f{i}", kind, ["box", *parameters]))
            self.known[kind].append((f"f{i}", len(parameters)))
        out.append(self.function("entry", "number", ["box", "p0", "p1"]))
        return HEAD.format(even=even, odd=odd) + "\n\n".join(out)

    def method(self, name: str, kind: str, above: str) -> str:
        self.above = above
        text = self.function(name, kind, ["self", "box", "p0"])
        self.above = ""
        return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())

    def function(self, name: str, kind: str, parameters: list[str]) -> str:
        self.kind = kind
        self.in_loop = 0
        self.goes_on = False
        self.budget = 12
        known = {each for each in parameters if each not in ("box", "self")}
        self.own = "self" in parameters
        lines: list[str] = []
        if self.random.random() > 0.2:
            lines, known, _ = self.block(known, set(), 1)
        lines = [*lines, f"    {self.back(known, set())}"]
        return "\n".join(["@straight", f"def {name}({', '.join(parameters)}):", *lines]) + "\n"

    # ------------------------------------------------------------ statements
    def block(self, known: set[str], lanes: set[str], depth: int, most: int = 4) -> tuple[list[str], set[str], bool]:
        """Lines, the names that are assigned after it, and whether its end is reached."""
        known = set(known)
        out: list[str] = []
        for _ in range(self.random.randint(1, most)):
            lines, known, goes_on = self.statement(known, lanes, depth)
            out += [("    " * depth + line) if line else line for line in lines]
            if not goes_on:
                return out, known, False
        return out, known, True

    def inner(self, known: set[str], lanes: set[str], most: int = 3) -> tuple[list[str], set[str], bool]:
        return self.block(known, lanes, 1, most)

    def fresh(self, known: set[str]) -> str:
        """Now and then one that is there already."""
        pool = sorted(each for each in known if not each.startswith("maybe"))
        if pool and self.random.random() < 0.4:
            return self.random.choice(pool)
        if self.random.random() < 0.6:
            return self.random.choice(("a", "b", "c"))  # the same in all functions
        self.names += 1
        return f"v{self.names}"

    def statement(self, known: set[str], lanes: set[str], depth: int) -> tuple[list[str], set[str], bool]:
        pick = self.random.random()
        self.budget -= 1
        if self.budget < 0 or depth > 4:
            pick = pick / 2
        if pick < 0.12:
            return [f"box.hear({self.value(known, lanes)})"], known, True
        if pick < 0.24:
            to = self.fresh(known)
            return [f"{to} = {self.value(known, lanes)}"], known | {to}, True
        if pick < 0.36:
            to = self.fresh(known)
            call = self.call("number", known, lanes)
            return [f"{to} = {call}"], known | {to}, True
        if pick < 0.42:
            to = self.random.choice(("box.at", "box.at", *(f"{lane}.mine" for lane in sorted(lanes))))
            return [f"{to} = {self.call('number', known, lanes)}"], known, True
        if pick < 0.50:
            a, b = self.fresh(known), self.fresh(known)
            if self.random.random() < 0.3:
                a = "box.at"
            given = (
                self.call("pair", known, lanes)
                if self.random.random() < 0.6
                else f"{self.value(known, lanes)}, {self.value(known, lanes)}"
            )
            return [f"{a}, {b} = {given}"], known | {a, b} - {"box.at"}, True
        if pick < 0.56:
            self.names += 1
            to = f"maybe{self.names}"
            return [f"{to} = {self.call('maybe', known, lanes)}"], known | {to}, True
        if pick < 0.61 and known:
            to = self.random.choice(sorted(known))
            if to.startswith("maybe"):
                return [f"box.hear({to} is None)"], known, True
            more = self.call("number", known, lanes) if self.random.random() < 0.5 else self.value(known, lanes)
            return [f"{to} += {more}"], known, True
        if pick < 0.65:
            self.names += 1
            to = f"pair{self.names}"
            more = f", {self.value(known, lanes)}" if self.random.random() < 0.5 else ""
            lines = [f"{to} = Pair({self.value(known, lanes)}{more})", f"box.hear(({to}.left, {to}.right))"]
            return lines, known, True
        if pick < 0.78:
            return self.branch(known, lanes)
        if pick < 0.86 and not self.own:  # a method would call itself
            return self.row(known, lanes)
        if pick < 0.91:
            return self.loop(known, lanes)
        return self.tried(known, lanes)

    def branch(self, known: set[str], lanes: set[str]) -> tuple[list[str], set[str], bool]:
        test = self.test(known, lanes)
        if self.random.random() < 0.3 and self.may_return():
            return [f"if {test}:", f"    {self.back(known, lanes)}"], known, True
        if self.random.random() < 0.3 and (self.goes_on or self.in_loop):
            way = "continue" if self.goes_on or self.random.random() < 0.5 else "break"
            return [f"if {test}:", f"    {way}"], known, True
        body, one, on = self.inner(known, lanes)
        if self.random.random() < 0.5:
            return [f"if {test}:", *body], known, True
        orelse, two, also = self.inner(known, lanes)
        after = one & two if on and also else one if on else two
        return [f"if {test}:", *body, "else:", *orelse], after, on or also

    def may_return(self) -> bool:
        return not self.in_loop and not self.goes_on

    def row(self, known: set[str], lanes: set[str]) -> tuple[list[str], set[str], bool]:
        self.names += 1
        lane = f"lane{self.names}"
        before = self.in_loop, self.goes_on
        self.in_loop, self.goes_on = 0, self.random.random() < 0.4
        body, _, _ = self.inner(known, lanes | {lane})
        self.in_loop, self.goes_on = before
        if before[0] or before[1]:
            body = [line.partition("return ")[0] + "pass" if "return " in line else line for line in body]
        return [f"for {lane} in box.lanes:", *body], known, True

    def loop(self, known: set[str], lanes: set[str]) -> tuple[list[str], set[str], bool]:
        before = self.in_loop, self.goes_on
        self.in_loop, self.goes_on = self.in_loop + 1, False
        self.names += 1
        local = f"i{self.names}"
        body, _, _ = self.inner(known | {local}, lanes)
        self.in_loop, self.goes_on = before
        more: list[str] = []
        if self.random.random() < 0.3:
            self.in_loop, lines = before[0], []
            lines, _, _ = self.inner(known, lanes, 1)
            more = ["else:", *lines]
        return [f"for {local} in range({self.random.randint(0, 3)}):", *body, *more], known, True

    def tried(self, known: set[str], lanes: set[str]) -> tuple[list[str], set[str], bool]:
        body, _, _ = self.inner(known, lanes)
        out = ["try:", *body]
        way = self.random.random()
        if way < 0.7:
            self.names += 1
            error = f"e{self.names}"
            named = f" as {error}" if self.random.random() < 0.4 else ""
            lines, _, on = self.inner(known, lanes, 2)
            if named:
                lines = [f"    box.hear({error}.args)", *lines]
            if on and self.random.random() < 0.3:
                lines.append("    raise")
            out += [f"except Oops{named}:", *lines]
        if way > 0.5:
            before, self.in_loop, self.goes_on = (self.in_loop, self.goes_on), 1, False  # no return, and no jump, in it
            hear = self.value(known, lanes)
            self.in_loop, self.goes_on = before
            out += ["finally:", f"    box.hear({hear})"]
        return out, known, True

    def back(self, known: set[str], lanes: set[str]) -> str:
        if self.kind == "pair":
            pair = f"{self.value(known, lanes)}, {self.value(known, lanes)}"
            return f"return {self.call('pair', known, lanes) if self.random.random() < 0.3 else pair}"
        if self.kind == "maybe" and self.random.random() < 0.4:
            return "return None"
        named = sorted(each for each in known if not each.startswith("maybe"))
        pick = self.random.random()
        if pick < 0.4 and named:
            return f"return {self.random.choice(named)}"
        if pick < 0.7:
            return f"return {self.call('number', known, lanes)}"
        return f"return {self.value(known, lanes)}"

    # ------------------------------------------------------------ expressions
    def call(self, kind: str, known: set[str], lanes: set[str]) -> str:
        if kind == "number" and self.own and self.above and self.random.random() < 0.5:
            return self.above.format(self.value(known, lanes))
        if kind != "pair" and lanes and self.random.random() < 0.5:
            lane = self.random.choice(sorted(lanes))
            return f"{lane}.{'m' if kind == 'number' else 'n'}(box, {self.value(known, lanes)})"
        if not self.known[kind]:
            one, two = self.value(known, lanes), self.value(known, lanes)
            return {"number": f"box.hear({one})", "maybe": "None", "pair": f"({one}, {two})"}[kind]
        name, count = self.random.choice(self.known[kind])
        given = [self.value(known, lanes) for _ in range(count)]
        if count == 2 and self.random.random() < 0.3:
            return f"{name}(box, p1={given[0]}, p0={given[1]})"
        return f"{name}({', '.join(['box', *given])})"

    def value(self, known: set[str], lanes: set[str], depth: int = 0) -> str:
        named = sorted(each for each in known if not each.startswith("maybe"))
        pick = self.random.random()
        if pick < 0.4 and named:
            return self.random.choice(named)
        if pick < 0.5 and (lanes or self.own):
            lane = self.random.choice([*sorted(lanes), *(["self"] if self.own else [])])
            return self.random.choice((f"{lane}.fixed", f"{lane}.count", f"{lane}.kind", f"{lane}.up(box)"))
        if pick < 0.6:
            return f"box.hear({self.value(known, lanes, depth + 1)})" if depth < 2 else "box.at"
        if pick < 0.7 and depth < 2:
            op = self.random.choice("+-")
            return f"({self.value(known, lanes, depth + 1)} {op} {self.value(known, lanes, depth + 1)})"
        if pick < 0.76 and depth < 2:
            return f"{self.call('number', known, lanes)}" if depth < 1 else "box.at"
        if pick < 0.8 and depth < 2:
            one, two = self.value(known, lanes, depth + 1), self.value(known, lanes, depth + 1)
            return f"({one} if {self.test(known, lanes, depth + 1)} else {two})"
        if pick < 0.84 and depth < 2:
            own = self.random.choice(("a", "b", "k"))
            return f"sum([{own} + {self.value(known, lanes, 2)} for {own} in range({self.value(known, lanes, 2)} % 3)])"
        if pick < 0.88:
            return "box.at"
        return str(self.random.randint(-1, 3))

    def test(self, known: set[str], lanes: set[str], depth: int = 0) -> str:
        maybes = sorted(each for each in known if each.startswith("maybe"))
        pick = self.random.random()
        if pick < 0.3 and maybes:
            return f"{self.random.choice(maybes)} is {self.random.choice(('None', 'not None'))}"
        if pick < 0.4 and lanes:
            lane = self.random.choice(sorted(lanes))
            return self.random.choice((f"{lane}.fixed == 1", f"{lane}.kind > 2", f"{lane}.__class__ is Even"))
        if pick < 0.5 and depth < 2:
            op = self.random.choice(("and", "or"))
            return f"({self.test(known, lanes, depth + 1)} {op} {self.test(known, lanes, depth + 1)})"
        if pick < 0.56 and depth < 2:
            return f"not {self.test(known, lanes, depth + 1)}"
        if pick < 0.65:
            return self.call("number", known, lanes)
        op = self.random.choice(("<", "==", "!=", ">="))
        return f"{self.value(known, lanes, 1)} {op} {self.value(known, lanes, 1)}"


def made(text: str, filename: str) -> dict[str, Any]:
    """The names of a module with this source, which can be looked up while ``linecache`` has it."""
    linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    space: dict[str, Any] = {"__name__": filename.strip("<>")}
    exec(compile(text, filename, "exec", dont_inherit=True), space)
    return space


def fused(space: dict[str, Any]) -> tuple[Any, str]:
    """``entry`` for boxes of three lanes, and its text. Unable: it stays as it is."""
    row = Row(
        tuple(
            (name, Thing(space[kind], {"fixed": Const(at)}))
            for at, (name, kind) in enumerate(zip(LASTING, KINDS, strict=True))
        )
    )
    fuser = Fuser({}, {}, LASTING)
    text = fuser.entry(space["entry"], {"box": Thing(space["Box"], {"lanes": row})}, "box.lanes")
    exec(compile(text, "<fused>", "exec"), fuser.scope)
    return fuser.scope["entry"], text


def outcome(space: dict[str, Any], entry: Any, fails: int, given: tuple[int, int]) -> tuple[Any, ...]:
    """What ``entry`` returns or raises, and all that it did until then."""
    box = space["Box"](tuple(space[kind](at) for at, kind in enumerate(KINDS)), fails)
    try:
        told: Any = entry(box, *given)
    except Exception as error:
        told = type(error), str(error)
    return told, box.heard, box.at, [(lane.count, lane.mine) for lane in box.lanes]
