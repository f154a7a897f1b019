"""The import rule: the core imports no plugin, a plugin imports only prefixloom's public names, and names stay out."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import prefixloom
import prefixloom_resumable
from prefixloom import connections, lab, storage
from tests.docs.test_house import nodes_of

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "prefixloom"
PLUGINS = {folder.name: folder for folder in sorted(ROOT.glob("plugins/*/prefixloom_*"))}
ENGINES = {folder.name: folder for folder in sorted(ROOT.glob("engine/prefixloom_*"))}
OUTSIDE = {*PLUGINS, *ENGINES}

BUILT_IN_NAMES = re.compile(r"\b(full|swa|mamba)\b", re.IGNORECASE)
ORDINARY_ENGLISH = re.compile(
    r"\bfull attention\b"  # the layer kind, in prose
    r"|\bfull (pool|pools|page|pages|hit|hits|collection|queue|cache|path)\b"
    r"|\b(is|are|was|runs|run|in|not|pool|pools) full\b",
    re.IGNORECASE,
)
"""The word "full" as an adjective of something else than a component."""


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(source: str) -> Iterator[tuple[str, str | None, int]]:
    """(module, name or None, relative level) of every import, wherever it stands."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, 0
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name, node.level


def breaches_of_core(source: str, *, testing: bool = False) -> list[str]:
    """What the core may not import, nor name in a string to import later."""
    found = []
    for module, _, level in imports(source):
        top = module.partition(".")[0]
        if not level and top in OUTSIDE:
            found.append(f"imports {module}")
        if not level and top in ("pytest", "_pytest", "hypothesis") and not testing:
            found.append(f"imports {module}")
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(".")[0] in OUTSIDE:
            found.append(f"names {node.value!r}")
    return found


PUBLIC = {
    "prefixloom": [*prefixloom.__all__, "connections", "lab", "storage"],
    "prefixloom.connections": connections.__all__,
    "prefixloom.lab": lab.__all__,
    "prefixloom.storage": storage.__all__,
    "prefixloom.testing": ["Truth"],
    "prefixloom_resumable": prefixloom_resumable.__all__,
}
"""The modules that a plugin may import from, and the names that it may import. The last one is a room below the plugins
that tell events. It needs prefixloom alone.
"""


OF_ENGINES = {
    "imports prefixloom.lab.pages.charts.stacked_bars", "imports prefixloom.lab.pages.report.html_page",
    "imports prefixloom.lab.pages.report.html_table",
}  # fmt: skip
"""What the engine of this repository takes beside public names: the one maker of HTML pages, for its demo's report."""


def breaches_of_plugin(source: str, own: str) -> list[str]:
    """What a plugin may not import: submodules of prefixloom, names that are not public, other plugins."""
    found = []
    for module, name, level in imports(source):
        top = module.partition(".")[0]
        if level or top == own:
            continue
        if top in OUTSIDE and module not in PUBLIC:
            found.append(f"imports {module}")
        public = PUBLIC.get(module)
        if (top == "prefixloom" or module in PUBLIC) and (public is None or (name is not None and name not in public)):
            found.append(f"imports {module}{f'.{name}' if name else ''}")
    return found


def component_names(text: str) -> list[str]:
    """Lines that mention a built-in component by name."""
    return [line.strip() for line in text.splitlines() if BUILT_IN_NAMES.search(ORDINARY_ENGLISH.sub("", line))]


def test_core_imports_no_plugin_mentions_no_component_and_only_testing_imports_pytest() -> None:
    found = {
        str(path): breaches_of_core(path.read_text(), testing="testing" in path.relative_to(CORE).parts)
        + component_names(path.read_text())
        for path in sources(CORE)
    }
    assert len(found) > 100
    assert {path: breaches for path, breaches in found.items() if breaches} == {}


def test_plugins_and_engines_import_only_public_names_of_prefixloom() -> None:
    folders = {**PLUGINS, **ENGINES}
    assert {"prefixloom_full", "prefixloom_engine"} <= folders.keys()
    found = {
        str(path): breaches_of_plugin(path.read_text(), name) for name in folders for path in sources(folders[name])
    }
    of_engines = {each for path, breaches in found.items() if "/engine/" in path for each in breaches}
    assert of_engines == OF_ENGINES
    assert {path: breaches for path, breaches in found.items() if breaches and "/engine/" not in path} == {}


def test_every_public_name_exists() -> None:
    assert [name for name in prefixloom.__all__ if not hasattr(prefixloom, name)] == []
    assert sorted(set(prefixloom.__all__)) == sorted(prefixloom.__all__)


def test_importing_prefixloom_imports_no_plugin_no_torch_and_no_pytest() -> None:
    code = (
        "import prefixloom, prefixloom.cli, sys\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(t for t in tops if t in ('torch', 'pytest') or t.startswith('prefixloom_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("source", "breaks"),
    [
        ("import prefixloom_full", True),
        ("def f():\n    from prefixloom_full.plugin import FullComponent", True),
        ("importlib.import_module('prefixloom_full.plugin')", True),
        ("import pytest", True),
        ("from .values import Profile", False),
        ("name = 'prefixloom_component'", False),
    ],
)
def test_the_rule_for_the_core_sees_a_breach(source: str, breaks: bool) -> None:
    assert bool(breaches_of_core(source)) is breaks
    if "pytest" in source:
        assert breaches_of_core(source, testing=True) == []


@pytest.mark.parametrize(
    ("source", "breaks"),
    [
        ("from prefixloom import Manifest, hookimpl", False),
        ("from prefixloom.storage import Record", False),
        ("from prefixloom.storage import attrs", True),
        ("from prefixloom.storage.contract import Record", True),
        ("import prefixloom", False),
        ("from .plugin import FullComponent", False),
        ("from prefixloom_own.plugin import X", False),
        ("import torch", False),
        ("from prefixloom.contract.values import Profile", True),
        ("import prefixloom.tree.radix", True),
        ("from prefixloom import tree", True),
        ("def f():\n    import prefixloom_full", True),
        ("from prefixloom_resumable import ResumablePages", False),
        ("from prefixloom_resumable.pages import ResumablePages", True),
        ("from prefixloom_resumable import pages", True),
        ("from prefixloom_events import Mirror", True),
    ],
)
def test_the_rule_for_plugins_sees_a_breach(source: str, breaks: bool) -> None:
    assert bool(breaches_of_plugin(source, "prefixloom_own")) is breaks


@pytest.mark.parametrize(
    ("line", "breaks"),
    [
        ('kind == "full"', True),
        ("# the Full component goes first", True),
        ("if swa is None:", True),
        ("# Mamba states", True),
        ("the pool is full", False),
        ("full attention over a full pool", False),
        ('"full_attention"', False),
        ("swap()", False),
    ],
)
def test_the_rule_for_names_sees_a_mention(line: str, breaks: bool) -> None:
    assert bool(component_names(line)) is breaks
