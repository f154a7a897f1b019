"""The command line: what it prints, its exit codes, and that it leaves no traceback."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import CompositionError, cli
from prefixloom.cli import main
from tests.support.interrupting import interruptible

Distribution = Callable[..., Path]
SAYING = """
def add_arguments(parser):
    parser.add_argument("word")

def run(args):
    print(args.word)
    return 0
"""
GOOD = """
from prefixloom import Component, ComponentType, hookimpl

@hookimpl
def prefixloom_component():
    return ComponentType("ring", Component, "a ring of tokens")
"""


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "prefixloom", *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def with_path(*roots: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])}


def substitute(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Put a subcommand of the test's own in place of ``components``."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "prefixloom.cli.components", module)


def test_components_lists_what_works_with_its_distribution(
    distribution: Distribution, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution("prefixloom-ring", {"ring": "cli_ring"}, {"cli_ring": GOOD}, version="1.2.3")
    assert main(["components"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["OFFER", "NAME", "DISTRIBUTION", "VERSION", "STATUS", "SERVES"]
    (row,) = [row for row in rows if "ring" in row]
    assert row.split() == ["component", "ring", "prefixloom-ring", "1.2.3", "ok", "a", "ring", "of", "tokens"]
    assert row.index("1.2.3") == header.index("VERSION"), "columns are aligned"


def test_components_tells_what_is_broken_and_why_and_exits_with_1(
    distribution: Distribution, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution("prefixloom-ring", {"ring": "cli_ring2"}, {"cli_ring2": GOOD})
    distribution("prefixloom-bad", {"bad": "cli_bad"}, {"cli_bad": "import no_such_dependency"})
    assert main(["components"]) == 1
    out = capsys.readouterr().out
    assert "1 of" in out
    assert "broken:\n  component 'bad' (distribution prefixloom-bad 1.0" in out
    assert "failed to import: ModuleNotFoundError: No module named 'no_such_dependency'. Install what it needs" in out


def test_two_distributions_of_one_name_are_told_once(
    distribution: Distribution, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution("prefixloom-ring", {"ring": "cli_a"}, {"cli_a": GOOD})
    distribution("ring-two", {"ring": "cli_b"}, {"cli_b": GOOD})
    assert main(["components"]) == 1
    out = capsys.readouterr().out
    assert out.count("is offered by 2 distributions") == 1
    assert "2 of" in out


def test_components_as_json_says_the_same(distribution: Distribution, capsys: pytest.CaptureFixture[str]) -> None:
    distribution("prefixloom-ring", {"ring": "cli_json"}, {"cli_json": GOOD}, version="4.5")
    distribution("prefixloom-bad", {"bad": "cli_bad2"}, {"cli_bad2": "1 / 0"})
    assert main(["components", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["prefixloom", "offers"]
    assert told["prefixloom"] == cli.version()
    offers = {offer["name"]: offer for offer in told["offers"]}
    assert offers["ring"] == {
        "offer": "component", "name": "ring", "distribution": "prefixloom-ring", "version": "4.5", "status": "ok",
        "reason": "", "summary": "a ring of tokens", "layer_kinds": [],
    }  # fmt: skip
    assert offers["bad"]["status"] == "broken"
    assert "ZeroDivisionError" in offers["bad"]["reason"]


def test_nothing_installed_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(["components"]) == 0
    assert "Nothing is installed in the entry-point group 'prefixloom'" in capsys.readouterr().out


def test_python_m_prefixloom_is_the_same_command(tmp_path: Path, distribution: Distribution) -> None:
    root = distribution("prefixloom-ring", {"ring": "cli_sub"}, {"cli_sub": GOOD})
    done = command("components", env=with_path(root))
    assert (done.returncode, done.stderr) == (0, "")
    assert "prefixloom-ring" in done.stdout


def test_errors_of_our_family_are_one_line_on_stderr_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise CompositionError("this cannot be\n   composed")

    substitute(monkeypatch, fail)
    assert main(["components"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "prefixloom: this cannot be composed\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), PermissionError(errno.EACCES, "a bug")], ids=repr)
def test_other_errors_are_not_hidden(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    substitute(monkeypatch, fail)
    with pytest.raises(type(error)):
        main(["components"])


def test_an_interrupt_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    substitute(monkeypatch, interrupt)
    assert main(["components"]) == 130
    assert capsys.readouterr().err == "prefixloom: interrupted\n"


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_a_real_interrupt_ends_the_process_cleanly(distribution: Distribution, tmp_path: Path, inherited: Any) -> None:
    marker = tmp_path / "loading"
    slow = f"import pathlib, time\npathlib.Path({str(marker)!r}).touch()\ntime.sleep(60)\n"
    root = distribution("prefixloom-slow", {"slow": "cli_slow"}, {"cli_slow": slow})
    call = [sys.executable, "-m", "prefixloom", "components"]
    before = signal.signal(signal.SIGINT, inherited)
    try:
        with interruptible(call, with_path(root)) as process:
            deadline = time.monotonic() + 30
            while not marker.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (process.returncode, out, err) == (130, "", "prefixloom: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes close otherwise there")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_leaves_no_traceback(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    try:
        call = [sys.executable, "-m", "prefixloom", "components"]
        done = subprocess.run(call, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(("argument", "unbuffered"), [("components", ""), ("components", "1"), ("--help", "")])
def test_a_full_device_is_one_line_and_exit_2(argument: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        call = [sys.executable, "-m", "prefixloom", argument]
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (2, "prefixloom: cannot write: No space left on device\n")


def test_no_command_and_an_unknown_command_exit_2_with_the_usage() -> None:
    for arguments in ((), ("composents",)):
        done = command(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: prefixloom")
        assert "components" in done.stderr


def test_an_unknown_option_prints_the_usage_of_the_command_that_it_was_given_to() -> None:
    for arguments, usage in (
        (("components", "--bogus"), "usage: prefixloom components "),
        (("--bogus", "components"), "usage: prefixloom "),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(usage + "[-h]")
        assert done.stderr.endswith("error: unrecognized arguments: --bogus\n")


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom prefixloom.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: print('exit', e.code)\n"
        "print([n for n in sys.modules if n.startswith('prefixloom.cli.') or n == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("exit 0\n[]\n")
    for name, summary in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary.split()[0] in done.stdout


def test_only_the_chosen_subcommand_is_imported() -> None:
    code = (
        "import sys\nfrom prefixloom.cli import main\nmain(['components', '--json'])\n"
        "print([n for n in sys.modules if n.startswith('prefixloom.cli.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "['prefixloom.cli.components']\n"


def test_every_command_has_a_module_here_or_an_entry_point(installed: None) -> None:
    folder = Path(cli.__file__).parent
    elsewhere = {point.name for point in importlib.metadata.entry_points(group=cli.GROUP)}
    ours = {name for name in cli.COMMANDS if not (folder / f"{name.replace('-', '_')}.py").exists()}
    assert ours == {"cache", "demo", "explain", "fleet", "plan", "replay", "serve", "top"}
    assert ours - set(cli.APART) <= elsewhere


def test_a_command_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(["demo"]) == 2
    assert "the command 'demo' is not installed" in capsys.readouterr().err


def test_another_distribution_may_add_a_command(distribution: Distribution, capsys: pytest.CaptureFixture[str]) -> None:
    root = distribution("loomtool", {}, {"loomtool_say": SAYING})
    next(root.glob("*.dist-info")).joinpath("entry_points.txt").write_text(
        "[prefixloom.commands]\nsay = loomtool_say\n"
    )
    assert main(["say", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "of distribution loomtool" in capsys.readouterr().out


def test_the_version_is_that_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"9.9 of {name}")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "prefixloom 9.9 of prefixloom\n"


def test_without_an_installation_there_is_no_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert cli.version() is None
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "prefixloom (not installed, run from its source)\n"
