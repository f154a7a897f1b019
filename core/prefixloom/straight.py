"""The mark of the usual way of a request, from which functions of a composition's own are made (``fusing``).

What is marked is ordinary code and runs as it is written wherever nothing is made of it. It keeps to a few rules, so
that it can stand in the place of a call: no ``return`` in a loop, but for loops over lanes, nor in a ``try``; no
``break`` out of loops over lanes; no ``with``, no ``yield``, no function or ``lambda`` inside; and no ``assert``, which
pytest would rewrite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def straight(function: F) -> F:
    """``function`` may take the place of a call to it."""
    function.__straight__ = True  # type: ignore[attr-defined]
    return function


def is_straight(function: object) -> bool:
    return hasattr(function, "__straight__")
