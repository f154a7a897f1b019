"""The kit held against other caches: a broken one is caught by what it breaks, ours passes, and peers are tried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.engines.ours_kit import OurCache
from prefixloom.script import Failure, failure, play
from prefixloom.testing.foreign import command
from prefixloom.testing.foreign.command import ForeignSetup, find_adapter, report_on_foreign
from prefixloom.testing.foreign.contract import AdapterUnavailable, ForeignCache
from prefixloom.testing.foreign.hits import hit_rows
from prefixloom.testing.foreign.orders import explore_orders, interleavings, plans_of
from prefixloom.testing.foreign.traffic import ForeignWriter
from tests.support import foreign_cache as listed

TIGHT, ROOMY = (64, 15), (400, 60)


def failures(adapter: type[ForeignCache], components: str = "FM", page: int = 4, seeds: int = 40) -> Iterator[Failure]:
    for tokens, states in (TIGHT, ROOMY):
        world = ForeignSetup(components, page, tokens, states).world(adapter)
        for seed in range(seeds):
            found = failure(world, ForeignWriter(f"test {tokens} {seed}", 4).script(60))
            if found is not None:
                yield found


@pytest.mark.parametrize("components", ["F", "FM"])
@pytest.mark.parametrize("page", [1, 4])
def test_a_right_cache_passes(components: str, page: int) -> None:
    assert list(failures(listed.ListedCache, components, page, seeds=25)) == []


@pytest.mark.parametrize(
    ("adapter", "topics"),
    [
        (listed.ForgetsTheNamespace, {"content"}),
        (listed.ForgetsTheState, {"content"}),
        (listed.SnapshotsTooEarly, {"content"}),
        (listed.UnlocksTooFar, {"content", "owners"}),
        (listed.LocksNothing, {"content", "owners"}),
        (listed.FreesTwice, {"owners"}),
        (listed.LosesAState, {"lost"}),
        (listed.NamesNoSlot, {"absent"}),
        (listed.RaisesOnRetraction, {"raised"}),
    ],
)
def test_a_broken_cache_is_caught(adapter: type[ForeignCache], topics: set[str]) -> None:
    found = next(failures(adapter), None)
    assert found is not None, "nothing was found"
    assert found.topic in topics, found


def test_what_is_cached_for_a_pass_that_never_ran_is_caught() -> None:
    """The second request needs room, the first is retracted from the pass that is being made, and comes again."""
    first, second = tuple(range(12)), tuple(range(100, 108))
    opened = [("open", first, "", 0), ("open", second, "", 0), ("pass", ((0, 4), (1, 4)))]
    script = [*opened, ("pass", ((0, 8), (1, 4))), ("finish", 0), ("pass", ((0, 12),))]
    setup = ForeignSetup("F", 4, 16, 0)
    found = failure(setup.world(listed.PublishesBeforehand), script)
    assert found is not None
    assert found.topic == "content"
    assert "request 0 again, for the token at 8, reads 'kv' of the token at 4" in found.sentence
    assert failure(setup.world(listed.ListedCache), script) is None


def test_the_scripts_meet_what_they_are_for() -> None:
    counts: dict[str, int] = {}
    for seed in range(25):
        player = play(
            ForeignSetup("FM", 4, *TIGHT).world(listed.ListedCache), ForeignWriter(f"met {seed}", 4).script(60)
        )
        for what, count in player.counts.items():
            counts[what] = counts.get(what, 0) + count
    assert {what for what, count in counts.items() if count >= 5} >= {
        "hit", "miss", "finished", "aborted", "retracted", "refused", "passes",
    }  # fmt: skip


def test_a_snapshot_that_is_taken_early_is_shown_with_the_order_that_shows_it() -> None:
    plans = plans_of(4)["two prompts that begin alike"]
    make = ForeignSetup("FM", 4, *ROOMY).make(listed.SnapshotsTooEarly)
    with pytest.raises(Failure, match="content") as failed:
        explore_orders(make, plans)
    assert "scheduler" in failed.value.sentence and "layers" in failed.value.sentence  # the order is told
    report = explore_orders(ForeignSetup("FM", 4, *ROOMY).make(listed.ListedCache), plans)
    assert report.schedules > report.interleavings
    assert len(report.outcomes) == 1


def test_hits_that_depend_on_the_order_are_told() -> None:
    plans = plans_of(4)["two prompts that begin alike"]
    with pytest.raises(Failure, match="order: what hits in the end depends on the order"):
        explore_orders(ForeignSetup("F", 4, *ROOMY).make(listed.HitsByOrder), plans)


def test_interleavings_keep_the_order_of_each_request() -> None:
    assert list(interleavings([2, 1])) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_a_cache_that_never_hits_is_told_so() -> None:
    world = ForeignSetup("F", 4, *ROOMY).world(listed.NeverHits)
    assert failure(world, ForeignWriter("never", 4).script(60)) is None
    rows = hit_rows(ForeignSetup("F", 4, *ROOMY).make(listed.NeverHits), 4)
    assert all(row.hit == 0 < row.could for row in rows)
    rows = hit_rows(ForeignSetup("F", 4, *ROOMY).make(listed.ListedCache), 4)
    assert [row.hit for row in rows] == [row.could for row in rows]


@pytest.mark.parametrize("components", OurCache.sets)
@pytest.mark.parametrize("page", OurCache.page_sizes)
def test_our_own_cache_passes(components: str, page: int) -> None:
    assert list(failures(OurCache, components, page, seeds=2)) == []


def test_our_own_cache_gives_the_same_answers_in_every_order() -> None:
    for plans in plans_of(4).values():
        report = explore_orders(ForeignSetup("FSM", 4, *ROOMY).make(OurCache), plans, schedules=3)
        assert len(report.outcomes) <= 1


def test_the_report_says_what_was_done_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_on_foreign(listed.LosesAState, ["FM"], seeds=10, schedules=2)
    assert {found.topic for found in report.findings} == {"lost"}
    assert all(len(found.script) <= 12 for found in report.findings)
    setups = [found.setup for found in report.findings if found.script]
    assert len(setups) == len({*map(str, setups)}), "of one setup and topic, the first script stands for all"
    shown = next(found for found in report.findings if found.script)
    name = "tests.support.foreign_cache:LosesAState"
    assert command.main([name, "--on", str(shown.setup), "--play", repr(list(shown.script))]) == 1
    assert "lost: " in capsys.readouterr().out
    name = "tests.support.foreign_cache:ListedCache"
    assert command.main([name, "--on", str(shown.setup), "--play", repr(list(shown.script))]) == 0
    assert command.main([name, "--sets", "F", "--seeds", "2", "--schedules", "1"]) == 0
    out = capsys.readouterr().out
    assert "listed (ListedCache): 4 scripts, 0 findings" in out
    assert "hits on F:4:400:60: the same prompt again: 24 of 24" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sets", "F,Z"], "has no components Z; it has F"),
        (["--on", "Z:4:16:0", "--play", "[]"], "has no components Z; it has F"),
        (["--on", "F:4", "--play", "[]"], "--on is components:page:tokens:states"),
        (["--play", "open"], "--play is a list of operations"),
        (["--play", "[('fly',)]"], "no operation 'fly' in ('fly',); there are abort, device"),
    ],
)
def test_wrong_options_are_refused_and_are_no_findings(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["tests.support.foreign_cache:ListedCache", *options])
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_is_no_adapter_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nobody"]) == 2
    assert "'nobody': No module named 'nobody'" in capsys.readouterr().err
    assert command.main(["tests.support.foreign_cache:SlotContent"]) == 2
    assert command.main(["tests.support.foreign_cache:Nobody"]) == 2
    assert find_adapter("tests.support.foreign_cache:ListedCache") is listed.ListedCache


@pytest.mark.parametrize("name", ["bench.engines.sglang:SGLangCache", "bench.engines.vllm:VLLMCache"])
def test_a_peer_passes_a_few_scripts(name: str) -> None:
    """``docs/peers.md`` has what many find."""
    try:
        adapter = find_adapter(name)
    except AdapterUnavailable as error:
        pytest.skip(str(error))
    assert list(failures(adapter, "FM", adapter.page_sizes[-1], seeds=3)) == []
