"""Parameters of which a part runs by default and the rest with ``-m slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return the parameters of one case that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(values: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """Return all ``values`` of one parameter; all but the ``every``-th, counted from ``first``, are marked slow."""
    return [value if number % every == first else slow(value) for number, value in enumerate(values)]


def sampled_rows(rows: Iterable[tuple[Any, ...]], every: int, first: int = 0) -> list[Any]:
    """Return rows of several parameters, marked as in ``sampled``."""
    return [row if number % every == first else slow(*row) for number, row in enumerate(rows)]


def only(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all ``values`` of one parameter; those that are not among ``quick`` are marked slow."""
    return [value if value in quick else slow(value) for value in values]


EVERY = {
    "test_without_the_collector_nothing_is_left_of_a_tree": 4,
    "test_a_sequence_that_arrived_goes_on_as_if_it_had_been_computed_here": 5,
    "test_whatever_a_policy_answers_the_books_are_right_after_every_operation": 3,
    "test_a_queue_that_raises_anywhere_is_dismissed_and_nothing_is_lost": 3,
    "test_over_random_traffic_every_composition_is_exact": 3,
    "test_with_the_same_row_partition_the_cache_changes_no_bit": 3,
    "test_what_is_restorable_is_what_sets_say_and_comes_back_as_it_was": 4,
    "test_without_room_it_comes_to_the_deepest_candidate_that_fits": 4,
    "test_a_step_and_another_sequence_read_what_a_load_has_yet_to_bring": 3,
    "test_any_window_over_any_page_is_resumed_to_the_same_bits": 3,
}
"""Of these parametrized tests each so many-th case runs by default; the others are marked slow."""


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that ``EVERY`` leaves out, counting those of a test that are not marked slow already."""
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        every = EVERY.get(name)
        if every is not None and item.get_closest_marker("slow") is None:
            number = seen[str(item.path), name] = seen.get((str(item.path), name), -1) + 1
            if number % every:
                item.add_marker(pytest.mark.slow)
