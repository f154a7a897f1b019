"""What is known of a value while a function is made, and of the function that is being put in place."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import attrs

Use = Callable[[ast.expr, Any], list[ast.stmt]]
"""The statements that do something with an expression, of which something is known."""
Told = tuple[ast.expr, Any]
"""An expression, and what is known of its value: one of those below, or None."""
PLAIN = frozenset({int, str, bytes, bool, float, type(None)})


class Unable(Exception):
    """It cannot be done with what is written there: the function stays as it is."""


@attrs.frozen
class Const:
    """It is this value."""

    value: Any

    @property
    def plain(self) -> bool:
        """Whether it can be written out."""
        return self.value.__class__ in PLAIN or self.value == ()


@attrs.frozen(eq=False)
class Thing:
    """An object of exactly this class; ``known`` is what is known of its attributes."""

    cls: type
    known: dict[str, Any]
    maybe: bool = False
    """Whether None may be there instead."""


@attrs.frozen(eq=False)
class Row:
    """A tuple of things, each with the name of the local that holds it from the beginning to the end."""

    items: tuple[tuple[str, Thing], ...]


@attrs.frozen(eq=False)
class Each:
    """Any number of items, of each of which this is known."""

    item: Any


@attrs.frozen(eq=False)
class Items:
    """So many items, of which this is known."""

    items: tuple[Any, ...]


@attrs.define(eq=False)
class Frame:
    """A function that is being put in place."""

    function: Any
    names: dict[str, str]
    """What its locals are called there."""
    used: set[str]
    """The names there that are its own, or of what it stands in."""
    known: dict[str, tuple[ast.expr | None, Any]]
    """By local: what to write for it, if not its name, and what is known of it."""
    once: dict[str, int]
    """How often each local is assigned; one that is only the target of loops, never."""
    give: Use
    """What is done with what it returns."""
    caught: frozenset[str]
    """Locals of which it is seen what they were when something was raised."""
    wrapped: bool = False
    """Whether a return breaks out of it, until it is seen whether that takes a loop."""
    depth: int = 0
    """In how many branches and loops."""
    rare: int = 0
    """In how many branches that hardly ever run: nothing is put in place there."""
    tries: int = 0
    """In how many statements of which handlers, or a ``finally``, may see what has been done."""
    over: bool = False
    """Whether nothing of it is read after what is being put in place."""

    @property
    def what(self) -> str:
        return str(self.function.__qualname__)
