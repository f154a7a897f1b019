"""Fixtures shared by the tests: distributions made on disk, as real as pip leaves them, and worker threads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prefixloom.compose.registry import default_registry
from prefixloom.device.streams import ThreadStream

Distribution = Callable[..., Path]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distribution]:
    """Make a distribution on disk and put it on ``sys.path``; its modules are forgotten afterwards."""
    made: list[str] = []

    def make(
        name: str,
        entries: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
        folder: str | None = None,
    ) -> Path:
        root = tmp_path / (folder or f"{name}-{len(made)}")
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{entry} = {target}\n" for entry, target in entries.items())
        info.joinpath("entry_points.txt").write_text(f"[prefixloom]\n{lines}")
        for module, source in (modules or {}).items():
            root.joinpath(f"{module}.py").write_text(source)
            made.append(module)
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        return root

    yield make
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture
def installed(distribution: Distribution) -> Iterator[None]:
    """prefixloom's own components and commands are found as in an installation, also where only its source is."""
    found = {point.name for point in entry_points(group="prefixloom")}
    own = {kind: f"prefixloom_{kind}.plugin" for kind in ("full", "swa", "mamba")}
    own["hicache"] = "prefixloom_hicache.host"
    own["storage:memory"] = "prefixloom_hicache.memory_store"
    own["storage:file"] = "prefixloom_hicache.file_store.backend"
    own["session:transformers"] = "prefixloom_engine.adapter"
    if not found >= own.keys():  # one of that name hides an older installation
        root = distribution("prefixloom", own)
        points = next(root.glob("*.dist-info")) / "entry_points.txt"
        points.write_text(f"{points.read_text()}[prefixloom.commands]\ndemo = prefixloom_engine.demo.command\n")
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers cannot be imported, as where it is not installed."""
    for name in ("transformers", *(each for each in sys.modules if each.startswith("transformers."))):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def threads() -> Iterator[Callable[..., ThreadStream]]:
    """Makes streams that end with the test."""
    made: list[ThreadStream] = []

    def make(name: str = "worker", kind: Callable[[str], ThreadStream] = ThreadStream) -> ThreadStream:
        made.append(kind(name))
        return made[-1]

    yield make
    for stream in made:
        stream.close()
