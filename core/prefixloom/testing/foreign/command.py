"""Finds an adapter by its name, holds its cache against everything, and prints what was found.

An adapter's name is ``module:Class``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from ...script import Failure, Op, ScriptError, failure, play, shrink
from .contract import AdapterUnavailable, ForeignCache
from .hits import hit_rows
from .orders import SCHEDULES, explore_orders, plans_of
from .player import ForeignPlayer, MakeForeign
from .traffic import ForeignWriter

WINDOW = 6
SIZES = {"tight": (64, 15), "roomy": (400, 60)}
"""Tokens and states of the pools. In the tight ones four requests do not fit."""
OPS = 60


def find_adapter(name: str) -> type[ForeignCache]:
    """Return the class ``module:Class``. AdapterUnavailable: there is none, or its engine cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise AdapterUnavailable(f"{name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ForeignCache)):
        raise AdapterUnavailable(f"{name!r} is {found!r}, and not a class of ForeignCache")
    return found


@attrs.frozen
class ForeignSetup:
    """One way to make a cache: its set of components, the tokens of a page, tokens and states in all."""

    components: str
    page: int
    tokens: int
    states: int

    def make(self, adapter: type[ForeignCache]) -> MakeForeign:
        return partial(
            adapter,
            components=self.components,
            page=self.page,
            tokens=self.tokens,
            states=self.states,
            window=WINDOW,
        )

    def world(self, adapter: type[ForeignCache]) -> Callable[[], ForeignPlayer]:
        """Return what makes a new cache, with a scheduler for it."""
        return partial(ForeignPlayer, self.make(adapter))

    def __str__(self) -> str:
        return f"{self.components}:{self.page}:{self.tokens}:{self.states}"

    @classmethod
    def parsed(cls, text: str) -> ForeignSetup:
        """Return the setup ``components:page:tokens:states``. ValueError: ``text`` is none."""
        components, page, tokens, states = text.split(":")
        return cls(components, int(page), int(tokens), int(states))


@attrs.frozen
class ForeignFinding:
    """Something that does not hold, and the shortest script that shows it; there is none for an order."""

    setup: ForeignSetup
    topic: str
    sentence: str
    script: Sequence[Op] = ()


@attrs.define
class ForeignReport:
    """What was found of one cache. ``counts``: what the scripts did, by setup."""

    version: str
    counts: dict[str, Counter[str]] = attrs.field(factory=dict)
    findings: list[ForeignFinding] = attrs.field(factory=list)
    orders: list[str] = attrs.field(factory=list)
    hits: list[tuple[str, str, int, int]] = attrs.field(factory=list)
    scripts: int = 0

    def lines(self, name: str) -> Iterator[str]:
        yield f"{self.version}: {self.scripts} scripts, {len(self.findings)} findings"
        for setup, counts in self.counts.items():
            told = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            yield f"  scripts on {setup}: {told}"
        yield from (f"  orders on {line}" for line in self.orders)
        yield from (f"  hits on {setup}: {what}: {hit} of {could}" for setup, what, hit, could in self.hits)
        for setup, what, hit, could in self.hits:
            if hit == 0 < could:
                yield f"WARNING {setup}: {what}: nothing hits"
        for found in self.findings:
            yield f"FINDING {found.setup} {found.topic}: {found.sentence}"
            if found.script:
                yield (
                    "  python -m prefixloom.testing.foreign "
                    + f'{name} --on {found.setup} --play "{list(found.script)}"'
                )


def setups_of(adapter: type[ForeignCache], sets: Sequence[str], sizes: Sequence[str]) -> list[ForeignSetup]:
    chosen = [components for components in adapter.sets if not sets or components in sets]
    return [ForeignSetup(each, page, *SIZES[size]) for each in chosen for page in adapter.page_sizes for size in sizes]


def report_on_foreign(
    adapter: type[ForeignCache],
    sets: Sequence[str] = (),
    seeds: int = 20,
    seed: int = 0,
    ops: int = OPS,
    schedules: int = SCHEDULES,
) -> ForeignReport:
    """Hold a cache against random scripts, orders, and the question what hits."""
    report = ForeignReport(adapter.version())
    for setup in setups_of(adapter, sets, list(SIZES)):
        world = setup.world(adapter)
        counts = report.counts.setdefault(str(setup), Counter())
        for number in range(seed, seed + seeds):
            script = ForeignWriter(f"{setup} {number}", max(setup.page, 4)).script(ops)
            report.scripts += 1
            try:
                counts.update(play(world, script).counts)
            except Failure as failed:
                if not any(found.setup == setup and found.topic == failed.topic for found in report.findings):
                    short = shrink(world, script)
                    again = failure(world, short) or failed
                    report.findings.append(ForeignFinding(setup, again.topic, again.sentence, short))
    for setup in setups_of(adapter, sets, ["roomy"]):
        _orders(report, setup, adapter, schedules)
        _hits(report, setup, adapter)
    return report


def _orders(report: ForeignReport, setup: ForeignSetup, adapter: type[ForeignCache], schedules: int) -> None:
    for what, plans in plans_of(max(setup.page, 4)).items():
        try:
            found = explore_orders(setup.make(adapter), plans, schedules)
        except Failure as failed:
            report.findings.append(ForeignFinding(setup, failed.topic, f"{what}: {failed.sentence}"))
        else:
            report.orders.append(f"{setup}: {what}: {found}")


def _hits(report: ForeignReport, setup: ForeignSetup, adapter: type[ForeignCache]) -> None:
    try:
        rows = hit_rows(setup.make(adapter), setup.page)
    except Failure as failed:
        report.findings.append(ForeignFinding(setup, failed.topic, f"when it was asked what hits: {failed.sentence}"))
    else:
        report.hits += [(str(setup), row.what, row.hit, row.could) for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if everything holds, 1 if there are findings, and 2 if there is nothing to test."""
    parser = argparse.ArgumentParser(prog="python -m prefixloom.testing.foreign", description=__doc__)
    parser.add_argument("name", help="module:Class of an adapter")
    parser.add_argument("--sets", default="", help="sets of components, for example F,FM; default: all")
    parser.add_argument("--seeds", type=int, default=20, help="random scripts for each setup")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--ops", type=int, default=OPS, help="operations of a script")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="schedules of the device for each order")
    parser.add_argument("--play", default="", metavar="SCRIPT", help="play this script only")
    parser.add_argument("--on", default="", metavar="SETUP", help="components:page:tokens:states, for --play")
    given = parser.parse_args(arguments)
    try:
        adapter = find_adapter(given.name)
    except AdapterUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    sets = [each for each in given.sets.split(",") if each]
    asked = [*sets, *([given.on.partition(":")[0]] if given.on else [])]
    if unknown := [each for each in asked if each not in adapter.sets]:
        parser.error(f"{given.name} has no components {', '.join(unknown)}; it has {', '.join(adapter.sets)}")
    if given.play:
        try:
            setup = ForeignSetup.parsed(given.on) if given.on else setups_of(adapter, (), ["roomy"])[0]
            script: list[Any] = ast.literal_eval(given.play)
            failed = failure(setup.world(adapter), script)
        except (ScriptError, SyntaxError, ValueError) as error:
            parser.error(f"--play is a list of operations, --on is components:page:tokens:states: {error}")
        print(f"{adapter.version()} on {setup}: {failed or 'all that must hold holds'}")
        return 1 if failed else 0
    report = report_on_foreign(adapter, sets, given.seeds, given.seed, given.ops, given.schedules)
    print("\n".join(report.lines(given.name)))
    return 1 if report.findings else 0
