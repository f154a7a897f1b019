"""Checks of types, numbers and choices. An error names the argument, what it may be, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs

from ..errors import CompositionError

Check = Callable[[object, "attrs.Attribute[Any]", Any], object]
"""A validator of attrs."""

T = TypeVar("T")


def of_type(value: object, kind: type[T], what: str) -> T:
    """Return ``value``, which must be of type ``kind``. ``what``: its name in the error."""
    if not isinstance(value, kind):
        raise CompositionError(f"{what} must be of type {kind.__name__}, got {value!r}")
    return value


def items(values: object, kind: type[T], what: str, error: type[Exception] = CompositionError) -> tuple[T, ...]:
    """Return values of type ``kind`` as a tuple. ``what``: their name in the error."""
    if isinstance(values, kind | str) or not isinstance(values, Iterable):
        raise error(f"{what} must be a sequence of {kind.__name__} values: write [{values!r}]")
    found = tuple(values)
    for value in found:
        if not isinstance(value, kind):
            raise error(f"{what} must be {kind.__name__} values, got {value!r}")
    return found


def typed(kind: type) -> Check:
    """Return a validator of a field's type."""
    return lambda instance, field, value: of_type(value, kind, field.name)


def whole(
    value: object, what: str, low: int = 1, unit: str = "", error: type[Exception] = CompositionError,
    high: int | None = None,
) -> int:  # fmt: skip
    """Return ``value``, which must be a whole number in these bounds. ``what``: its name in the error."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise error(f"{what} must be a whole number {bounds}{unit}, got {value!r}")
    return value


def at_least(low: int, what: str = "", error: type[Exception] = CompositionError) -> Check:
    """Return a validator of a whole number. A field whose default is None may be None."""

    def check(instance: object, field: attrs.Attribute[object], value: object) -> None:
        if value is not None or field.default is not None:
            whole(value, what or field.name, low, error=error)

    return check


def function(instance: object, field: attrs.Attribute[Any], value: Any) -> None:
    """Validate a field that can be called, or is None."""
    if value is not None and not callable(value):
        raise CompositionError(f"{type(instance).__name__}: {field.name} must be a function, got {value!r}")


def one_of(*allowed: object, error: type[Exception] = CompositionError) -> Check:
    """Return a validator of a field that has one of a few values."""

    def check(instance: object, field: attrs.Attribute[object], value: object) -> None:
        if value not in allowed:
            raise error(f"{field.name} must be {' or '.join(map(repr, allowed))}, got {value!r}")

    return check
