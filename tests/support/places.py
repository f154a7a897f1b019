"""Where the repository's root and a test file of a given name are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def file_of_test(name: str) -> Path:
    """The one file of this name below ``tests``, whichever room it is in."""
    (found,) = TESTS.rglob(name)
    return found


def relative(name: str) -> str:
    """Return the path of a test file from the repository's root, as the documents print it."""
    return str(file_of_test(name if name.endswith(".py") else f"{name}.py").relative_to(ROOT))
