"""Which tests run which line, and how much processor time each takes: measured once, and kept while the sources are the
same.

There is one file of it for each test file. It is measured again when any file that those tests ran has changed. Tests
that fail while they are measured are left out: they may count calls, or be about tracing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.sites import product_files
from tests.mutation.workshop import Around, Job, Workshop
from tests.support.places import ROOT

KEPT = Path(os.environ.get("PREFIXLOOM_MUTATION_CACHE") or Path(tempfile.gettempdir()) / "prefixloom-mutation")
LONGEST = 240.0
"""Seconds that a test may take while it is measured."""


class Covering(NamedTuple):
    """A test that runs a line: its seconds of processor time, and how many lines of the product it runs in all."""

    test: str
    seconds: float
    breadth: int


class _Lines(Around):
    """Watches which lines of the product each test runs, on every thread."""

    def __init__(self) -> None:
        import coverage

        folders = [str(ROOT / each) for each in ("core", "plugins", "engine", "tests", "examples")]
        self._cover = coverage.Coverage(data_file=None, config_file=False, source=folders, messages=False)
        self._passed: dict[str, float] = {}
        self._cover.start()
        self._cover.switch_context("between")

    def before(self, test: str) -> None:
        self._cover.stop()  # a test that has a trace function of its own has taken the place of coverage's
        self._cover.start()
        self._cover.switch_context(test)
        self._start = time.process_time()

    def after(self, test: str, failed: bool) -> None:
        if not failed:
            self._passed[test] = time.process_time() - self._start
        self._cover.switch_context("between")

    def answer(self) -> Any:
        self._cover.stop()
        data = self._cover.get_data()
        number = {test: at for at, test in enumerate(self._passed)}
        lines: dict[str, dict[int, str]] = {}
        product, ran = set(product_files()), []
        breadth = dict.fromkeys(self._passed, 0)
        for path in data.measured_files():
            file = os.path.relpath(path, ROOT)
            ran.append(file)
            if file not in product:
                continue
            found: dict[int, str] = {}
            for line, contexts in data.contexts_by_lineno(path).items():
                who = [test for test in contexts if test in number]
                for test in who:
                    breadth[test] += 1
                if who:
                    found[line] = hex(sum(1 << number[test] for test in who))
            lines[file] = found
        tests = [(test, round(seconds, 3), breadth[test]) for test, seconds in self._passed.items()]
        return {"tests": tests, "lines": lines, "ran": ran}


class CoverageMap:
    """What all test files together run."""

    def __init__(self, maps: Iterable[dict[str, Any]]) -> None:
        self._maps = [([Covering(*test) for test in each["tests"]], each["lines"]) for each in maps]

    def covering(self, file: str, lines: tuple[int, int]) -> list[Covering]:
        """The tests that run any of these lines, the first and the last included."""
        found = []
        for tests, by_file in self._maps:
            here = by_file.get(file, {})
            bits = 0
            for line in range(lines[0], lines[1] + 1):
                bits |= int(here.get(str(line), "0x0"), 16)
            while bits:
                low = bits & -bits
                found.append(tests[low.bit_length() - 1])
                bits ^= low
        return found

    @property
    def tests(self) -> int:
        return sum(len(tests) for tests, _ in self._maps)


def _digest(file: str) -> str:
    path = ROOT / file
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def _place(file: str) -> Path:
    name = hashlib.sha256(f"{file} {ROOT} {sys.version}".encode()).hexdigest()[:20]
    return KEPT / f"{name}.json"


def _kept(file: str) -> dict[str, Any] | None:
    """The map of a test file, if nothing that its tests ran has changed since."""
    place = _place(file)
    if not place.exists():
        return None
    found: dict[str, Any] = json.loads(place.read_text())
    return found if all(_digest(each) == then for each, then in found["digests"].items()) else None


def measured(workshop: Workshop, at_once: int) -> CoverageMap:
    """The map of the tests that the workshop has collected. What is not kept, or is out of date, is measured."""
    KEPT.mkdir(parents=True, exist_ok=True)
    maps = {file: _kept(file) for file in workshop.files}
    lacking = [(file, tests) for file, tests in workshop.files.items() if not maps[file]]
    jobs = deque(Job(file, tests, [LONGEST] * len(tests), _Lines) for file, tests in lacking)
    if jobs:
        print(f"measuring what the tests of {len(jobs)} files run", flush=True)
    for number, (job, done) in enumerate(workshop.run(jobs, at_once)):
        told = f"{number + 1}/{len(lacking)} {job.name}: {done.how}, {done.seconds:.0f} s"
        if done.how == "passed":
            digests = {each: _digest(each) for each in {job.name, *done.answer["ran"]}}
            part = _place(job.name).with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({**done.answer, "digests": digests}))
            part.replace(_place(job.name))
            maps[job.name] = json.loads(_place(job.name).read_text())
            print(f"{told}, {len(done.answer['tests'])} of {len(job.tests)} tests", flush=True)
        else:
            print(f"{told} in {done.test} {done.answer}: its tests kill nothing in this run", flush=True)
    return CoverageMap(each for each in maps.values() if each)
