"""The README is true: its Python runs, its commands are where a script finds them, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from prefixloom import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^(?:<!-- ci: (?P<mark>\w+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = [match["body"] for match in BLOCK.finditer(README) if match["kind"] == "python"]
COMMANDS = {match["mark"]: match["body"] for match in BLOCK.finditer(README) if match["mark"]}


def test_the_python_of_the_readme_runs_as_it_stands(installed: None) -> None:
    assert len(PYTHON) == 5
    names: dict[str, object] = {"__name__": "readme"}
    for number, body in enumerate(PYTHON, 1):
        exec(compile(body, f"README.md, block {number}", "exec"), names)


def test_its_toml_names_the_entry_point_group() -> None:
    from prefixloom.compose.registry import GROUP

    (toml,) = [match["body"] for match in BLOCK.finditer(README) if match["kind"] == "toml"]
    assert toml.startswith(f"[project.entry-points.{GROUP}]\n")


def test_the_marked_commands_have_one_line_each() -> None:
    assert list(COMMANDS) == ["run", "test", "serve", "example"]
    for body in COMMANDS.values():
        assert body.count("\n") == 1
        assert "-c constraints.txt" in body
    assert COMMANDS["run"].rstrip().endswith(".venv/bin/prefixloom demo")
    assert "demo" in cli.COMMANDS
    assert COMMANDS["example"].rstrip().endswith(".venv/bin/prefixloom conformance sink")
    assert COMMANDS["test"].rstrip().endswith(".venv/bin/pytest")
    assert "prefixloom serve" in COMMANDS["serve"] and "curl" in COMMANDS["serve"]


def test_every_command_line_that_it_mentions_exists() -> None:
    mentioned = set(re.findall(r"`prefixloom ([a-z-]+)", README))
    assert mentioned <= set(cli.COMMANDS)
    assert mentioned


def test_its_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert [each for each in targets if not each.startswith("https://") and not (ROOT / each).is_file()] == []


@pytest.mark.outside("bash")
@pytest.mark.parametrize("mark", ["run", "test", "example"])
def test_the_ci_script_finds_the_commands_as_they_stand(mark: str) -> None:
    """The script's own way of reading them, without running anything."""
    call = [str(ROOT / ".ci" / "run"), "--print", mark]
    done = subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout == COMMANDS[mark]
