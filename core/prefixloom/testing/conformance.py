"""The conformance kit: all laws of components, and the functions that check a component against them.

A law is a function of a case. Its docstring states the law and names the clauses of docs/hooks.md that it proves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal

import attrs

from ..errors import PrefixloomError
from .kit.bench import Failure
from .kit.case import ComponentCase, LawBroken, NotApplicable, Truth
from .laws import facts, hooks, machine, schedules, service

Law = Callable[[ComponentCase], None]


def _laws(module: ModuleType) -> list[Law]:
    return [value for name, value in vars(module).items() if name.startswith("law_")]


MODULES = (facts, hooks, service, machine, schedules)
LAWS: tuple[Law, ...] = tuple(law for module in MODULES for law in _laws(module))
"""Every law; the laws that need no traffic come first."""


def clauses(law: Law) -> tuple[str, ...]:
    """Return the clauses of docs/hooks.md that a law proves, as named in its docstring."""
    found = re.search(r"Clauses: ([A-Z0-9, ]+)\.", law.__doc__ or "")
    return tuple(found[1].split(", ")) if found else ()


def statement(law: Law) -> str:
    """Return a law's statement in words."""
    return " ".join((law.__doc__ or "").partition("Clauses:")[0].split())


def name_of(law: Law) -> str:
    return str(getattr(law, "__name__", law))


def check_law(law: Law, case: ComponentCase) -> None:
    """Check a component against one law.

    LawBroken: it breaks the law; the error has the law's clauses and a script. NotApplicable: the law does not apply.
    """
    name, script = name_of(law), ""
    try:
        law(case)
        return
    except NotApplicable:
        raise
    except LawBroken as error:
        sentence, script = error.sentence, error.script
    except Failure as error:
        sentence = error.sentence
    except PrefixloomError as error:
        sentence = " ".join(str(error).split())
    again = f"from prefixloom.testing import {name}\n\n# case: the ComponentCase of your test ({case})\n{name}(case)"
    raise LawBroken(sentence, script or again, name, clauses(law))


@attrs.frozen
class Verdict:
    """The result of one law. ``told``: how the law is broken, or why it does not apply."""

    law: str
    clauses: tuple[str, ...]
    status: Literal["holds", "broken", "not applicable"]
    statement: str
    told: str = ""
    script: str = ""


@attrs.frozen
class Report:
    """The results of all laws, and what was not tested."""

    component: str
    verdicts: tuple[Verdict, ...]
    untested: tuple[str, ...]

    @property
    def broken(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "broken")


def verdict(law: Law, case: ComponentCase) -> Verdict:
    """Check one law and return its result."""
    name, cited, said = name_of(law), clauses(law), statement(law)
    try:
        check_law(law, case)
    except NotApplicable as reason:
        return Verdict(name, cited, "not applicable", said, str(reason))
    except LawBroken as error:
        return Verdict(name, cited, "broken", said, error.sentence, error.script)
    return Verdict(name, cited, "holds", said)


def report_on(case: ComponentCase, laws: Iterable[Law] = LAWS) -> Report:
    """Check a component against all laws and report every result."""
    case.component()  # a component that cannot be made is refused before any law runs
    verdicts = tuple(verdict(law, case) for law in laws)
    return Report(str(case), verdicts, tuple(untested(case)))


def untested(case: ComponentCase) -> list[str]:
    """Return what no law tested, and why."""
    out = []
    believed = [name for name in case.truth.untold() if name != "reads" or not case.has_states]
    if believed:
        out.append(
            f"what the layers do is believed as the component says it: {', '.join(believed)} (say them in a Truth)"
        )
    out += [f"some orders of steps ({told})" for told in case.memo.get("orders", ())]
    out.append("the arithmetic of the layers: run the toy model of prefixloom.testing.toy through a cache for that")
    out.append("copies to a tier below the device: the kit composes none (T1, D1)")
    return out


def check_component(
    make: Callable[[], Any] | ComponentCase, truth: Truth | None = None, *, laws: Iterable[Law] = LAWS, **options: Any
) -> Report:
    """Check a component against the laws. ``make()`` returns a new instance; ``truth`` says what its layers do.

    Raises LawBroken for the first law that is broken. Further options are those of ``ComponentCase``.
    """
    case = make if isinstance(make, ComponentCase) else ComponentCase(make, truth or Truth(), **options)
    case.component()  # a component that cannot be made is refused before any law runs
    verdicts = []
    for law in laws:
        found = verdict(law, case)
        if found.status == "broken":
            raise LawBroken(found.told, found.script, found.law, found.clauses)
        verdicts.append(found)
    return Report(str(case), tuple(verdicts), tuple(untested(case)))
