"""Events of random operations over a line that loses some: what CI runs of ``python -m tests.random.events``."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Residency
from prefixloom.testing.oracle.writer import SetsWriter
from prefixloom_resumable import Holder, ResumablePages, Run
from prefixloom_resumable.boundaries import Boundaries
from tests.random.events import run, setups
from tests.support.sampling import sampled

OPERATIONS = 120
"""For each composition."""


@pytest.mark.parametrize("name", sampled(setups(), 2, 1))
def test_subscribers_rebuild_what_is_cached_and_answer_as_the_cache_does(name: str) -> None:
    counts = run(name, "ci", OPERATIONS)
    assert counts["asked"] > 50 and counts["replays"] > 5, counts


def test_the_scripts_meet_what_they_are_meant_to_meet() -> None:
    counts = run("path, window and point", "coverage", 1200) + run("different pages", "coverage", 1200)
    for what in ("hit", "lost", "snapshots", "replays", "events", "exact"):
        assert counts[what] > 10, (what, counts)
    assert counts["counted alike"] < counts["asked"], "some prompts leave a path between two boundaries"


def with_names_of_another(self: ResumablePages, run: Run, child: Run) -> None:
    joined(self, run, child)
    run.names = run.names[::-1]


def one_short(self: ResumablePages, run: Run, page: int) -> None:
    split(self, run, page)
    run.leads = [max(0, leads - 1) for leads in run.leads]


joined, split = ResumablePages._join, ResumablePages._split
MISTAKES = {
    "no gap is seen": ("two windows", Holder, "gap", lambda self, run, at, high: (high, high)),
    "changes do not matter below": ("two windows", Boundaries, "changed", lambda self, run, above: None),
    "pages that lead are not looked for": ("path", ResumablePages, "_lead", lambda self, run: None),
    "a beginning is taken for the whole": (
        "path", ResumablePages, "_common", lambda self, run, tokens, most: min(run.count, most),
    ),
    "names are mixed up when runs are joined": ("path", ResumablePages, "_join", with_names_of_another),
    "a page is lost when a run is split": ("path", ResumablePages, "_split", one_short),
    "pages of which nothing is left stay": ("path", ResumablePages, "_tidy", lambda self: None),
}  # fmt: skip
"""What is changed by each mistake, and the composition whose scripts show it."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_mirror_is_seen(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    name, *change = MISTAKES[mistake]
    monkeypatch.setattr(*change)  # type: ignore[misc]
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(8):
            run(name, f"mistake {seed}", 400, SetsWriter)  # its prompts share more


def test_needs_of_any_form_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    resumable = Residency.resumable

    def only_intervals(self: Residency, edge: Any, low: int, high: int) -> int:
        return resumable(self, edge, low, high) if self.paged.convex else (1 << (high - low) // self.step) - 1

    monkeypatch.setattr(Residency, "resumable", only_intervals)
    with pytest.raises(AssertionError):
        run("strided", "mistake", 1000)


def test_a_batch_that_is_lost_for_good_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixloom_events.OrderedEvents.replayed", lambda self, number, payload: None)
    with pytest.raises(AssertionError):
        run("path", "lost", 500)
