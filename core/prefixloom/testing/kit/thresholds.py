"""Thresholds: the numbers in a component's own code behind which a hook may begin to do something else.

A hook that acts at boundaries from 1024 on, or at its 200th call, has the number somewhere in its code. So long prompts
and many requests are chosen by these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from ...contract.values import Component
from .case import ComponentCase
from .probes import numbers_in

PROMPT = 1100
"""The length of long prompts, where no number in the code is larger."""
LONGEST = 1 << 13
"""The most tokens of a long prompt."""
CALLS = 200
"""How often a few requests are repeated, where no number in the code is larger. Each hook is called twice as often."""
MOST_CALLS = 1500
"""The most such repetitions."""


def _own_functions(component: Any) -> Iterator[FunctionType]:
    """Yield the functions of a component's classes, as far as they are its own."""
    for kind in type(component).__mro__:
        if kind not in Component.__mro__:
            for value in vars(kind).values():
                function = getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    yield function


def numbers_of(case: ComponentCase) -> list[int]:
    """Return the numbers that stand in the code of a component and in its attributes, in ascending order."""
    component = case.component()
    kinds = [kind for kind in type(component).__mro__ if kind not in Component.__mro__]
    said = [value for kind in kinds for value in vars(kind).values() if isinstance(value, int | float)]
    return sorted(numbers_in(component, *_own_functions(component), *said))


def longest(case: ComponentCase) -> int:
    """Return the length of long prompts: beyond each number in the component's code, up to ``LONGEST``."""
    return min(LONGEST, max([PROMPT, *(number + 40 for number in numbers_of(case) if number <= LONGEST)]))


def most_calls(case: ComponentCase) -> int:
    """Return how often requests are repeated, so that hooks are called more often than any number in the code says."""
    return max([CALLS, *(number // 2 + 9 for number in numbers_of(case) if number // 2 + 9 <= MOST_CALLS)])
