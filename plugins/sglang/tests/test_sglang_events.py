"""SGLang's events of hybrids: which pages are announced, in SGLang's own form, over its own scheduler calls.

Random traffic with evictions runs over full attention, windows and states. What a router knows from SGLang's stream is
compared with an oracle that asks the books which boundaries can be resumed at.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import random
import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

import msgspec

from prefixloom import Cache
from prefixloom_resumable import Holder, PageRange, ResumablePages
from prefixloom_sglang.composition import FULL

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.disaggregation.kv_events import KVEventBatch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

    from prefixloom_sglang import events as ours
    from prefixloom_sglang.cache import namespace_of
    from prefixloom_sglang.events import Events, label_of
    from tests.support.sglang_calls import scheduler, serve

PARTS = ("F", "FS", "FM", "FSM")


class SGLangRouter:
    """What a router has after SGLang's events: by hash, how often it was stored, and its page."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.blocks: Counter[int] = Counter()
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, list[Any]] = {}

    def apply(self, events: Sequence[Any], is_bigram: bool = False) -> None:
        if not is_bigram:  # pairs of tokens are not what SGLang's own classes read back
            events = msgspec.msgpack.decode(
                msgspec.msgpack.encode(KVEventBatch(0.0, list(events))), type=KVEventBatch
            ).events
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockRemoved":
                assert event.medium == "GPU"
                for each in event.block_hashes:
                    assert self.blocks[each] > 0, "what was never stored is removed"
                    self.blocks[each] -= 1
            else:
                assert event.block_size == self.page and event.medium == "GPU"
                parent = event.parent_block_hash
                assert parent is None or self.blocks[parent] > 0, "its parent is not there"
                for place, each in enumerate(event.block_hashes):
                    self.blocks[each] += 1
                    self.parents[each] = parent
                    self.tokens[each] = event.token_ids[place * self.page : (place + 1) * self.page]
                    parent = each


def hashes(tokens: Sequence[int], page: int, is_bigram: bool, salt: str | None = None) -> list[int]:
    """SGLang's hashes of all pages of a path, by SGLang's own function, from scratch."""
    count = (len(tokens) - is_bigram) // page * page
    seed = None if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).hexdigest()
    key = RadixKey(array("q", tokens[: count + is_bigram]), None, is_bigram=is_bigram)
    return [hash_str_to_int64(each) for each in get_hash_str(key, seed, page_size=page)] if count else []


def expected(made: Any, page: int, is_bigram: bool) -> Counter[int]:
    """What must be announced: the pages above each boundary that the books can resume at."""
    books, found = made.cache.books, {}
    for change in books.contents():
        tokens, salt = change.tokens.tolist(), label_of(change.namespace)[1]
        whole = (len(tokens) - is_bigram) // page * page
        for boundary in range(whole, 0, -page):
            if books.peek(tokens[: boundary + is_bigram], namespace=change.namespace) == boundary:
                for end, each in enumerate(hashes(tokens[: boundary + is_bigram], page, is_bigram, salt), 1):
                    found[change.namespace, tuple(tokens[: end * page + is_bigram])] = each
                break
    return Counter(found.values())


def traffic(letters: str, page: int, seed: int, is_bigram: bool = False, steps: int = 40) -> Counter[str]:
    """Random conversations with evictions. After each, the router has what the oracle says."""
    rng = random.Random(f"{letters} {page} {seed}")
    made = scheduler(letters, page, tokens=240, enable_kv_cache_events=True, is_eagle=is_bigram)
    router, texts, counts = SGLangRouter(page), [[0]], Counter[str]()
    for _ in range(steps):
        base = rng.choice(texts)
        prompt = [*base[: rng.randrange(len(base) + 1)], *(rng.randrange(30) for _ in range(rng.randrange(1, 24)))][:60]
        extra_key = rng.choice(["", "", "", "adapter"])
        serve(made, prompt, rng.randrange(1, 9), extra_key=extra_key, chunk=rng.choice([8, 1 << 20]))
        texts = [*texts[-8:], prompt]
        if rng.random() < 0.3:
            made.cache.evict(EvictParams(**{rng.choice(["num_tokens", "swa_num_tokens", "mamba_num"]): 9}))
        if rng.random() < 0.03:
            made.cache.reset()
            made.allocator.clear()
            made.rows.clear()
            if made.cache.supports_mamba():
                made.rows.mamba_allocator.clear()
        router.apply(made.cache.take_events(), is_bigram)
        assert not made.cache.kv_events.failures
        right = expected(made, page, is_bigram)
        assert +router.blocks == right, (letters, page, seed)
        counts["announced"] += right.total()
        cached = sum(hi - lo for each in made.cache.books.contents() if each.component == FULL for lo, hi in each.spans)
        counts["full attention has"] += cached // page
        for text in texts:
            known = hashes(text, page, is_bigram)
            for at, each in enumerate(known):
                if router.blocks[each]:
                    assert router.parents[each] == (known[at - 1] if at else None)
                    assert is_bigram or list(router.tokens[each]) == text[at * page : (at + 1) * page]
            said = next((at for at, each in enumerate(known) if not router.blocks[each]), len(known)) * page
            assert said >= made.cache.books.peek(text), "a router promises less than there is"
            counts["asked"] += 1
    return counts


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("letters", PARTS)
def test_a_router_has_the_pages_that_lead_to_a_boundary_and_no_others(letters: str, page: int) -> None:
    counts = traffic(letters, page, 1)
    if letters == "F":
        assert 0 < counts["announced"] == counts["full attention has"], counts
    else:
        assert 0 < counts["announced"] < counts["full attention has"], counts
    assert counts["asked"] > 100


@pytest.mark.parametrize("page", [1, 4])
def test_so_it_is_with_the_keys_of_a_draft_model(page: int) -> None:
    assert traffic("FS", page, 2, is_bigram=True)["announced"] > 0


def test_a_window_that_went_takes_the_pages_that_led_to_it() -> None:
    made = scheduler("FS", 4, enable_kv_cache_events=True)
    router = SGLangRouter(4)
    serve(made, range(40))
    router.apply(made.cache.take_events())
    assert [router.blocks[each] for each in hashes(range(40), 4, False)] == [1] * 10
    made.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=1000))
    events = made.cache.take_events()
    router.apply(events)
    assert not +router.blocks and made.cache.books.peek(range(40)) == 0
    (removed,) = events
    assert removed.block_hashes == hashes(range(40), 4, False)[::-1], "from the leaves up"
    assert any(change.component == FULL for change in made.cache.books.contents()), "full attention has them still"


def test_a_page_is_announced_again_with_the_same_hashes_when_a_state_has_come_back() -> None:
    made = scheduler("FM", 4, enable_kv_cache_events=True)
    router = SGLangRouter(4)
    serve(made, range(40))
    router.apply(made.cache.take_events())
    before = +router.blocks
    made.cache.evict(EvictParams(num_tokens=0, mamba_num=100))
    router.apply(made.cache.take_events())
    assert before and not +router.blocks
    serve(made, range(60))
    router.apply(made.cache.take_events())
    after = +router.blocks
    assert after == Counter(hashes(range(made.cache.books.peek(range(61))), 4, False))
    assert before <= after, "the same hashes"


class Elsewhere:
    """Books whose plain namespace is another one, as far as events look at books."""

    def __init__(self, books: Any, namespace: str) -> None:
        self.books, self.composition, self.namespace = books, books.composition, namespace

    def moved(self, changes: Sequence[Any]) -> list[Any]:
        return [attrs.evolve(each, namespace=self.namespace) if each.component else each for each in changes]

    def journal(self) -> Any:
        journal = self.books.journal()
        return SimpleNamespace(missing=False, take=lambda: self.moved(journal.take()))

    def contents(self) -> list[Any]:
        return self.moved(self.books.contents())


def test_salts_are_in_the_hashes_and_in_the_events_as_sglang_has_them() -> None:
    assert label_of(namespace_of(None, "pepper")) == (None, "pepper")
    made = scheduler("FS", 4, enable_kv_cache_events=True)
    serve(made, range(12))
    parameters = SimpleNamespace(page_size=4, dynamo_kv_event_format=False)
    _, event = Events(Elsewhere(made.cache.books, namespace_of(None, "pepper")), parameters).take()
    assert event.cache_salt == "pepper" and event.block_hashes == hashes(range(12), 4, False, "pepper")
    key = RadixKey(array("q", range(12)), cache_salt="pepper")
    assert made.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == 0


class UsualEvents(Events):
    """Events of which SGLang's recorder makes all, page by page."""

    def _store(self, pages: PageRange) -> None:
        self._recorder.record_store(self._node(pages))

    def _remove(self, pages: PageRange) -> None:
        for at in range(pages.end - 1, pages.first - 1, -1):
            self._recorder.record_remove(self._node(PageRange(pages.run, at, at + 1)))


@pytest.mark.parametrize("is_dynamo", [False, True])
@pytest.mark.parametrize("extra_key", [None, "a key", "for an adapter " + 32 * "1"])
@pytest.mark.parametrize("salt", [None, "pepper"])
@pytest.mark.parametrize("is_bigram", [False, True])
def test_the_fast_path_makes_the_events_of_sglangs_recorder(
    is_dynamo: bool, extra_key: str | None, salt: str | None, is_bigram: bool
) -> None:
    names = KvEventLoraNames()
    names.register(lora_id=32 * "1", lora_name="adapter")
    names.register(SimpleNamespace(lora_id=32 * "1", extra_key="for an adapter " + 32 * "1"), "adapter")
    parameters = SimpleNamespace(page_size=4, dynamo_kv_event_format=is_dynamo, kv_event_lora_names=names)
    made = scheduler("FS", 4, tokens=160, enable_kv_cache_events=True, is_eagle=is_bigram)
    books = Elsewhere(made.cache.books, namespace_of(extra_key, salt))
    events, usual = Events(books, parameters), UsualEvents(books, parameters)
    rng, kinds = random.Random(1), Counter[str]()
    for _ in range(25):
        serve(made, [rng.randrange(2) for _ in range(rng.randrange(4, 50))], 3)
        found = events.take()
        assert found == usual.take()
        kinds += Counter(type(event).__name__ for event in found)
    assert kinds["BlockStored"] > 5 < kinds["BlockRemoved"]


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("the sink is broken")


HOOKS = {
    "store": (KVCacheEventRecorder, "record_store"),
    "remove": (KVCacheEventRecorder, "record_remove"),
    "clear": (KVCacheEventRecorder, "record_all_cleared"),
    "take": (KVCacheEventRecorder, "take"),
    "hashes": (ours, "compute_node_event_hash_values"),
    "keys": (ours, "RadixKey"),
    "pages": (ResumablePages, "apply"),
    "contents": (Cache, "contents"),
}
"""Everything that the code for events calls: of SGLang, of the followed pages, and of the cache."""


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("letters", ["F", "FS"])
def test_an_error_in_event_code_stays_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, letters: str, hook: str
) -> None:
    monkeypatch.setattr("prefixloom_resumable.announcements.ANEW_SHARE", 1e12)
    made = scheduler(letters, 4, enable_kv_cache_events=True)
    router = SGLangRouter(4)
    serve(made, range(40))
    router.apply(made.cache.take_events())
    before = +router.blocks
    assert before
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "sglang.prefixloom"):
        patch.setattr(*HOOKS[hook], broken)
        if hook in ("clear", "contents"):  # they are called after another error alone
            patch.setattr(KVCacheEventRecorder, "record_store", broken)
        for user in (50, 60):
            serve(made, range(user, user + 20))
            made.cache.evict(EvictParams(num_tokens=8))
            router.apply(made.cache.take_events())
    assert made.cache.kv_events.failures
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info and "the sink is broken" in caplog.text
    right = expected(made, 4, False)
    assert +router.blocks in ({}, before, right), "withdrawn; or nothing could be said at all; or announced again"
    serve(made, range(70, 90))
    router.apply(made.cache.take_events())
    assert +router.blocks == expected(made, 4, False)
    failures = made.cache.kv_events.failures
    serve(made, range(80, 110))
    events = made.cache.take_events()
    router.apply(events)
    assert +router.blocks == expected(made, 4, False)
    assert made.cache.kv_events.failures == failures and "AllBlocksCleared" not in {
        type(each).__name__ for each in events
    }


def test_the_scheduler_goes_on_whatever_fails_and_the_router_has_nothing_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random("errors")
    monkeypatch.setattr("prefixloom_resumable.announcements.ANEW_SHARE", 1e12)

    def shaky(call: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if rng.random() < 0.05:
                raise ValueError("an error that was thrown for the test")
            return call(*arguments, **named)

        return called

    for name in ("record_store", "record_remove"):
        monkeypatch.setattr(KVCacheEventRecorder, name, shaky(getattr(KVCacheEventRecorder, name)))
    monkeypatch.setattr(ours, "compute_node_event_hash_values", shaky(ours.compute_node_event_hash_values))
    failures = 0
    for letters in ("F", "FS", "FSM"):
        made = scheduler(letters, 4, tokens=240, enable_kv_cache_events=True)
        router = SGLangRouter(4)
        for _ in range(40):
            serve(made, [rng.randrange(3) for _ in range(rng.randrange(8, 40))], 3)
            router.apply(made.cache.take_events())
            assert +router.blocks <= expected(made, 4, False)
        failures += made.cache.kv_events.failures
    assert failures > 20


@pytest.mark.parametrize("letters", ["FS", "FSM"])
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, letters: str) -> None:
    monkeypatch.setattr(Holder, "gap", lambda self, run, at, high: (high, high))
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(3):
            traffic(letters, 1, seed)
