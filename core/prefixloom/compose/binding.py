"""Binding: the hot hooks of one composed cache, resolved once into a table of plain callables.

Every component instance is registered in one pluggy manager per cache and checked against the specifications. After
that the manager is not used for calls: a call of a bound hook is a plain call with positional arguments in the order of
its specification. A hook that a component does not override is None. This module knows names and signatures, and not
what an answer means.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import attrs
import pluggy

from ..contract.composition import Hooks
from ..contract.hookspecs import COLD_HOOKS, HOT_HOOKS, PROJECT, ComponentSpecs
from ..errors import CompositionError, ProtocolError


def make_manager(instances: Mapping[str, object], origins: Mapping[str, str] | None = None) -> pluggy.PluginManager:
    """Register the component instances of one cache in a new manager, by name, and check every hook.

    ``origins`` says where a component comes from, for errors. Monitoring attaches to the manager.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ComponentSpecs)
    labels = {name: _label(name, (origins or {}).get(name, "")) for name in instances}
    for name, instance in instances.items():
        check_identity(instance, labels[name])
        _check_marks(manager, instance, labels[name])
        try:
            manager.register(instance, name=name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise CompositionError(
                f"{labels[name]} has a hook that does not fit its specification: {_one_line(error)}. Take the "
                f"arguments by the names in prefixloom.contract.hookspecs.ComponentSpecs, or fewer of them"
            ) from error
        _check_pending(manager, labels[name])
    for verb in ("register", "unregister", "set_blocked"):
        setattr(manager, verb, partial(_refuse_change, verb))
    return manager


def _refuse_change(verb: str, *_: object, **__: object) -> NoReturn:
    """Refuse what would change the components of a manager, because their hooks are bound once."""
    raise ProtocolError(
        f"{verb}: the hooks of a cache are bound when it is made, so its components cannot change. Compose another "
        f"cache; to watch calls, compose with tracing=True and take add_hookcall_monitoring"
    )


def bind(manager: pluggy.PluginManager, name: str, *, tracing: bool = False) -> Hooks:
    """Resolve the hooks of the instance that is registered as ``name``.

    With ``tracing`` every call goes through the manager, where ``add_hookcall_monitoring`` sees it.
    """
    instance = manager.get_plugin(name)
    bound: dict[str, Any] = {}
    for hook_name in HOT_HOOKS:
        caller: pluggy.HookCaller = getattr(manager.hook, hook_name)
        mine = [impl for impl in caller.get_hookimpls() if impl.plugin is instance]
        if not mine or caller.spec is None:
            continue
        spec_args = tuple(caller.spec.argnames)
        if tracing:
            others = [plugin for plugin in manager.get_plugins() if plugin is not instance]
            bound[hook_name] = _traced(manager.subset_hook_caller(hook_name, others), spec_args)
        else:
            bound[hook_name] = _direct(mine[0].function, tuple(mine[0].argnames), spec_args)
    return Hooks(**bound)


def _direct(function: Callable[..., Any], takes: tuple[str, ...], spec_args: tuple[str, ...]) -> Callable[..., Any]:
    """Return the implementation itself, or an adapter if it takes fewer arguments or another order."""
    if takes == spec_args:
        return function
    picks = [spec_args.index(arg) for arg in takes]
    if not picks:
        return lambda *_: function()
    if len(picks) == 1:
        (at,) = picks
        return lambda *args: function(args[at])
    pick = itemgetter(*picks)
    return lambda *args: function(*pick(args))


def _traced(caller: pluggy.HookCaller, spec_args: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that calls the hook through the manager."""

    def call(*args: Any) -> Any:
        answers = caller(**dict(zip(spec_args, args, strict=True)))
        return answers[0] if answers else None

    return call


# ---------------------------------------------------------------- checks


def _label(name: str, origin: str) -> str:
    return f"component {name!r} ({origin})" if origin else f"component {name!r}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


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
            f"{label}: {cls.__name__} compares by value, and a component is registered by identity. Make the class "
            f"with {made_by}"
        )


def _check_marks(manager: pluggy.PluginManager, instance: object, label: str) -> None:
    """Refuse hooks that pluggy would ignore, wrap, or call without some of their arguments."""
    seen: dict[str, str] = {}
    for attribute in dir(instance):
        options = manager.parse_hookimpl_opts(instance, attribute)
        if options is None:
            if attribute in HOT_HOOKS and getattr(instance, attribute, None) is not None:
                raise CompositionError(
                    f"{label} defines {attribute} without @hookimpl, so it would never be called. Decorate it with "
                    f"@prefixloom.hookimpl, or give it another name"
                )
            continue
        if options.get("wrapper") or options.get("hookwrapper"):
            raise CompositionError(
                f"{label}: {attribute} is a hook wrapper, and a component's hooks are bound to plain calls. Write a "
                f"plain @hookimpl; to watch calls, compose with tracing=True and monitor the manager"
            )
        refuse_order(options, attribute, label)
        hook_name = options.get("specname") or attribute
        if hook_name in seen:
            raise CompositionError(
                f"{label} implements {hook_name} twice, as {seen[hook_name]} and {attribute}. Keep one"
            )
        seen[hook_name] = attribute
        if hook_name in HOT_HOOKS:
            _check_parameters(getattr(instance, attribute), hook_name, label)


def refuse_order(options: Mapping[str, Any], attribute: str, label: str) -> None:
    """Refuse a mark that would change the order in which plugins are asked. No order of pluggy's is used."""
    for mark in ("tryfirst", "trylast"):
        if options.get(mark):
            raise CompositionError(
                f"{label}: {attribute} is marked {mark}, which has no effect: components are asked in the order of the "
                f"composition, and what distributions offer in the order of its names. Leave it out"
            )


def _check_parameters(function: Callable[..., Any], hook_name: str, label: str) -> None:
    """Refuse parameters that pluggy would never fill: it passes plain positional parameters only."""
    spec_args = tuple(inspect.signature(getattr(ComponentSpecs, hook_name)).parameters)[1:]
    for parameter in inspect.signature(function).parameters.values():
        plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        defaulted = parameter.default is not parameter.empty
        if plain and not (defaulted and parameter.name in spec_args):
            continue
        if not plain and defaulted and parameter.name not in spec_args:
            continue
        shown = parameter.replace(default=parameter.empty, annotation=parameter.empty)
        raise CompositionError(
            f"{label}: {hook_name} takes {shown}, which would never be filled: hook arguments are "
            f"passed to plain parameters without a default. Write ({', '.join(('self', *spec_args))}), or fewer of them"
        )


def _check_pending(manager: pluggy.PluginManager, label: str) -> None:
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [name for name in vars(manager.hook) if not name.startswith("_") and name not in HOT_HOOKS]
        name = unknown[0] if unknown else "?"
        close = get_close_matches(name, HOT_HOOKS, n=1)
        if name in COLD_HOOKS:
            remedy = "That is a hook of the registry: move it to the module of the entry point"
        elif close:
            remedy = f"Did you mean {close[0]}?"
        else:
            remedy = "Hooks of a component: " + ", ".join(HOT_HOOKS)
        raise CompositionError(f"{label} implements {name}, which is no hook of a component. {remedy}") from error
