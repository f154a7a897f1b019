"""What the property test found in the core, each shrunk to a sentence. Every one of these failed once."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Buffer, Chunk, Codec, Component, Manifest, Path, Point, ProtocolError, Reach, Sinks, Window
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence as Running
from prefixloom.operations.step import Step
from tests.support.helpers import cache_of, part, run, serve, serve_tightly, settle

TOKENS = list(range(100, 140))


def test_a_node_that_slack_is_trimmed_from_to_nothing_is_unlinked() -> None:
    cache = cache_of(part("chunk", Chunk(10)), max_rewind=4)
    serve_tightly(cache, TOKENS[:23])  # [8, 20) was kept for a rewind; at 20 none of it is needed
    assert cache.stats().components["chunk"].cached == 3
    cache.evict({"chunk": 64})
    assert cache.stats().nodes == 0


def test_the_half_of_a_split_that_holds_nothing_is_unlinked() -> None:
    cache = cache_of(part("sinks", Sinks(6)))
    serve_tightly(cache, TOKENS[:28])
    with cache.open([*TOKENS[:10], 1, 2]) as other:  # cuts behind the sinks, so that the lower half is bare
        assert other.ready == 8
    assert cache.stats().nodes == 1


def test_a_plan_is_stale_once_its_boundary_was_unlinked() -> None:
    """A boundary where nothing is needed can hold nothing; no eviction counts it when it goes."""
    cache = cache_of(part("chunk", Chunk(12)))
    sequence = cache.open(TOKENS[:20])
    run(sequence, 12)
    cache.reclaim()
    sequence.publish()
    plan = cache.match(TOKENS[:15])
    assert plan.ready == 12
    sequence.abort()
    assert plan.stale
    cache.lease(plan).release()


def test_sinks_stay_covered_while_the_window_moves_on() -> None:
    cache = cache_of(part("both", Sinks(4) | Window(8)))
    serve(cache, TOKENS[:8])
    sequence = cache.open(TOKENS)
    assert sequence.ready == 8
    run(sequence, 32)  # the window has left [0, 8); the sinks have not
    cache.evict({"both": 64})
    sink = sequence.pages("both")[0]
    assert sink >= 0
    assert sink not in cache.pool("both").free_ids()
    sequence.close()


def test_what_a_shifted_window_will_need_later_is_covered_now() -> None:
    """A reach that is not convex may need at a later boundary what it does not need at this one."""
    cache = cache_of(part("late", Window(9).shift(4)), part("path", Path()))
    sequence = cache.open(TOKENS)
    run(sequence, 8)
    sequence.publish()
    run(sequence, 4)
    sequence.publish()  # [8, 12) is needed from 16 on, not at 12
    cache.evict({"late": 64})
    free = set(cache.pool("late").free_ids())
    assert not free & {slot for slot in sequence.pages("late") if slot >= 0}
    run(sequence, 8)
    sequence.close()
    assert cache.peek(TOKENS) == 20


class KeptForLonger(Reach):
    """A window of 7 that is convex, and says of each position that it is needed for longer than it is."""

    convex = True

    def __init__(self, longer: float) -> None:
        self.longer = longer

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((max(0, n - 6), n),) if n else ()

    def until(self, p: int) -> float:
        return p + 6 + self.longer


@pytest.mark.parametrize("longer", [9, float("inf")])
def test_a_page_table_lists_nothing_that_its_lease_does_not_cover(longer: float) -> None:
    """What a convex reach does not need at a published boundary is evicted, whatever its ``until`` says."""
    cache = cache_of(part("near", KeptForLonger(longer)))
    with cache.open(TOKENS) as sequence:
        for _ in range(4):
            run(sequence, 8)
            sequence.publish()
        cache.evict({"near": 64})
        listed = {slot for slot in sequence.pages("near") if slot >= 0}
        assert not listed & set(cache.pool("near").free_ids())
        assert len(listed) == 2
        run(sequence, 8)
    assert cache.peek([*TOKENS, 1]) == 40


def test_a_plan_from_before_a_flush_is_refused() -> None:
    """Its key may name extra keys by numbers that mean other images now."""
    cache = cache_of(part("path", Path()))
    plan = cache.match(TOKENS, extra=((0, 4, "one image"),))
    cache.flush()
    serve(cache, TOKENS, extra=((0, 4, "another image"),))
    with pytest.raises(ProtocolError, match="flush"):
        cache.open(plan)
    assert cache.peek(TOKENS) == 0


def test_two_rewinds_go_no_deeper_than_the_rewind_depth() -> None:
    """What lies too far below the highest commit was given back when that was committed."""
    cache = cache_of(part("path", Path()), part("window", Window(6)), max_rewind=5)
    sequence = cache.open(TOKENS)
    run(sequence, 30)
    sequence.rewind(3)
    with pytest.raises(ProtocolError, match="cannot rewind 6"):
        sequence.rewind(3)
    sequence.rewind(2)
    sequence.close()


def test_slack_of_a_covered_cell_counts_as_room() -> None:
    """A lease covers the whole cell, and what is older than its window may go nevertheless."""
    cache = cache_of(part("window", Window(5)), tokens=32, max_rewind=8)
    serve(cache, TOKENS[:16])  # [4, 16) was kept for a rewind; a resume at 16 needs [12, 16)
    holder = cache.open([*TOKENS[:16], 1])
    assert holder.ready == 16
    other = cache.open([9] * 28)
    other.grow(28)  # 7 of 8 pages, where 5 are free
    other.abort()
    holder.abort()


def test_a_rewind_keeps_the_tokens_that_published_keys_name() -> None:
    """With a lookahead, a published page depends on a token behind it: to take that back is refused."""
    cache = cache_of(part("path", Path()), part("draft", Path(), lookahead=1))
    sequence = cache.open(TOKENS[:9])
    run(sequence, 9)
    assert sequence.publish() == 8
    with pytest.raises(ProtocolError, match="depend on 1 tokens more"):
        sequence.rewind(1)
    run(sequence, 4)
    sequence.rewind(4)
    sequence.append([1, 2, 3])
    run(sequence, 3)
    sequence.close()
    assert cache.peek([*TOKENS[:9], 1, 2, 3, 4]) == 8
    assert cache.peek([*TOKENS[:8], 1, 2, 3, 4]) == 4


def test_an_extra_key_at_the_end_of_a_prompt_outlives_what_is_appended() -> None:
    cache = cache_of(part("path", Path()), part("draft", Path(), lookahead=1))
    for image in ("one", "two"):
        sequence = cache.open([1], extra=((0, 1, image),))
        sequence.append(TOKENS[:8])
        run(sequence, 9)
        sequence.close()
        assert cache.peek([1, *TOKENS[:8]]) == 0


def test_what_a_sequence_of_a_dropped_namespace_publishes_is_freed_with_it() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)))
    sequence = cache.open(TOKENS, namespace="gone")
    run(sequence, 12)
    sequence.publish()
    cache.drop_namespace("gone")
    run(sequence, 12)
    sequence.close()
    for stats in cache.stats().components.values():
        assert stats.free == stats.capacity


def test_a_page_that_arrives_begun_has_a_slot_to_be_written_on() -> None:
    """A reach that does not need the newest positions yet still needs the slot that the next ones go to."""
    cache = cache_of(part("late", Window(9).shift(4)), part("path", Path()))
    sequence = cache.open(TOKENS[:34])
    sequence.grow(34, arriving=True)
    assert sequence.pages("late")[8] >= 0
    sequence.abort()


def test_nothing_is_read_above_a_hole_that_no_lease_covers() -> None:
    """What arrived was not all, and a boundary inside of the gap is published: the lease stops at the gap."""
    cache = cache_of(part("path", Path()), part("window", Window(7), lookahead=2), page=1)
    serve(cache, TOKENS[:7])
    sequence = cache.open(TOKENS[:12])
    assert sequence.ready == 5
    sequence.grow(13, arriving=True)
    sequence.commit()
    sequence.publish(8)  # [5, 8) never had a slot
    cache.evict({"window": 64})
    free = set(cache.pool("window").free_ids())
    assert not free & {slot for slot in sequence.pages("window") if slot >= 0}
    sequence.abort()


def test_a_failed_step_leaves_no_state_to_rewind_to() -> None:
    """Its layers may have written over the states of single tokens: what was rewound to them was published as good."""
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=3), max_rewind=3, slots=12)
    sequence = cache.open(TOKENS[:12])
    run(sequence, 3)
    sequence.grow(1)
    with pytest.raises(ZeroDivisionError), cache.step([sequence]) as step:
        step.run_ops()
        raise ZeroDivisionError
    with pytest.raises(ProtocolError, match="cannot rewind to 1"):
        sequence.rewind(3)
    for go_on in (lambda: cache.step([sequence]), sequence.commit):  # from a state that is nobody's
        with pytest.raises(ProtocolError, match=r"half a state of component 'state'\. Abort the sequence"):
            go_on()
    sequence.close()
    assert cache.stats().components["state"].cached == 0


def test_a_step_that_goes_on_from_one_that_failed_commits_nothing() -> None:
    """Overlap: the second step of two was computed on what the first, which failed, should have written."""
    cache = cache_of(part("path", Path()))
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    first = cache.step([sequence]).__enter__()
    first.run_ops()
    sequence.grow(8)
    second = cache.step([sequence]).__enter__()
    second.run_ops()
    first.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(ProtocolError, match="computed from 8 on, and the step before it failed"):
        second.__exit__(None, None, None)
    assert sequence.committed == 0
    sequence.close()
    assert cache.peek(TOKENS) == 0


def test_steps_that_end_in_order_commit_in_order() -> None:
    cache = cache_of(part("path", Path()))
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        first = cache.step([sequence]).__enter__()
        sequence.grow(8)
        second = cache.step([sequence]).__enter__()
        first.__exit__(None, None, None)
        assert sequence.committed == 8
        second.__exit__(None, None, None)
        assert sequence.committed == 16


@pytest.mark.parametrize("tokens, facts", [(4, {}), (1, {"max_rewind": 3})], ids=["whole", "small"])
def test_step_keeps_no_checkpoint_if_the_layers_of_a_later_step_have_run(tokens: int, facts: dict[str, int]) -> None:
    """The copy would be enqueued behind them, and have the state that they left."""
    cache = cache_of(part("path", Path()), part("state", Point(), checkpoint_every=4, **facts), slots=20, **facts)
    sequence, states = cache.open(TOKENS), cache.pool("state").buffers["data"]

    def begin(count: int) -> Step:
        sequence.grow(count)
        step = cache.step([sequence]).__enter__()
        step.run_ops()
        for slot in [*sequence.pages("state"), *sequence.rewind_slots("state")]:
            states[:, slot] = sequence.reserved
        return step

    if tokens < 4:
        begin(4 - tokens).__exit__(None, None, None)
    first, second = begin(tokens), begin(tokens)
    first.__exit__(None, None, None)
    second.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    sequence.close()
    assert cache.stats().components["path"].cached == 1
    assert cache.peek(TOKENS) == 0


def test_a_batch_commits_as_a_whole_or_not_at_all() -> None:
    cache = cache_of(part("path", Path()))
    one, other = cache.open(TOKENS[:8]), cache.open(TOKENS[8:16])
    one.grow(4)
    other.grow(4)
    ahead = cache.step([other]).__enter__()
    other.grow(4)
    with pytest.raises(ProtocolError, match="has not ended"), cache.step([one, other]) as step:
        step.run_ops()
    assert (one.committed, other.committed) == (0, 0)
    ahead.__exit__(None, None, None)
    one.abort()
    other.abort()


def _with_an_open_step(**facts: Any) -> tuple[Cache, Running, Step, Step]:
    """A cache, a sequence and its step of 8 tokens. While that is open, the sequence gets a page that another one had
    when a later step, which is open as well, began.
    """
    state = Component("state", Manifest([Buffer("data", (4,), "float32")], **facts), Point())
    cache = cache_of(part("path", Path()), state, tokens=24, slots=16, max_running=3)
    sequence, another = cache.open(range(100)), cache.open(range(200, 300))
    sequence.grow(8)
    another.grow(16)
    step = cache.step([sequence]).__enter__()
    step.run_ops()
    later = cache.step([cache.open(range(300, 400))]).__enter__()
    later.run_ops()
    another.abort()
    sequence.grow(4)
    return cache, sequence, step, later


def test_step_keeps_its_checkpoint_when_its_sequence_has_a_page_of_a_step_that_is_open() -> None:
    cache, sequence, step, later = _with_an_open_step(checkpoint_every=4)
    step.__exit__(None, None, None)
    assert sequence.committed == 8
    later.__exit__(None, None, None)
    sequence.grow(1)
    with cache.step([sequence]) as again:
        again.run_ops()
    sequence.close()
    assert cache.peek(range(9)) == 8


@pytest.mark.parametrize("end", ["publish", "close"])
def test_publication_leaves_a_coded_state_out_when_its_sequence_has_a_page_of_a_step_that_is_open(end: str) -> None:
    cache, sequence, step, later = _with_an_open_step(stored_as=Codec("int8", 0.1))
    step.__exit__(None, None, None)
    getattr(sequence, end)()
    figures = cache.stats()
    assert (figures.components["path"].cached, figures.components["state"].cached) == (2, 0)
    assert figures.skipped_checkpoints == 1
    later.__exit__(None, None, None)


def test_a_state_that_was_only_copied_may_become_the_trees_again() -> None:
    """Its own was evicted meanwhile, and at the end of the sequence the tree takes what has the same content."""
    cache = cache_of(part("path", Path()), part("state", Point(), admission="branch-and-last"))
    serve(cache, range(8))
    with cache.open(range(8)) as sequence:
        assert sequence.ready == 8
        with cache.step([sequence]) as step:
            step.run_ops()
        cache.evict({"state": 1})
        assert cache.peek(range(8)) == 0
    assert cache.peek(range(8)) == 8
    settle(cache)


def test_room_is_found_in_what_a_rewound_sequence_need_not_keep() -> None:
    """It may be rewound by one token more, to 33: so no boundary below 32 matters, and 32 needs nothing before 11."""
    cache = cache_of(part("window", Window(22)), max_rewind=3, tokens=48)
    sequence = cache.open(range(36))
    run(sequence, 8)
    sequence.publish()
    run(sequence, 28)
    sequence.rewind(2)
    with cache.open(range(100, 118)) as other:
        other.grow(18)  # five pages: three are free, and nothing needs two that are published
    sequence.abort()


def test_tokens_that_replace_rewound_ones_are_published_under_their_own_key() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(6)))
    serve(cache, range(17))
    cache.evict({"window": 4})
    with cache.open(range(17)) as sequence:  # its keys agree with 16 cached tokens, and nothing can be resumed at
        assert sequence.ready == 0
        sequence.grow(17)
        sequence.rewind(9)
        others = [*range(8), *range(50, 59)]
        sequence.append(others[8:])
        run(sequence, 9)
    assert cache.peek(others) == 16
    settle(cache)
