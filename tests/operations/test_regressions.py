"""What the property test found in the core, each shrunk to a sentence. Every one of these failed once."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Buffer, Chunk, Codec, Component, Manifest, Path, Point, ProtocolError, Window
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence as Running
from prefixloom.operations.step import Step
from tests.support.helpers import cache_of, part, run, serve, settle

TOKENS = list(range(100, 140))


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
