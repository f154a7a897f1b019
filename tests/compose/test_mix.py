"""Mix: one memory budget shared out for a traffic, so that windows and states get what they need and paths the rest."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import prefixloom
from prefixloom import Buffer, Chunk, Component, CompositionError, Manifest, Path, Point, Reach, Traffic, Window
from prefixloom.compose.sizing import reach_tokens
from prefixloom.contract.composition import Composition
from tests.support.composing import composed, paths, refused, state, windowed

TRAFFIC = Traffic(running=4, prompt=800, output=200, shared=0.25, chunk=100)
"""Paths of 1000 tokens that begin with 200 in common."""


def weighed(reach: Reach, size: int = 1, name: str = "heavy", **facts: Any) -> Component:
    return Component(name, Manifest([Buffer("b", (size,), "uint8")], **facts), reach)


def capacities(composition: Composition) -> list[int]:
    return [part.capacity for part in composition.parts]


def cost(composition: Composition) -> int:
    return sum(
        part.capacity * part.manifest.slot_bytes * max(1, part.page_tokens // part.manifest.tokens_per_slot)
        for part in composition.parts
    )


def test_paths_alone_get_all_of_it() -> None:
    assert capacities(composed(paths(), memory=1 << 20, traffic=TRAFFIC)) == [(1 << 20) // 16]


def test_two_paths_get_the_same_tokens() -> None:
    first, second = composed(paths("a"), weighed(Path(), 3, "b", page_size=4), memory=100_000, traffic=TRAFFIC).parts
    assert first.capacity * 16 == second.capacity * 4 == 100_000 // 4 // 16 * 16


def test_a_window_gets_what_running_sequences_hold_and_one_end_per_cached_path() -> None:
    composition = composed(paths(), windowed(w=33, page_size=8), memory=100_000, traffic=TRAFFIC)
    whole, near = composition.parts
    cached = (near.capacity - 4 * (-(-(32 + 100 + 16) // 8) + 1)) // (32 // 8 + 1) - 1
    held = (whole.capacity * 16 - 200) // 800
    assert held - 4 == pytest.approx(cached, abs=1), "as many ends as there are paths for them"
    assert near.capacity * 8 < whole.capacity * 16 / 5
    assert 100_000 - 200 < cost(composition) <= 100_000


def test_states_are_those_of_running_sequences_and_one_per_cached_path() -> None:
    whole, states = composed(paths(), weighed(Point(), 500), memory=100_000, traffic=TRAFFIC).parts
    held = (whole.capacity * 16 - 200) // 800
    assert states.capacity == pytest.approx(4 + 1 + 1 + held - 4, abs=1)


def test_checkpoints_and_rewinds_take_states_of_their_own() -> None:
    def states(max_rewind: int = 0, **facts: Any) -> int:
        plugins = paths(), weighed(Point(), 1, max_rewind=3, **facts)
        composition = composed(*plugins, capacity=4096, max_running=40, max_rewind=max_rewind)
        return composition.parts[1].capacity

    assert states() == 40 + 1
    assert states(max_rewind=3) == 40 * (1 + 4) + 1
    assert states(checkpoint_every=64) == 40 * (1 + 2) + 1
    few = composed(weighed(Point()), memory=400, traffic=TRAFFIC).parts[0].capacity
    many = composed(weighed(Point(), checkpoint_every=100), memory=400, traffic=TRAFFIC)
    assert few == 400
    assert "cached paths x 8" in many.sizing[1], "a path has 800 tokens of its own"


def test_a_longer_window_leaves_fewer_paths() -> None:
    sizes = [composed(paths(), windowed(w=w), memory=200_000, traffic=TRAFFIC).parts[0].capacity for w in (8, 64, 512)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


def test_a_window_longer_than_the_sequences_takes_no_more_than_they_have() -> None:
    composition = composed(windowed(w=10_000), memory=1 << 20, traffic=TRAFFIC)
    assert "4 running x 1,000 tokens, " in composition.sizing[1]


def test_a_reach_that_is_never_released_early_is_held_whole_while_running() -> None:
    class Bare(Reach):
        def needs(self, n: int) -> tuple[tuple[int, int], ...]:
            return ((max(0, n - 8), n),) if n else ()

    assert "4 running x 1,000 tokens, " in composed(weighed(Bare()), memory=1 << 20, traffic=TRAFFIC).sizing[1]


def test_a_model_of_many_windows_keeps_far_more_than_with_the_same_tokens_for_all() -> None:
    """gpt-oss: half of the layers see 128 tokens; with equal pools half of the memory would hold what nobody needs."""
    half = Buffer("kv", (16, 64), "bfloat16", range(18))
    plugins = [Component("whole", Manifest([half]), Path()), Component("near", Manifest([half]), Window(128))]
    mixed = composed(*plugins, memory="20GiB")
    equal = (20 << 30) // (2 * half.entry_bytes)
    assert mixed.parts[0].capacity * 16 > 1.4 * equal


def test_the_choice_is_told_in_words() -> None:
    composition = composed(paths(), windowed(w=33), weighed(Point(), 500), memory=100_000, traffic=TRAFFIC)
    first, whole, near, states = composition.sizing
    assert first == ("97.66 KiB for 4 running sequences of 800 + 200 tokens, 200 of them shared, in steps of 100")
    held = (composition.parts[0].capacity * 16 - 200) // 800
    assert whole.startswith(f"whole: {composition.parts[0].capacity * 16:,} tokens in ")
    assert whole.endswith((f": {held} whole paths", f": {held - 1} whole paths")), "the last may lack its state"
    assert ": 4 running x 148 tokens (32 that it reaches, 100 of a step, a page), " in near
    assert near.endswith(" cached ends x 32 tokens")
    assert f"heavy: {composition.parts[2].capacity} states, " in states
    assert ": 4 running x 1, 1 to copy into, " in states


def test_sizes_by_capacity_are_told_too() -> None:
    assert composed(paths(), state(), capacity=64).sizing == (
        "whole: 64 tokens in 4 pages, 64 bytes: as capacity says",
        "state: 16 states, 16 bytes: as capacity says",
    )


def test_a_budget_in_which_not_all_run_at_full_length_says_how_many_do() -> None:
    apart = attrs.evolve(TRAFFIC, output=224, shared=0)
    for memory, traffic, fit in ((2600, TRAFFIC, 2), (2048, apart, 2), (2047, apart, 1)):
        (first, *_) = composed(paths(), memory=memory, traffic=traffic).sizing
        assert first.endswith(f"; {fit} of them fit at once when they are done")


def test_a_budget_that_is_too_small_for_the_traffic_is_refused_with_the_bytes_needed() -> None:
    plugins = paths(), weighed(Point(), 500)
    told = refused("too little for 4 running sequences of 1000 tokens", *plugins, memory=3000, traffic=TRAFFIC)
    needed = 63 * 16 + (4 + 2) * 500
    assert f"takes {needed} bytes" in told
    assert composed(*plugins, memory=needed, traffic=TRAFFIC).parts[1].capacity == 6
    refused("too little", *plugins, memory=needed - 1, traffic=TRAFFIC)


def test_without_a_traffic_a_small_budget_runs_fewer_and_a_tiny_one_gives_all_the_same() -> None:
    plugins = paths(), weighed(Point(), 500)
    assert "for 32 running sequences" in composed(*plugins, memory=1 << 20).sizing[0]
    assert "for 8 running sequences" in composed(*plugins, memory=10_000).sizing[0]
    composition = composed(paths(), state(), memory=100)
    assert capacities(composition) == [5, 16]
    assert all(text.endswith("the same tokens for all, as the budget is small") for text in composition.sizing)


def test_more_memory_never_makes_a_pool_smaller() -> None:
    plugins = paths(), windowed(w=40), weighed(Point(), 300)
    before = [0, 0, 0]
    for memory in range(20_000, 60_000, 777):
        now = capacities(composed(*plugins, memory=memory, traffic=TRAFFIC))
        assert now[1] >= before[1] and now[2] >= before[2]
        assert sum(now) >= sum(before)
        before = now


# ---------------------------------------------------------------- states of running sequences


def test_too_few_states_for_the_running_sequences_are_refused_with_the_number_needed() -> None:
    sizes = {"whole": 4096, "state": 8}
    told = refused(
        "'state' has 8 state slots, and 8 running sequences need 9", paths(), state(), capacity=sizes, max_running=8
    )
    assert "capacity={'state': 9, ...}" in told
    composed(paths(), state(), capacity=sizes, max_running=7)
    refused("need 33: 1 each, and one to copy into", paths(), state(), capacity=sizes, traffic=Traffic())
    plugins = paths(), state(max_rewind=2)
    each = r"4 each \(1 that runs \+ 3 of the single tokens of a step \(max_rewind=2\)\), and one to copy into"
    told = refused(f"2 running sequences need 9: {each}", *plugins, capacity=sizes, max_running=2, max_rewind=2)
    assert told.endswith("or say fewer running")


STATES_OF_ONE: list[tuple[dict[str, Any], int, int, str]] = [
    ({}, 0, 2, "1 that runs, and one to copy into"),
    ({"max_rewind": 4}, 3, 6, "1 that runs + 4 of the single tokens of a step (max_rewind=3), and one to copy into"),
    ({"max_rewind": 4}, 0, 2, "1 that runs, and one to copy into"),
    ({"checkpoint_every": 8}, 0, 4, "1 that runs + 2 kept on the way (checkpoint_every), and one to copy into"),
    (
        {"checkpoint_every": 8, "max_rewind": 1}, 1, 6,
        "1 that runs + 2 of the single tokens of a step (max_rewind=1) + 2 kept on the way (checkpoint_every), and one "
        "to copy into",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "rewind", "needed", "made_of"), STATES_OF_ONE)
def test_too_few_states_for_a_single_sequence_are_refused_where_nothing_is_said_of_running(
    facts: dict[str, Any], rewind: int, needed: int, made_of: str
) -> None:
    plugins, sizes = (paths(), state(**facts)), {"whole": 4096, "state": needed - 1}
    told = refused("component 'state' has", *plugins, capacity=sizes, max_rewind=rewind)
    slots = "1 state slot" if needed == 2 else f"{needed - 1} state slots"
    assert told == (
        f"component 'state' has {slots}, and a single running sequence needs {needed}: {made_of}. Give it more "
        f"(capacity={{'state': {needed}, ...}})"
    )
    sizes["state"] = needed
    composed(*plugins, capacity=sizes, max_rewind=rewind)
    assert told == refused(
        "'state'", *plugins, capacity=sizes | {"state": needed - 1}, max_rewind=rewind, max_running=1
    ), "a traffic of one sequence is no other case"


@pytest.mark.parametrize(("facts", "rewind", "needed", "_"), STATES_OF_ONE)
def test_with_the_number_needed_a_sequence_runs_and_its_state_is_kept(
    facts: dict[str, Any], rewind: int, needed: int, _: str
) -> None:
    cache = prefixloom.compose(
        None,
        plugins=[paths(), state(**facts)],
        page_size=4,
        capacity={"whole": 64, "state": needed},
        max_rewind=rewind,
        debug=True,
    )
    for length, hit in ((8, 0), (16, 8), (24, 16)):
        with cache.open([*range(length), 99], leave=1) as sequence:
            assert sequence.ready == hit
            for end in (length, length + 1):
                sequence.grow(end - sequence.reserved)
                with cache.step([sequence]) as step:
                    step.run_ops()
                if end == length:
                    sequence.publish()
        assert cache.stats().components["state"].cached
    assert cache.stats().components["state"].running == 0


@pytest.mark.parametrize("size", [{"capacity": 64}, {"memory": 100}, {"memory": 1 << 20}], ids=str)
def test_a_pool_that_is_sized_for_the_caller_has_room_for_a_deep_rewind(size: dict[str, Any]) -> None:
    """Sixteen states, the least otherwise, would not do for one sequence that may take twenty tokens back."""
    composition = composed(paths(), state(max_rewind=20), max_rewind=20, **size)
    assert composition.parts[1].capacity >= 1 + 21 + 1


def test_max_running_overrides_the_traffic() -> None:
    text = composed(paths(), memory=1 << 20, traffic=TRAFFIC, max_running=2).sizing[0]
    assert "for 2 running sequences of 800" in text
    assert "for 2 running sequences of 4,096" in composed(paths(), memory=1 << 20, max_running=2).sizing[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"running": 0}, "running must be a whole number of at least 1, got 0"),
        ({"prompt": 1.5}, "prompt must be a whole number"),
        ({"output": -1}, "output must be a whole number of at least 0"),
        ({"chunk": True}, "chunk must be a whole number"),
        ({"shared": 1.1}, "shared must be a part from 0 to 1, got 1.1"),
        ({"shared": "half"}, "shared must be a part"),
    ],
)
def test_an_impossible_traffic_is_refused(change: Any, told: str) -> None:
    with pytest.raises(CompositionError, match=f"traffic: {told}"):
        Traffic(**change)


def test_a_traffic_whose_prompts_are_all_shared_still_gets_room() -> None:
    alike = Traffic(running=2, prompt=100, output=0, shared=1.0, chunk=16)
    assert (alike.length, alike.common) == (100, 99), "every path has a token of its own"
    composition = composed(paths(), windowed(), state(), memory=100_000, traffic=alike)
    assert all(part.capacity > 0 for part in composition.parts)
    assert cost(composition) <= 100_000
    assert capacities(composed(paths(), memory=1600, traffic=alike)) == [100]


@pytest.mark.parametrize(
    ("reach", "length", "tokens"),
    [(Window(33), 1000, 32), (Window(33), 10, 10), (Chunk(50), 1000, 49), (Chunk(5000), 1000, 1000), (Window(1), 9, 0),
     (Chunk(4096), 4096, 4095)],
)  # fmt: skip
def test_what_a_reach_needs_at_most_is_found_by_asking_it(reach: Reach, length: int, tokens: int) -> None:
    assert reach_tokens(reach, length) == pytest.approx(tokens, abs=2)
