"""What hooks and policies are shown of extra keys: the spans of the tokens that they are shown."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import AdmissionPolicy, Component, Path, Point, TierManifest, compose, hookimpl
from prefixloom.cache.cache import Cache
from prefixloom.contract.values import WalkView
from prefixloom_hicache import HostTier
from tests.support.helpers import cache_of, finish, part, run, serve

TOKENS = list(range(24))
EXTRA = ((2, 6, "cat"), (10, 12, ("dog", 1)))


class Seeing(Component):
    """Remembers what every hook was shown of extra keys."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[tuple[str, Any]] = []

    def note(self, hook: str, *views: Any) -> None:
        self.seen += [(hook, view) for view in views]

    def of(self, hook: str) -> list[Any]:
        return [view.extra for name, view in self.seen if name == hook]

    @hookimpl
    def create_match_validator(self, tiers: Any) -> Any:
        def valid(walk: Any) -> int:
            self.note("validator", walk)
            return int(walk.boundary)

        return valid

    @hookimpl
    def finalize_match_result(self, walk: Any) -> None:
        self.note("match", walk)

    @hookimpl
    def commit_insert(self, walk: Any) -> None:
        self.note("insert", walk)

    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> None:
        self.note("split", parent, child)

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> None:
        self.note("lock", anchor)

    @hookimpl
    def evict_component(self, node: Any) -> None:
        self.note("evict", *node)

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> None:
        self.note("step", *batch)

    @hookimpl
    def build_hicache_transfers(self, plan: Any, phase: str) -> None:
        self.note(phase, plan)


def watched(lookahead: int = 0) -> tuple[Cache, Any]:
    seeing = part("path", Path(), Seeing, lookahead=lookahead)
    return cache_of(seeing), seeing


def test_a_request_shows_the_spans_that_it_was_opened_and_went_on_with() -> None:
    cache, seeing = watched()
    with cache.open(TOKENS[:8], extra=EXTRA[:1]) as sequence:
        finish(sequence)
        sequence.append(TOKENS[8:], extra=[(2, 4, ("dog", 1))])
        run(sequence, 16)
    assert seeing.of("match") == [EXTRA[:1]]
    assert seeing.of("step") == [EXTRA[:1], EXTRA]
    assert seeing.of("insert") == [EXTRA]
    assert seeing.of("lock") == [(), EXTRA]
    assert cache.peek(TOKENS, extra=EXTRA) == 24
    assert seeing.of("validator")[-1] == seeing.of("match")[-1] == EXTRA


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_node_shows_those_of_its_own_tokens(lookahead: int) -> None:
    cache, seeing = watched(lookahead)
    serve(cache, [*TOKENS, 1, 1], extra=EXTRA)
    cache.lease(cache.match(TOKENS[: 4 + lookahead], extra=[(2, 4 + lookahead, "cat")])).release()
    assert seeing.of("split") == [((2, 4, "cat"),), ((4, 6, "cat"), (10, 12, ("dog", 1)))]
    assert [view.pages for name, view in seeing.seen if name == "split"] == [1, 5]
    assert seeing.of("lock")[-1] == ((2, 4, "cat"),)
    cache.evict(1000)
    assert sorted(seeing.of("evict")) == sorted(seeing.of("split"))


def test_spans_that_meet_are_told_apart() -> None:
    cache, seeing = watched()
    extra = [(0, 4, "cat"), (4, 8, "cat"), (8, 9, "frame"), (9, 10, 1), (10, 11, True)]
    serve(cache, TOKENS, extra=extra)
    cache.evict(1000)
    (shown,) = seeing.of("evict")
    assert sorted(shown, key=str) == sorted([tuple(span) for span in extra], key=str)
    assert {type(key) for start, _, key in shown if start in (9, 10)} == {int, bool}


def test_tokens_without_extra_keys_show_none() -> None:
    cache, seeing = watched()
    serve(cache, TOKENS)
    serve(cache, [*TOKENS[:12], 99, 98, 97, 96], extra=EXTRA[:1])
    serve(cache, [*TOKENS[:12], 99, 98, 97, 96])
    cache.evict(1000)
    shown = [view.extra for _, view in seeing.seen]
    assert set(shown) == {(), EXTRA[:1]}
    assert {view.extra for name, view in seeing.seen if name == "split"} == {()}


def test_a_plan_of_copies_shows_them_both_ways() -> None:
    seeing = part("path", Path(), Seeing)
    cache = cache_of(seeing, HostTier(TierManifest(capacity=1024)))
    serve(cache, TOKENS, extra=EXTRA)
    cache.evict(1000)
    with cache.open([*TOKENS, 5], extra=EXTRA) as sequence:
        assert sequence.restore().ready == 24
    assert seeing.of("backup")[0] == seeing.of("load")[0] == EXTRA
    asked = [view for hook, view in seeing.seen if hook == "validator"]
    assert WalkView("", 24, 25, 24, start=0, extra=EXTRA) in asked, "what lies below is asked about as well"
    assert {view.extra for view in asked} == {EXTRA}


def test_admission_is_shown_those_before_the_state() -> None:
    views: list[Any] = []
    policy = AdmissionPolicy("sees", admit=lambda view: views.append(view) is None)
    state = part("state", Point(), admission=policy)
    cache = compose(None, plugins=[part("path", Path()), state], page_size=4, capacity={"path": 64, "state": 4})
    with cache.open(TOKENS, extra=EXTRA) as sequence:
        for _ in range(3):
            run(sequence, 8)
            sequence.publish()
    assert [(view.boundary, view.extra) for view in views] == [
        (8, EXTRA[:1]), (16, EXTRA), (24, EXTRA)
    ]  # fmt: skip
