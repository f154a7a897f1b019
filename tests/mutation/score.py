"""Areas of the product with their bars and their share of a sample, and the mutants that were judged equivalent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tomllib

from tests.mutation.sites import Site
from tests.mutation.trial import Verdict

JUDGED = Path(__file__).with_name("equivalents.toml")


class Area(NamedTuple):
    """Part of the product. ``bar``: the per cent of its mutants to be killed. ``share``: its per cent of a sample."""

    name: str
    paths: tuple[str, ...]
    bar: int
    share: int


AREAS = (
    Area("operations", ("core/prefixloom/operations",), 95, 17),
    Area("tree", ("core/prefixloom/tree",), 95, 17),
    Area("tiers", ("core/prefixloom/tiers",), 95, 14),
    Area("store", ("plugins/hicache", "core/prefixloom/storage"), 95, 13),
    Area("device", ("core/prefixloom/device",), 90, 10),
    Area("cache", ("core/prefixloom/cache", "core/prefixloom/insight"), 90, 6),
    Area("contract", ("core/prefixloom/contract", "core/prefixloom/errors"), 90, 5),
    Area("compose", ("core/prefixloom/compose",), 90, 5),
    Area("engine", ("engine",), 90, 8),
    Area("plugins", ("plugins",), 90, 3),
    Area("testing", ("core/prefixloom/testing", "core/prefixloom/script"), 90, 2),
)
"""The first whose path fits is a file's area. What has none (the commands) is in no sample."""


def area_of(file: str) -> Area | None:
    for area in AREAS:
        if file.startswith(area.paths):
            return area
    return None


def sample(sites: Sequence[Site], count: int, seed: int) -> list[Site]:
    """Return so many sites in the order in which they are tried, by the shares of their areas, and spare ones.

    Within an area an operator has as many as the root of its sites, so that no frequent one has nearly all.
    """
    by_area: dict[Area, list[Site]] = {}
    for site in sites:
        area = area_of(site.file)
        if area is not None:
            by_area.setdefault(area, []).append(site)
    whole = sum(area.share for area in by_area)
    found: list[tuple[float, Site]] = []
    for area, its in by_area.items():
        mixed = _mixed(its, random.Random(f"{seed} {area.name}"))
        of_area = max(1.0, count * area.share / whole)
        found += [((place + 0.5) / of_area, site) for place, site in enumerate(mixed)]
    return [site for _, site in sorted(found, key=lambda each: each[0])]


def _mixed(sites: Sequence[Site], rng: random.Random) -> list[Site]:
    by_operator: dict[str, list[Site]] = {}
    for site in sites:
        by_operator.setdefault(site.operator, []).append(site)
    places: list[tuple[float, Site]] = []
    for its in by_operator.values():
        rng.shuffle(its)
        places += [((at + rng.random()) / len(its) ** 0.5, site) for at, site in enumerate(its)]
    return [site for _, site in sorted(places, key=lambda each: each[0])]


def equivalents() -> dict[str, str]:
    """Return why no test can kill a site, by its name."""
    found = {}
    for each in tomllib.loads(JUDGED.read_text()).get("equivalent", []):
        name = f"{each['file']}::{each['function']} {each['operator']} {each['ordinal']} {each['digest']}"
        found[name] = each["why"]
    return found


class Result(NamedTuple):
    """A mutant of a sample, what came of it, and why it is equivalent, if it was judged so."""

    site: Site
    verdict: Verdict
    why: str

    @property
    def dead(self) -> bool:
        return self.verdict.how in ("killed", "timeout")

    @property
    def counts(self) -> bool:
        """Whether it stands in the score: not one that nothing can kill."""
        return self.dead or not self.why


class Score(NamedTuple):
    """Of an area: mutants that count, and how many of them were killed."""

    area: Area
    mutants: int
    killed: int
    equivalent: int

    @property
    def per_cent(self) -> float:
        return 100 * self.killed / self.mutants if self.mutants else 100.0


def scores(results: Sequence[Result]) -> list[Score]:
    found = []
    for area in AREAS:
        its = [each for each in results if area_of(each.site.file) is area]
        if its:
            counted = [each for each in its if each.counts]
            killed = sum(each.dead for each in counted)
            found.append(Score(area, len(counted), killed, len(its) - len(counted)))
    return found


def table(results: Sequence[Result]) -> str:
    """Return the scores as they stand in the documents."""
    rows = ["| area | mutants | killed | equivalent | score | bar |", "|---|---|---|---|---|---|"]
    for area, mutants, killed, equivalent in (each[:4] for each in scores(results)):
        told = f"{100 * killed / mutants:.0f}%" if mutants else "-"
        rows.append(f"| {area.name} | {mutants} | {killed} | {equivalent} | {told} | {area.bar}% |")
    return "\n".join(rows)
