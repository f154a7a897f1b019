"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.places import ROOT


def python(source: str, *arguments: object) -> str:
    """What ``source`` prints there."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def spoken(name: str, *arguments: str, begins: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A module of tests.support as a process, killed at the end, and its first line that ``begins`` so."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", f"tests.support.{name}", *arguments]
    made = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    try:
        yield made, next((line.strip() for line in made.stdout if line.startswith(begins)), "")
    finally:
        made.kill()
        made.wait()
        made.stdout.close()
