"""A real router reads our events: a short run of ``python -m tests.engines.routers``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.engines.routers import RELEASE, run
from tests.support.places import ROOT


def interpreter() -> Path | None:
    """One that has the indexer: this one, or that of the folder in which .ci/run keeps it."""
    kept = Path(os.environ.get("PREFIXLOOM_ENGINES", ROOT / ".engines")) / "dynamo" / "venv" / "bin" / "python"
    if kept.exists():
        return kept
    return Path(sys.executable) if importlib.util.find_spec("dynamo") is not None else None


def test_dynamos_indexer_says_what_the_rule_says_and_never_less_than_the_caches(tmp_path: Path) -> None:
    python = interpreter()
    if python is None:
        pytest.skip(f"no environment has {RELEASE}: python -m tests.engines.routers makes one in .engines")
    counts = run(python, 60, "tests", tmp_path / "indexer.log")
    assert counts["operations"] == 60 and counts["hits"] > 40 and counts["evicted"] > 20, counts
    assert counts["as peek says"] > 0.85 * counts["asked"], counts
    assert counts["full attention alone has more than peek"] > counts["more than peek"], counts
