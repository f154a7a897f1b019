"""What a journal tells of a cache: that it leads to the contents, on all tiers, and what a late reader is told.

That it agrees with the sets of the random model on the device is checked after each of the model's operations.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from prefixloom import (
    Buffer,
    Cache,
    Change,
    Component,
    InputError,
    Manifest,
    Path,
    Point,
    Sinks,
    ThreadStream,
    TierManifest,
    Window,
    compose,
)  # fmt: skip
from prefixloom_hicache import HostTier

KV = Manifest([Buffer("kv", (2,), "float32")])

Pieces = set[tuple[Any, ...]]


def pieces_of(change: Change) -> Pieces:
    """One for each page of two tokens, or for the state."""
    where = change.tier, change.component, change.namespace
    ends = (
        [p + 2 for lo, hi in change.spans for p in range(lo, hi, 2)] if change.boundary is None else [change.boundary]
    )
    return {(*where, tuple(change.tokens.part(0, end).tolist()), change.tokens.extra) for end in ends}


LABEL = "a request"
BY = {("room", "device"): (LABEL,), ("unneeded", "device"): ("path", "near")}
"""Who may have made a piece go, by cause and tier. Of other causes nobody is told."""


def follow(changes: list[Change], known: Pieces) -> None:
    for change in changes:
        if change.kind == "cleared":
            known.clear()
        if change.kind in ("cleared", "refused"):
            continue
        found = pieces_of(change)
        if change.kind == "stored":
            assert not found & known, change
            assert (change.cause, change.by) == ("", ""), change
            known |= found
        else:
            assert found <= known, change
            assert change.by in BY.get((change.cause, change.tier), ("",)), change
            known -= found


def run(cache: Cache, tokens: list[int], namespace: str, chunk: int) -> None:
    with cache.open(tokens, leave=1, namespace=namespace, extra=[(0, 2, "an image")], label=LABEL) as sequence:
        sequence.restore()
        while sequence.committed < len(tokens):
            sequence.grow(min(chunk, len(tokens) - sequence.committed))
            with cache.step([sequence]) as step:
                step.run_ops()
            sequence.publish()


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("seed", range(3))
def test_on_two_tiers_the_journal_leads_to_the_contents(seed: int, write: Any) -> None:
    kinds = [
        Component("path", KV, Path()),
        Component("near", KV, Sinks(2) | Window(5)),
        Component("state", KV, Point()),
    ]
    host = HostTier(TierManifest(capacity={"path": 40, "near": 32, "state": 4}, write=write))
    capacity = {"path": 32, "near": 28, "state": 4}
    cache = compose(None, plugins=[*kinds, host], page_size=2, capacity=capacity, debug=True)
    journal, known, chance = cache.journal(), set[tuple[Any, ...]](), random.Random(seed)
    seen: set[tuple[str, str]] = set()
    for _ in range(120):
        what = chance.randrange(12)
        if what < 8:
            tokens = [chance.randrange(2) for _ in range(3)] + [chance.randrange(2)] * chance.randrange(4, 20)
            run(cache, tokens, chance.choice(["", "", "b"]), chance.randrange(3, 9))
        elif what < 10:
            cache.evict(chance.randrange(20))
        elif what == 10:
            cache.drop_namespace("b")
        elif chance.randrange(3) == 0:
            cache.flush()
        cache.poll()
        changes = journal.take()
        seen |= {(change.kind, change.tier) for change in changes}
        follow(changes, known)
        now: Pieces = set()
        follow(cache.contents(), now)
        assert known == now
    assert seen >= {(kind, tier) for kind in ("stored", "removed") for tier in ("device", "host")} | {("cleared", "")}


def small() -> Cache:
    return compose(None, plugins=[Component("path", KV, Path())], page_size=2, capacity=32)


def test_one_that_nobody_reads_begins_again_and_says_so() -> None:
    cache = small()
    journal = cache.journal(most=3)
    for user in range(5):
        run(cache, [user] * 4, "", 4)
    assert journal.missing
    assert [change.tokens.tolist()[0] for change in journal.take()] == [3, 4]
    assert not journal.missing
    assert sorted(change.tokens.tolist() for change in cache.contents()) == [[user] * 4 for user in range(5)]


def test_a_journal_is_bounded_in_bytes_and_complete_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixloom.tree.journal.BYTES", 40)
    cache = small()
    journal = cache.journal()
    for user in range(4):
        run(cache, [user] * 4, "", 4)
    assert journal.missing
    assert [change.tokens.tolist()[0] for change in journal.take()] == [2, 3]
    for user in range(4):
        run(cache, [9, user, 9, 9], "", 4)
    cache.flush()
    assert not journal.missing and [change.kind for change in journal.take()] == ["cleared"]


def test_what_is_told_has_tokens_keys_and_pages() -> None:
    cache = small()
    journal = cache.journal()
    run(cache, [1, 2, 3, 4, 5], "tenant", 5)
    assert not journal.missing, "nor before anything was taken"
    (change,) = journal.take()
    assert (change.kind, change.component, change.tier, change.namespace) == ("stored", "path", "device", "tenant")
    assert change.tokens.tolist() == [1, 2, 3, 4] and change.tokens.extra == ((0, 2, "an image"),)
    assert (change.spans, change.boundary) == (((0, 4),), None)


def test_each_journal_of_a_cache_has_all_changes_until_its_close() -> None:
    cache = small()
    journal, second = cache.journal(), cache.journal(1)
    run(cache, [1, 2], "", 2)
    assert len(journal.take()) == 1
    run(cache, [3, 4], "", 2)
    journal.close()
    run(cache, [5, 6], "", 2)
    assert [change.tokens.tolist() for change in journal.take()] == [[3, 4]]
    assert second.missing and [change.tokens.tolist() for change in second.take()] == [[5, 6]]
    journal.close()
    run(cache, [7, 8], "", 2)
    assert len(second.take()) == 1
    second.close()
    run(cache, [9, 8], "", 2)
    assert second.take() == journal.take() == []
    for most in (0, True, 2.0):
        with pytest.raises(InputError, match="at least 1 change"):
            cache.journal(most)  # type: ignore[arg-type]
    assert cache.journal(1).take() == []


@pytest.mark.parametrize("below", [False, True], ids=["device", "host"])
def test_what_a_failed_step_had_published_is_told_as_removed(below: bool) -> None:
    kinds = [Component("path", KV, Path()), Component("near", KV, Window(5))]
    tier = [HostTier(TierManifest(capacity=64))] if below else []
    cache = compose(None, plugins=[*kinds, *tier], page_size=2, capacity=32, debug=True)
    journal, known, go = cache.journal(), set[tuple[Any, ...]](), threading.Event()

    def fail() -> None:
        assert go.wait(60)
        raise RuntimeError("out of memory")

    stream = ThreadStream("forward")
    run(cache, [5, 6], "", 2)
    sequence = cache.open([5, 6, *range(10)], extra=[(0, 2, "an image")])
    sequence.grow(10)
    with cache.step([sequence]) as step:
        step.run_ops(stream)
        stream.run(fail)
    sequence.publish()
    follow(journal.take(), known)
    assert len(known) == (24 if below else 12)
    go.set()
    while sequence.open:
        cache.poll()
    stream.close()
    follow(journal.take(), known)
    now: Pieces = set()
    follow(cache.contents(), now)
    assert known == now and len(now) == (4 if below else 2)
