"""What comes of playing scripts with a component, in all surroundings: played once per case, judged by many laws."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import attrs

from .bench import Bench, text_of
from .case import ComponentCase, LawBroken
from .scripts import Op, Setting, failure, pasted, shrunk, written

LENGTH = 110
"""Operations of one random script."""
ALONE = (Setting(), Setting(units=40), Setting(page=1, units=56))
PAIRS = (Setting(("path",)), Setting(("window",), layout="page_first"), Setting(("state",)))
TRIPLES = (Setting(("path", "window")), Setting(("path", "state"), layout="page_first"), Setting(("window", "state")))
SERVING = ("content", "absent", "books", "lock", "race")
"""Topics of what goes wrong in serving, whatever hooks there are."""
THREADS = (Setting(threads=True), Setting(("state",), threads=True), Setting(("path", "window"), threads=True))


@attrs.frozen
class Outcome:
    """A script that failed."""

    topic: str
    sentence: str
    script: tuple[Op, ...]
    setting: Setting


def played(case: ComponentCase, name: str, settings: Collection[Setting], make: Callable[[int, str], list[Op]]) -> Any:
    """The outcomes of playing scripts in these settings; once per case, whoever asks."""
    if name not in case.memo:
        found = []
        for setting in settings:
            if setting.page is not None and (setting.page % case.manifest.tokens_per_slot or case.manifest.page_size):
                continue  # such a page is none for this component
            unit = max(4, Bench(case, setting.beside, page=setting.page).unit)
            for seed in range(case.effort if not setting.beside else 1):
                script = make(unit, f"{case.seed} {name} {seed}")
                failed = failure(case, script, setting)
                if failed is not None:
                    found.append(Outcome(failed.topic, failed.sentence, tuple(script), setting))
        case.memo[name] = found
    return case.memo[name]


def random_scripts(case: ComponentCase) -> list[Outcome]:
    """Alone, beside one and two others, all in one thread."""

    def make(unit: int, seed: str) -> list[Op]:
        return written(seed, LENGTH, unit)

    return [*played(case, "alone", ALONE, make), *beside(case)]


def beside(case: ComponentCase) -> list[Outcome]:
    found: list[Outcome] = played(case, "beside", PAIRS + TRIPLES, lambda unit, seed: written(seed, LENGTH, unit))
    return found


def in_threads(case: ComponentCase) -> list[Outcome]:
    found: list[Outcome] = played(case, "threads", THREADS, lambda unit, seed: written(seed, LENGTH // 3, unit))
    return found


def branches(case: ComponentCase) -> list[Outcome]:
    """Prompts that part after every whole page, each computed to its end."""

    def make(unit: int, seed: str) -> list[Op]:
        base = text_of(0)[: 6 * unit + 4]
        ops: list[Op] = [("open", base), ("run", 0, 99 * unit), ("close", 0)]
        for cut in range(unit, 6 * unit, unit):
            for at in (cut, cut + 1, cut + 2):  # where content looks ahead, what is shared ends before they part
                other = (*base[:at], 1 - base[at], *text_of(2)[: 2 * unit])
                ops += [("open", other), ("run", 0, 99 * unit), ("close", 0), ("peek", other)]
        return ops

    found: list[Outcome] = played(case, "branches", (Setting(units=99),), make)
    return found


def off_the_grid(case: ComponentCase) -> list[Outcome]:
    """Prompts in steps of odd lengths, published after each, and found again by others."""

    def make(unit: int, seed: str) -> list[Op]:
        ops: list[Op] = []
        for length in (1, 3, unit - 1, unit, unit + 1):
            prompt = text_of(1)[: 5 * unit + 1]
            ops += [("open", prompt)] + [("run", 0, max(1, length)), ("publish", 0)] * (5 * unit // max(1, length))
            ops += [("run", 0, 1), ("close", 0), ("open", (*prompt, 0, 0)), ("run", 0, 3), ("close", 0)]
            ops += [("evict", 3 * unit)]
        return ops

    found: list[Outcome] = played(case, "off the grid", (Setting(units=40),), make)
    return found


def judge(case: ComponentCase, outcomes: Collection[Outcome], *topics: str) -> None:
    """Raise for the first outcome of one of these topics (any, if none is named), with a script that is shrunk."""
    for outcome in outcomes:
        if not topics or outcome.topic in topics:
            script = shrunk(case, outcome.script, outcome.setting, outcome.topic)
            told = failure(case, script, outcome.setting)
            raise LawBroken(told.sentence if told else outcome.sentence, pasted(case, script, outcome.setting))
