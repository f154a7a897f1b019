"""Where a step ends so that a state is kept, and the warning to an engine whose steps never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import Cache, InputError, Path, Point, ProtocolError, Sequence, Window
from tests.support.helpers import cache_of, held, part, run, settle

PROMPT = list(range(100, 130))
"""30 tokens: with pages of 4, the deepest boundary of a prompt that leaves one token is 28."""


def hybrid(**states: int) -> Cache:
    return cache_of(part("path", Path()), part("window", Window(9)), part("state", Point(), **states), slots=9)


def whole(sequence: Sequence) -> None:
    """Compute all that is named in one step, as an engine without states does."""
    run(sequence, sequence.named - sequence.reserved)
    sequence.publish()


def by_stops(sequence: Sequence) -> None:
    while sequence.reserved < sequence.named:
        run(sequence, sequence.next_stop(10) - sequence.reserved)
        sequence.publish()


def unpublished(sequence: Sequence) -> None:
    while sequence.reserved < sequence.named:
        run(sequence, sequence.next_stop(10) - sequence.reserved)


def stops_of(sequence: Sequence, budget: int, stops: tuple[int, ...] = ()) -> list[int]:
    found = []
    while sequence.reserved < sequence.named:
        found.append(sequence.next_stop(budget, stops=stops))
        run(sequence, found[-1] - sequence.reserved)
        sequence.publish()
    return found


def test_next_stop_ends_each_step_at_a_boundary_and_one_at_the_deepest_that_can_be_resumed() -> None:
    cache = hybrid()
    with cache.open(PROMPT) as sequence:
        assert stops_of(sequence, 10, (16,)) == [8, 16, 24, 28, 30]
        assert sequence.next_stop(7) == 37, "past what is named a step takes all that it may"
    assert held(cache, PROMPT) == 28
    with cache.open([*PROMPT[:20], 1, 2, 3, 4, 5], leave=1) as sequence:
        assert (sequence.ready, sequence.branch) == (16, 20)
        assert stops_of(sequence, 99) == [20, 24, 25]
    settle(cache)


@pytest.mark.parametrize(
    ("make", "count", "budget", "stops"),
    [
        (hybrid, 9, 3, [3, 4, 7, 8, 9]),
        (lambda: hybrid(checkpoint_every=12), 30, 16, [12, 24, 28, 30]),
        (lambda: cache_of(part("path", Path())), 30, 99, [30]),
    ],
    ids=["a budget below a page", "where a checkpoint is due", "no states are composed"],
)
def test_next_stop_ends_where_a_state_can_be_kept(
    make: Callable[[], Cache], count: int, budget: int, stops: list[int]
) -> None:
    cache = make()
    with cache.open(PROMPT[:count]) as sequence:
        assert stops_of(sequence, budget) == stops
    settle(cache)


@pytest.mark.parametrize("budget", [0, -1, 2.5, None, True])
def test_next_stop_refuses_what_is_no_number_of_tokens(budget: object) -> None:
    with hybrid().open(PROMPT) as sequence, pytest.raises(InputError, match="from 1 up"):
        sequence.next_stop(budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [["x"], [2.5], 3])
def test_next_stop_refuses_stops_that_are_no_positions(stops: Any) -> None:
    with hybrid().open(PROMPT) as sequence, pytest.raises(InputError, match="stops are whole numbers"):
        sequence.next_stop(4, stops=stops)


def test_next_stop_of_a_closed_sequence_is_refused() -> None:
    sequence = hybrid().open(PROMPT)
    sequence.close()
    with pytest.raises(ProtocolError):
        sequence.next_stop(4)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "next_stop" in record.getMessage()]


@pytest.mark.parametrize("compute", [whole, unpublished])
def test_a_prompt_that_is_closed_without_a_state_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, compute: Callable[[Sequence], None]
) -> None:
    cache = hybrid()
    for salt in (0, 1):
        with cache.open([salt, *PROMPT[1:]]) as sequence:
            compute(sequence)
    (warning,) = said(caplog)
    assert "'state'" in warning and "sequence.publish()" in warning
    settle(cache)


def evicted(cache: Cache) -> None:
    with cache.open(PROMPT) as sequence:
        by_stops(sequence)
        cache.evict({"state": 9})


def aborted(cache: Cache) -> None:
    sequence = cache.open(PROMPT)
    whole(sequence)
    sequence.abort()


def dropped(cache: Cache) -> None:
    with cache.open(PROMPT) as sequence:
        by_stops(sequence)
        cache.drop_namespace("")


def short_of_room(cache: Cache) -> None:
    others = [cache.open([salt]) for salt in range(8)]
    with cache.open(PROMPT) as sequence:
        by_stops(sequence)
    for other in others:
        other.abort()


def of_one_page(cache: Cache) -> None:
    with cache.open(PROMPT[:4]) as sequence:
        whole(sequence)


def twice(cache: Cache) -> None:
    """The second answers past a boundary, and its prompt has a state from the first."""
    with cache.open(PROMPT) as sequence:
        by_stops(sequence)
    with cache.open(PROMPT, leave=1) as sequence:
        sequence.append([1, 2, 3, 4])
        whole(sequence)


@pytest.mark.parametrize("serve", [evicted, aborted, dropped, short_of_room, of_one_page, twice])
def test_no_warning_is_given_where_a_state_was_kept_or_could_not_be(
    caplog: pytest.LogCaptureFixture, serve: Callable[[Cache], None]
) -> None:
    cache = hybrid()
    serve(cache)
    assert not said(caplog)
    settle(cache)
