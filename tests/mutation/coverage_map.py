"""Which tests run which line, and how much processor time each takes: measured once, and kept while the sources are the
same.

There is one file of it for each test file. It is measured again when a file has changed that those tests ran, or that
the test file imports from beside the product. Tests that fail while they are measured are left out: they may count
bytecodes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.probes import Probes
from tests.mutation.workshop import Around, Job, Workshop
from tests.support.places import ROOT

KEPT = Path(os.environ.get("PREFIXLOOM_MUTATION_CACHE") or Path(tempfile.gettempdir()) / "prefixloom-mutation")
BESIDE = ("tests.", "bench.", "examples.")
"""Modules beside the product that tests import begin so."""
LONGEST = 240.0
"""Seconds that a test may take while it is measured."""


class Covering(NamedTuple):
    """A test that runs a line: its seconds of processor time, and how many lines of the product it runs in all."""

    test: str
    seconds: float
    breadth: int


class _Lines(Around):
    """Notes which lines of the product each test runs, on every thread."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._passed: dict[str, float] = {}
        self._ran: dict[int, int] = {}  # by probe: a bit for each test that passes it
        self._files: set[str] = set()
        self._breadth: list[int] = []
        probes.put_in()

    def before(self, test: str) -> None:
        self._note(self._probes.taken())
        self._start = time.process_time()

    def after(self, test: str, failed: bool) -> None:
        spent, taken = time.process_time() - self._start, self._probes.taken()
        self._note(taken)
        if not failed:
            bit = 1 << len(self._passed)
            self._passed[test] = spent
            self._breadth.append(sum(len(self._probes.places[probe][1]) for probe in taken))
            for probe in taken:
                self._ran[probe] = self._ran.get(probe, 0) | bit

    def _note(self, taken: Iterable[int]) -> None:
        self._files |= {self._probes.places[probe][0] for probe in taken}

    def answer(self) -> Any:
        lines: dict[str, dict[int, int]] = {}
        for probe, bits in self._ran.items():
            file, its = self._probes.places[probe]
            found = lines.setdefault(file, {})
            for line in its:
                found[line] = found.get(line, 0) | bits
        told = {file: {line: hex(bits) for line, bits in found.items()} for file, found in lines.items()}
        tests = [
            (test, round(seconds, 3), breadth)
            for (test, seconds), breadth in zip(self._passed.items(), self._breadth, strict=True)
        ]
        return {"tests": tests, "lines": told, "ran": sorted(self._files)}


class CoverageMap:
    """What all test files together run."""

    def __init__(self, maps: Iterable[dict[str, Any]]) -> None:
        self._maps = [([Covering(*test) for test in each["tests"]], each["lines"]) for each in maps]

    def covering(self, file: str, lines: tuple[int, int]) -> list[Covering]:
        """Return the tests that run any of these lines, the first and the last included."""
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


def imported_by(file: str) -> set[str]:
    """Return the files that a test file imports, directly or not, and that are no part of the product; with itself."""
    found: set[str] = set()
    left = [file, "conftest.py"]
    while left:
        here = left.pop()
        if here in found or not (ROOT / here).exists():
            continue
        found.add(here)
        for node in ast.walk(ast.parse((ROOT / here).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            else:
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith(BESIDE):
                    left += [f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"]
    return found


def _digest(file: str) -> str:
    path = ROOT / file
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def _place(file: str) -> Path:
    name = hashlib.sha256(f"{file} {ROOT} {sys.version}".encode()).hexdigest()[:20]
    return KEPT / f"{name}.json"


def _kept(file: str) -> dict[str, Any] | None:
    """Return the map of a test file, if nothing that its tests ran has changed since."""
    place = _place(file)
    if not place.exists():
        return None
    found: dict[str, Any] = json.loads(place.read_text())
    return found if all(_digest(each) == then for each, then in found["digests"].items()) else None


def measured(workshop: Workshop, at_once: int) -> CoverageMap:
    """Return the map of the tests that the workshop has collected. What is not kept, or is out of date, is measured."""
    KEPT.mkdir(parents=True, exist_ok=True)
    maps = {file: _kept(file) for file in workshop.files}
    lacking = [(file, tests) for file, tests in workshop.files.items() if not maps[file]]
    probes = Probes(workshop) if lacking else None
    jobs = deque(Job(file, tests, [LONGEST] * len(tests), partial(_Lines, probes)) for file, tests in lacking)
    if jobs:
        print(f"measuring what the tests of {len(jobs)} files run", flush=True)
    for number, (job, done) in enumerate(workshop.run(jobs, at_once)):
        told = f"{number + 1}/{len(lacking)} {job.name}: {done.how}, {done.seconds:.0f} s"
        if done.how == "passed":
            digests = {each: _digest(each) for each in {*imported_by(job.name), *done.answer["ran"]}}
            part = _place(job.name).with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({**done.answer, "digests": digests}))
            part.replace(_place(job.name))
            maps[job.name] = json.loads(_place(job.name).read_text())
            print(f"{told}, {len(done.answer['tests'])} of {len(job.tests)} tests", flush=True)
        else:
            print(f"{told} in {done.test} {done.answer}: its tests kill nothing in this run", flush=True)
    return CoverageMap(each for each in maps.values() if each)
