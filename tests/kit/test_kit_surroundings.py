"""What the kit composes beside a component, and what it sees late and in other processes."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import pytest
import torch

from prefixloom import Buffer, Claim, Component, Manifest, Path, Point, Window, hookimpl
from prefixloom.device.pool import Pool
from prefixloom.script import shrink
from prefixloom.testing import (
    LAWS,
    ComponentCase,
    LawBroken,
    Pit,
    Setting,
    Truth,
    check_component,
    play,
    report_on,
)
from prefixloom.testing.conformance import name_of, untested, verdict
from prefixloom.testing.inside.memory import PlainMemory, memory_of
from prefixloom.testing.kit.bench import Bench, that_fit
from prefixloom.testing.kit.machines import Machine, on_machine
from prefixloom.testing.kit.outcomes import below, everything
from prefixloom.testing.kit.scripts import MORE, ContentWriter, Player
from prefixloom.testing.laws import hooks
from tests.support.broken import (
    KV,
    WINDOW,
    ByAHelpersClock,
    ByTheHashOfATenant,
    ByTheOrderOfASet,
    CopiesTheWrongWay,
    K,
    RaisesAtTheThousandth,
    V,
    W,
    original,
    raising,
)

LAW = {name_of(law): law for law in LAWS}
PROCESS, SAME = "law_another_process_answers_the_same", "law_the_same_calls_get_the_same_answers"


def window() -> Component:
    return Component("subject", KV, Window(W))


# ---------------------------------------------------------------- what stands beside it


@pytest.mark.parametrize("write", ["through", "selective", "back"])
def test_what_the_device_lost_comes_back_from_the_tier(write: Any) -> None:
    again = [("open", (range(44),)), ("close", 0)]
    turn = [("open", (range(40),)), ("run", 0, 99), ("close", 0), *again, *again, ("evict", 999)]
    player = play(Setting(original("window"), below=write), [*turn, *turn, *turn])
    assert player.counts["from below"] >= 40


def test_the_scripts_of_a_tier_bring_something_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    finish = Player.finish

    def finished(self: Player) -> None:
        seen.append(self.counts.get("from below", 0))
        finish(self)

    monkeypatch.setattr(Player, "finish", finished)
    for name in ("window", "state", "path"):
        assert below(original(name)) == []
    assert len(seen) == 9 and all(tokens >= 24 for tokens in seen)


@pytest.mark.parametrize("name", ["window", "state", "path that looks ahead", "window on a grid"])
def test_prompts_of_which_a_part_arrives_are_served(name: str) -> None:
    case = original(name)
    setting = Setting(case, ("window", "checkpoints"))
    unit = Bench(case, setting.beside).unit
    counts = [play(setting, ContentWriter(f"{seed}", unit).script(110, MORE)).counts for seed in range(2)]
    assert sum(count.get("arrived", 0) for count in counts) > 5
    assert sum(count.get("together", 0) for count in counts) > 1


def test_what_arrives_is_what_the_layers_would_have_written() -> None:
    bench = Bench(original("window"))
    player = Player(bench)
    for op in (("open", (range(30),)), ("arrive", 0, 20), ("run", 0, 10), ("close", 0)):
        player.apply(op)
    assert bench.cache.peek(range(20)) == 20
    player.apply(("open", (range(20),)))
    slot = player.running[0].sequence.pages("subject")[4]
    bench.memories["subject"].write(slot, 0, 5)
    with pytest.raises(AssertionError, match=r"position 16 of subject, in a page that a .* lists, holds the"):
        player.check()


AHEAD = [
    ("open", "", (0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1), 0, (), 1, 4), ("grow", -1, -1), ("step", 31, 0), ("step", 31, 4),
    ("append", 1, 9, 1),
]  # fmt: skip
"""A step that computes nothing writes anew what waits, with tokens that it chooses; then a key would change these."""


def test_the_sets_know_which_tokens_layers_have_chosen() -> None:
    case = ComponentCase(lambda: Component("subject", Manifest([K], lookahead=2), Path()))
    play(Pit(case, ("path",)), AHEAD)


def test_an_answer_that_cannot_be_used_is_told_in_the_words_of_the_cache() -> None:
    case = ComponentCase(lambda: CopiesTheWrongWay("subject", KV, Window(W)), effort=1)
    found = verdict(LAW["law_no_hook_raises"], case)
    assert found.told.startswith("component 'subject': build_hicache_transfers must answer Transfers of ")
    assert "going on" not in found.told


def test_what_goes_wrong_while_a_script_is_played_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    script = [("open", (range(9),)), ("run", 0, 9), ("close", 0)]
    with pytest.raises(AssertionError, match="raised ValueError: commit_insert is broken"):
        play(Setting(ComponentCase(lambda: raising("commit_insert")("subject", KV, Window(W)))), script)
    assert caplog.records == []


# ---------------------------------------------------------------- late


class KnowsItsLayers(Component):
    """Looks at its last layer, and at the end of an entry: right, where all of a pool is there."""

    pool: Any = None

    @hookimpl
    def commit_insert(self, walk: Any) -> None:
        assert self.pool.buffers["k"][3, 0, 0, 7].numel()


def test_what_fails_with_few_layers_alone_is_no_mistake() -> None:
    buffers = [Buffer("k", (8,), "float32", range(4))]
    case = ComponentCase(lambda: KnowsItsLayers("subject", Manifest(buffers), Window(W)), effort=1)
    assert everything(case) == []
    with pytest.raises(AssertionError, match="IndexError"):
        play(Setting(case, small=True), [("open", (range(9),)), ("run", 0, 9), ("close", 0)])


def test_pools_of_long_prompts_are_not_too_large() -> None:
    few, many = (Manifest([Buffer("k", (64, 64), "float32", range(layers))]) for layers in (1, 40))
    assert that_fit(ComponentCase(lambda: KnowsItsLayers("subject", few, Window(W))), (1, 40, 4000)) == [1, 40]
    assert that_fit(ComponentCase(lambda: KnowsItsLayers("subject", many, Window(W))), (1, 40, 4000)) == [1, 40]
    assert that_fit(original("window"), (1, 40, 4000)) == [1, 40, 4000]


def test_repeated_operations_are_shrunk_to_as_many_as_it_takes() -> None:
    case = ComponentCase(lambda: RaisesAtTheThousandth("subject", KV, Window(W)), WINDOW)
    script = [("peek", (range(5),)), ("repeat", 1500, [("peek", (range(9),))])]
    short = shrink(Setting(case), script, work=10**6)
    assert len(short) == 1 and short[0][0] == "repeat" and 1000 <= short[0][1] < 1400


# ---------------------------------------------------------------- clocks and other processes


def of_the_machine() -> dict[str, Callable[[], Any]]:
    """What depends on the machine or on the day, with how a program asks for it."""
    import datetime
    import platform

    return {
        "weekday": lambda: datetime.date.today().weekday(), "hour": lambda: time.localtime().tm_hour,
        "month": lambda: time.strftime("%m"), "minutes": lambda: datetime.datetime.now().minute,
        "uptime": lambda: int(time.monotonic()) // 60, "nanoseconds": lambda: time.time_ns(), "number": os.getpid,
        "cores": os.cpu_count, "mine": lambda: len(os.sched_getaffinity(0)),
        "host": socket.gethostname, "node": platform.node, "uname": lambda: os.uname().nodename,
        "hostname": lambda: pathlib.Path("/etc/hostname").read_text(),
        "memory": lambda: open("/proc/meminfo").readline(), "lines": lambda: open("/proc/cpuinfo").read().count("\n"),
        "devices": torch.cuda.device_count, "threads": torch.get_num_threads,
        "device": lambda: os.path.exists("/dev/nvidia0"),
    }  # fmt: skip


def test_every_thing_that_differs_between_machines_differs_on_a_machine_and_is_as_before_behind_it() -> None:
    before = {name: getattr(module, name) for module, name, _ in Machine(0).replaced}
    seen: dict[str, set[Any]] = {}
    for seed in range(7):
        with on_machine(Machine(seed)):
            for name, ask in of_the_machine().items():
                seen.setdefault(name, set()).update(str(ask()) for _ in range(3))
    assert {name: found for name, found in seen.items() if len(found) < 2} == {}
    assert len(seen["weekday"]) == 7 and len(seen["hour"]) > 5
    assert {name: getattr(module, name) for module, name, _ in Machine(0).replaced} == before


def test_a_class_inside_of_a_function_is_asked_on_other_machines_in_this_process() -> None:
    class Local(Component):
        @hookimpl
        def commit_insert(self, walk: Any) -> Claim | None:
            return Claim(keep=()) if (os.cpu_count() or 1) > 40 else None

    case = ComponentCase(lambda: Local("subject", KV, Window(W)), effort=1)
    assert verdict(LAW[PROCESS], case).status == "not applicable"
    assert verdict(LAW[SAME], case).status == "broken"


def test_a_class_inside_of_a_function_is_asked_in_no_other_process_and_the_report_says_so() -> None:
    class Local(ByTheHashOfATenant):
        pass

    case = ComponentCase(lambda: Local("subject", KV, Window(W)), effort=1)
    found = verdict(LAW[PROCESS], case)
    assert found.status == "not applicable" and "Local" in found.told
    assert any(told.startswith("whether another process answers the same: ") for told in untested(case))


MODULE = """
from prefixloom import Buffer, Component, Manifest, Window
from tests.support.broken import ByTheHashOfATenant

class Elsewhere(ByTheHashOfATenant):
    pass

def make():
    return Elsewhere("subject", Manifest([Buffer("kv", (2,), "float32")]), Window(7))
"""


def test_a_module_that_is_not_on_the_path_is_found_by_its_file(tmp_path: File) -> None:
    """A test that pytest imports by its file has a name that no other process knows."""
    import importlib.util

    (tmp_path / "kit_elsewhere.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("kit_elsewhere", tmp_path / "kit_elsewhere.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["kit_elsewhere"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        found = verdict(LAW[PROCESS], ComponentCase(module.make, effort=1))
    finally:
        del sys.modules["kit_elsewhere"]
    assert found.status == "broken" and "another process answers otherwise: commit_insert(" in found.told


def test_already_the_first_call_that_is_answered_otherwise_is_told() -> None:
    found = verdict(LAW[PROCESS], ComponentCase(lambda: ByTheOrderOfASet("subject", KV, Window(W)), effort=1))
    assert found.status == "broken" and "another process answers otherwise: acquire_component_lock(" in found.told


RAISES = "law_a_hook_that_raises_has_the_documented_consequence"


@pytest.mark.parametrize(("group", "hook"), [("FAIL", "commit_insert"), ("COUNTED", "finalize_match_result")])
def test_a_hook_that_raises_with_another_consequence_is_noticed(
    group: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the documents said something else of it than the cache does."""
    for name in ("FAIL", "COUNTED", "BETWEEN_TIERS"):
        monkeypatch.setattr(hooks, name, (hook,) if name == group else ())
    found = verdict(LAW[RAISES], original("window"))
    assert found.status == "broken" and found.told.startswith(f"{hook} raised, and ")


def test_a_program_that_is_started_is_not_run_again(tmp_path: File) -> None:
    """What stands in the program itself is asked nowhere else."""
    text = MODULE + textwrap.dedent(
        f"""
        from prefixloom.testing import ComponentCase
        from prefixloom.testing.conformance import LAWS, name_of, verdict

        print("started")
        (law,) = [law for law in LAWS if name_of(law) == {PROCESS!r}]
        found = verdict(law, ComponentCase(make, effort=1))
        print(found.status, found.told)
        """
    )
    (tmp_path / "program.py").write_text(text)
    call = [sys.executable, str(tmp_path / "program.py")]
    root = str(File(__file__).parents[2])
    done = subprocess.run(call, env={"PYTHONPATH": root}, capture_output=True, text=True, check=True)
    why = "no other process can be asked: it is defined in the program that was started, and not in a module"
    assert done.stdout.split("\n") == ["started", f"not applicable {why}", ""]


# ---------------------------------------------------------------- what cannot be served, and what never hits


def test_what_cannot_be_composed_ends_the_report_in_one_sentence_that_names_its_class() -> None:
    report = report_on(ComponentCase(lambda: ByAHelpersClock("subject", Manifest([K, V], admission="all"), Window(W))))
    assert [found.law for found in report.broken] == ["law_a_cache_can_be_composed_of_it"]
    assert report.verdicts[-1].law == "law_a_cache_can_be_composed_of_it"
    assert f"class tests.support.broken.{ByAHelpersClock.__name__}" in report.broken[0].told
    assert "admission says which states the tree takes" in report.broken[0].told


class Rejects(Component):
    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: 0


def test_what_never_hits_is_broken_and_the_hook_is_named() -> None:
    with pytest.raises(LawBroken, match=r"none of their tokens hits again\. Without create_match_validator they hit"):
        check_component(
            lambda: Rejects("subject", KV, Point()), Truth(), laws=[LAW["law_what_was_served_is_found_again"]]
        )


@pytest.mark.parametrize(
    ("buffers", "plain"),
    [
        ([Buffer("n", (), "int64")], True),
        ([Buffer("n", (), "int32")], False),
        ([Buffer("n", (2,), "int64")], False),
        ([Buffer("n", (), "int64", (0, 1))], False),
        ([Buffer("n", (), "int64"), Buffer("m", (), "int64")], False),
    ],
    ids=["one number", "half of one", "two in a row", "two layers", "two buffers"],
)
def test_only_a_single_number_per_entry_is_kept_as_it_is_and_a_write_changes_its_slot_alone(
    buffers: list[Buffer], plain: bool
) -> None:
    manifest = Manifest(buffers)
    pool = Pool("p", manifest, "page", 8, 1, "cpu")
    contents = memory_of(pool, manifest, 1)
    assert isinstance(contents, PlainMemory) == plain
    contents.write(1, 0, 77)
    assert contents.agree(contents.numbers(1), [77])
    for buffer in pool.buffers.values():
        assert [slot for slot in range(8) if buffer[:, slot].any()] == [1]
