"""The conformance kit: all laws, and what checks a component against them.

A law is a function of a case; its docstring says it in words and names the clauses of docs/hooks.md that it proves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal

import attrs

from ..errors import PrefixloomError
from . import laws_of_facts, laws_of_hooks, laws_of_machine, laws_of_schedules, laws_of_service
from .bench import Failure
from .case import ComponentCase, LawBroken, NotApplicable, Truth

Law = Callable[[ComponentCase], None]


def _laws(module: ModuleType) -> list[Law]:
    return [value for name, value in vars(module).items() if name.startswith("law_")]


MODULES = (laws_of_facts, laws_of_hooks, laws_of_service, laws_of_machine, laws_of_schedules)
LAWS: tuple[Law, ...] = tuple(law for module in MODULES for law in _laws(module))
"""Every law, those first that are proved without traffic."""


def clauses(law: Law) -> tuple[str, ...]:
    """The clauses of docs/hooks.md that a law proves, as its docstring names them."""
    found = re.search(r"Clauses: ([A-Z0-9, ]+)\.", law.__doc__ or "")
    return tuple(found[1].split(", ")) if found else ()


def statement(law: Law) -> str:
    """What a law says, in words."""
    return " ".join((law.__doc__ or "").partition("Clauses:")[0].split())


def name_of(law: Law) -> str:
    return str(getattr(law, "__name__", law))


def check_law(law: Law, case: ComponentCase) -> None:
    """Hold a component against one law. LawBroken names it, its clauses, and a script; NotApplicable says why not."""
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
    """What came of one law. ``told``: how it is broken, or why it has nothing to say."""

    law: str
    clauses: tuple[str, ...]
    status: Literal["holds", "broken", "not applicable"]
    statement: str
    told: str = ""
    script: str = ""


@attrs.frozen
class Report:
    """What came of all laws, and what was not tested."""

    component: str
    verdicts: tuple[Verdict, ...]
    untested: tuple[str, ...]

    @property
    def broken(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "broken")


def verdict(law: Law, case: ComponentCase) -> Verdict:
    """What comes of one law."""
    name, cited, said = name_of(law), clauses(law), statement(law)
    try:
        check_law(law, case)
    except NotApplicable as reason:
        return Verdict(name, cited, "not applicable", said, str(reason))
    except LawBroken as error:
        return Verdict(name, cited, "broken", said, error.sentence, error.script)
    return Verdict(name, cited, "holds", said)


def report_on(case: ComponentCase, laws: Iterable[Law] = LAWS) -> Report:
    """Hold a component against all laws, and tell all."""
    case.component()  # what cannot be made is refused before any law is asked
    verdicts = tuple(verdict(law, case) for law in laws)
    return Report(str(case), verdicts, tuple(untested(case)))


def untested(case: ComponentCase) -> list[str]:
    """What no law looked at, and why."""
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
    """Hold a component against the laws. ``make()`` gives a new instance each time; ``truth`` says what its layers do.

    Raises LawBroken for the first law that it breaks. Further options are those of ``ComponentCase``.
    """
    case = make if isinstance(make, ComponentCase) else ComponentCase(make, truth or Truth(), **options)
    case.component()  # what cannot be made is refused before any law is asked
    verdicts = []
    for law in laws:
        found = verdict(law, case)
        if found.status == "broken":
            raise LawBroken(found.told, found.script, found.law, found.clauses)
        verdicts.append(found)
    return Report(str(case), tuple(verdicts), tuple(untested(case)))
