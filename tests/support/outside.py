"""What tests need and pip does not bring: programs, with the libraries of the system that they are linked to.

A test says so by ``@pytest.mark.outside("redis-server")``. It is skipped with a sentence where the program is missing
or cannot start. ``pytest -m outside`` runs these tests alone, as ``.ci/run`` does when apt-get and npm have brought the
programs. Whoever starts one gets it from ``program``, which fails if the test that runs does not say so.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

T = TypeVar("T")

BRINGS: Mapping[str, str] = {
    "azurite-blob": "npm install -g azurite",
    "bash": "apt-get install bash",
    "chromedriver": "apt-get install chromium-driver",
    "chromium": "apt-get install chromium",
    "git": "apt-get install git",
    "ip": "apt-get install iproute2",
    "mooncake_client": "apt-get install libibverbs1, to which pip's mooncake_client is linked",
    "mooncake_master": "apt-get install libibverbs1, to which pip's mooncake_master is linked",
    "node": "apt-get install nodejs",
    "npm": "apt-get install npm",
    "nsenter": "apt-get install util-linux",
    "redis-server": "apt-get install redis-server",
    "unshare": "apt-get install util-linux",
}
"""By program: what brings it, or what it lacks. pip brings those of Mooncake, and not their library."""
ALSO_CALLED = {"chromium": ("google-chrome", "chrome")}
CANNOT_START = 127
"""The exit status of a program whose libraries the loader does not find."""

_said: set[str] | None = None
"""The programs that the running test says it needs. None: no test runs."""


def skip_if_missing(item: pytest.Item) -> None:
    """Skip a test that needs a program which is not here."""
    global _said
    _said = {name for mark in item.iter_markers("outside") for name in mark.args}
    for name in sorted(_said):
        if why := missing(name):
            pytest.skip(why)


def program(name: str) -> str:
    """Return the path of a program that the running test says it needs."""
    assert _said is None or name in _said, f'mark this test: @pytest.mark.outside("{name}")'
    if why := missing(name):
        pytest.skip(why)
    found = _found(name)
    assert found is not None
    return found


@functools.cache
def missing(name: str) -> str:
    """Return a sentence if a program is not here or cannot start, else an empty text."""
    found, remedy = _found(name), BRINGS[name]
    if found is None:
        return f"{name} is not installed here: {remedy}"
    done = subprocess.run([found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    if done.returncode != CANNOT_START:
        return ""
    return f"{name} cannot start here ({' '.join(done.stderr.split())}): {remedy}"


def _found(name: str) -> str | None:
    beside = os.path.dirname(sys.executable)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return next(filter(None, (shutil.which(each, path=path) for each in (name, *ALSO_CALLED.get(name, ())))), None)


def kept(name: str) -> Callable[[Callable[[], T]], Callable[[], T]]:
    """Make a function that starts servers start them once, and check each time that the test says it needs ``name``."""

    def decorate(start: Callable[[], T]) -> Callable[[], T]:
        once = functools.cache(start)

        def get() -> T:
            program(name)
            return once()

        return get

    return decorate
