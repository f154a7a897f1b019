"""Fixture of all tests of the fleet."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def fleet_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``prefixloom fleet`` be found where only the source of its distribution is."""
    if importlib.metadata.entry_points(group="prefixloom.commands", name="fleet"):
        return
    info = tmp_path / "path" / "prefixloom_fleet-0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: prefixloom-fleet\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text("[prefixloom.commands]\nfleet = prefixloom_fleet.commands.fleet\n")
    monkeypatch.syspath_prepend(str(info.parent))
