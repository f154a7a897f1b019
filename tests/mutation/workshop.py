"""A process that has collected the tests once, and forks a child for every job: warm, alone and with a time limit.

The parent imports torch, the product and all test modules, runs no test, and has one thread. A child runs the tests
that it is given by pytest's own protocol, and ends at the first failure. Each test has a time limit of its own, which
the parent enforces, so a mutant that loops for ever or waits for ever ends.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.places import ROOT

LEFT_OUT = (
    "tests/bench", "tests/mutation", "tests/docs/test_wheel.py", "tests/docs/test_readme.py",
    "tests/docs/test_house.py", "tests/docs/test_import_rule.py", "tests/docs/test_api_names.py",
    "tests/docs/test_conformance_docs.py", "tests/kit/test_kill_table.py", "tests/lessons/test_lesson_mutants.py",
    "tests/lessons/test_lesson_3_two_processes.py",
)  # fmt: skip
"""Tests that run nothing of the product in their own process, or mutants of their own."""
WAITING = 60.0
"""Seconds that may pass in a test beyond the processor time that it may take: the machine may be busy."""
MEMORY = 6 << 30
"""Bytes that a child may map beyond what the parent has."""
KILLED, PASSED, BROKEN = 7, 0, 9


class Job(NamedTuple):
    """Tests to run in a child, each with its limit of processor time in seconds, after ``prepare``."""

    name: str
    tests: Sequence[str]
    limits: Sequence[float]
    prepare: Callable[[], object]


class Done(NamedTuple):
    """How a job ended: ``passed``, ``failed`` (at ``test``), ``timeout`` (in ``test``) or ``broken``, and its answer.

    ``broken``: the child ended in another way, or ``prepare`` raised.
    """

    how: str
    test: str
    seconds: float
    answer: Any


class Workshop:
    """A pytest session that is collected, and whose tests only children run."""

    def __init__(self, session: pytest.Session) -> None:
        self._items = {item.nodeid: item for item in session.items}
        self.files: dict[str, list[str]] = {}
        for nodeid, item in self._items.items():
            inside = item.path.is_relative_to(ROOT)
            self.files.setdefault(str(item.path.relative_to(ROOT) if inside else item.path), []).append(nodeid)
        self._scratch = Path(tempfile.mkdtemp(prefix="mutation-"))
        gc.unfreeze()
        self._functions: dict[tuple[str, str, int], list[types.FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is types.FunctionType:
                code = each.__code__
                self._functions.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
        self._imported = {file for file, _, _ in self._functions}
        gc.collect()
        gc.freeze()

    def has_imported(self, file: str) -> bool:
        """Return whether any function of a file lives in this process."""
        return str(ROOT / file) in self._imported

    def functions(self, file: str, name: str, line: int) -> list[types.FunctionType]:
        """Return the living functions whose code stands there."""
        return self._functions.get((str(ROOT / file), name, line), [])

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def run(self, jobs: deque[Job], at_once: int) -> Iterator[tuple[Job, Done]]:
        """Run jobs, so many at once, and yield each when it has ended. More may be added to ``jobs`` meanwhile."""
        assert threading.active_count() == 1, f"threads would be lost at a fork: {threading.enumerate()}"
        running: list[_Child] = []
        while jobs or running:
            while jobs and len(running) < at_once:
                running.append(_Child(jobs.popleft(), self._scratch, self._items))
            for child in list(running):
                done = child.ended()
                if done is not None:
                    running.remove(child)
                    yield child.job, done
            time.sleep(0.01)


class _Child:
    """One fork of the parent. The two share a page, in which the child says at which test it is, and until when."""

    def __init__(self, job: Job, scratch: Path, items: dict[str, pytest.Item]) -> None:
        self.job = job
        self._page = mmap.mmap(-1, 4096)
        self._say(-1, 120.0, 0.0)
        self._looked = 0.0
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._start = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            code = BROKEN
            try:
                code = self._work(items)
            except BaseException as error:
                self._folder.joinpath("broken").write_text(repr(error))
            finally:
                os._exit(code)

    def _say(self, number: int, limit: float, spent: float) -> None:
        """Note which test begins, and how long it may run and wait."""
        self._page[:24] = struct.pack("qdd", number, spent + limit, time.monotonic() + WAITING + limit)

    def _is_late(self) -> bool:
        """Return whether the running test has taken more processor time than it may, or waits for nothing."""
        now = time.monotonic()
        if now < self._looked + 0.2:
            return False
        self._looked = now
        _, most, until = struct.unpack("qdd", self._page[:24])
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return bool(now > until or spent > most)

    def _work(self, items: dict[str, pytest.Item]) -> int:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(self._folder)
        chosen = [items[name] for name in self.job.tests]
        around = self.job.prepare()
        failures: list[str] = []
        if chosen:
            manager = chosen[0].config.pluginmanager
            manager.unregister(name="terminalreporter")
            manager.register(_Failures(failures))
        for number, item in enumerate(chosen):
            self._say(number, self.job.limits[number], time.process_time())
            following = chosen[number + 1] if number + 1 < len(chosen) else None
            if isinstance(around, Around):
                around.before(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if isinstance(around, Around):
                around.after(item.nodeid, bool(failures))
                failures.clear()
            if failures:
                return KILLED
        if isinstance(around, Around):
            self._say(len(chosen), 300.0, time.process_time())
            self._folder.joinpath("answer").write_text(json.dumps(around.answer()))
        return PASSED

    def ended(self) -> Done | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = not pid and self._is_late()
        if not pid and not late:
            return None
        try:
            os.killpg(self.pid, signal.SIGKILL)  # the child and whatever processes its tests have left
        except ProcessLookupError:
            if late:
                os.kill(self.pid, signal.SIGKILL)
        if late:
            os.waitpid(self.pid, 0)
        (number,) = struct.unpack("q", self._page[:8])
        test = self.job.tests[number] if 0 <= number < len(self.job.tests) else ""
        code = -1 if late else os.waitstatus_to_exitcode(status)
        how = "timeout" if late else {PASSED: "passed", KILLED: "failed"}.get(code, "broken")
        answer: Any = code
        for name in ("answer", "broken"):
            if self._folder.joinpath(name).exists():
                text = self._folder.joinpath(name).read_text()
                answer = json.loads(text) if name == "answer" else text
        shutil.rmtree(self._folder, ignore_errors=True)
        self._page.close()
        return Done(how, test, time.monotonic() - self._start, answer)


class Around:
    """What a job does around every test, if it goes on after failures and has an answer."""

    def before(self, test: str) -> None: ...

    def after(self, test: str, failed: bool) -> None: ...

    def answer(self) -> Any: ...


class _Failures:
    def __init__(self, failures: list[str]) -> None:
        self._failures = failures

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(report.nodeid)


class _Instead:
    """Runs ``work`` in place of the tests."""

    def __init__(self, work: Callable[[Workshop], int]) -> None:
        self._work = work
        self.code = 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        workshop = Workshop(session)
        manager: Any = session.config.pluginmanager.getplugin("capturemanager")
        manager.suspend_global_capture(in_=True)
        try:
            self.code = self._work(workshop)
        finally:
            workshop.close()
            manager.resume_global_capture()
        return True


def in_workshop(work: Callable[[Workshop], int], paths: Sequence[str] = ()) -> int:
    """Collect the tests, all or those of ``paths``, and call ``work``. What it returns is returned."""
    import torch

    torch.set_num_threads(1)
    instead = _Instead(work)
    ignored = [f"--ignore={ROOT / each}" for each in LEFT_OUT]
    options = ["-q", "-m", "not slow", "-o", "addopts=--import-mode=importlib", "-o", "timeout=0"]
    options += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*options, *ignored, *paths], plugins=[instead])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    return instead.code
