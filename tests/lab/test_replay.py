"""Replays: what is served, counted and told, against what can be worked out by hand or by a plainer model."""

from __future__ import annotations

import gc
import json
import math
import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator

import attrs
import pytest

from prefixloom import Buffer, Cache, Component, InputError, Manifest, Path, Point, Window, compose
from prefixloom.lab import BlockPrompt, LabRequest, Replay, ReplayOutcome, Service

KV = Manifest([Buffer("kv", (2,), "float32")])
PAGE = 4


def cache(*, window: int = 16, debug: bool = True, policy: str = "lru", **capacity: int) -> Cache:
    """A cache of a path, a window and states, or of those of them that have a capacity."""
    reaches = {"whole": Path(), "near": Window(window), "state": Point()}
    parts = [Component(name, KV, reaches[name]) for name in capacity]
    return compose(None, plugins=parts, page_size=PAGE, capacity=capacity, device="meta", debug=debug, policy=policy)


def asked(*prompts: tuple[list[int], int], output: int = 1, every: float = 1.0) -> list[LabRequest]:
    """Requests of blocks of 8 tokens: their ids and their tokens."""
    return [LabRequest(at * every, BlockPrompt(ids, 8, length, at), output) for at, (ids, length) in enumerate(prompts)]


def traffic(count: int, seed: int = 0, output: int = 40) -> Iterator[LabRequest]:
    """Conversations that go on, some with a beginning in common, at random times."""
    rng, at, fresh = random.Random(seed), 0.0, iter(range(1000, 10**9))
    talks: list[list[int]] = []
    for number in range(count):
        at += rng.expovariate(2.0)
        if len(talks) < 12 or rng.random() < 0.3:
            talks = [*talks[-11:], [rng.randrange(3)]]
        talk = rng.choice(talks)
        talk += [next(fresh) for _ in range(rng.randrange(1, 4))]
        length = 8 * len(talk) - rng.randrange(8)
        yield LabRequest(at, BlockPrompt([*talk], 8, length, number), rng.randrange(output))


def balanced(outcome: ReplayOutcome) -> None:
    """What must be true of every outcome."""
    missed = sum(outcome.missed.values())
    assert outcome.hit + outcome.restored + missed == outcome.prompt
    assert outcome.computed >= outcome.ideal > 0
    assert sum(outcome.left.values()) == outcome.requests
    assert sum(tokens * count for tokens, count in outcome.left.items()) == missed
    assert all(each.peak <= each.capacity * each.page_bytes for each in outcome.components.values())
    json.dumps(outcome.as_dict())


# ---------------------------------------------------------------- counts


def test_with_room_for_all_a_cache_of_a_path_computes_the_ideal() -> None:
    outcome = Replay(cache(whole=4000)).run(traffic(60))
    balanced(outcome)
    assert outcome.multiple == 1.0
    assert outcome.hit_rate == outcome.ideal_rate > 0.3
    assert set(outcome.missed) == {"new"}


def test_hits_and_the_reasons_of_misses_are_counted_by_component() -> None:
    requests = asked(([1, 2, 3], 24), ([1, 2, 4], 24), ([1, 2, 4], 24), ([9] * 5, 40), ([1, 2, 3], 24))
    outcome = Replay(cache(whole=64, state=20), closely=1).run(requests)
    balanced(outcome)
    # the second prompt parts at 16, where the first left no state: chunks end at 20 and 24 only
    assert outcome.missed == {"new": 24 + 8 + 4 + 40 + 4, "state": 16, "gone": 4}
    assert outcome.components["state"].stops == 1
    assert outcome.hit == 20 + 16  # the last one's end was evicted, and the state where prompts parted was not
    assert outcome.states_used == 2
    assert {name: (use.made, use.evicted, use.peak) for name, use in outcome.components.items()} == {
        "whole": (20, 4, 16 * 32), "state": (9, 4, 5 * 8),
    }  # fmt: skip
    assert outcome.components["whole"].alone == (16 + 20 + 16) / outcome.prompt
    assert (outcome.to_compute(0.5), outcome.to_compute(0.99)) == (24, 40)
    third = Replay(cache(whole=400, state=20)).run(asked(([1, 2, 3], 24), ([1, 2, 4], 24), ([1, 2, 5], 24)))
    assert third.hit == 16  # the second one has left a checkpoint where it parted


def test_answers_that_the_trace_knows_are_hit_by_the_next_turn_if_they_are_published() -> None:
    whole = BlockPrompt([1, 2, 3], 8, 24)
    turns = [
        LabRequest(0, BlockPrompt([1, 2], 8, 13), 12, whole=whole),
        LabRequest(9, BlockPrompt([1, 2, 3, 4], 8, 32), 1),
    ]
    published = Replay(cache(whole=400, state=20), outputs="published").run(turns)
    balanced(published)
    assert (published.hit, published.computed, published.ideal) == (24, 13 + 8, 13 + 8)
    assert Replay(cache(whole=400), outputs="running").run(turns).hit == 12


def test_answers_take_memory_while_they_run_and_are_not_cached_unless_they_are_published() -> None:
    requests = asked(([1], 8), output=33)
    for outputs, pages in (("running", 2), ("published", 10)):
        one = cache(whole=400)
        outcome = Replay(one, outputs=outputs).run(requests)  # type: ignore[arg-type]
        assert (outcome.output, outcome.computed) == (33, 8)
        assert one.stats().components["whole"].cached == pages


def test_requests_of_other_namespaces_share_nothing() -> None:
    first, second = asked(([1, 2], 16), ([1, 2], 16))
    outcome = Replay(cache(whole=400)).run([first, attrs.evolve(second, namespace="other")])
    assert (outcome.hit, outcome.ideal) == (0, 32)


def test_what_nobody_wants_any_more_goes_first() -> None:
    a, b, c, again = asked(([1, 2], 16), ([3, 4], 16), ([5, 6], 16), ([3, 4], 16), every=10)
    kept = Replay(cache(whole=36)).run([a, b, attrs.evolve(c), attrs.evolve(again, prompt=a.prompt)])
    assert kept.hit == 0
    wanted = [a, attrs.evolve(b, ttl=5), c, attrs.evolve(again, prompt=a.prompt)]
    assert Replay(cache(whole=36)).run(wanted).hit == 12


# ---------------------------------------------------------------- overlap


@pytest.mark.parametrize(("running", "outputs"), [(1, "published"), (3, "running"), (8, "published"), (8, "running")])
def test_requests_that_overlap_are_all_served_and_nothing_stays_open(running: int, outputs: str) -> None:
    one = cache(whole=1200, near=800, state=40)
    service = Service(prefill=200, decode=20, max_running=running, chunk=16)
    count = 60 if outputs == "running" else 25  # a state is kept at each page of an answer that is published
    outcome = Replay(one, service=service, outputs=outputs).run(traffic(count, seed=running))  # type: ignore[arg-type]
    balanced(outcome)
    assert (outcome.requests, outcome.refused, one.stats().sequences) == (count, 0, 0)
    assert all(each.running == each.leased == 0 for each in one.stats().components.values())


def test_requests_that_overlap_hold_memory_that_one_after_the_other_they_do_not() -> None:
    requests = list(traffic(80, seed=3, output=200))
    in_turn = Replay(cache(whole=1000, debug=False)).run(requests)
    service = Service(prefill=1000, decode=2, max_running=8, chunk=64)
    overlapping = Replay(cache(whole=1000, debug=False), service=service).run(requests)
    balanced(overlapping)
    assert overlapping.components["whole"].evicted > in_turn.components["whole"].evicted
    assert overlapping.span > in_turn.span


def test_where_pools_are_short_the_youngest_give_up_their_room_and_are_served_later() -> None:
    requests = asked(*(([number] * 2, 16) for number in range(10, 16)), output=300, every=0.01)
    one = cache(whole=800, debug=False)
    outcome = Replay(one, service=Service(prefill=1000, decode=10, max_running=6, chunk=16)).run(requests)
    balanced(outcome)
    assert outcome.requests == 6
    assert outcome.retracted > 0
    assert outcome.computed > outcome.prompt - outcome.hit  # what they had decoded is computed again


@pytest.mark.parametrize("service", [None, Service(prefill=100, decode=10, max_running=4, chunk=8)])
def test_a_request_that_is_too_long_for_the_pools_is_refused_and_counted_nowhere_else(service: Service | None) -> None:
    requests = asked(([1, 2], 16), ([1] * 30, 240), ([1, 2], 16), ([7] * 5, 40))
    outcome = Replay(cache(whole=48, near=80), service=service).run(requests)
    balanced(outcome)
    assert (outcome.requests, outcome.refused, outcome.prompt) == (3, 1, 72)
    assert "refused   1 requests" in str(outcome)
    nothing = Replay(cache(whole=8), service=service).run(asked(([1, 2, 3], 24)))
    assert (nothing.requests, nothing.refused, str(nothing)) == (
        0,
        1,
        "No request was served: 1 were refused, which are too long for the pools.",
    )


def test_states_for_which_requests_that_run_leave_no_slot_are_counted() -> None:
    requests = asked(*(([number] * 4, 32) for number in range(10, 16)), output=40, every=0.01)
    service = Service(prefill=1000, decode=10, max_running=6, chunk=16)
    outcome = Replay(cache(whole=800, state=3), service=service).run(requests)
    assert (outcome.skipped, outcome.states_made) == (12, 6)
    assert "6 made, 0 hits went on from one, 12 not kept for lack of a slot" in str(outcome)


def test_two_replays_of_one_trace_are_equal() -> None:
    def once() -> dict[str, object]:
        service = Service(prefill=200, decode=20, max_running=5, chunk=16)
        told = Replay(cache(whole=600, near=300, state=20), service=service).run(traffic(50)).as_dict()
        return {name: value for name, value in told.items() if name != "cpu"}

    assert once() == once()


def test_an_interrupted_replay_tells_what_it_measured_and_leaves_nothing_open() -> None:
    one, done = cache(whole=600, state=30), []

    def told(requests: int, now: float) -> None:
        done.append(requests)
        if requests == 7:
            raise KeyboardInterrupt

    replay = Replay(one, service=Service(prefill=200, decode=20, max_running=5, chunk=16), told=told)
    with pytest.raises(KeyboardInterrupt):
        replay.run(traffic(50))
    outcome = replay.outcome()
    assert (outcome.requests, outcome.complete, done) == (7, False, [*range(1, 8)])
    assert "interrupted" in str(outcome)
    assert one.stats().sequences == 0


def test_bad_settings_are_refused() -> None:
    for wrong in ({"outputs": "lost"}, {"chunk": 0}):
        with pytest.raises(InputError):
            Replay(cache(whole=400), **wrong)  # type: ignore[arg-type]
    for wrong in ({"prefill": 0}, {"decode": math.inf}, {"max_running": 0}, {"chunk": 1.5}):
        with pytest.raises(InputError, match="service"):
            Service(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- against plainer models


def of_whole_blocks(seed: int, count: int = 400, size: int = 4) -> list[LabRequest]:
    rng = random.Random(seed)
    paths = [[rng.randrange(2), *(10 * number + at for at in range(rng.randrange(1, 12)))] for number in range(1, 40)]
    return [
        LabRequest(at, BlockPrompt(path, size, size * len(path), at))
        for at, path in enumerate(paths[min(int(rng.paretovariate(0.6)), 39) - 1] for _ in range(count))
    ]


def least_recently_used(requests: list[LabRequest], capacity: int) -> int:
    """Hits in blocks of a pool that evicts the block used longest ago, the deepest of a path first."""
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for request in requests:
        assert isinstance(request.prompt, BlockPrompt)
        ids = request.prompt.ids
        paths = [tuple(ids[: end + 1]) for end in range(len(ids))]
        known = 0
        while known < len(paths) and paths[known] in held:
            known += 1
        hits += known
        for path in reversed(paths):
            held.pop(path, None)
            held[path] = None
        for path in [*held][: max(0, len(held) - capacity)]:
            del held[path]
    return hits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [12, 30, 80])
def test_one_path_in_blocks_hits_what_a_list_of_blocks_by_last_use_hits(seed: int, capacity: int) -> None:
    """The rule of lru with the tail of a path refreshed first: reference value ``lru_rev_prefix``."""
    requests = of_whole_blocks(seed)
    one = compose(
        None, plugins=[Component("path", KV, Path())], page_size=4, capacity=4 * capacity, device="meta", debug=False
    )
    outcome = Replay(one, chunk=4, leave=0).run(requests)
    assert outcome.hit == 4 * least_recently_used(requests, capacity)


# ---------------------------------------------------------------- size


def endless(count: int) -> Iterator[LabRequest]:
    """Conversations that come and go: what is alive at any time does not grow with ``count``."""
    for number in range(count):
        talk, turn = number % 16 + 16 * (number // 128), number // 16 % 8 + 1
        ids = [0, *(100 * talk + at for at in range(turn))]
        yield LabRequest(number / 8, BlockPrompt(ids, 16, 16 * len(ids), number), 20)


def test_the_memory_of_a_replay_follows_what_is_alive_and_not_the_number_of_requests() -> None:
    held = []
    for count in (400, 2400):
        tracemalloc.start()
        replay = Replay(cache(whole=600, state=20, debug=False), service=Service(), closely=0)
        replay.run(endless(count))
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    blocks = 2000 * 1.2  # distinct blocks that came beside
    assert held[1] - held[0] < 100_000 + 20 * blocks


def test_a_request_is_explained_at_the_time_of_the_replay() -> None:
    short = cache(whole=64, near=64)
    driver = Replay(short, explain=[1, 3])
    driver.run(asked(([1, 2, 3, 4], 32), ([5, 6, 7, 8, 9, 10], 48), ([1, 2, 3, 4], 32), every=10.0))
    first, third = driver.explained[1], driver.explained[3]
    assert [each.reason for each in first.findings] == ["new", "left"]
    lost = [each.loss for each in third.findings if each.loss is not None]
    assert lost and all(each.by == "request 2" and each.cause == "room" for each in lost)
    assert (third.at, {each.stored for each in lost}, {each.when for each in lost}) == (20.0, {0.0}, {10.0})
