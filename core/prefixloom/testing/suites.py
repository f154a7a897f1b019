"""Reports on anything that is installed: components, stores, eviction policies and admission policies.

A name without a prefix is a component's. The others are named like their entry points, for example ``storage:NAME``.
Torch is imported only once it is known that the thing can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CompositionError
from .kit.case import LawBroken, NotApplicable, Wasteful

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
    untested = "whether its order is a good one" if kind == "policy" else "whether what it keeps is worth keeping"
    return report_on_laws(case, case.laws, (f"{untested}: how many tokens hit with it",), ended)


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
    from .laws.storage import CHECKS, installed_case

    with installed_case(default_registry().storage(name), options) as case:
        lacking = sorted({case.lacks(check) for check in CHECKS} - {""})
        unsaid = tuple(f"{what}: say how in a BackendCase" for what in lacking)
        return report_on_laws(case, CHECKS, unsaid, ended, case.lacks)


def report_on_laws(
    case: Any,
    laws: tuple[Any, ...],
    untested: tuple[str, ...],
    ended: Ended,
    lacks: Callable[[Any], str] | None = None,
) -> Any:
    """Check every law and report the results. ``lacks`` says why a law does not apply."""
    from .conformance import Report, Verdict, clauses, name_of, statement

    verdicts = []
    for law in laws:
        missing = lacks(law) if lacks is not None else ""
        status, told = ("not applicable", missing) if missing else outcome(law, case)
        said = statement(law) or name_of(law).removeprefix("check_").replace("_", " ")
        verdicts.append(Verdict(name_of(law), clauses(law), status, said, told))  # type: ignore[arg-type]
        ended(verdicts[-1])
    return Report(str(getattr(case, "name", case)), tuple(verdicts), untested)


def outcome(law: Any, case: Any) -> tuple[str, str]:
    """Check one law; return (status, explanation). Every error counts as a mistake of what is tested."""
    try:
        law(case)
    except NotApplicable as reason:
        return "not applicable", str(reason)
    except Wasteful as cost:
        return "wasteful", str(cost)
    except LawBroken as error:
        return "broken", error.sentence
    except AssertionError as error:
        return "broken", " ".join(str(error).split()) or "its assertion does not hold"
    except Exception as error:
        return "broken", f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "holds", ""
