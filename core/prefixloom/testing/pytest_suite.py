"""The file that pytest collects for ``--component NAME``: one test, which runs once for every law."""

from __future__ import annotations

from typing import Any


def test_law(case: Any, law: Any) -> None:
    law(case)
