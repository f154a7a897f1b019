"""One mutant: the living functions get the changed code, and the tests that run its lines are run.

The code is changed in place (``__code__``), so nothing is imported again. A change that makes a closure need other
variables of its surroundings cannot be put in place like that, nor can one of a function that no test has imported:
such sites are out of reach, and are counted.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.mutation.coverage_map import CoverageMap, Covering
from tests.mutation.fragments import Fragment, changed
from tests.mutation.sites import Site, mutate, parsed, units
from tests.mutation.workshop import Done, Job, Workshop
from tests.support.places import ROOT

RANDOM = ("tests/random", "plugins/hicache/tests/test_hicache_fuzz.py")
"""Where the tests stand that compare random traffic with a model."""
FIRST = 4
"""So many tests that killed in the same function, and so many that did in the same file, go before all others."""
TIMES = 8
"""A mutant's test may take so many times what it took while it was measured, and some seconds beyond that."""


class Verdict(NamedTuple):
    """What came of a mutant: ``killed``, ``timeout``, ``survived``, ``uncovered`` (no test runs its line) or
    ``broken`` (no test could begin, which kills nothing)."""

    how: str
    by: str
    tests: int
    seconds: float


class Mutant(NamedTuple):
    """A changed module, the function that is different in it, and the lines of which a test must run one."""

    name: str
    file: str
    function: str
    lines: tuple[int, int]
    tree: Any


def of_site(site: Site) -> Mutant:
    return Mutant(site.name, site.file, site.function, site.lines, mutate(site))


def of_fragment(fragment: Fragment) -> Mutant:
    tree, lines = changed(fragment)
    return Mutant(fragment.name, fragment.file, fragment.function, lines, tree)


def place_in(workshop: Workshop, mutant: Mutant) -> Callable[[], None] | None:
    """Return what puts the mutant in its place in this process; None if it is out of reach, or no change at all."""
    path = str(ROOT / mutant.file)
    old = _codes(compile(parsed(mutant.file), path, "exec", dont_inherit=True), mutant, parsed(mutant.file))
    new = _codes(compile(mutant.tree, path, "exec", dont_inherit=True), mutant, mutant.tree)
    if not old or not new or old[0] == new[0]:
        return None
    swaps: list[tuple[types.FunctionType, types.CodeType]] = []
    for code in new:
        for function in workshop.functions(mutant.file, code.co_qualname, code.co_firstlineno):
            if len(function.__code__.co_freevars) != len(code.co_freevars):
                return None
            swaps.append((function, code))
    if not any(code is new[0] for _, code in swaps):
        return None

    def prepare() -> None:
        for function, code in swaps:
            function.__code__ = code

    return prepare


def _codes(module: types.CodeType, mutant: Mutant, tree: Any) -> list[types.CodeType]:
    """Return the code of the function that is changed, and behind it those of all functions in it."""
    (node,) = [unit.node for unit in units(tree) if unit.name == mutant.function]
    line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    name = mutant.function.partition("#")[0]
    for code in _inside(module):
        if code.co_qualname == name and code.co_firstlineno == line:
            return [code, *_inside(code)]
    return []


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _inside(each)


def chosen(covering: Sequence[Covering], budget: float) -> list[Covering]:
    """Return so many tests as take ``budget`` seconds, in three parts: the quickest, the random ones, and the broadest.

    The quickest are the most specific, and find most. The random ones compare with models of the whole. Of the rest,
    those come first that run most of the product for their time. Tests of one file stay together.
    """
    left = sorted(covering, key=lambda each: (each.seconds, each.breadth, each.test))
    found: list[Covering] = []
    spent = 0.0
    for upto, wanted in (
        (0.4, lambda test: True),
        (0.8, lambda test: test.startswith(RANDOM)),
        (1.0, lambda test: True),
    ):
        if upto == 1.0:
            left.sort(key=lambda each: each.seconds**0.5 / (each.breadth + 1))
        part = []
        for each in left:
            if wanted(each.test) and spent + each.seconds <= upto * budget:
                spent += each.seconds
                part.append(each)
        found += _by_file(part)
        left = [each for each in left if each not in set(part)]
    return found


class Telling:
    """Tests that have killed, so that those go first which killed most mutants of the same function, or else file."""

    def __init__(self) -> None:
        self._kills: dict[str, Counter[str]] = {}

    def killed(self, mutant: Mutant, test: str) -> None:
        for where in (f"{mutant.file}::{mutant.function}", mutant.file):
            self._kills.setdefault(where, Counter())[test] += 1

    def first(self, mutant: Mutant, covering: Sequence[Covering]) -> list[Covering]:
        """Return those of ``covering`` that are likely to kill, at most ``FIRST`` of a function and of a file."""
        by_name = {each.test: each for each in covering}
        found: dict[str, None] = {}
        for where in (f"{mutant.file}::{mutant.function}", mutant.file):
            found |= dict.fromkeys(test for test, _ in self._kills.get(where, Counter()).most_common(FIRST))
        return [by_name[test] for test in found if test in by_name]


def _by_file(tests: Sequence[Covering]) -> list[Covering]:
    files: dict[str, list[Covering]] = {}
    for each in tests:
        files.setdefault(each.test.partition("::")[0], []).append(each)
    least = sorted(files.values(), key=lambda of: sum(each.breadth for each in of) / len(of))
    return [each for of in least for each in of]


def run_all(
    workshop: Workshop, covered: CoverageMap, mutants: Sequence[Mutant], budget: float, patience: float, at_once: int
) -> Iterator[tuple[Mutant, Verdict]]:
    """Yield the verdict on each mutant, as it comes. A test that fails without any mutant, too, is not believed.

    ``budget``    the seconds of tests for each mutant
    ``patience``  seconds of processor time that a test may take beyond ``TIMES`` what it took without a mutant
    """
    by_name = {mutant.name: mutant for mutant in mutants}
    believed: set[str] = set()
    doubted: set[str] = set()
    unproved: dict[str, list[tuple[Mutant, Verdict]]] = {}
    telling = Telling()
    waiting = deque(mutants)
    jobs: deque[Job] = deque()

    def fill() -> Iterator[tuple[Mutant, Verdict]]:
        """Make the next jobs: no earlier than needed, since what kills meanwhile goes first."""
        while waiting and len(jobs) < at_once:
            mutant = waiting.popleft()
            tests = [each for each in covered.covering(mutant.file, mutant.lines) if each.test not in doubted]
            if tests:
                first = telling.first(mutant, tests)
                rest = [each for each in chosen(tests, budget) if each not in set(first)]
                jobs.append(_job(workshop, mutant, [*first, *rest], patience))
            else:
                yield mutant, Verdict("uncovered", "", 0, 0.0)

    yield from fill()
    for job, done in workshop.run(jobs, at_once):
        if job.name in unproved:  # it was the test that killed, without a mutant
            killed = unproved.pop(job.name)
            if done.how == "passed":
                believed.add(job.name)
                for mutant, verdict in killed:
                    telling.killed(mutant, job.name)
                    yield mutant, verdict
            else:
                print(f"{job.name} fails without a mutant, too, if it is run alone: it kills nothing", flush=True)
                doubted.add(job.name)
                waiting.extendleft(mutant for mutant, _ in killed)
        else:
            mutant, verdict = by_name[job.name], _verdict(job, done)
            if verdict.how != "killed" or not verdict.by or verdict.by in believed:
                if verdict.how == "killed":
                    telling.killed(mutant, verdict.by)
                yield mutant, verdict
            else:
                if verdict.by not in unproved:
                    jobs.appendleft(Job(verdict.by, [verdict.by], [120.0], lambda: None))
                unproved.setdefault(verdict.by, []).append((mutant, verdict))
        yield from fill()


def _job(workshop: Workshop, mutant: Mutant, tests: Sequence[Covering], patience: float) -> Job:
    prepare = place_in(workshop, mutant)
    assert prepare is not None, f"{mutant.name} is out of reach"
    return Job(mutant.name, [each.test for each in tests], [TIMES * each.seconds + patience for each in tests], prepare)


def _verdict(job: Job, done: Done) -> Verdict:
    """Return the verdict of a job. A child that a signal or want of memory ends in a test is killed as well."""
    how = {"passed": "survived", "timeout": "timeout"}.get(done.how, "killed" if done.test else "broken")
    return Verdict(how, done.test if how != "survived" else "", len(job.tests), round(done.seconds, 1))
