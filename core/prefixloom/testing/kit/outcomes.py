"""The scripts that fail with a component, in all settings. They are played once per case and judged by many laws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs

from ...script import Op, World, as_code, failure, shrink, text_of
from .bench import Bench, that_fit
from .case import ComponentCase, LawBroken
from .probes import FAR
from .scripts import MORE as MORE_KINDS
from .scripts import WEIGHTS, ContentWriter, Setting, images

LENGTH = 110
"""How many operations a random script has."""
LONG = 2010
"""How many tokens long prompts with content have."""
REPEATS = 200
"""How often two requests are repeated. Each hook is called at least twice as often."""
STEPS = 100
"""The most small steps in which a prompt is computed."""
Given = Mapping[str, Any]
"""The options of a ``Setting``."""
ALONE: tuple[Given, ...] = ({}, {"units": 40}, {"page": 1, "units": 56})
PAIRS: tuple[Given, ...] = (
    {"beside": ("path",)}, {"beside": ("window",), "layout": "page_first"}, {"beside": ("state",)},
)  # fmt: skip
TRIPLES: tuple[Given, ...] = (
    {"beside": ("path", "window")}, {"beside": ("path", "state"), "layout": "page_first"},
    {"beside": ("window", "state")},
)  # fmt: skip
MORE: tuple[Given, ...] = (
    {}, {"beside": ("ahead",)}, {"beside": ("checkpoints",)}, {"beside": ("window", "checkpoints")},
)  # fmt: skip
TIERS: tuple[Given, ...] = ({"below": "through"}, {"below": "back"}, {"beside": ("path",), "below": "back"})
BELOW = ("", "back")
ONCE = ("far", "farthest", "often", "below")
"""Scripts that are played once."""
SERVING = ("content", "absent", "books", "lock", "race")
"""The topics of failures in serving that do not concern hooks."""
LATE_STEPS: tuple[Given, ...] = tuple(
    {"beside": beside, "late": True} for beside in ((), ("state",), ("path", "window"))
)


@attrs.frozen
class FailedScript:
    """A script that failed."""

    topic: str
    sentence: str
    script: tuple[Op, ...]
    setting: Callable[[], World]
    """Where it was played."""


def played(
    case: ComponentCase, name: str, settings: Iterable[Given], make: Callable[[int, str], list[Op]]
) -> list[FailedScript]:
    """Return the failures of scripts in these settings. The scripts are played once per case."""
    if name not in case.memo:
        found = []
        for given in settings:
            setting = Setting(case, **given)
            if setting.page is not None and (setting.page % case.manifest.tokens_per_slot or case.manifest.page_size):
                continue  # this component cannot have such a page
            bench = Bench(case, setting.beside, page=setting.page, units=2)
            unit = max(4, bench.unit)
            slim = bench.touches and name != "alone" and not setting.late
            for seed in range(case.effort if name not in ONCE and not setting.beside else 1):
                script = make(unit, f"{case.seed} {name} {seed}")
                failed = failure(attrs.evolve(setting, small=slim), script)
                if failed is not None and slim:  # a hook may know the true sizes
                    failed = failure(setting, script)
                if failed is not None:
                    found.append(FailedScript(failed.topic, failed.sentence, tuple(script), setting))
        case.memo[name] = found
    played_once: list[FailedScript] = case.memo[name]
    return played_once


def _random(unit: int, seed: str, weights: Mapping[str, float] = WEIGHTS, part: int = 1) -> list[Op]:
    """Return a random script: shorter where prompts are long, since pages are large. ``part``: of this length."""
    length = LENGTH if unit <= 32 else max(20, LENGTH * 32 // unit)
    return ContentWriter(seed, unit).script(length // part, weights)


def random_scripts(case: ComponentCase) -> list[FailedScript]:
    """Play random scripts in one thread: the component alone, and beside one and two others."""
    return [*played(case, "alone", ALONE, _random), *beside(case)]


def beside(case: ComponentCase) -> list[FailedScript]:
    """Play random scripts beside others; in some, prompts arrive, or are computed in one step."""
    more = played(case, "more", MORE, lambda unit, seed: _random(unit, seed, MORE_KINDS))
    return [*played(case, "beside", PAIRS + TRIPLES, _random), *more]


def below(case: ComponentCase) -> list[FailedScript]:
    """Play prompts that the device loses and a tier below it has, among random operations and copies that fail."""

    def make(unit: int, seed: str) -> list[Op]:
        gone: Op = ("evict", 99 * unit)
        served: list[Op] = [("run", -1, 99 * unit), ("close", -1)]
        turn = [("open", text_of(2)[: 5 * unit + 1], "", 0, images(5 * unit + 1, unit, 1)), *served, gone]
        ops: list[Op] = [("uncopied", turn), *turn, ("uncopied", turn), *turn]
        for number in range(5):
            prompt = text_of(number % 2)[: (3 + number) * unit + number]
            again = [("open", prompt, "", 0, images(len(prompt), unit, number % 3)), *served]
            ops += [*again, gone, *ContentWriter(f"{seed} {number}", unit).script(6), gone, *again]
        return ops

    return played(case, "below", TIERS, make)


def late(case: ComponentCase) -> list[FailedScript]:
    """Play long prompts and many requests, for hooks that do something else far on, or late."""
    page = None if case.manifest.page_size or 16 % case.manifest.tokens_per_slot else 16
    unit = Bench(case, page=page).unit
    length = LONG + unit

    def far(_unit: int, _seed: str) -> list[Op]:
        ops: list[Op] = [("open", (range(length),)), ("run", -1, length // 2), ("publish", -1), ("run", -1, length)]
        ops += [("close", -1), ("open", (range(length), range(90000, 90000 + 2 * unit))), ("run", -1, 9 * unit)]
        for cut in (length // 3, length - 2 * unit):
            ops += [("open", (range(cut), range(70000, 70000 + 3 * unit))), ("run", -1, length), ("close", -1)]
        opened: Op = ("open", (range(length), 1), "", 0, images(length, length // 9, 1))
        again: list[Op] = [opened, ("run", -1, length), ("close", -1)]
        return [*ops, ("lease", (range(length),)), *again, ("release", 0), ("evict", length // 2), *again]

    def often(unit: int, seed: str) -> list[Op]:
        prompt, other = text_of(0)[: 4 * unit + 1], text_of(2)[: 3 * unit + 1]
        turn: list[Op] = []
        for tokens in (prompt, other):
            turn += [("open", tokens, "", 0, images(len(tokens), unit, tokens == other)), ("run", -1, 99 * unit)]
            turn += [("close", -1), ("lease", tokens), ("release", 0), ("peek", tokens)]
        return [("repeat", REPEATS, [*turn, ("evict", 2 * unit)])]

    found = [*played(case, "far", [{"units": 2 * length // unit, "page": page}], far)]
    return [*found, *farthest(case), *played(case, "often", [{}], often)]


def farthest(case: ComponentCase) -> list[FailedScript]:
    """Play prompts as long as those of real models, without content: what hooks say of them."""
    page = None if case.manifest.page_size else 4096 // case.manifest.tokens_per_slot * case.manifest.tokens_per_slot
    bench = Bench(case, page=page, units=2, blank=True)
    unit = bench.unit
    length = -(-FAR // unit) * unit + 2 * unit
    if not bench.spy.overridden or length // unit not in that_fit(case, (1, length // unit), page):
        return []

    def make(_unit: int, _seed: str) -> list[Op]:
        ops: list[Op] = []
        for tail in ((), (range(1 << 20, (1 << 20) + 2 * unit),), ()):
            ops += [("open", (range(length), *tail)), ("run", -1, length // 2 // unit * unit), ("publish", -1)]
            ops += [
                ("run", -1, 2 * length),
                ("close", -1),
                ("lease", (range(length),)),
                ("evict", unit),
                ("release", 0),
            ]
        at = length - 9 * unit
        film = [(at + start, at + end, key) for start, end, key in images(9 * unit, unit, 1)]
        other: Op = ("open", (range(length - unit), 7, range(unit)), "", 0, film)
        branch = [other, ("run", -1, 2 * length), ("close", -1)]
        return [*ops, *branch, ("evict", length), *branch]

    units = length // unit * 3 // 2 + 8
    settings = [{"units": units, "page": page, "below": below, "blank": True} for below in BELOW]
    return played(case, "farthest", settings, make)


def with_late_steps(case: ComponentCase) -> list[FailedScript]:
    return played(case, "late steps", LATE_STEPS, lambda unit, seed: _random(unit, seed, MORE_KINDS, part=3))


def everything(case: ComponentCase) -> list[FailedScript]:
    """Play all scripts: what a hook does wrong may show in any of them."""
    kinds = (random_scripts, branches, off_the_grid, with_late_steps, below, late)
    return [outcome for kind in kinds for outcome in kind(case)]


def branches(case: ComponentCase) -> list[FailedScript]:
    """Play prompts that differ from each other after each whole page, each computed to its end."""

    def make(unit: int, seed: str) -> list[Op]:
        base = text_of(0)[: 6 * unit + 4]
        film = images(6 * unit, unit, 1)
        ops: list[Op] = [("open", base), ("run", 0, 99 * unit), ("close", 0), ("open", base, "", 0, film)]
        ops += [("run", 0, 99 * unit), ("close", 0)]
        for cut in range(unit, 6 * unit, unit):
            for at in (cut, cut + 1, cut + 2):  # with a lookahead, the shared part ends earlier
                other = (*base[:at], 1 - base[at], *text_of(2)[: 2 * unit])
                for spans in ((), images(len(other), unit, 1)):
                    ops += [("open", other, "", 0, spans), ("run", 0, 99 * unit), ("close", 0), ("peek", other)]
        return ops

    return played(case, "branches", [{"units": 99}], make)


def off_the_grid(case: ComponentCase) -> list[FailedScript]:
    """Play prompts in steps of odd lengths, published after each step and found again by later prompts.

    The first prompts have no token, or one.
    """

    def make(unit: int, seed: str) -> list[Op]:
        ops: list[Op] = []
        for few in ((), (1,), (), (1,)):
            ops += [("peek", few), ("lease", few), ("open", few), ("run", 0, 2), ("publish", 0)]
            ops += [("run", 0, 2), ("close", 0), ("release", 0)]
        for length in (1, 3, unit - 1, unit, unit + 1):
            prompt = text_of(1)[: 5 * unit + 1]
            steps = min(STEPS, 5 * unit // max(1, length))
            ops += [("open", prompt)] + [("run", 0, max(1, length)), ("publish", 0)] * steps
            ops += [
                ("run", 0, 5 * unit),
                ("run", 0, 1),
                ("close", 0),
                ("open", (*prompt, 0, 0)),
                ("run", 0, 3),
                ("close", 0),
            ]
            ops += [("evict", 3 * unit)]
        return ops

    return played(case, "off the grid", [{"units": 40}, {"page": 1, "units": 99}], make)


def judge(case: ComponentCase, outcomes: Collection[FailedScript], *topics: str) -> None:
    """Raise LawBroken for the first failure of one of these topics (of any, if none is given), with a short script."""
    for outcome in outcomes:
        if not topics or outcome.topic in topics:
            script = shrink(outcome.setting, outcome.script)
            told = failure(outcome.setting, script)
            raise LawBroken(
                told.sentence if told else outcome.sentence,
                f"from prefixloom.testing import {type(outcome.setting).__name__}, play\n\n"
                f"# case: the ComponentCase of your test ({case.label})\n{as_code(outcome.setting, script)}",
            )
