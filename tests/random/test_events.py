"""Events of random operations over a line that loses some: what CI runs of ``python -m tests.random.events``."""

from __future__ import annotations

import pytest

from prefixloom_resumable import ResumablePages
from tests.random.events import run, setups

OPERATIONS = 120
"""For each composition."""


@pytest.mark.parametrize("name", list(setups()))
def test_subscribers_rebuild_what_is_cached_and_answer_as_the_cache_does(name: str) -> None:
    counts = run(name, "ci", OPERATIONS)
    assert counts["asked"] > 50 and counts["replays"] > 5, counts


def test_the_scripts_meet_what_they_are_meant_to_meet() -> None:
    counts = run("path, window and point", "coverage", 1000) + run("different pages", "coverage", 1000)
    for what in ("hit", "lost", "snapshots", "replays", "events", "exact"):
        assert counts[what] > 10, (what, counts)
    assert counts["told alike"] < counts["asked"], "some prompts leave a path between two boundaries"


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("_regap", lambda self, node, seen: None),
        ("_prune", lambda self, node: None),
        ("_common", lambda self, one, other: min(len(one), len(other)) // (4 * self.page)),
        ("_has", lambda self, node, need, level: True),
    ],
)
def test_a_mistake_in_the_mirror_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, mistake: object) -> None:
    monkeypatch.setattr(ResumablePages, name, mistake)
    with pytest.raises((AssertionError, LookupError, IndexError)):
        run("path, window and point", "mistake", 1000)


def test_a_batch_that_is_lost_for_good_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixloom_events.OrderedEvents.replayed", lambda self, number, payload: None)
    with pytest.raises(AssertionError):
        run("path", "lost", 500)
