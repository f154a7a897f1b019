"""Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def python(source: str, *arguments: object) -> str:
    """What ``source`` prints there."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
