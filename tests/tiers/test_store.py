"""The store behind the host tier: what comes back after a restart, what does not and why, and that nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path as File
from typing import Any

import pytest

from prefixloom import Buffer, Component, CompositionError, Manifest, Path, Point, StorageError, TierManifest
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom_hicache import FileBackend, HostTier, MemoryBackend
from tests.support.helpers import part, settle
from tests.support.stores import TOKENS, behind, composed, idle, parts, read_back, restored, stocked, until
from tests.support.tiers import compute, restorable, serve

SETS = {
    "F": ("path",), "S": ("window",), "M": ("point",), "FS": ("path", "window"), "FM": ("path", "point"),
    "FSM": ("path", "window", "point"), "FU": ("path", "union"), "FH": ("path", "holes"), "FT": ("path", "tail"),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: File) -> Iterator[Callable[[], FileBackend]]:
    opened: list[FileBackend] = []

    def again() -> FileBackend:
        """The same store, opened by the next process."""
        if opened:
            opened[-1].close()
        opened.append(FileBackend(tmp_path / "store", capacity=1 << 22))
        return opened[-1]

    yield again
    opened[-1].close()


# ---------------------------------------------------------------- restart


class Other(Component): ...


def two(*names: str, kind: type[Component] = Component, version: int = 1) -> Component:
    """A component with a buffer of each name."""
    return kind("path", Manifest([Buffer(name, (2,), "int64") for name in names], version=version), Path())


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_process_that_comes_back_finds_its_prefixes(names: tuple[str, ...], page: int, file: Any) -> None:
    cache, _ = composed(*parts(names), store=file(), page=page)
    prompts = [[*range(20), *([k] * 17)] for k in range(3)]
    for tokens in prompts:
        serve(cache, tokens, chunk=12)
    idle(cache)
    best = [max(restorable(cache, [*tokens, 1])) for tokens in prompts]
    assert min(best) > 0
    for layout in ("layer_first", "page_first"):
        cache, _ = composed(*parts(names), store=file(), page=page, layout=layout)
        assert [read_back(cache, [*tokens, 1]) for tokens in prompts] == best
        settle(cache)
        assert not behind(cache).writes.refused


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model": "another"}, "model is 'm' there and 'another' here"),
        ({"page": 8}, "page_size is 4 there and 8 here"),
        ({"components": [two("data", "more", version=2)]}, "plugin_version is '1' there and '2' here"),
        ({"components": [two("data", "more", kind=Other)]}, "plugin is"),
        ({"components": [two("more", "data")]}, "'record of data, more' there and 'record of more, data' here"),
    ],
)
def test_after_a_change_of_what_matters_nothing_is_found_and_it_is_said_why(changed: Any, why: str, file: Any) -> None:
    cache, _ = composed(two("data", "more"), store=file())
    serve(cache, list(range(32)))
    idle(cache)
    components = changed.pop("components", [two("data", "more")])
    cache, _ = composed(*components, store=file(), **changed)
    with cache.open(range(33)) as sequence:
        told = restored(cache, sequence)
    assert told.ready == 0
    assert why in told.why


def test_it_is_said_why_also_where_the_cache_has_all_of_the_path() -> None:
    kinds = part("path", Path()), part("state", Point())
    store = stocked(*kinds)
    cache, _ = composed(*kinds, store=store, model="another", keep="selective", host={"path": 512, "state": 1}, slots=3)
    serve(cache, TOKENS)
    cache.evict({"state": 8})
    serve(cache, [9] * 8)  # takes the place of the other state below
    with cache.open([*TOKENS, 1]) as sequence:
        told = restored(cache, sequence)
    assert told.ready == 0
    assert "model is 'm' there and 'another' here" in told.why
    settle(cache)


def test_extra_keys_come_back(file: Any) -> None:
    cache, _ = composed(part("path", Path()), store=file())
    tokens = list(range(32))
    for key in ("cat", ("dog", 7)):
        with cache.open(tokens, extra=[(8, 12, key)]) as sequence:
            compute(cache, sequence, tokens, 32)
    idle(cache)
    cache, _ = composed(part("path", Path()), store=file())
    assert read_back(cache, [*tokens, 1], extra=[(8, 12, "cat")]) == 32
    assert read_back(cache, [*tokens, 1], extra=[(8, 12, ("dog", 7))]) == 32
    assert read_back(cache, [*tokens, 1], extra=[(8, 12, "dog")]) == 8
    assert read_back(cache, [*tokens, 1]) == 8


# ---------------------------------------------------------------- coming and going


def test_a_store_that_is_attached_while_running_gets_what_the_host_has_already() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, tier = composed(part("path", Path()))
    serve(cache, list(range(32)))
    tier.attach(store)
    idle(cache)
    cache.poll()
    idle(cache)
    assert store.status().records == 8
    with pytest.raises(StorageError, match="attached already"):
        tier.attach(store)
    tier.detach()
    cache.poll()
    serve(cache, list(range(100, 132)))
    cache.poll()
    assert store.status().records == 8 or store.status().records == 0  # it may have been closed


def test_a_store_is_asked_from_the_moment_that_it_is_attached() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(store=store)
    serve(cache, list(range(40)))
    idle(cache)
    cache, tier = composed()
    tier.attach(store)  # and nobody has polled
    assert read_back(cache, list(range(44))) == 40


def test_a_store_needs_to_know_of_which_model_its_records_are() -> None:
    with pytest.raises(StorageError, match="does not say its model and weights"):
        HostTier(TierManifest(capacity=64)).attach(MemoryBackend(capacity=1 << 20))
    with pytest.raises(CompositionError, match="fetch must be"):
        HostTier(TierManifest(capacity=64), fetch="never")  # type: ignore[arg-type]


def test_a_split_and_a_drop_while_the_store_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    store, held = MemoryBackend(capacity=1 << 22), threading.Event()
    put = store.put
    monkeypatch.setattr(store, "put", lambda records: (held.wait(10), put(records))[1])
    cache, _ = composed(part("path", Path()), part("state", Point()), store=store)
    serve(cache, list(range(40)))
    cache.poll()
    pinned = tier_lanes(cache)[0].leased
    assert pinned == 10
    serve(cache, [*range(20), *[9] * 12])  # splits what the store's thread reads
    cache.evict({"path": 100, "state": 9})
    cache.drop_namespace("")
    assert tier_lanes(cache)[0].leased == pinned
    held.set()
    idle(cache)
    assert [lane.leased for lane in tier_lanes(cache)] == [0, 0]
    assert cache.stats().tier.cached == {"path": 0, "state": 0}  # type: ignore[union-attr]
    settle(cache)


def test_a_flush_while_a_prompt_is_fetched_ends_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store, held = stocked(), threading.Event()
    cache, _ = composed(store=store)
    get = store.get
    monkeypatch.setattr(store, "get", lambda *given: (held.wait(10), get(*given))[1])
    told = (sequence := cache.open([*TOKENS, 1])).restore()
    until(cache, lambda: any(fetch.calls for fetch in behind(cache).reads.fetches))
    cache.flush()
    assert told.over
    held.set()
    until(cache, lambda: not behind(cache).reads.fetches)
    assert told.ready == 0 and not sequence.open
    assert cache.stats().tier.cached == dict.fromkeys(("path", "window", "point"), 0)  # type: ignore[union-attr]


def test_a_flush_while_the_store_still_reads_stores_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    store, held = MemoryBackend(capacity=1 << 22), threading.Event()
    cache, _ = composed(part("path", Path()), store=store)
    pool: Any = tier_lanes(cache)[0].pool
    read_into = pool.read_into
    monkeypatch.setattr(type(pool), "read_into", lambda self, *given: (held.wait(10), read_into(*given))[1])
    tokens = list(range(40))
    serve(cache, tokens)
    cache.poll()
    cache.flush()
    serve(cache, list(range(500, 540)))  # takes the same slots
    held.set()
    idle(cache)
    cache.flush()
    assert read_back(cache, [*tokens, 1]) == 0
    assert read_back(cache, list(range(500, 541))) == 40
    settle(cache)


def test_what_a_store_gets_is_the_policys_to_say() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store, keep="selective")
    for hits in range(3):
        idle(cache)
        assert store.status().records == 0, hits
        serve(cache, list(range(21)))
    idle(cache)
    assert store.status().records == 5

    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store, keep="back", host=40)
    serve(cache, list(range(32)))
    idle(cache)
    assert store.status().records == 0
    serve(cache, list(range(100, 132)))
    idle(cache)
    assert store.status().records == 8  # what made room
    cache, _ = composed(part("path", Path()), store=store)
    assert read_back(cache, list(range(33))) == 32
    assert read_back(cache, list(range(100, 133))) == 0
