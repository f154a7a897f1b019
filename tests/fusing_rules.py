"""One rule of fusing at a time: a small source, what is made of it, and what both do."""

from __future__ import annotations

import itertools
from typing import Any

from fusing_programs import made
from prefixloom.fusing import Const, Fuser, Row, Thing

COUNT = itertools.count()
HEAD = "from __future__ import annotations\nfrom prefixloom.straight import straight\n\n"
LANES = ("lane_0", "lane_1")


def both(source: str, *given: str, known: dict[str, Any] | None = None) -> str:
    """The text made of ``entry``, after it has done for what is ``given`` (each time anew) what the source does."""
    space = made(HEAD + source, f"<rule {next(COUNT)}>")
    fuser = Fuser({"cells": ("cell_0", "cell_1")}, {}, LANES)
    told = {name: thing(space) if callable(thing) else thing for name, thing in (known or {}).items()}
    text = fuser.entry(space["entry"], told, "box.lanes")
    exec(compile(text, "<made>", "exec"), fuser.scope)
    for each in given:
        seen = []
        for entry in (space["entry"], fuser.scope["entry"]):
            arguments = eval(f"({each},)", space)
            try:
                seen.append((repr(entry(*arguments)), [repr(one) for one in arguments]))
            except Exception as error:
                seen.append((repr(error), [repr(one) for one in arguments]))
        assert seen[0] == seen[1], text
    return text


def boxed(space: dict[str, Any]) -> Thing:
    """A ``Box`` of two lanes that are ints, of which the numerators are known."""
    row = tuple((name, Thing(int, {"numerator": Const(at + 1)})) for at, name in enumerate(LANES))
    return Thing(space["Box"], {"lanes": Row(row)})


BOX = """
class Box:
    def __init__(self):
        self.lanes = 1, 2

    def __repr__(self):
        return str(self.lanes)
"""
