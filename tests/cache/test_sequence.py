"""Sequences: their lengths, growth, publication and its overlaps, rewinding, early release."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import CapacityError, InputError, Path, ProtocolError, Window
from tests.support.helpers import cache_of, finish, held, part, path_cache, run, serve, settle

TOKENS = list(range(40))


def test_a_life_from_open_to_close() -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS[:10], label="chat 7")
    assert (sequence.ready, sequence.named, sequence.reserved, sequence.committed) == (0, 10, 0, 0)
    sequence.grow(10)
    assert (sequence.reserved, sequence.committed) == (10, 0)
    assert sequence.owned("path") == 3
    sequence.commit()
    assert (sequence.committed, sequence.publishable) == (10, 8)
    assert sequence.publish() == 8
    sequence.grow(1)
    sequence.append([10])
    sequence.commit()
    assert sequence.tokens.tolist() == TOKENS[:11]
    assert "chat 7" in repr(sequence)
    sequence.close()
    assert not sequence.open
    assert held(cache, TOKENS[:11]) == 8
    settle(cache)


def test_the_statistics_follow_a_request() -> None:
    cache = path_cache()
    serve(cache, TOKENS)
    serve(cache, [*TOKENS, 1, 2])
    stats = cache.stats()
    assert (stats.opened, stats.asked_tokens, stats.hit_tokens, stats.sequences) == (2, 82, 40, 0)
    with cache.open([1, 2, 3]):
        assert cache.stats().sequences == 1


@pytest.mark.parametrize("leave", [0, 1, 3, 4, 5, 39, 40, 41, 1000])
def test_leave_leaves_so_many_tokens_to_compute(leave: int) -> None:
    cache = path_cache()
    serve(cache, TOKENS)
    with cache.open(TOKENS, leave=leave) as sequence:
        assert sequence.ready == max(0, (40 - leave) // 4 * 4)
    assert cache.peek(TOKENS, leave=leave) == sequence.ready


# ---------------------------------------------------------------- growing


def test_growing_is_all_or_nothing_and_says_who_holds_what() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), capacity={"path": 64, "window": 32})
    big = cache.open(TOKENS, label="big one")
    big.grow(24)
    with cache.open([9] * 30, label="late") as late:
        before = cache.stats()
        with pytest.raises(CapacityError) as caught:
            late.grow(16)
        assert cache.stats() == before
        assert (late.reserved, late.owned("path"), late.owned("window")) == (0, 0, 0)
        (shortage,) = caught.value.shortages
        assert (shortage.component, shortage.wanted, shortage.free, shortage.evictable) == ("window", 4, 2, 0)
        assert shortage.holders == (("big one", 6),)
        assert caught.value.lacking == {"window": 2}
        message = str(caught.value)
        assert "reserve 16 tokens" in message
        assert "window: needs 4 pages (or state slots), 2 free + 0 evictable of 8" in message
        assert "big one 6" in message
        late.grow(8)
    big.abort()
    settle(cache)


def test_what_a_running_sequence_published_is_not_evicted_for_another() -> None:
    cache = path_cache(tokens=40)
    first = cache.open(TOKENS[:32])
    finish(first)
    first.publish()
    with cache.open([7] * 20) as second, pytest.raises(CapacityError, match="8 pinned by leases"):
        second.grow(12)
    first.close()
    settle(cache)


# ---------------------------------------------------------------- publishing


def test_a_published_chunk_costs_the_chunk() -> None:
    from tests.contract.test_policy_cost import lines_run

    costs = []
    cache = path_cache(tokens=4096, debug=False)
    with cache.open(range(4000)) as sequence:
        for _ in range(250):
            run(sequence, 16)
            costs.append(lines_run(sequence.publish))
    assert max(costs[2:]) - min(costs[2:]) <= 2


def test_publishing_is_refused_past_what_is_named_and_committed() -> None:
    cache = path_cache()
    with cache.open(TOKENS[:10]) as sequence:
        sequence.grow(20)
        sequence.commit(6)
        for upto in (8, 12, -4, 5):
            with pytest.raises(ProtocolError, match=r"cannot publish -?\d+.*multiple of 4 from 0 to 4"):
                sequence.publish(upto)
        sequence.commit()
        with pytest.raises(ProtocolError, match="cannot publish 12"):
            sequence.publish(12)  # committed, and not named yet
        sequence.append(range(10))
        assert sequence.publish(12) == 12
        with pytest.raises(ProtocolError, match="from 12 to 20"):
            sequence.publish(8)
    settle(cache)


@pytest.mark.parametrize("wrong", ["8", 8.0, True, [8]])
@pytest.mark.parametrize("what", ["publish", "commit"])
def test_a_boundary_that_is_no_whole_number_is_refused(what: str, wrong: Any) -> None:
    cache = path_cache()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        if what == "publish":
            sequence.commit()
        with pytest.raises(InputError, match=what):
            getattr(sequence, what)(wrong)
    settle(cache)


def test_commit_stays_between_what_was_computed_and_what_is_reserved() -> None:
    cache = path_cache()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        sequence.commit(5)
        for upto in (4, 9, -1):
            with pytest.raises(ProtocolError, match=f"cannot commit {upto}: 5 are committed and 8 reserved"):
                sequence.commit(upto)
        sequence.commit(5)


# ---------------------------------------------------------------- rewinding


def test_rewinding_stops_at_what_is_published() -> None:
    cache = path_cache()
    with cache.open(TOKENS) as sequence:
        run(sequence, 16)
        sequence.publish(8)
        with pytest.raises(ProtocolError, match="cannot rewind to 7: 8 are published"):
            sequence.rewind(9)
        sequence.rewind(8)
        assert sequence.committed == 8
    settle(cache)


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", None, True])
def test_a_count_that_is_no_whole_number_from_zero_up_is_refused(wrong: Any) -> None:
    with path_cache().open(TOKENS) as sequence:
        for method in (sequence.grow, sequence.rewind):
            with pytest.raises(InputError, match="takes a number of tokens from 0 up"):
                method(wrong)
