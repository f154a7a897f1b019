"""What one sequence holds of every pool, against what it is seen to hold. Pages: tests/engine/test_engine_plans.py."""

from __future__ import annotations

import pickle

import pytest

from prefixloom import Buffer, Cache, Component, Manifest, Path, Point, SequenceNeeds, Window, compose

BUFFER = [Buffer("content", (), "int64")]


def parts(rewind: int = 0) -> list[Component]:
    return [
        Component("path", Manifest(BUFFER), Path()),
        Component("window", Manifest(BUFFER), Window(20)),
        Component("state", Manifest(BUFFER, max_rewind=rewind), Point()),
    ]


def cache_of(rewind: int, window: int, states: int) -> Cache:
    capacity = {"path": 800, "window": window, "state": states}
    return compose(None, plugins=parts(rewind), page_size=4, capacity=capacity, max_rewind=rewind)


@pytest.mark.parametrize(("rewind", "states"), [(0, 1), (3, 5)])
def test_a_path_grows_a_window_does_not_and_states_are_those_of_one_sequence(rewind: int, states: int) -> None:
    needs = SequenceNeeds.of(cache_of(rewind, 400, 20).composition, 16)
    assert needs.step == 16 + rewind
    short, long = needs.slots(8), needs.slots(400)
    assert (short["path"], short["window"]) == (2, 2) and (long["path"], long["state"]) == (100, states)
    assert long["window"] == needs.slots(4000)["window"] == 10 + (rewind > 0), "5 pages, and those of a step"
    assert needs.shares(400) == {"path": 0.5, "window": long["window"] / 100, "state": states / 20}


@pytest.mark.parametrize("rewind", [0, 3])
def test_pools_of_that_size_are_enough_for_one_sequence(rewind: int) -> None:
    slots = SequenceNeeds.of(cache_of(rewind, 400, 20).composition, 16).slots(400)
    cache = cache_of(rewind, 4 * slots["window"], slots["state"] + 1)  # and one to copy into
    with cache.open(range(400)) as sequence:
        while sequence.reserved < 400:
            sequence.grow(16)
            with cache.step([sequence]) as step:
                step.run_ops()


def test_it_goes_to_another_process_as_it_is() -> None:
    needs = SequenceNeeds.of(cache_of(0, 400, 20).composition, 16)
    assert pickle.loads(pickle.dumps(needs)) == needs
