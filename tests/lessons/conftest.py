"""The end of a test run tells how many schedules the tests of lesson 2 explored."""

from __future__ import annotations

from typing import Any

from tests.support.schedules import explorations


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if explorations:
        classes, orders = (sum(getattr(each, what) for each in explorations) for what in ("classes", "orders"))
        terminalreporter.write_line(
            f"{classes:,} schedules explored in {len(explorations)} scenarios, which stand for {orders:,} interleavings"
        )
