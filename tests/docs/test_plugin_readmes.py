"""Each plugin's README is true: it says what the component does in the same five words, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PLUGINS = sorted(path for path in (Path(__file__).resolve().parents[2] / "plugins").iterdir() if path.is_dir())
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_says_what_it_stores_needs_locks_evicts_and_moves(plugin: Path) -> None:
    text = (plugin / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \*\*(\w+)\*\* \|", text, re.MULTILINE) == ["stores", "needs", "locks", "evicts", "moves"]
    assert "```text\n" in text or ".svg)" in text, "with a picture"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_the_python_of_a_plugins_readme_runs(plugin: Path) -> None:
    blocks = PYTHON.findall((plugin / "README.md").read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, object] = {"__name__": "readme"}
    for number, body in enumerate(blocks, 1):
        exec(compile(body, f"{plugin.name}/README.md, block {number}", "exec"), names)
