"""Faults from outside: reaches that raise, interrupts in the middle of a hook, copied handles, broken policies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from prefixloom import (
    BrokenError,
    Claim,
    Component,
    CompositionError,
    EvictionPolicy,
    InvariantError,
    Path,
    PluginError,
    Point,
    ProtocolError,
    Reach,
    SplitRule,
    WalkView,
    Window,
    hookimpl,
)
from prefixloom.contract.reach import Interval
from prefixloom.tree.path_lane import PathLane
from tests.support.helpers import cache_of, part, path_cache, run, serve, settle
from tests.support.setups import FIFO

TOKENS = list(range(100, 140))


class Moody(Reach):
    """A window in plain Python that can be made to raise."""

    raising = False

    def needs(self, n: int) -> tuple[Interval, ...]:
        if self.raising:
            raise RuntimeError("moody")
        return ((max(0, n - 7), n),) if n else ()

    def until(self, p: int) -> float:
        return p + 7


def test_a_publication_that_fails_half_way_ends_its_sequence() -> None:
    """The tree has what was handed over, a state among it, and the lease does not cover that: it cannot go on."""
    reach = Moody()
    cache = cache_of(part("path", Path()), part("moody", reach), part("state", Point()), slots=4, debug=False)
    sequence = cache.open(TOKENS[:24])
    run(sequence, 8)
    reach.raising = True
    with pytest.raises(PluginError, match="moody") as raised:
        sequence.publish()
    reach.raising = False
    assert not sequence.open
    assert sequence.failed is raised.value
    with pytest.raises(ProtocolError, match="or its publication did") as refused:
        sequence.grow(8)
    assert refused.value.__cause__ is raised.value
    sequence.close()
    sequence.abort()
    assert serve(cache, TOKENS[:24]) in (0, 8), "what was handed over may be there"
    cache.flush()
    assert sorted(cache.pool("state").free_ids()) == [0, 1, 2, 3]
    settle(cache)


@pytest.mark.parametrize("needs", [((-4, 8),), None, ((0.0, 8.0),), ((8, 4),), ((0, 99),)])
def test_a_wrong_answer_of_a_reach_is_a_plugin_error_and_is_not_remembered(needs: Any) -> None:
    class Odd(Reach):
        odd = False

        def needs(self, n: int) -> Any:
            return needs if self.odd and n else ((max(0, n - 3), n),)

        def until(self, p: int) -> Any:
            return -1 if self.odd else p + 3

    reach = Odd()
    cache = cache_of(part("odd", reach), page=4)
    assert serve(cache, range(9)) == 0
    reach.odd = True
    with pytest.raises(PluginError, match=r"component 'odd': (needs|until)\(\d+\) of its reach"):
        serve(cache, range(13))
    reach.odd = False
    assert serve(cache, range(13)) == 12, "what was computed is there, though its publication failed"


class KeepsTheEnd(Component):
    @hookimpl
    def commit_insert(self, walk: WalkView) -> Claim | None:
        return Claim(keep=((walk.boundary - 4, walk.boundary),)) if walk.last else None


class KeepsNothing(Component):
    @hookimpl
    def commit_insert(self, walk: WalkView) -> Claim | None:
        return Claim(keep=())


def test_a_publication_gives_back_nothing_when_the_reach_of_another_component_raises_before_it() -> None:
    """The pages that a plugin does not want to keep were given back while the other components were still asked."""
    reach = Moody()
    reach.convex = True
    cache = cache_of(part("near", Window(6), kind=KeepsNothing), part("moody", reach, kind=KeepsNothing))
    with cache.open(TOKENS) as sequence:
        run(sequence, 20)
        owned = sequence.owned("near"), sequence.pages("near")
        reach.raising = True
        with pytest.raises(PluginError, match="moody"):
            sequence.publish()
        reach.raising = False
        assert (sequence.owned("near"), sequence.pages("near")) == owned
        assert sequence.publish() == 20
    settle(cache)


@pytest.mark.parametrize("kind", [Component, KeepsTheEnd])
@pytest.mark.parametrize("first", ["path", "moody"])
def test_what_a_failed_publication_handed_over_may_be_evicted(first: str, kind: type[Component]) -> None:
    reach = Moody()
    parts = [part("path", Path()), part("moody", reach, kind=kind), part("state", Point())]
    cache = cache_of(*parts[:: 1 if first == "path" else -1], slots=4, debug=False)
    sequence = cache.open(TOKENS[:24])
    run(sequence, 8)
    reach.raising = True
    with pytest.raises(PluginError, match="moody"):
        sequence.publish()
    reach.raising = False
    cache.evict(dict.fromkeys(("path", "moody", "state"), 1000))
    for name, pages in cache.stats().components.items():
        assert (pages.free, pages.cached, pages.leased) == (pages.capacity, 0, 0), name
    assert cache.stats().nodes == 0


@pytest.mark.parametrize("at", ["path", "other"])
def test_what_a_publication_handed_over_that_failed_before_it_is_covered_may_be_evicted(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path's new cells come into the queue when they are covered and released, or by the end of the publication."""
    whole = PathLane.follow

    def failing(lane: PathLane, *given: Any) -> Any:
        if lane.name == at:
            raise PluginError(at)
        return whole(lane, *given)

    parts = part("path", Path(), kind=KeepsTheEnd), part("other", Path(), kind=KeepsTheEnd), part("state", Point())
    cache = cache_of(*parts, slots=4, debug=False)
    sequence = cache.open(TOKENS[:24])
    run(sequence, 8)
    with monkeypatch.context() as patch:
        patch.setattr(PathLane, "follow", failing)
        with pytest.raises(PluginError):
            sequence.publish()
    assert cache.stats().components[at].cached == 2
    cache.evict(dict.fromkeys(("path", "other", "state"), 1000))
    for name, pages in cache.stats().components.items():
        assert (pages.free, pages.cached, pages.leased) == (pages.capacity, 0, 0), name
    assert cache.stats().nodes == 0


class Interrupted(Component):
    """Is interrupted in whatever hook is asked."""

    interrupted = False

    def maybe(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> SplitRule | None:
        self.maybe()
        return None

    @hookimpl
    def evict_component(self, node: Any, tier: Any) -> Claim | None:
        self.maybe()
        return None


@pytest.mark.parametrize("verb", ["open", "evict"])
@pytest.mark.parametrize("reach", [Path(), Window(9)], ids=repr)
def test_after_an_interrupt_in_a_hook_all_is_refused_but_what_ends_until_a_flush(reach: Reach, verb: str) -> None:
    cache = cache_of(part("path", Path()), part("it", reach, kind=Interrupted))
    serve(cache, TOKENS, chunk=20)
    lease, sequence = cache.lease(cache.match(TOKENS[:20])), cache.open(TOKENS[:20])
    cache.composition.parts[1].component.interrupted = True
    with pytest.raises(KeyboardInterrupt), cache.open([1, 2, 3, 4]) as other:
        other.grow(4)
        cache.open([*TOKENS[:28], 1, 2]) if verb == "open" else cache.evict({"it": 64})
    cache.composition.parts[1].component.interrupted = False
    assert not other.open
    words = rf"the cache is broken: KeyboardInterrupt in (Cache.)?{verb}, .*flush\(\)"
    for call in (cache.poll, cache.stats, sequence.close, lambda: cache.peek(TOKENS), lambda: sequence.pages("it")):
        with pytest.raises(BrokenError, match=words):
            call()
    lease.release()
    sequence.abort()
    cache.flush()
    assert [serve(cache, TOKENS), serve(cache, [*TOKENS[:28], 1, 2])] == [0, 28]
    settle(cache)


def handles() -> list[Any]:
    cache = path_cache()
    serve(cache, TOKENS)
    return [cache.pool("path").mint(2), cache.lease(cache.match(TOKENS)), cache.open(TOKENS)]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["span", "lease", "sequence"])
def test_a_handle_is_neither_copied_nor_pickled(which: int) -> None:
    held = handles()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ProtocolError, match=r"cannot be (copied|pickled)"):
            attempt(held[which])
    held[0].free()
    held[1].release()
    held[2].abort()


@pytest.mark.parametrize(
    ("slot", "told"),
    [
        (None, r"path: slot \d+ is owned by the sequence 'one' made at .* and by the sequence 'other' made at "),
        (-2, r"path: the sequence 'other' made at .* has slot -2, which does not exist"),
        (999, r"path: the sequence 'other' made at .* has slot 999, which does not exist"),
    ],
)
def test_debug_mode_names_who_has_anothers_slot_or_one_that_does_not_exist(slot: int | None, told: str) -> None:
    cache = path_cache()
    one, other = cache.open(TOKENS, label="one"), cache.open([9] * 8, label="other")
    for sequence in (one, other):
        run(sequence, 8)
    (mine,), (theirs,) = ([holding for _, holding in each.running.pairs] for each in (one, other))
    honest = theirs.table[0]
    theirs.table[0] = mine.table[0] if slot is None else slot
    with pytest.raises(InvariantError, match=told):
        cache.poll()
    theirs.table[0] = honest
    for sequence in (one, other):
        sequence.abort()
    settle(cache)


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words")


class Rude(Component):
    @hookimpl
    def commit_insert(self, walk: Any) -> Any:
        return Unspeakable()


def test_an_answer_whose_repr_raises_is_counted_like_any_other() -> None:
    cache = cache_of(part("it", Path(), kind=Rude))
    serve(cache, TOKENS)
    assert cache.stats().plugin_errors == 1
    assert cache.peek(TOKENS) == 40


@pytest.mark.parametrize("make", [lambda: None, lambda: 1 / 0], ids=["none", "raises"])
def test_a_policy_that_makes_no_queue_is_refused_at_composition(make: Any) -> None:
    with pytest.raises(CompositionError, match="eviction policy 'broken'"):
        path_cache(policy=EvictionPolicy("broken", make=make))


# ---------------------------------------------------------------- across components


def test_a_keyed_queue_does_not_grow_with_use() -> None:
    cache = path_cache(policy=FIFO)
    for first in range(3):
        serve(cache, [first] * 8)
    for _ in range(300):
        cache.lease(cache.match([0] * 8)).release()
    queue: Any = cache.core.shape.lanes[0].queue
    assert len(queue._queue._heap) <= 4 * 3 + 64, "entries of cells that have left since are forgotten"
    cache.evict({"path": 2})
    assert [cache.peek([first] * 8) for first in range(3)] == [0, 8, 8], "first in, first out, however often used"


def test_a_wrong_count_of_nodes_is_told() -> None:
    cache = path_cache()
    serve(cache, TOKENS)
    cache.core.index.tree.nodes += 1
    with pytest.raises(InvariantError, match="2 nodes are counted, and there are 1"):
        cache.evict(0)


def test_a_reach_that_raises_when_a_step_commits_leaves_no_sequence_behind_its_state() -> None:
    """The layers have written the states of all of them: who were left behind would compute the same tokens twice."""

    class Unsure(Moody):
        def until(self, p: int) -> float:
            if self.raising:
                raise RuntimeError("moody")
            return super().until(p)

    reach = Unsure()
    cache = cache_of(part("path", Path()), part("moody", reach), part("state", Point()), capacity={"moody": 60})
    sequences = [cache.open(range(start, start + 20)) for start in (0, 100, 200)]
    for sequence in sequences:
        sequence.grow(20)
    with pytest.raises(PluginError, match="moody"), cache.step(sequences) as step:
        step.run_ops()
        reach.raising = True  # and the pool is full: what need not be kept goes at once
    reach.raising = False
    assert [sequence.committed for sequence in sequences] == [20, 20, 20]
    for sequence in sequences:
        sequence.close()
    assert cache.peek(range(100, 120)) == cache.peek(range(200, 220)) == 20
    settle(cache)
