"""SGLang's events of hybrids: which pages are told, in SGLang's own form, over its own scheduler calls.

Random traffic with evictions runs over full attention, windows and states. What a router knows from SGLang's stream is
compared with an oracle that asks the books which boundaries can be resumed at.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

import msgspec

from prefixloom_resumable import ResumablePages
from prefixloom_sglang.composition import FULL

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.disaggregation.kv_events import KVEventBatch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

    from prefixloom_sglang import events as ours
    from prefixloom_sglang.cache import namespace_of
    from prefixloom_sglang.events import HybridPages, label_of
    from tests.support.sglang_calls import scheduler, serve

PARTS = ("FS", "FM", "FSM")


class SGLangRouter:
    """What a router has after SGLang's events: by hash, how often it was told, and its page."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.told: Counter[int] = Counter()
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
                self.told.clear()
            elif kind == "BlockRemoved":
                assert event.medium == "GPU"
                for each in event.block_hashes:
                    assert self.told[each] > 0, "what was never stored is removed"
                    self.told[each] -= 1
            else:
                assert event.block_size == self.page and event.medium == "GPU"
                parent = event.parent_block_hash
                assert parent is None or self.told[parent] > 0, "its parent is not told"
                for place, each in enumerate(event.block_hashes):
                    self.told[each] += 1
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
    """What must be told: the pages above each boundary that the books can resume at."""
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
        right = expected(made, page, is_bigram)
        assert +router.told == right, (letters, page, seed)
        counts["told"] += right.total()
        cached = sum(hi - lo for each in made.cache.books.contents() if each.component == FULL for lo, hi in each.spans)
        counts["full attention has"] += cached // page
        for text in texts:
            known = hashes(text, page, is_bigram)
            for at, each in enumerate(known):
                if router.told[each]:
                    assert router.parents[each] == (known[at - 1] if at else None)
                    assert is_bigram or list(router.tokens[each]) == text[at * page : (at + 1) * page]
            said = next((at for at, each in enumerate(known) if not router.told[each]), len(known)) * page
            assert said >= made.cache.books.peek(text), "a router promises less than there is"
            counts["asked"] += 1
    return counts


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("letters", PARTS)
def test_a_router_has_the_pages_that_lead_to_a_boundary_and_no_others(letters: str, page: int) -> None:
    counts = traffic(letters, page, 1)
    assert 0 < counts["told"] < counts["full attention has"], counts
    assert counts["asked"] > 100


@pytest.mark.parametrize("page", [1, 4])
def test_so_it_is_with_the_keys_of_a_draft_model(page: int) -> None:
    assert traffic("FS", page, 2, is_bigram=True)["told"] > 0


def test_a_window_that_went_takes_the_pages_that_led_to_it() -> None:
    made = scheduler("FS", 4, enable_kv_cache_events=True)
    router = SGLangRouter(4)
    serve(made, range(40))
    router.apply(made.cache.take_events())
    assert [router.told[each] for each in hashes(range(40), 4, False)] == [1] * 10
    made.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=1000))
    events = made.cache.take_events()
    router.apply(events)
    assert not +router.told and made.cache.books.peek(range(40)) == 0
    (removed,) = events
    assert removed.block_hashes == hashes(range(40), 4, False)[::-1], "from the leaves up"
    assert any(change.component == FULL for change in made.cache.books.contents()), "full attention has them still"


def test_a_page_is_told_again_with_the_same_hashes_when_a_state_has_come_back() -> None:
    made = scheduler("FM", 4, enable_kv_cache_events=True)
    router = SGLangRouter(4)
    serve(made, range(40))
    router.apply(made.cache.take_events())
    before = +router.told
    made.cache.evict(EvictParams(num_tokens=0, mamba_num=100))
    router.apply(made.cache.take_events())
    assert before and not +router.told
    serve(made, range(60))
    router.apply(made.cache.take_events())
    told = +router.told
    assert told == Counter(hashes(range(made.cache.books.peek(range(61))), 4, False))
    assert before <= told, "the same hashes"


def test_salts_are_in_the_hashes_and_in_the_events_as_sglang_has_them() -> None:
    made = scheduler("FS", 4, enable_kv_cache_events=True)
    books = made.cache.books
    with_salt = namespace_of(None, "pepper")
    assert label_of(with_salt) == (None, "pepper")
    pages = HybridPages(books, 4)
    serve(made, range(12))
    journal = [
        each.__class__(each.kind, each.component, each.tier, with_salt, each.tokens, each.spans)
        for each in books.contents()
    ]
    (told,) = [each for each in pages.told(journal) if each.kind == "stored"]
    recorder = ours.KVCacheEventRecorder(enabled=True, page_size=4)
    recorder.record_store(told.node)
    (event,) = recorder.take()
    assert event.cache_salt == "pepper" and event.block_hashes == hashes(range(12), 4, False, "pepper")
    key = RadixKey(array("q", range(12)), cache_salt="pepper")
    assert made.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == 0


def test_plain_attention_needs_no_copy_of_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ours, "ResumablePages")
    made = scheduler("F", 4, enable_kv_cache_events=True)
    serve(made, range(12))
    assert any(type(event).__name__ == "BlockStored" for event in made.cache.take_events())
    with pytest.raises(NameError):
        scheduler("FS", 4, enable_kv_cache_events=True)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("_has", lambda self, node, need, level: True), ("_regap", lambda self, node, seen: None)],
)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, mistake: Any) -> None:
    monkeypatch.setattr(ResumablePages, name, mistake)
    with pytest.raises((AssertionError, LookupError)):
        traffic("FSM", 4, 1)
