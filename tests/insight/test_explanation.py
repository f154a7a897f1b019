"""Why a prompt missed, as ``Cache.explain`` says it: each kind of a miss by its name, and what would have helped.

That every token which did not hit has one reason, and that what is said to have gone has been there, is checked by the
random model.
"""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest

from prefixloom import (
    Component,
    Explanation,
    Identity,
    InputError,
    PageChain,
    Path,
    Point,
    Reach,
    ThreadStream,
    TierManifest,
    Window,
    hookimpl,
)
from prefixloom.insight.history import AGES, Histogram, Paths
from prefixloom.keys.tokens import encode
from prefixloom.storage import Refused
from prefixloom_hicache import HostTier, MemoryBackend
from tests.support.helpers import cache_of, part, path_cache, serve
from tests.support.stores import composed, idle

TOKENS = list(range(100, 140))


def reasons(told: Explanation) -> list[tuple[int, int, str, str]]:
    return [(each.start, each.end, each.reason, each.component) for each in told.findings]


class UpTo20(Component):
    """Rejects every boundary above 20, at once or page by page."""

    by_page = False

    @hookimpl
    def create_match_validator(self) -> Any:
        return lambda view: max(min(view.boundary, 20), view.boundary - 4 if self.by_page else 0)


class UpTo20ByPage(UpTo20):
    by_page = True


def path_and(name: str, reach: Reach, kind: type[Component] = Component, **facts: Any) -> Any:
    """Return a maker of a cache of a path and one more component."""
    return lambda *tiers: cache_of(part("path", Path()), part(name, reach, kind, **facts), *tiers, tokens=80)


def below(make: Any) -> Any:
    return lambda: make(HostTier(TierManifest(capacity=4096)))


PARTED, IMAGES = [1, 2, 3, 4], [(2, 3, "dog"), (0, 1, "cat")]
STATE, NEVER = path_and("state", Point()), "a step that ends at 36, with its state published"
CHOSEN = path_and("state", Point(), admission="branch-and-last")
LOOKING = lambda: cache_of(part("path", Path(), lookahead=2))  # noqa: E731
CASES: dict[str, tuple[Any, list[Any], Any, dict[str, Any], Any, str]] = {
    "first time": (path_cache, [], TOKENS, {}, [(0, 40, "new", "")], "nothing that begins so has been cached."),
    "no step left a state": (
        STATE, [TOKENS], TOKENS[:38], {}, [(0, 36, "never kept", "state"), (36, 38, "page", "")], NEVER,
    ),
    "a policy did not want a state": (
        CHOSEN, [(TOKENS, {"chunk": 20})], [*TOKENS[:20], 7, 7, 7, 7], {}, [(0, 20, "refused", "state")],
        "a policy did not want it",
    ),
    "a prompt parts inside of a page": (
        path_cache, [TOKENS], [*TOKENS[:22], *range(10)], {}, [(20, 24, "branch", ""), (24, 32, "new", "")],
        "2 tokens of the page of 4 that begins at 20",
    ),
    "a prompt parts at a node": (path_cache, [TOKENS], [*TOKENS, *PARTED], {}, [(40, 44, "new", "")], ""),
    "a prompt parts in a node below": (
        path_cache, [TOKENS, [*TOKENS, 1, 2, 3, 9]], [*TOKENS, *PARTED], {}, [(40, 44, "branch", "")], "",
    ),
    "used longest ago": (
        lambda: path_cache(tokens=80), [range(40), range(50, 90), range(90, 130)], [*range(40), 7, 7, 7, 7], {},
        [(0, 40, "evicted", "path"), (40, 44, "new", "")], "to make room",
    ),
    "gone with extra keys": (
        path_cache, [(TOKENS, {"extra": IMAGES}), {"path": 40}], TOKENS, {"extra": IMAGES[::-1]},
        [(0, 40, "evicted", "path")], "",
    ),
    "below the device": (
        below(STATE), [TOKENS, {"path": 20}], TOKENS, {}, [(0, 40, "below", "path")], "can bring back 40 tokens",
    ),
    "no tier has the state": (
        below(STATE), [TOKENS, {"path": 20}], [*TOKENS[:30], 1, 2], {}, [(0, 28, "never kept", "state")], "",
    ),
    "no tier has a state where a node ends": (
        below(CHOSEN), [(TOKENS, {"chunk": 8}), {"path": 20}], [*TOKENS[:16], *PARTED], {},
        [(0, 16, "refused", "state")], "",
    ),
    "content depends on what follows": (LOOKING, [[*TOKENS, 1, 2]], TOKENS, {}, [(36, 40, "lookahead", "")], ""),
    "left to compute": (
        LOOKING, [[*TOKENS, 1, 2]], [*TOKENS, 1, 2], {"leave": 9}, [(32, 40, "left", ""), (40, 42, "page", "")], "",
    ),
    "a plugin rejects": (
        path_and("near", Path(), UpTo20), [TOKENS], TOKENS, {}, [(20, 40, "plugin", "near")], "",
    ),
    "a plugin rejects one after another": (
        path_and("near", Window(10), UpTo20ByPage), [TOKENS], TOKENS, {}, [(20, 40, "plugin", "near")], "",
    ),
}  # fmt: skip
"""A cache, what it serves (prompts, some with options) and evicts (counts by component), a prompt, how it is asked, the
first reasons why it misses, and words of the explanation."""


@pytest.mark.parametrize("case", CASES)
def test_explanation_names_the_reason(case: str) -> None:
    make, script, tokens, options, expected, words = CASES[case]
    cache = make()
    cache.history()
    for each in script:
        if isinstance(each, dict):
            cache.evict(each)
        else:
            served, how = each if isinstance(each, tuple) else (each, {})
            serve(cache, served, **how)
    told = cache.explain(tokens, **options)
    assert reasons(told)[: len(expected)] == expected
    assert words in str(told)


def test_a_window_that_was_evicted_says_by_whom_and_how_many_pages_were_lacking() -> None:
    cache = cache_of(part("path", Path()), part("near", Window(10)), capacity={"near": 40})
    cache.history()
    serve(cache, TOKENS)
    serve(cache, [1] * 40, label="the other")
    told = cache.explain(TOKENS)
    (finding,) = told.findings
    assert (finding.reason, finding.component, finding.lacks) == ("evicted", "near", ((28, 40),))
    assert (told.ready, told.alone) == (0, {"path": 40, "near": 0})
    assert finding.loss is not None and (finding.loss.cause, finding.loss.by) == ("room", "the other")
    assert finding.pages == 3, "so many pages of its window are gone"
    assert "evicted to make room for 'the other' from the device" in str(told)
    assert f"{finding.pages} more pages of 'near' on the device" in str(told)


@pytest.mark.parametrize(
    ("untils", "now", "reason"),
    [
        ((5,), 5, "expired"),
        ((5,), 4, "evicted"),
        ((5, 9), 8, "evicted"),
        ((5, math.inf), 8, "evicted"),
        ((), 8, "evicted"),
    ],
)
def test_what_went_first_since_its_time_had_passed_says_so(untils: tuple[float, ...], now: float, reason: str) -> None:
    """What several used is wanted until the latest of their times."""
    cache = path_cache(capacity={"path": 44})
    cache.history()
    for until in untils or (math.inf,):
        serve(cache, TOKENS, until=until)
    cache.expire(now)
    cache.expire(now - 3)  # a clock that goes back changes nothing
    assert not reasons(cache.explain(TOKENS)), "it is not freed yet"
    serve(cache, [1] * 44, label="the other")
    (finding, *_) = cache.explain(TOKENS).findings
    assert finding.reason == reason
    assert finding.loss is not None and (finding.loss.cause, finding.loss.by) == (
        "expired" if reason == "expired" else "room", "the other",
    )  # fmt: skip
    assert finding.help.startswith("a later time until which it is wanted or about ") == (reason == "expired")


def test_a_state_for_which_there_was_no_slot() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()), slots=2)
    cache.history()
    with cache.open([1] * 8) as other:  # has one of the two slots
        serve(cache, TOKENS, chunk=20)
        told = cache.explain([*TOKENS[:20], 7, 7, 7, 7])
        assert (20, 24, "new", "") in reasons(told)
        assert reasons(told)[0] == (0, 20, "refused", "state")
        assert "no slot could be had" in str(told)
        assert other.open


def test_another_namespace_and_another_adapter() -> None:
    cache = path_cache()
    cache.history()
    cache.identity = Identity(model="m", weights="1")
    serve(cache, TOKENS, namespace="a")
    told = cache.explain([*TOKENS, 1, 2, 3, 4], namespace="b")
    assert reasons(told) == [(0, 40, "namespace", ""), (40, 44, "new", "")]
    assert "in 'a'" in str(told)
    assert reasons(cache.explain(TOKENS, namespace="b", closely=False)) == [(0, 40, "new", "")]
    cache.identity = Identity(model="m", weights="1", adapters="tuned")
    assert reasons(cache.explain(TOKENS, namespace="a")) == [(0, 40, "identity", "")]


def test_a_prompt_that_is_larger_than_a_pool() -> None:
    cache = path_cache(tokens=80)
    cache.history()
    with pytest.raises(InputError, match="longer than the pool"):
        serve(cache, range(100))
    told = cache.explain(range(100))
    assert reasons(told) == [(0, 100, "too large", "path")]
    assert "the pool of 'path' holds 80 tokens" in str(told)


def test_a_page_that_the_store_refused() -> None:
    class Full(MemoryBackend):
        def put(self, records: Any) -> Any:
            return tuple(Refused(record.key, "capacity", "no room for 10 pages") for record in records)

    store = Full(capacity=1 << 20)
    cache, _ = composed(part("path", Path()), store=store, host=40, tokens=40)
    cache.history()
    for first in range(0, 4000, 1000):
        serve(cache, range(first, first + 40))
        idle(cache)
    told = cache.explain(range(2000, 2040))
    reason = told.findings[0]
    assert reason.reason == "refused" and reason.loss is not None and reason.loss.tier == "store", str(told)
    assert "the store refused it" in str(told) and "capacity: no room for 10 pages" in str(told)


def test_what_a_history_has_forgotten_is_not_said_to_be_never_stored() -> None:
    cache = cache_of(part("path", Path()), part("near", Window(10)), tokens=400)
    serve(cache, TOKENS)
    cache.evict({"near": 64})
    cache.history()
    assert "of which all is known" in str(cache.explain(TOKENS))
    other = cache_of(part("path", Path()), part("near", Window(10)), tokens=400, capacity={"near": 80})
    other.history(most=4)
    for first in range(0, 5000, 1000):
        serve(other, range(first, first + 40))
    assert other.explain(range(40)).findings[0].reason in ("never kept", "evicted")
    assert other.explain(range(40)).since is not None


def test_a_sequence_may_be_explained_later() -> None:
    cache = path_cache(tokens=160)
    with cache.open(TOKENS) as first, cache.open(range(40)) as second:
        serve(cache, range(1000, 1040))
        cache.evict(1000)
        for sequence in (first, second):
            told = cache.account(sequence)
            assert sum(each.tokens for each in told.findings) == 40 - told.ready


def test_what_failed_was_flushed_or_dropped() -> None:
    stream = ThreadStream("forward")
    cache = path_cache()
    cache.history()
    with cache.open(TOKENS) as sequence:
        sequence.grow(40)
        with cache.step([sequence]) as step:
            step.run_ops(stream)
            stream.run(_fail)
        sequence.publish()
        stream.close()
        cache.poll()
    told = cache.explain(TOKENS)
    assert reasons(told) == [(0, 40, "failed", "path")]
    serve(cache, TOKENS, namespace="gone")
    cache.drop_namespace("gone")
    assert reasons(cache.explain(TOKENS, namespace="gone")) == [(0, 40, "flushed", "path")]
    assert "its namespace was dropped" in str(cache.explain(TOKENS, namespace="gone"))
    serve(cache, TOKENS)
    cache.flush()
    assert "the cache was flushed" in str(cache.explain(TOKENS))


def _fail() -> None:
    raise RuntimeError("the layers failed")


def test_without_a_history_it_is_said_that_none_is_kept() -> None:
    cache = cache_of(part("path", Path()), part("near", Window(10)))
    serve(cache, TOKENS)
    cache.evict({"near": 64})
    told = cache.explain(TOKENS)
    assert reasons(told) == [(0, 40, "absent", "near")]
    assert "no history is kept" in str(told)
    history = cache.history()
    assert cache.history() is history
    history.close()
    assert reasons(cache.explain(TOKENS)) == [(0, 40, "absent", "near")]
    again = cache.history()
    assert again is not history
    cache.evict(40)
    again.close()
    cache.poll()
    assert not again.remembered, "it follows no longer"


def test_a_history_that_missed_changes_begins_again_with_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixloom.insight.history.CHANGES", 2)
    now = [100.0]
    cache = path_cache(tokens=80)
    history = cache.history(clock=lambda: now[0])
    for first in (0, 100, 200):
        serve(cache, range(first, first + 8))
    now[0] = 110.0
    history.poll()
    cache.evict(2)
    now[0] = 130.0
    history.poll()
    ages = history.losses("path", "device").ages
    assert (history.since, sum(ages.counts), ages.sum) == (110.0, 2, 2 * 20.0)


def test_a_history_remembers_so_many_losses_and_no_tokens() -> None:
    cache = path_cache(tokens=80)
    history = cache.history(most=16)
    for first in range(0, 20000, 1000):
        serve(cache, range(first, first + 40))
    assert cache.explain(range(18000, 18040)).ready == 40
    assert reasons(cache.explain(range(17000, 17040))) == [(0, 40, "evicted", "path")]
    old = cache.explain(range(40))
    assert reasons(old) == [(0, 40, "new", "")]
    assert "longer ago than the last losses that are remembered" in str(old)
    assert 0 < history.remembered <= 16
    with pytest.raises(InputError, match="at least 1 loss"):
        path_cache().history(0)


def test_an_explanation_is_data_as_well_and_changes_nothing() -> None:
    cache = path_cache(tokens=80)
    cache.history()
    for first in (0, 1000, 2000):
        serve(cache, range(first, first + 40))
    before = cache.contents(), cache.stats()
    plan = cache.match(range(60), leave=5)
    told = cache.explain(plan)
    assert (cache.contents(), cache.stats()) == before
    assert told == cache.explain(range(60), leave=5) or told.findings == cache.explain(range(60), leave=5).findings
    data = json.loads(json.dumps(told.as_dict()))
    assert [each["reason"] for each in data["findings"]] == ["evicted", "new", "left"]
    assert data["findings"][0]["loss"]["cause"] == "room"
    assert data["findings"][0]["loss"]["seconds_cached"] >= 0


def test_missed_tokens_are_counted_by_component_and_add_up() -> None:
    cache = cache_of(part("path", Path()), part("near", Window(10)))
    serve(cache, TOKENS)
    cache.evict({"near": 64})
    serve(cache, [*TOKENS, *range(12), 1], leave=1)
    stats = cache.stats()
    assert {name: each.missed_tokens for name, each in stats.components.items()} == {"path": 0, "near": 40}
    assert stats.new_tokens == 40 + 12
    assert stats.asked_tokens - stats.hit_tokens - stats.new_tokens - 40 == 1


def test_a_history_counts_losses_and_how_long_after_them_a_prompt_missed() -> None:
    now = [100.0]
    cache = path_cache(tokens=80)
    history = cache.history(clock=lambda: now[0])
    serve(cache, TOKENS)
    history.poll()
    for _ in range(2):
        with cache.open([*TOKENS, 1], leave=1) as sequence:
            now[0] += 1
            cache.account(sequence)
    assert [(each.tokens, each.hits, each.last) for each in history.hot.values()] == [(40, 2, 102.0)]
    now[0] = 160.0
    cache.evict(40)
    history.poll()
    now[0] = 165.0
    with cache.open([*TOKENS, *range(4)]) as sequence:
        cache.account(sequence)
    losses = history.losses("path", "device")
    (loss,) = history.recent
    assert (loss.when, loss.component, loss.tier, loss.figure, loss.count) == (160.0, "path", "device", "asked", 10)
    assert (losses.count, losses.causes, losses.ages.sum, losses.gaps.sum) == (10, {"asked": 10}, 10 * 60.0, 5.0)
    assert (sum(losses.ages.counts), sum(losses.gaps.counts)) == (10, 1)
    assert losses.ages.counts[AGES.index(60.0)] == 10, "a bound is the largest time that falls below it"
    now[0] += 2 * AGES[-1]
    with cache.open([*TOKENS, *range(4)]) as sequence:
        cache.account(sequence)
    assert losses.gaps.counts[-1] == 1, "above the last bound"


@pytest.mark.parametrize("lookahead", [0, 2])
def test_numbers_of_a_path_do_not_depend_on_what_was_asked_before(lookahead: int) -> None:
    chance = random.Random(5)
    kept = Paths(PageChain(4, lookahead))
    for _ in range(600):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 5))] * chance.randrange(1, 8)
        extra = [(0, 1, "key")] if chance.random() < 0.3 else []
        upto = chance.randrange(max(0, len(tokens) - lookahead) // 4 + 1) * 4
        path = encode(tokens).keyed(extra)
        assert kept.of("", path, upto) == Paths(PageChain(4, lookahead)).of("", path, upto)


def test_figures_have_names_kinds_and_samples_of_one_form() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()), HostTier(TierManifest(capacity=4096)), tokens=80)
    cache.history()
    serve(cache, TOKENS)
    cache.evict({"path": 20})
    figures = cache.figures()
    assert len({each.name for each in figures}) == len(figures) > 20
    for each in figures:
        assert re.fullmatch("prefixloom:[a-z_]+", each.name), each
        assert each.kind in ("counter", "gauge", "histogram"), each
        assert " " in each.help, each
        assert {isinstance(value, Histogram) for _, value in each.samples} <= {each.kind == "histogram"}, each
