"""Binding: the hot hooks of one component, resolved once into a table of plain callables.

A call of a bound hook is a plain call with positional arguments in the order of its specification. A hook that a
component does not override is None. Everything that would never be called, or never be filled, is refused by name. This
module knows names and signatures, and not what an answer means.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from operator import itemgetter
from typing import Any

import attrs
import pluggy

from ..contract.composition import Hooks
from ..contract.hookspecs import COLD_HOOKS, HOT_HOOKS, PROJECT, ComponentSpecs
from ..errors import CompositionError, PrefixloomError

ARGUMENTS = {name: tuple(inspect.signature(getattr(ComponentSpecs, name)).parameters)[1:] for name in HOT_HOOKS}
"""The arguments of every hot hook, in the order of its specification."""

MARKS = pluggy.PluginManager(PROJECT)
"""Reads the marks of ``@hookimpl``. Nothing is registered in it."""


def bind(component: object, label: str) -> Hooks:
    """Return the hooks that a component overrides. ``label``: how errors call it."""
    check_identity(component, label)
    bound: dict[str, Callable[..., Any]] = {}
    attributes: dict[str, str] = {}
    for attribute in dir(component):
        marks = MARKS.parse_hookimpl_opts(component, attribute)
        if marks is None:
            if attribute in HOT_HOOKS and getattr(component, attribute, None) is not None:
                raise CompositionError(
                    f"{label} defines {attribute} without @hookimpl, so it would never be called. Decorate it with "
                    f"@prefixloom.hookimpl, or give it another name"
                )
            continue
        name = marks.get("specname") or attribute
        if name not in HOT_HOOKS:
            raise CompositionError(
                f"{label} implements {name}, which is no hook of a component. {_remedy_of_unknown(name)}"
            )
        if marks.get("wrapper") or marks.get("hookwrapper"):
            raise CompositionError(
                f"{label}: {attribute} is a hook wrapper, and a component's hooks are bound to plain calls. Write a "
                f"plain @hookimpl"
            )
        refuse_order(marks, attribute, label)
        if name in attributes:
            raise CompositionError(f"{label} implements {name} twice, as {attributes[name]} and {attribute}. Keep one")
        attributes[name] = attribute
        function = getattr(component, attribute)
        bound[name] = _in_order(function, _parameters(function, name, label), ARGUMENTS[name])
    return Hooks(**bound)


def _in_order(function: Callable[..., Any], takes: tuple[str, ...], given: tuple[str, ...]) -> Callable[..., Any]:
    """Return the implementation itself, or an adapter if it takes fewer arguments or another order."""
    if takes == given:
        return function
    picks = [given.index(name) for name in takes]
    if not picks:
        return lambda *_: function()
    if len(picks) == 1:
        (at,) = picks
        return lambda *args: function(args[at])
    pick = itemgetter(*picks)
    return lambda *args: function(*pick(args))


def _parameters(function: Callable[..., Any], name: str, label: str) -> tuple[str, ...]:
    """Return the arguments that an implementation takes. Refuse parameters that are never filled."""
    given, takes = ARGUMENTS[name], []
    for parameter in inspect.signature(function).parameters.values():
        defaulted = parameter.default is not parameter.empty
        if defaulted and parameter.name not in given:
            continue  # the component's own
        if defaulted or parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            shown = parameter.replace(default=parameter.empty, annotation=parameter.empty)
            raise CompositionError(
                f"{label}: {name} takes {shown}, which would never be filled: hook arguments are passed to plain "
                f"parameters without a default. Write ({', '.join(('self', *given))}), or fewer of them"
            )
        if parameter.name not in given:
            raise CompositionError(
                f"{label} has a hook that does not fit its specification: {name} takes {parameter.name}, and there are "
                f"{', '.join(given)}. Take the arguments by these names, or fewer of them"
            )
        takes.append(parameter.name)
    return tuple(takes)


# ---------------------------------------------------------------- what is refused


@contextmanager
def naming(who: object, did: str, remedy: str = "") -> Iterator[None]:
    """Make a ``CompositionError`` that names ``who`` of what the block raises.

    ``did``: what happened to it, where the error is none of ours; ``remedy``: what helps then.
    """
    try:
        yield
    except CompositionError as error:
        raise CompositionError(f"{who}: {error}") from error
    except PrefixloomError:
        raise
    except Exception as error:
        raise CompositionError(f"{who} {did}: {shown(error)}" + (f". {remedy}" if remedy else "")) from error


def shown(error: BaseException) -> str:
    """Return an error with its type, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_identity(instance: object, label: str) -> None:
    """Refuse an object that cannot be a component of one cache: a class, or an object that compares by value."""
    if inspect.isclass(instance):
        raise CompositionError(
            f"{label} is the class {instance.__name__}, not an instance. Pass {instance.__name__}(...)"
        )
    cls = type(instance)
    if cls.__eq__ is not object.__eq__:
        made_by = "attrs.define(eq=False)" if attrs.has(cls) else "eq=False, or no __eq__"
        raise CompositionError(
            f"{label}: {cls.__name__} compares by value, and a component is known by identity. Make the class with "
            f"{made_by}"
        )


def refuse_order(marks: Mapping[str, Any], attribute: str, label: str) -> None:
    """Refuse a mark that would change the order in which plugins are asked. No order of pluggy's is used."""
    for mark in ("tryfirst", "trylast"):
        if marks.get(mark):
            raise CompositionError(
                f"{label}: {attribute} is marked {mark}, which has no effect: components are asked in the order of the "
                f"composition, and what distributions offer in the order of its names. Leave it out"
            )


def _remedy_of_unknown(name: str) -> str:
    if name in COLD_HOOKS:
        return "That is a hook of the registry: move it to the module of the entry point"
    close = get_close_matches(name, HOT_HOOKS, n=1)
    return f"Did you mean {close[0]}?" if close else f"Hooks of a component: {', '.join(HOT_HOOKS)}"
