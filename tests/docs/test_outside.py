"""README's test command fails nowhere for want of what pip does not bring: such tests are skipped with a sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import outside
from tests.support.places import ROOT

FOLDERS = ("tests", "plugins", "engine", "fleet", "examples")


def test_tests_of_what_pip_does_not_bring_are_skipped_where_it_is_hidden(tmp_path: Path) -> None:
    """Neither a program of the system is on the path, nor can the loader read the library that Mooncake needs."""
    (tmp_path / "libibverbs.so.1").write_text("no library")
    hidden = {"PATH": os.path.dirname(sys.executable), "LD_LIBRARY_PATH": str(tmp_path)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    marked = [str(path) for path in files if "mark.outside(" in path.read_text(encoding="utf-8")]
    assert len(marked) > 5
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "outside", *marked]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | hidden, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280
    )
    assert re.search(r"^=+ \d+ skipped(, \d+ deselected)? in ", done.stdout, re.MULTILINE), done.stdout[-4000:]
    for name in ("redis-server", "azurite-blob", "chromedriver", "node", "mooncake_client", "git", "bash"):
        sentence = rf"SKIPPED .*{name} (is not installed|cannot start) here.*: (apt-get|npm) install"
        assert re.search(sentence, done.stdout), name


def test_a_test_that_starts_what_it_does_not_say_it_needs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    start = outside.kept("bash")(lambda: calls.append(1))
    monkeypatch.setattr(outside, "missing", lambda name: "")
    monkeypatch.setattr(outside, "_found", lambda name: name)

    def running(*marks: Any) -> None:
        outside.skip_if_missing(SimpleNamespace(iter_markers=lambda name: marks))  # type: ignore[arg-type]

    monkeypatch.setattr(outside, "_said", None)
    running(pytest.mark.outside("bash").mark)
    start()
    running()
    with pytest.raises(AssertionError, match="mark this test"):
        start()
    assert calls == [1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exit 0", ""),
        ("echo libodd.so.1 not found >&2; exit 127", "odd cannot start here (libodd.so.1 not found): get odd"),
        (None, "odd is not installed here: get odd"),
    ],
)
@pytest.mark.outside("bash")
def test_a_program_is_missing_if_it_is_not_there_or_lacks_a_library(
    text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        path = tmp_path / "odd"
        path.write_text(f"#!{outside.program('bash')}\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setattr(outside, "BRINGS", {"odd": "get odd"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert outside.missing.__wrapped__("odd") == why
