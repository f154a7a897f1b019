"""The conformance kit as its users meet it: what it says, how it shrinks, the command line and the pytest plugin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import pytest

import prefixloom.testing
from prefixloom import Component, CompositionError, Manifest, Path, Point, Window
from prefixloom.cli import main
from prefixloom.compose.registry import Registry, default_registry
from prefixloom.script import Failure, failure, shrink
from prefixloom.testing import (
    LAWS,
    ComponentCase,
    LawBroken,
    Setting,
    Truth,
    check_component,
    conformance,
    play,
    report_on,
)
from prefixloom.testing.conformance import WATCHED, clauses, name_of, statement
from prefixloom.testing.inside.memory import POISON, STRANGE
from prefixloom.testing.kit.bench import Bench
from prefixloom.testing.kit.outcomes import ALONE, LENGTH, PAIRS
from prefixloom.testing.kit.scripts import ContentWriter
from tests.support.broken import BROKEN, WINDOW, K, V

ROOT = File(__file__).resolve().parents[2]
SINK = ROOT / "examples" / "prefixloom-sink"
Distribution = Callable[..., File]


def window() -> Component:
    return Component("window", Manifest([K, V]), Window(7))


def broken(mistake: str) -> ComponentCase:
    (found,) = [row for row in BROKEN if row.mistake == mistake]
    return found.case()


# ---------------------------------------------------------------- what it says


def test_every_law_is_a_sentence_and_cites_clauses_that_exist() -> None:
    known = set(re.findall(r"^(?:- |\| )\*\*([A-Z]\d+)\b", (ROOT / "docs/hooks.md").read_text(), re.MULTILINE))
    for law in LAWS:
        assert re.fullmatch(r"[A-Z`].{30,}\.", statement(law)), name_of(law)
        assert clauses(law) and set(clauses(law)) <= known, name_of(law)
        assert name_of(law).startswith("law_")
    assert len({name_of(law) for law in LAWS}) == len(LAWS) > 30


def test_a_sound_component_gets_a_report_and_an_unsound_one_the_law_that_it_breaks() -> None:
    report = check_component(window, WINDOW, effort=1, laws=LAWS[:14])
    assert report.broken == ()
    assert {verdict.status for verdict in report.verdicts} == {"holds", "not applicable"}
    assert all(verdict.told for verdict in report.verdicts if verdict.status == "not applicable")
    with pytest.raises(
        LawBroken, match=r"^law_the_reach_covers_what_the_layers_read \(P3, R9, R10\): the token at "
    ) as told:
        check_component(lambda: Component("window", Manifest([K, V]), Window(6)), WINDOW, effort=1)
    assert told.value.clauses == ("P3", "R9", "R10")


def test_a_report_goes_on_behind_a_law_that_is_broken_unless_nothing_can_be_served() -> None:
    def law_one(case: ComponentCase) -> None:
        """Says no.

        Clauses: H1.
        """
        raise LawBroken("no")

    def law_two(case: ComponentCase) -> None:
        """Says yes.

        Clauses: H2.
        """

    report = report_on(ComponentCase(window), laws=(law_one, law_two))
    assert [(each.law, each.status) for each in report.verdicts] == [("law_one", "broken"), ("law_two", "holds")]

    def layers(view: Any, start: int, tokens: Any) -> Any:
        raise ValueError("these layers cannot be run")

    report = report_on(ComponentCase(window, Truth(layers=layers)), laws=(law_two, law_one))
    assert [(each.law, each.status) for each in report.verdicts] == [(name_of(WATCHED), "broken")]


def test_a_result_is_told_before_the_next_law_begins() -> None:
    told: list[str] = []

    def law_one(case: ComponentCase) -> None:
        """Holds."""

    def law_two(case: ComponentCase) -> None:
        """Sees what was told."""
        assert told == ["law_one"]

    report_on(ComponentCase(window), laws=(law_one, law_two), ended=lambda found: told.append(found.law))
    assert told == ["law_one", "law_two"]


def test_no_verdict_of_the_kit_depends_on_a_clock() -> None:
    """Only what shows another time to others knows the clocks."""
    home = File(prefixloom.testing.__file__).parent
    clock = re.compile(
        r"^\s*(import time|from time import)|\btimeout=|os\.times\b|perf_counter|monotonic", re.MULTILINE
    )
    found = {file.relative_to(home).as_posix() for file in home.rglob("*.py") if clock.search(file.read_text())}
    assert found == {"kit/machines.py"}


def test_it_says_what_it_did_not_test() -> None:
    report = report_on(ComponentCase(window), laws=())
    assert report.believed == ("reads", "ahead", "grid", "buffers", "tokens_per_entry")
    assert "the arithmetic of the layers" in "\n".join(report.untested)
    state = ComponentCase(lambda: Component("state", Manifest([K]), Point()), Truth(grid=1))
    assert report_on(state, laws=()).believed == ("buffers",)


def test_what_is_broken_comes_with_a_short_script_that_can_be_pasted() -> None:
    case = broken("an op clears another's slot")
    with pytest.raises(LawBroken) as told:
        check_component(case)
    code = told.value.script
    assert "from prefixloom.testing import Setting, play" in code
    assert code.count("('") <= 14, code
    with pytest.raises(Failure):
        exec(code, {"case": case})
    sound = ComponentCase(window, WINDOW)
    exec(code, {"case": sound})


def test_a_law_that_serves_nothing_gives_a_line_to_run_it_again() -> None:
    case = broken("until is one too early")
    with pytest.raises(LawBroken) as told:
        check_component(case)
    assert told.value.script.endswith("\nlaw_until_is_the_last_boundary(case)")
    with pytest.raises(LawBroken, match=r"until\(0\) is 5, and needs\(6\) names position 0: it would be given back"):
        exec(told.value.script, {"case": case})
    with pytest.raises(AttributeError, match="law_of_nobody"):
        exec("prefixloom.testing.law_of_nobody", {"prefixloom": __import__("prefixloom.testing")})


def test_a_script_is_shrunk_to_what_matters() -> None:
    case = broken("an op clears all states")
    script = ContentWriter("shrink", 4).script(120)
    found = failure(Setting(case), script)
    assert found is not None and found.topic == "content"
    short = shrink(Setting(case), script)
    assert len(short) <= 8 < len(script)
    assert {op[0] for op in short} <= {"open", "run", "align", "publish", "close", "rewind"}


def test_a_script_is_the_same_for_the_same_seed() -> None:
    script = ContentWriter("a", 4).script(60)
    assert script == ContentWriter("a", 4).script(60) != ContentWriter("b", 4).script(60)


@pytest.mark.parametrize("reach", [Path(), Window(7), Point()], ids=repr)
def test_the_scripts_meet_what_they_are_meant_to_meet(reach: Any) -> None:
    """A random script that never hits, evicts, refuses or rewinds proves nothing."""
    case = ComponentCase(lambda: Component("subject", Manifest([K], max_rewind=3), reach))
    counts: dict[str, int] = {}
    for setting in (*ALONE, *PAIRS):
        for seed in range(2):
            player = play(Setting(case, **setting), ContentWriter(f"{seed}", 4).script(LENGTH))
            for what, times in player.counts.items():
                counts[what] = counts.get(what, 0) + times
    for what, least in {"hit": 20, "miss": 20, "step": 100, "evicted": 50, "rewind": 4, "refused": 1}.items():
        assert counts.get(what, 0) >= least, counts


def test_late_steps_really_run_behind() -> None:
    case = ComponentCase(window, WINDOW)
    assert play(Setting(case, late=True), ContentWriter("threads", 4).script(90)).bench.stream.tick > 20


# ---------------------------------------------------------------- content


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "bool", "complex64"])
def test_content_is_told_apart_in_every_dtype(dtype: str) -> None:
    from prefixloom import Buffer

    manifest = Manifest([Buffer("a", (4, 3), dtype, (0, 3)), Buffer("b", (5, 2), dtype)])
    bench = Bench(ComponentCase(lambda: Component("subject", manifest, Path())))
    memory = bench.memories["subject"]
    for number in range(60):
        memory.write(1, 2, number)
        assert memory.read(1, 2) == number
    assert memory.read(0, 0) == POISON
    pool = bench.cache.pool("subject")
    before = memory.snapshot()
    assert memory.changed(before) == []
    pool.buffers["a"][1, 1, 2] = pool.buffers["a"][0, 1, 2]
    assert memory.read(1, 2) == STRANGE, "one layer has another's content"
    assert memory.changed(before) == [1]
    assert memory.changed(before, but=[1]) == []
    pool.clear([1])
    assert memory.read(1, 2) == 0


# ---------------------------------------------------------------- the command line


def test_the_command_says_what_came_of_every_law(
    installed: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few laws here: the plugins' own tests hold them against all."""
    few = LAWS[:12]
    monkeypatch.setattr(conformance, "LAWS", few)
    assert main(["conformance", "full"]) == 0
    out = capsys.readouterr().out
    for law in few:
        assert re.search(rf"^ +(ok|-)  {name_of(law)}\b", out, re.MULTILINE), name_of(law)
    assert "Not tested:\n" in out
    assert re.search(r"^(\d+) of \1 laws hold, 0 are broken\.$", out, re.MULTILINE)


BAD = """
import time
from prefixloom import Buffer, Component, ComponentType, Manifest, Window, hookimpl

class Bad(Component):
    def __init__(self, name, size=6):
        super().__init__(name, Manifest([Buffer("kv", (3,), "float32")]), Window(size))

    @hookimpl
    def create_match_validator(self):
        return lambda walk: 0 if time.time() < 1.5e9 else walk.boundary

@hookimpl
def prefixloom_component():
    return ComponentType("bad", Bad)
"""


@pytest.mark.slow
def test_the_command_tells_which_law_is_broken_and_how(
    distribution: Distribution, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution("prefixloom-bad", {"bad": "kit_bad"}, {"kit_bad": BAD})
    default_registry.cache_clear()
    assert main(["conformance", "bad"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "BROKEN law_the_same_calls_get_the_same_answers" in out
    assert "Broken: of two instances that were asked the same, on different days and machines, one did: finalize" in out
    assert main(["conformance", "bad", "--json", "--set", "size=3"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["broken"] == 3 and told["component"] == "bad(size=3)"
    default_registry.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nope"], "no installed distribution offers a component named 'nope'"),
        (["swa", "--set", "window=0"], "a window must be a whole number of at least 1, got 0"),
        (["swa", "--set", "size=3"], "cannot be made with the options {'size': 3}"),
        (["swa", "--set", "window"], "--set takes OPTION=VALUE, such as --set window=8; got 'window'"),
        (["swa", "--set", "name=mine"], "--set takes no name: the kit names what it makes"),
    ],
)
def test_the_command_refuses_what_it_cannot_test(
    arguments: list[str], told: str, installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.out == ""
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("made", [None, 7, Component, ("name",)], ids=repr)
def test_what_is_no_component_is_refused_before_any_law(made: Any) -> None:
    with pytest.raises(CompositionError, match=r"A component has a name, a manifest and a reach$"):
        check_component(lambda: made)


class Forgets(Component):
    def __init__(self) -> None:
        self.window = 8


def test_a_component_that_forgets_its_base_class_is_told_in_a_sentence() -> None:
    told = r"a Forgets, which has no name that is a str\. .*: does Forgets\.__init__ call super\(\)\.__init__\("
    with pytest.raises(CompositionError, match=told):
        check_component(Forgets)


@pytest.mark.parametrize(
    ("make", "truth", "told"),
    [
        (
            "sink",
            None,
            r"a function that makes a new component each time, .*got 'sink'\. An installed component is Comp",
        ),
        (window(), None, "a function that makes a new component each time"),
        (window, "reads", r"is a prefixloom\.testing\.Truth, got 'reads'"),
        (window, {"buffers": ("k",)}, r"is a prefixloom\.testing\.Truth, got"),
    ],
)
def test_what_is_no_case_is_refused_with_what_is_meant(make: Any, truth: Any, told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        check_component(make, truth)


def test_buffers_of_a_truth_are_buffers() -> None:
    with pytest.raises(CompositionError, match=r"takes what the layers write as prefixloom\.Buffer"):
        Truth(buffers=("k", "v"))  # type: ignore[arg-type]


def test_a_maker_that_raises_is_told_as_the_components_mistake() -> None:
    def make() -> Any:
        raise KeyError("size")

    with pytest.raises(CompositionError, match="component: it cannot be made: KeyError: 'size'"):
        check_component(make)


# ---------------------------------------------------------------- pytest


def pytest_run(tmp_path: File, *arguments: str, roots: tuple[File, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, roots), *sys.path])
    call = [sys.executable, "-m", "pytest", "-p", "prefixloom.testing.pytest_plugin", "-q", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_pytest_runs_every_law_on_a_component_that_is_named(tmp_path: File, distribution: Distribution) -> None:
    root = distribution("prefixloom-bad", {"bad": "kit_bad"}, {"kit_bad": BAD})
    few = "same_calls or somebody or another_process"
    done = pytest_run(tmp_path, "--component", "bad", "-k", few, roots=(root,))
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "law_the_same_calls_get_the_same_answers (H4, H6, C4): of two instances that were asked the same" in done.stdout
    )
    assert "Traceback" not in done.stdout
    assert "nobody but the component says reads, ahead, grid, buffers, tokens_per_entry" in done.stdout
    assert f"3 failed, {len(LAWS) - 3} deselected" in done.stdout
    believed = pytest_run(tmp_path, "--component", "bad", "--believe", "-k", "somebody_says", roots=(root,))
    assert believed.returncode == 0 and "1 skipped" in believed.stdout


def test_pytest_refuses_a_component_that_is_not_there(tmp_path: File) -> None:
    done = pytest_run(tmp_path, "--component", "nope")
    assert done.returncode == 4
    assert done.stderr.startswith("ERROR: no installed distribution offers a component named 'nope'")


def test_the_plugin_and_the_kit_import_nothing_heavy_before_they_are_asked() -> None:
    code = (
        "import prefixloom.testing, prefixloom.testing.kit.case, prefixloom.testing.pytest_plugin, sys\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- the example


def test_the_example_is_a_distribution_of_its_own_and_short() -> None:
    code = (SINK / "prefixloom_sink" / "__init__.py").read_text().splitlines()
    assert len([line for line in code if line.strip() and not line.lstrip().startswith("#")]) < 60
    assert 'sink = "prefixloom_sink"' in (SINK / "pyproject.toml").read_text()


def test_the_wheel_of_the_example_is_found_by_its_entry_point(tmp_path: File, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("hatchling.build", reason="the build backend; .ci/run installs the example for good")
    monkeypatch.chdir(SINK)
    wheel = tmp_path / backend.build_wheel(str(tmp_path))
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert Registry().source("component", "sink") == "distribution prefixloom-sink 0.1.0"
    assert Registry().component("sink").make(name="sink", sinks=2).reach.needs(100) == ((0, 2), (37, 100))
