"""The command: a sample of mutants, or survivors of an earlier run, against the tests that cover them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutation.by_hand import BY_HAND
from tests.mutation.coverage_map import CoverageMap, measured
from tests.mutation.score import AREAS, Result, area_of, equivalents, sample, scores, table
from tests.mutation.sites import Site, difference, product_files, sites
from tests.mutation.trial import Mutant, of_fragment, of_site, place_in, run_all
from tests.mutation.workshop import Workshop, in_workshop


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="a path from the root that a file begins with")
    parser.add_argument("--function", default="", help="part of a function's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests for each mutant, at most")
    parser.add_argument("--patience", type=float, default=4.0, help="seconds after which a test loops for ever")
    parser.add_argument("--again", type=Path, help="the survivors of an earlier run, in the file that it wrote")
    parser.add_argument("--by-hand", action="store_true", help="the mutants of by_hand.py in place of a sample")
    parser.add_argument("--named", action="append", default=[], help="part of the name of a mutant made by hand")
    parser.add_argument("--json", type=Path, default=Path("mutation.json"), help="where the results are written")
    parser.add_argument("--bars", type=float, help="exit with 1 if an area is more than so many points below its bar")
    parser.add_argument("tests", nargs="*", help="test files or folders; all if there is none")
    options = parser.parse_args()
    if sys.version_info < (3, 11):
        parser.error("it needs Python 3.11, whose code objects know their qualified names")
    return in_workshop(lambda workshop: _run(workshop, options), options.tests)


def _run(workshop: Workshop, options: argparse.Namespace) -> int:
    start = time.monotonic()
    covered = measured(workshop, options.jobs)
    if options.by_hand:
        return _run_by_hand(workshop, covered, options)
    wanted = _of_earlier(options.again) if options.again else _sampled(options)
    mutants: list[Mutant] = []
    by_name: dict[str, Site] = {}
    beyond = 0
    for site in wanted:
        if not options.again and len(mutants) >= options.count:
            break
        mutant = of_site(site)
        if place_in(workshop, mutant) is None:
            beyond += 1
        else:
            mutants.append(mutant)
            by_name[mutant.name] = site
    print(f"{len(mutants)} mutants, {covered.tests} tests; {beyond} sites were out of reach", flush=True)
    known = equivalents()
    chosen = {mutant.file for mutant in mutants}
    there = {site.name for file in chosen for site in sites(file)}
    for name in sorted(name for name in known.keys() - there if name.partition("::")[0] in chosen):
        print(f"to be judged again, since its function has changed: {name}", flush=True)
    results: list[Result] = []
    limits = (options.seconds, options.patience, options.jobs)
    for mutant, verdict in run_all(workshop, covered, mutants, *limits):
        result = Result(by_name[mutant.name], verdict, known.get(mutant.name, ""))
        results.append(result)
        told = f"{len(results)}/{len(mutants)} {verdict.how:9} {verdict.seconds:5.1f} s {verdict.tests:4} tests "
        print(f"{told} {mutant.name} {verdict.by}", flush=True)
        options.json.write_text(json.dumps([_plain(each) for each in results], indent=1))
    results.sort(key=lambda each: each.site)
    _tell(results)
    print(f"\n{time.monotonic() - start:.0f} s")
    points = 200.0 if options.bars is None else options.bars
    low = [each for each in scores(results) if each.per_cent < each.area.bar - points]
    for each in low:
        print(f"{each.area.name}: {each.per_cent:.1f}% of its mutants were killed, and its bar is {each.area.bar}%")
    return 1 if low else 0


def _run_by_hand(workshop: Workshop, covered: CoverageMap, options: argparse.Namespace) -> int:
    named = options.named or [""]
    mutants = [of_fragment(each) for each in BY_HAND if any(part in each.name for part in named)]
    why = {each.name: each.why for each in BY_HAND}
    found: Counter[str] = Counter()
    for mutant, verdict in run_all(workshop, covered, mutants, options.seconds, options.patience, options.jobs):
        dead = verdict.how in ("killed", "timeout")
        found["killed" if dead else "equivalent" if why[mutant.name] else "alive"] += 1
        told = f"{verdict.how:9} {verdict.seconds:5.1f} s {verdict.tests:4} tests "
        print(f"{told} {mutant.name}: {verdict.by or why[mutant.name]}", flush=True)
    print(f"{len(mutants)} mutants made by hand: {dict(found)}")
    return 1 if found["alive"] else 0


def _sampled(options: argparse.Namespace) -> list[Site]:
    only = tuple(options.only) or ("",)
    files = [file for file in product_files() if file.startswith(only) and area_of(file)]
    found = [site for file in files for site in sites(file) if options.function in site.function]
    return sample(found, options.count, options.seed)


def _of_earlier(path: Path) -> list[Site]:
    """Return the sites of the survivors, also of functions that were changed since, where they still have that site."""
    wanted = []
    for each in json.loads(path.read_text()):
        if each["how"] in ("survived", "uncovered"):
            named = (each["function"], each["operator"], each["ordinal"])
            found = [site for site in sites(each["file"]) if (site.function, site.operator, site.ordinal) == named]
            if not found:
                print(f"{each['name']} is gone")
            wanted += found
    return wanted


def _plain(result: Result) -> dict[str, Any]:
    site, verdict = result.site, result.verdict
    told = {"name": site.name, **site._asdict(), **verdict._asdict(), "why": result.why}
    return told if result.dead else {**told, "diff": difference(site).splitlines()}


def _tell(results: Iterable[Result]) -> None:
    results = list(results)
    for area in AREAS:
        for each in results:
            if area_of(each.site.file) is area and not each.dead:
                judged = f"judged equivalent: {each.why}" if each.why else each.verdict.how
                print(f"\n-- {judged}, {each.verdict.tests} tests\n   {each.site.name}\n{difference(each.site)}")
    print()
    print(table(results))


if __name__ == "__main__":
    sys.exit(main())
