"""Triton's interpreter: kernels for a GPU run on a processor, in a process that says so before triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
"""Whether this process is such a one."""


def pass_interpreted(file: str, chosen: str) -> None:
    """Fail unless the tests of ``file`` that ``chosen`` selects pass in the interpreter. Skip without triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:benchmark", "-k", chosen]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", file, *options],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr
