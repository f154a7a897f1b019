"""The conformance kit: all laws of components, and the functions that check a component against them.

A law is a function of a case. Its docstring states the law and names the clauses of docs/hooks.md that it proves.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal

import attrs

from ..errors import PrefixloomError
from ..script import Failure
from .kit.answers import has_code
from .kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful
from .kit.outcomes import LONG, REPEATS
from .kit.probes import DENSE, FAR
from .kit.truth import Truth
from .kit.watching import watch
from .laws import arithmetic, costs, facts, hooks, machine, options, reach, schedules, service
from .laws.hooks import quiet

Law = Callable[[ComponentCase], None]


def _laws(module: ModuleType) -> list[Law]:
    return [value for name, value in vars(module).items() if name.startswith("law_")]


def law_somebody_says_what_the_layers_do(case: ComponentCase) -> None:
    """What the layers read and write is said without the component, which cannot be tested against itself.

    Clauses: O21.
    """
    if not case.believed:
        return
    if case.believe:
        raise NotApplicable(f"{', '.join(case.believed)}: believed, as was asked for")
    raise LawBroken(
        f"nobody but the component says {', '.join(case.believed)}, so no mistake in it can be found. Say it in a "
        f"Truth: in prefixloom_truth of the component's distribution, or in the test"
    )


FIRST = (facts.law_each_component_is_an_instance_of_its_own, facts.law_a_cache_can_be_composed_of_it)
"""Where one of these is broken, the component cannot be served, and no other law says more."""
MODULES = (facts, reach, arithmetic, options, hooks, costs, service, machine, schedules)
WATCHED = arithmetic.law_layers_go_on_from_what_is_stored
"""The law that is broken where layers cannot be run."""
LATE = {hooks.law_hooks_are_called_when_the_contract_says, hooks.law_a_hook_that_raises_has_the_documented_consequence}
"""Laws that serve requests for components without hooks as well, where others say better what is wrong."""
_ALL = [law for module in MODULES for law in _laws(module)]
_SOON = (*FIRST, law_somebody_says_what_the_layers_do)
LAWS: tuple[Law, ...] = (*_SOON, *sorted((law for law in _ALL if law not in _SOON), key=LATE.__contains__))
"""Every law. Those that are broken most often, and those that tell most about a mistake, come first."""


def clauses(law: Law) -> tuple[str, ...]:
    """Return the clauses of docs/hooks.md that a law proves, as named in its docstring."""
    found = re.search(r"Clauses: ([A-Z0-9, ]+)\.", law.__doc__ or "")
    return tuple(found[1].split(", ")) if found else ()


def statement(law: Law) -> str:
    """Return a law's statement in words: those of its docstring, or of its name."""
    said = " ".join((law.__doc__ or "").partition("Clauses:")[0].split())
    return said or name_of(law).removeprefix("law_").replace("_", " ")


def name_of(law: Law) -> str:
    return str(getattr(law, "__name__", law))


def check_law(law: Law, case: ComponentCase) -> None:
    """Check a component against one law.

    LawBroken: it breaks the law; the error has the law's clauses and a script. NotApplicable: the law does not apply.
    Wasteful: it is right, and costs more than it must.
    """
    name, script = name_of(law), ""
    try:
        with quiet():
            if isinstance(case, ComponentCase):  # policies and stores have cases of their own, without layers
                try:
                    watch(case)
                except LawBroken as error:  # layers that cannot be run can be watched by no law
                    name, law = name_of(WATCHED), WATCHED
                    raise error
            law(case)
        return
    except (NotApplicable, Wasteful):
        raise
    except LawBroken as error:
        sentence, script = error.sentence, error.script
    except Failure as error:
        sentence = error.sentence
    except PrefixloomError as error:
        sentence = " ".join(str(error).split())
    except AssertionError as error:
        sentence = " ".join(str(error).split()) or "its assertion does not hold"
    except Exception as error:
        if isinstance(case, ComponentCase):
            raise
        sentence = f"{type(error).__name__}: {' '.join(str(error).split())}"
    again = f"from prefixloom.testing import {name}\n\n# case: the ComponentCase of your test ({case})\n{name}(case)"
    raise LawBroken(sentence, script or again, name, clauses(law))


@attrs.frozen
class Verdict:
    """The result of one law. ``told``: how the law is broken, why it does not apply, or what is wasted."""

    law: str
    clauses: tuple[str, ...]
    status: Literal["holds", "broken", "wasteful", "not applicable"]
    statement: str
    told: str = ""
    script: str = ""


@attrs.frozen
class Report:
    """The results of all laws, what was not tested, and which facts only the component itself states."""

    component: str
    verdicts: tuple[Verdict, ...]
    untested: tuple[str, ...]
    believed: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "broken")

    @property
    def wasteful(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "wasteful")


def verdict(law: Law, case: ComponentCase) -> Verdict:
    """Check one law and return its result."""
    name, cited, said = name_of(law), clauses(law), statement(law)
    try:
        check_law(law, case)
    except NotApplicable as reason:
        return Verdict(name, cited, "not applicable", said, str(reason))
    except Wasteful as cost:
        return Verdict(name, cited, "wasteful", said, str(cost))
    except LawBroken as error:
        broken = next((each for each in LAWS if name_of(each) == error.law), law)
        return Verdict(error.law, error.clauses, "broken", statement(broken), error.sentence, error.script)
    return Verdict(name, cited, "holds", said)


def report_on(case: Any, laws: Iterable[Law] | None = None, ended: Callable[[Verdict], object] = id) -> Report:
    """Check a component, store or policy against these laws, or all, and report every result.

    ``ended`` is called as each law ends. What cannot be served at all is judged no further.
    """
    if isinstance(case, ComponentCase):
        case.component()  # a component that cannot be made is refused before any law runs
    verdicts: list[Verdict] = []
    for law in laws_of(case) if laws is None else laws:
        verdicts.append(verdict(law, case))
        ended(verdicts[-1])
        if verdicts[-1].status == "broken" and (law in FIRST or verdicts[-1].law != name_of(law)):
            break
    told = untested(case) if isinstance(case, ComponentCase) else case.untested
    return Report(str(case), tuple(verdicts), tuple(told), getattr(case, "believed", ()))


def laws_of(case: Any) -> Iterable[Law]:
    """Return the laws of a case: those of components, unless it has its own."""
    laws: Iterable[Law] = getattr(case, "laws", LAWS)
    return laws


def untested(case: ComponentCase) -> list[str]:
    """Return what no law tested, and why."""
    out = []
    if "probes" in case.memo:
        out.append(f"the reach at boundaries past {FAR}, and at most of those past {DENSE}")
    out += [f"some orders of steps ({told})" for told in case.memo.get("orders", ())]
    if case.truth.layers is None:
        out.append("the arithmetic of the layers: give them in the Truth (layers=...), and the kit runs them")
    if "config" in case.memo:
        out.append(f"what it makes of a model's config: {case.memo['config']}")
    if "other processes" in case.memo:
        out.append(f"whether another process answers the same: {case.memo['other processes']}")
    if has_code(case):
        out.append(f"hooks at boundaries past {FAR}, or after more than {2 * REPEATS} calls")
        out.append(f"what hooks do to the content of prompts past {LONG} tokens")
    return out


def check_component(
    make: Callable[[], Any] | ComponentCase,
    truth: Truth | None = None,
    *,
    laws: Iterable[Law] | None = None,
    **options: Any,
) -> Report:
    """Check a component against these laws, or all. ``make()`` returns a new instance; ``truth`` is that of its layers.

    Raises LawBroken for the first law that is broken, and warns of what is wasted. Further options are those of
    ``ComponentCase``.
    """
    case = make if isinstance(make, ComponentCase) else ComponentCase(make, truth or Truth(), **options)

    def ended(found: Verdict) -> None:
        if found.status == "broken":
            raise LawBroken(found.told, found.script, found.law, found.clauses)
        if found.status == "wasteful":
            warnings.warn(f"{case}: {found.told}", stacklevel=4)

    return report_on(case, laws, ended)
