"""Every suite of the kit behind one name: of components, stores, eviction and admission policies.

A bare name is a component's; the others are named as their entry points are, ``storage:NAME`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CompositionError
from .case import LawBroken, NotApplicable

KINDS = ("storage", "policy", "admission")
"""What can be tested beside components."""


def report_on_installed(name: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A ``Report`` on something that is installed, by the name of its entry point."""
    kind, colon, rest = name.partition(":")
    if not colon:
        return component_report(name, options, seed)
    if kind not in KINDS:
        listed = ", ".join(f"{known}:NAME" for known in KINDS)
        raise CompositionError(f"{name!r}: there are suites for a component's NAME, {listed}")
    if kind == "storage":
        return storage_report(rest, options)
    if options:
        raise CompositionError(f"{name!r} takes no options, got {', '.join(options)}")
    from .policies import AdmissionCase, PolicyCase

    case: Any = (PolicyCase if kind == "policy" else AdmissionCase).installed(rest)
    case.seed = seed
    case.policy()  # what cannot be had is refused before any law
    untested = "whether its order is a good one" if kind == "policy" else "whether what it keeps is worth keeping"
    return judged(case, case.laws, (f"{untested}: how many tokens hit with it",))


def component_report(name: str, options: dict[str, Any], seed: int) -> Any:
    from .case import ComponentCase

    case = ComponentCase.installed(name, **options)
    case.seed = seed
    case.component()  # what cannot be made is refused before torch is imported
    from .conformance import report_on

    return report_on(case)


def storage_report(name: str, options: dict[str, Any]) -> Any:
    """A store that takes a folder gets one of its own each time, and is reopened there."""
    from ..compose.registry import default_registry
    from .storage import CHECKS, installed_case

    with installed_case(default_registry().storage(name), options) as case:
        lacking = sorted({case.lacks(check) for check in CHECKS} - {""})
        return judged(case, CHECKS, tuple(f"{what}: say how in a BackendCase" for what in lacking), case.lacks)


def judged(
    case: Any, laws: tuple[Any, ...], untested: tuple[str, ...], lacks: Callable[[Any], str] | None = None
) -> Any:
    """What comes of every law."""
    from .conformance import Report, Verdict, clauses, name_of, statement

    verdicts = []
    for law in laws:
        missing = lacks(law) if lacks is not None else ""
        status, told = ("not applicable", missing) if missing else outcome(law, case)
        said = statement(law) or name_of(law).removeprefix("check_").replace("_", " ")
        verdicts.append(Verdict(name_of(law), clauses(law), status, said, told))  # type: ignore[arg-type]
    return Report(str(getattr(case, "name", case)), tuple(verdicts), untested)


def outcome(law: Any, case: Any) -> tuple[str, str]:
    """(status, what there is to say). Whatever a law runs into is the fault of what is tested."""
    try:
        law(case)
    except NotApplicable as reason:
        return "not applicable", str(reason)
    except LawBroken as error:
        return "broken", error.sentence
    except AssertionError as error:
        return "broken", " ".join(str(error).split()) or "its assertion does not hold"
    except Exception as error:
        return "broken", f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "holds", ""
