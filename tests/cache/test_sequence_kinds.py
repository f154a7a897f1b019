"""Sequences over every kind of memory: early release, states, what is not shared, endings of every sort."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from prefixloom import CapacityError, Path, Point, ProtocolError, Window
from tests.support.helpers import cache_of, every_reach, finish, held, part, path_cache, run, serve, settle

TOKENS = list(range(40))
each = pytest.mark.parametrize("name", every_reach())


def mixed(**options: Any) -> Any:
    """A path, a window and a state."""
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


# ---------------------------------------------------------------- early release


@each
def test_a_running_sequence_keeps_what_its_next_boundaries_need(name: str) -> None:
    reach = every_reach()[name]
    cache = cache_of(part("path", Path()), part("it", reach), max_rewind=0 if name == "point" else 4)
    draw = random.Random(6)
    with cache.open(range(200)) as sequence:
        while sequence.reserved < 200:
            run(sequence, min(draw.randint(1, 12), 200 - sequence.reserved))
            if draw.random() < 0.4:
                sequence.publish()
            settle(cache)
            if reach.unit == "boundary":
                continue
            pages = sequence.pages("it")
            for boundary in range(max(sequence.published, sequence.committed - 4), sequence.committed + 1):
                for low, high in reach.needs(boundary):
                    assert all(pages[p // 4] >= 0 for p in range(low, high)), (boundary, low, high)
    settle(cache)


def test_a_long_sequence_needs_no_more_window_than_its_window() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), capacity={"path": 400, "window": 24})
    with cache.open(range(400)) as sequence:
        for _ in range(100):
            run(sequence, 4)
            sequence.publish()
            assert sequence.owned("window") <= 3
    assert held(cache, range(400)) == 400
    settle(cache)


def test_different_page_sizes_meet_at_their_least_common_multiple() -> None:
    cache = cache_of(
        part("path", Path(), page_size=4), part("window", Window(10), page_size=6),
        part("c", Path(), tokens_per_slot=8), page=8, tokens=240,
    )  # fmt: skip
    serve(cache, range(100), chunk=24)
    assert held(cache, range(100)) == 96
    serve(cache, [*range(50), *[7] * 50])
    assert cache.peek([*range(50), *[7] * 50]) == 96
    figures = cache.stats().components
    assert [figures[name].page_tokens for name in ("path", "window", "c")] == [4, 6, 8]
    with cache.open(range(50)) as sequence:
        assert [len(sequence.pages(name)) for name in ("path", "window", "c")] == [12, 8, 6]
    settle(cache)


# ---------------------------------------------------------------- states


def test_a_fresh_state_is_cleared_and_a_hit_is_copied_into_a_slot_of_its_own() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    content = cache.pool("state").buffers["data"]
    content.fill_(99)
    first = cache.open(TOKENS)
    (slot,) = first.pages("state")
    finish(first)
    assert not content[:, slot].any()
    content[:, slot] = 41
    first.close()
    with cache.open([*TOKENS, 1, 2]) as second:
        (mine,) = second.pages("state")
        assert mine != slot
        second.grow(2)
        with cache.step([second]) as step:
            assert [op.kind for op in step.ops] == ["copy"]
            step.run_ops()
        assert (content[:, mine] == 41).all()
        content[:, mine] = 42
    assert (content[:, slot] == 41).all(), "the tree's state is never written"
    settle(cache)


def test_a_checkpoint_donates_the_slot_and_goes_on_in_a_copy() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    content = cache.pool("state").buffers["data"]
    with cache.open(TOKENS) as sequence:
        run(sequence, 20)
        (donated,) = sequence.pages("state")
        content[:, donated] = 20
        sequence.publish()
        (fresh,) = sequence.pages("state")
        assert fresh != donated
        assert cache.match(TOKENS[:20]).pages("state").tolist() == [donated]
        run(sequence, 4)
        assert (content[:, fresh] == 20).all(), "its own running state went on where it was"
        content[:, fresh] = 24
        assert (content[:, donated] == 20).all()
    assert cache.peek(TOKENS) == 24
    settle(cache)


def test_a_donated_state_is_not_evicted_before_it_was_copied() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()), slots=4)
    with cache.open(TOKENS) as sequence:
        run(sequence, 20)
        sequence.publish()
        assert cache.evict({"state": 4}) == {"state": 0}
        run(sequence, 4)
        assert cache.evict({"state": 4}) == {"state": 1}
    settle(cache)


def test_committing_with_an_op_outstanding_is_refused() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with pytest.raises(ProtocolError, match="has ops that have not run"):
            sequence.commit()
        with cache.step([sequence]) as step:
            step.run_ops()
        assert sequence.committed == 8
    settle(cache)


def test_a_state_is_taken_only_at_the_boundary_that_it_stands_for() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    with cache.open(TOKENS) as sequence:
        run(sequence, 10)
        sequence.publish()
        assert cache.stats().components["state"].cached == 0, "the state stands for 10, the page ends at 8"
        run(sequence, 2)
        sequence.publish()
        assert cache.stats().components["state"].cached == 1
    assert held(cache, TOKENS[:12]) == 12
    settle(cache)


def test_a_checkpoint_without_a_free_slot_is_skipped_and_counted() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()), slots=2)
    other = cache.open([5] * 8)
    with cache.open(TOKENS) as sequence:
        run(sequence, 20)
        (slot,) = sequence.pages("state")
        assert sequence.publish() == 20
        assert sequence.pages("state") == [slot]
        assert cache.stats().skipped_checkpoints == 1
        assert cache.match(TOKENS).branch == 20
    assert held(cache, TOKENS[:20]) == 0
    other.abort()
    settle(cache)


def test_a_state_that_the_tree_has_already_is_not_given_twice() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    first, second = cache.open(TOKENS), cache.open(TOKENS)
    for sequence in (first, second):
        run(sequence, 20)
        sequence.publish()
    assert cache.stats().components["state"].cached == 1
    first.close()
    second.close()
    settle(cache)


def test_opening_with_no_slot_for_a_running_state_is_refused_and_leaves_nothing() -> None:
    cache = mixed(slots=2)
    serve(cache, TOKENS)
    runners = [cache.open([i] * 8) for i in (1, 2)]
    before = cache.stats().components
    with pytest.raises(CapacityError, match="cannot open a sequence: state: needs 1") as caught:
        cache.open(TOKENS)
    assert caught.value.lacking == {"state": 1}
    assert cache.stats().components == before
    for runner in runners:
        runner.close()
    settle(cache)


def test_a_branch_is_offered_where_a_state_is_missing() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    serve(cache, TOKENS)
    plan = cache.match([*TOKENS[:20], *[7] * 8])
    assert (plan.ready, plan.walked, plan.limited_by, plan.branch) == (0, 20, "state", 20)
    with cache.open([*TOKENS[:20], *[7] * 8]) as sequence:
        assert sequence.branch == plan.branch


# ---------------------------------------------------------------- endings


@pytest.mark.parametrize("first", ["close", "abort"])
@pytest.mark.parametrize("second", ["close", "abort"])
def test_ending_twice_does_nothing(first: str, second: str) -> None:
    cache = mixed()
    sequence = cache.open(TOKENS)
    run(sequence, 20)
    getattr(sequence, first)()
    before = cache.stats()
    getattr(sequence, second)()
    assert cache.stats() == before
    assert held(cache, TOKENS[:20]) == (20 if first == "close" else 0)
    settle(cache)


@pytest.mark.parametrize("use", ["grow", "append", "commit", "publish", "rewind", "__enter__"])
def test_a_closed_sequence_can_not_be_used(use: str) -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS, label="done")
    sequence.close()
    arguments: dict[str, Any] = {"grow": (1,), "append": ([1],), "rewind": (0,)}
    with pytest.raises(ProtocolError, match=r"<done closed.*> is closed"):
        getattr(sequence, use)(*arguments.get(use, ()))
    with pytest.raises(ProtocolError, match="is closed"):
        cache.step([sequence])


def test_an_exception_in_the_block_aborts_and_nothing_leaks() -> None:
    cache = mixed()
    with pytest.raises(ZeroDivisionError), cache.open(TOKENS) as sequence:
        run(sequence, 20)
        sequence.publish(8)
        raise ZeroDivisionError
    assert not sequence.open
    assert cache.peek(TOKENS) == 0
    assert cache.stats().components["path"].cached == 2, "what was published before stays"
    settle(cache)


def test_a_dropped_sequence_is_recovered_and_reported_with_where_it_was_made(caplog: pytest.LogCaptureFixture) -> None:
    cache = mixed()
    serve(cache, TOKENS)
    sequence = cache.open([*TOKENS, *range(8)])
    run(sequence, 4)
    sequence.grow(4)
    del sequence
    gc.collect()
    assert serve(cache, [1] * 8) == 0  # the next call takes it back
    assert cache.stats().recovered == 1
    assert "test_sequence_kinds.py" in caplog.text
    settle(cache)


def test_sequences_dropped_in_a_cycle_are_recovered_once() -> None:
    cache = mixed()
    serve(cache, TOKENS)
    box: list[Any] = [cache.open([*TOKENS, 1]), cache.lease(cache.match(TOKENS))]
    box.append(box)
    del box
    gc.collect()
    cache.poll()
    assert cache.stats().recovered == 2
    settle(cache)


@pytest.mark.parametrize("debug", [False, True])
def test_what_the_collector_drops_amid_a_flush_is_given_back_once(debug: bool) -> None:
    """The collector runs after so many allocations, so for each number it comes at another line of the flush."""
    before = gc.get_threshold()
    for allocations in range(40):
        cache = cache_of(part("path", Path()), part("window", Window(8)), part("point", Point()), debug=debug)
        gc.collect()
        gc.disable()
        try:
            box: list[Any] = [cache.open(TOKENS)]
            run(box[0], 8)
            box.append(box)
            del box
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            cache.flush()
        finally:
            gc.set_threshold(*before)
            gc.enable()
        cache.poll()
        for figures in cache.stats().components.values():
            assert figures.free == figures.capacity
        settle(cache)


def test_a_sequence_from_before_a_flush_is_refused_and_ends_quietly() -> None:
    cache = mixed()
    serve(cache, TOKENS)
    running, other = cache.open([*TOKENS, 1, 2]), cache.open([7] * 8)
    run(other, 4)
    lease, plan = cache.lease(cache.match(TOKENS)), cache.match(TOKENS)
    cache.flush()
    assert not lease.active
    for use in (lambda: running.grow(1), lambda: running.append([1]), running.commit, running.publish):
        with pytest.raises(ProtocolError, match="before the cache was flushed"):
            use()
    running.close()
    running.abort()
    del other
    gc.collect()
    cache.poll()
    assert plan.stale
    for use in (cache.open, cache.lease):
        with pytest.raises(ProtocolError, match="before the cache was flushed"):
            use(plan)
    if lease.active:
        lease.release()
    for figures in cache.stats().components.values():
        assert figures.free == figures.capacity
    assert cache.stats().recovered == 0
    assert serve(cache, TOKENS) == 0
    assert held(cache, TOKENS) == 40
    settle(cache)


def test_a_plan_from_before_a_flush_never_finds_another_image() -> None:
    cache = path_cache()
    plan = cache.match([0] * 20, extra=[(0, 8, "cat")])
    cache.flush()
    serve(cache, [0] * 20, extra=[(0, 8, "dog")])
    with pytest.raises(ProtocolError, match="before the cache was flushed"):
        cache.open(plan)
    assert cache.match([0] * 20, extra=[(0, 8, "cat")]).ready == 0


def test_a_stale_plan_still_knows_its_images() -> None:
    cache = cache_of(part("path", Path(), lookahead=1), page=1)
    serve(cache, [5] * 4)
    plan = cache.match([5, 0], extra=[(1, 2, "cat")])
    cache.evict(1)
    assert plan.stale
    with cache.open(plan) as sequence:
        finish(sequence)
        sequence.append([6, 7])
        run(sequence, 2)
    assert cache.match([5, 0, 6, 7], extra=[(1, 2, "cat")]).ready == 3


def test_dropping_a_namespace_keeps_what_runs_and_frees_it_at_its_end() -> None:
    cache = mixed()
    serve(cache, TOKENS, namespace="a", chunk=20)
    serve(cache, TOKENS, namespace="b")
    sequence = cache.open([*TOKENS, *range(8)], namespace="a")
    lease = cache.lease(cache.match(TOKENS[:20], namespace="a"))
    assert cache.drop_namespace("a") > 0
    assert held(cache, TOKENS, namespace="a") == 0
    run(sequence, 8)
    settle(cache)
    sequence.publish()
    sequence.close()
    lease.release()
    for figures in cache.stats().components.values():
        assert (figures.leased, figures.running) == (0, 0)
    assert held(cache, TOKENS, namespace="b") == 40
    cache.drop_namespace("b")
    assert cache.stats().components["path"].free == 64
    assert cache.drop_namespace("never there") == 0
    assert serve(cache, TOKENS, namespace="a") == 0
    settle(cache)


def test_a_namespace_that_holds_nothing_costs_nothing() -> None:
    cache = path_cache()
    for i in range(50):
        cache.open([1], namespace=f"tenant {i}").close()
        cache.peek([1] * 8, namespace=f"other {i}")
    assert cache.stats().namespaces <= 1
