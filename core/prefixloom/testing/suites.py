"""Reports on anything that is installed: components, stores, eviction policies and admission policies.

A name without a prefix is a component's. The others are named like their entry points, for example ``storage:NAME``.
Torch is imported only once it is known that the thing can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CompositionError

KINDS = ("storage", "policy", "admission")
"""The prefixes of what can be tested besides components."""


Ended = Callable[[Any], object]
"""It is called with the verdict of each law as it ends."""


def report_on_installed(
    name: str, options: dict[str, Any], seed: int = 0, believe: bool = False, ended: Ended = id
) -> Any:
    """Report on something that is installed, found by the name of its entry point."""
    kind, colon, rest = name.partition(":")
    if not colon:
        return component_report(name, options, seed, believe, ended)
    if kind not in KINDS:
        listed = ", ".join(f"{known}:NAME" for known in KINDS)
        raise CompositionError(f"{name!r}: there are suites for a component's NAME, {listed}")
    if kind == "storage":
        return storage_report(rest, options, ended)
    if options:
        raise CompositionError(f"{name!r} takes no options, got {', '.join(options)}")
    from .laws.admission import AdmissionCase
    from .laws.policies import PolicyCase

    case: Any = (PolicyCase if kind == "policy" else AdmissionCase).installed(rest)
    case.seed = seed
    case.policy()  # a policy that cannot be made is refused before any law runs
    from .conformance import report_on

    return report_on(case, ended=ended)


def component_report(name: str, options: dict[str, Any], seed: int, believe: bool, ended: Ended) -> Any:
    from .kit.case import ComponentCase

    case = ComponentCase.installed(name, **options)
    case.seed, case.believe = seed, believe
    case.component()  # a component that cannot be made is refused before torch is imported
    from .conformance import report_on

    return report_on(case, ended=ended)


def storage_report(name: str, options: dict[str, Any], ended: Ended) -> Any:
    """Report on a store. A store that takes a folder gets its own each time, and is reopened there."""
    from ..compose.registry import default_registry
    from .conformance import report_on
    from .laws.storage import installed_case

    with installed_case(default_registry().storage(name), options) as case:
        return report_on(case, ended=ended)
