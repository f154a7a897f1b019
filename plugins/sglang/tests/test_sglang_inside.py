"""The cache inside SGLang: its requests, batches, pools and scheduler calls, on a CPU and without an engine process.

Where SGLang is not installed there is nothing to test. docs/sglang.md says how it is installed on a CPU.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from prefixloom import CompositionError, InvariantError
from prefixloom.testing.foreign import command
from prefixloom_sglang import door, interface
from prefixloom_sglang.composition import FULL, STATE, SWA
from prefixloom_sglang.metrics import GONE, LOST, MISSED

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from prefixloom_sglang.cache import PrefixloomCache
    from tests.support.sglang_calls import scheduler, serve

SETS = ("F", "FS", "FM", "FSM")


def totals(scheduler: Any) -> dict[str, tuple[int, int]]:
    """By pool what SGLang's invariant checker adds up while no request runs, and what it must be."""
    cache, allocator = scheduler.cache, scheduler.allocator
    if cache.supports_swa():
        full = allocator.full_available_size() + cache.full_evictable_size() + cache.full_protected_size()
        windows = allocator.swa_available_size() + cache.swa_evictable_size() + cache.swa_protected_size()
        found = {FULL: (full, allocator.size_full), SWA: (windows, allocator.size_swa)}
    else:
        found = {FULL: (allocator.available_size() + cache.evictable_size() + cache.protected_size(), allocator.size)}
    if cache.supports_mamba():
        states = scheduler.rows.mamba_allocator
        sizes = cache.mamba_evictable_size() + cache.mamba_protected_size()
        found[STATE] = (states.available_size() + sizes, states.size)
    return found


@pytest.mark.parametrize("letters", SETS)
def test_the_kit_finds_nothing(letters: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Content, owners, lost slots and orders, at pages of 1 and 4 tokens, with both sides' books checked."""
    name = "bench.engines.sglang_variants:OurCacheInSGLang"
    assert command.main([name, "--sets", letters, "--seeds", "3", "--schedules", "1"]) == 0, capsys.readouterr().out
    assert "0 findings" in capsys.readouterr().out


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("letters", SETS)
def test_sizes_add_up_and_everything_can_be_evicted(letters: str, page: int) -> None:
    made = scheduler(letters, page)
    for user in range(4):
        serve(made, [*range(20), *range(100 * user, 100 * user + 15)], 9, chunk=8)
        assert all(found == whole for found, whole in totals(made).values()), totals(made)
    made.cache.sanity_check()
    made.evict(400)
    assert made.cache.evictable_size() == 0
    assert all(found == whole for found, whole in totals(made).values()), totals(made)


def test_evict_says_what_went() -> None:
    made = scheduler("FS", 4)
    serve(made, range(40))
    result = made.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=5))
    assert result.num_tokens_evicted == 0
    assert result.swa_num_tokens_evicted == 32, "what serves no boundary goes, all of it at once"
    assert totals(made)[SWA][1] - made.cache.swa_evictable_size() == made.allocator.swa_available_size()
    assert made.cache.evict(EvictParams(num_tokens=10**6)).num_tokens_evicted == 40
    assert totals(made)[FULL][1] == made.allocator.full_available_size()


@pytest.mark.parametrize("letters", SETS)
def test_what_is_free_is_told_in_the_words_of_sglangs_own_cache(letters: str) -> None:
    own, made = scheduler(letters, 4, own=True), scheduler(letters, 4)
    for each in (own, made):
        serve(each, range(40))
    said = [each.cache.available_and_evictable_str() for each in (own, made)]
    told = [re.findall(r"Available (\w+)(?: tokens)?: (\d+)", each) for each in said]
    assert len(told[1]) == len(letters)
    assert [(name.lower(), count) for name, count in told[0]] == told[1]


def test_a_lock_is_no_insanity_but_for_debug_mode() -> None:
    """SGLang's own check may come while something is locked. Debug mode looks for locks that nobody undid."""
    made = scheduler("F")
    serve(made, range(20))
    node = made.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", range(20))))).last_device_node
    lock = made.cache.lock(node)
    with pytest.raises(InvariantError, match="no request runs"):
        made.cache.sanity_check()
    PrefixloomCache.sanity_check(made.cache)
    made.cache.unlock(lock)
    made.cache.sanity_check()


@pytest.mark.parametrize("page", [1, 4])
def test_what_shares_no_prefix_is_apart(page: int) -> None:
    made = scheduler("F", page)
    prompt = list(range(33))
    assert serve(made, prompt) == 0
    assert serve(made, prompt) == 32
    assert serve(made, prompt, extra_key="adapter-0123") == 0
    assert serve(made, prompt, extra_key="adapter-0123") == 32
    assert serve(made, prompt, extra_key="adapter-4567") == 0

    def hit(**options: Any) -> int:
        found = made.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt), **options)))
        return int(found.device_prefix_len)

    assert hit() == 33 // page * page
    assert hit(cache_salt="pepper") == 0
    assert hit(extra_key="adapter-0123", cache_salt="pepper") == 0
    assert hit(limit=20) == 20


@pytest.mark.parametrize("page", [1, 4])
def test_bigram_keys_hit_only_where_the_next_token_agrees_too(page: int) -> None:
    """With EAGLE the draft model's entry at a position depends on the token behind it."""
    own, made = scheduler("F", page, own=True, is_eagle=True), scheduler("F", page, is_eagle=True)
    assert made.cache.books.composition.lookahead == 1
    for prompt in ([*range(24)], [*range(16), 99, *range(50, 60)], [*range(24), 7, 8], [*range(17), 99, 98]):
        assert serve(made, prompt) == serve(own, prompt)
    made.cache.sanity_check()


def test_of_requests_with_priorities_the_lowest_goes_first() -> None:
    made = scheduler("F", 1, eviction_policy="priority")
    from bench.engines import sglang as adapter

    usual = adapter.Req

    for priority, start in ((5, 0), (1, 100), (3, 200)):
        adapter.Req = lambda *args, wanted=priority, **kwargs: usual(*args, priority=wanted, **kwargs)
        serve(made, range(start, start + 30))
    adapter.Req = usual
    made.evict(30)
    assert [serve(made, range(start, start + 30)) for start in (0, 200)] == [29, 29]
    made.evict(0)
    assert made.cache.books.peek(range(100, 130)) == 0


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("is_eagle", [False, True])
def test_the_events_lead_a_router_to_the_same_pages_as_sglangs_own(page: int, is_eagle: bool) -> None:
    """Hashes, parents, tokens and namespaces are SGLang's. Only how pages are grouped into events may differ."""
    announced = []
    for own in (True, False):
        made = scheduler("F", page, tokens=120, own=own, enable_kv_cache_events=True, is_eagle=is_eagle)
        pages: Stored = Counter()
        stored = []
        for user, extra_key in ((0, ""), (1, ""), (2, "adapter"), (1, ""), (3, "")):
            prompt = [*range(10), *range(100 * user, 100 * user + 13)]
            serve(made, prompt, 3, extra_key=extra_key)
            events = made.cache.take_events()
            follow(events, pages, page)
            stored += [link for event in events if hasattr(event, "token_ids") for link in links(event, page)]
        assert made.cache.take_events() == []
        announced.append((+pages, sorted(stored)))
        made.evict(400)
        follow(made.cache.take_events(), pages, page)
        assert not +pages, "whatever was stored is removed"
    assert announced[0] == announced[1]
    assert len(announced[0][0]) > 10


def links(event: Any, size: int) -> list[tuple[int, int, str]]:
    """Of each page that an event stores: its hash, its parent's (0: it has none), and all else that it says."""
    found = []
    parent = event.parent_block_hash or 0
    for i, number in enumerate(event.block_hashes):
        tokens = event.token_ids[i * size : (i + 1) * size]
        found.append(
            (number, parent, repr((tokens, event.block_size, event.medium, event.cache_salt, event.lora_name)))
        )
        parent = number
    return found


Stored = Counter[int]


def follow(events: Sequence[Any], pages: Stored, size: int) -> None:
    """What a router knows after these events. SGLang's hashes leave out the extra key, so one may be stored twice."""
    for event in events:
        if type(event).__name__ == "AllBlocksCleared":
            pages.clear()
        elif type(event).__name__ == "BlockRemoved":
            for number in event.block_hashes:
                assert pages[number] > 0, "what was never stored is removed"
                pages[number] -= 1
        else:
            assert len(event.block_hashes) * size == len(event.token_ids)
            pages.update(event.block_hashes)


def test_a_reader_of_events_who_came_too_late_gets_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixloom import Cache

    usual = Cache.journal
    monkeypatch.setattr(Cache, "journal", lambda books: usual(books, most=2))
    made = scheduler("F", 4, enable_kv_cache_events=True)
    for user in range(5):
        serve(made, range(100 * user, 100 * user + 12))
    pages: Stored = Counter([12345])
    follow(made.cache.take_events(), pages, 4)
    assert len(pages) == 15


def test_after_a_reset_nothing_hits_and_the_pools_are_whole() -> None:
    made = scheduler("FSM", 4, enable_kv_cache_events=True)
    serve(made, range(40), chunk=8)
    assert len(made.cache.take_events()) > 1
    made.cache.reset()
    made.allocator.clear()
    made.rows.clear()
    made.rows.mamba_allocator.clear()
    assert [type(event).__name__ for event in made.cache.take_events()] == ["AllBlocksCleared"]
    assert all(found == whole for found, whole in totals(made).values())
    assert serve(made, range(40), chunk=8) == 0
    assert serve(made, range(41), chunk=8) == 40


def test_the_log_says_why_a_prompt_missed(caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler("FM", 4)
    serve(made, range(30))
    with caplog.at_level(logging.DEBUG, logger="sglang.prefixloom"):
        serve(made, [*range(22), 99, 98, 97])
    assert "component 'state' has no state at 20" in caplog.text


def test_the_metrics_say_what_was_lost_and_to_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    sglangs = SimpleNamespace(  # its own collector wants the ranks of an engine
        labels={"model": "tiny"},
        observe_eviction_duration=lambda seconds: None,
        increment_eviction_num_tokens=lambda count: None,
    )
    monkeypatch.setattr(PrefixloomCache, "init_metrics_collector", lambda self: None)
    monkeypatch.setattr(PrefixloomCache, "metrics_collector", sglangs)
    made = scheduler("FM", 4, enable_metrics=True)

    def total(name: str, **labels: str) -> float:
        samples = [each for family in prometheus.REGISTRY.collect() for each in family.samples]
        return sum(
            each.value for each in samples if each.name == f"{name}_total" and labels.items() <= each.labels.items()
        )

    serve(made, range(30))
    assert (total(LOST), total(MISSED), total(MISSED, reason="new")) == (0, 29, 28), "one token is left to compute"
    serve(made, [*range(22), 99, 98, 97])
    assert total(LOST, component=STATE) == total(MISSED, component=STATE, reason="never kept") == 20
    serve(made, range(500, 530))
    assert total(LOST, component=STATE) == 20, "nobody had sent this before"
    for first in range(1000, 5000, 100):
        serve(made, range(first, first + 30))
    serve(made, range(30))
    assert total(MISSED, reason="evicted") > 0 and total(GONE, cause="asked") > 0


def test_a_third_prompt_hits_where_two_parted() -> None:
    made = scheduler("FM", 4)
    hits = [serve(made, [*range(16), *range(100 * user, 100 * user + 9)]) for user in (1, 2, 3)]
    assert hits == [0, 0, 16]


@pytest.mark.parametrize("letters", ["FM", "FSM"])
def test_a_prompt_that_goes_on_alone_keeps_its_state_at_its_end_after_its_states_were_evicted(letters: str) -> None:
    """SGLang keeps one state of a pass. Where no other prompt goes on, the next turn needs the one at the end."""
    made = scheduler(letters, 4)
    serve(made, range(40))
    made.cache.evict(EvictParams(num_tokens=0, mamba_num=60))
    assert [serve(made, range(length)) for length in (44, 48, 52)] == [0, 44, 48]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("new", [1, 3])
def test_of_two_states_of_a_conversation_the_older_one_goes_first(page: int, new: int) -> None:
    """Whoever goes on from a state copies it at once, so it was used then, and not when the request ends."""
    for own in (True, False):
        made = scheduler("FM", page, own=own)
        assert [serve(made, range(16), new), serve(made, range(24), new)] == [0, 16]
        states = totals(made)[STATE][1] - made.rows.mamba_allocator.available_size()
        made.cache.evict(EvictParams(num_tokens=0, mamba_num=states - 1))
        assert serve(made, [*range(24), *range(1001, 1000 + new), 1, 2, 3, 4], new) == 23 + (new if page == 1 else 1)


def test_where_prompts_part_a_state_is_kept_even_if_the_window_is_gone() -> None:
    made = scheduler("FSM", 4)
    first, second, third = ([*range(24), *range(100 * user, 100 * user + 16)] for user in (1, 2, 3))
    serve(made, first)
    made.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=400, mamba_num=60))
    assert [serve(made, second), serve(made, third)] == [0, 24]


# ---------------------------------------------------------------- debug mode


def audited() -> Any:
    made = scheduler("FSM", 4)
    serve(made, range(40), chunk=8)
    made.cache.audit("the beginning")
    return made


def test_a_slot_that_sglang_lost_is_found() -> None:
    made = audited()
    full = made.allocator.full_attn_allocator
    page = int(full.free_pages[-1])
    full.free_pages = full.free_pages[:-1]
    with pytest.raises(InvariantError, match=rf"1 slots of 'full' .* Page {page}, for example, belongs to nobody"):
        made.cache.audit("a test")


def test_a_slot_with_two_owners_is_found() -> None:
    made = audited()
    pool = made.cache.books.pool(STATE)
    slot = next(slot for slot in range(pool.capacity) if pool.has(slot))
    import torch

    made.rows.mamba_allocator.free(torch.tensor([slot]))
    with pytest.raises(InvariantError, match=r"'state' .* belongs to SGLang's free list and the cache"):
        made.cache.audit("a test")


def test_a_window_that_lost_its_partner_is_found() -> None:
    made = audited()
    mapping = made.allocator.full_to_swa_index_mapping
    mapping[mapping > 0] = 0
    with pytest.raises(InvariantError, match="are cached without a page of full attention"):
        made.cache.audit("a test")


# ---------------------------------------------------------------- the door


def context(made: Any, config: dict[str, Any], **given: Any) -> Any:
    """SGLang's build context, for the pools of ``made``."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    params = CacheInitParams(
        disable=False, req_to_token_pool=made.rows, token_to_kv_pool_allocator=made.allocator, page_size=made.page
    )
    usual = {
        "params": params, "is_hybrid_swa": False, "is_hybrid_ssm": False, "disable_radix_cache": False,
        "enable_hierarchical_cache": False, "full_tokens_per_layer": None, "server_args": None,
        "model_config": SimpleNamespace(hf_config=config),
    }  # fmt: skip
    return SimpleNamespace(**(usual | given))


LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}


def test_the_interface_of_this_release_is_known() -> None:
    interface.check()
    if interface.installed() not in interface.VERSIONS:
        pytest.skip(f"SGLang {interface.installed()} is not one of those that we name")


def test_a_factory_is_registered_once_and_makes_a_cache() -> None:
    from sglang.srt.mem_cache import registry

    door.register()
    assert registry.get_radix_cache_factory("prefixloom") is door.make
    made = scheduler("F", 4)
    assert type(door.make(context(made, LLAMA))).__name__ in ("PrefixloomCache", "AuditedCache")


def test_a_model_that_no_profile_knows_is_left_to_sglang_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = scheduler("F", 4)
    strange = LLAMA | {"layer_types": ["hyena"]}
    with caplog.at_level(logging.WARNING, logger="sglang.prefixloom"):
        cache = door.make(context(made, strange))
    assert type(cache).__name__ == "UnifiedRadixCache"
    (line,) = [each.message for each in caplog.records if each.name == "sglang.prefixloom"]
    assert line.startswith("prefixloom cannot cache this model, so SGLang's own cache does: ") and "hyena" in line
    monkeypatch.setenv(door.UNKNOWN, "refuse")
    with pytest.raises(CompositionError, match=r"prefixloom cannot cache this model: .*hyena"):
        door.make(context(made, strange))
    monkeypatch.setenv(door.UNKNOWN, "perhaps")
    with pytest.raises(CompositionError, match="is 'own' or 'refuse', got 'perhaps'"):
        door.make(context(made, strange))


def test_without_a_prefix_cache_sglangs_own_class_keeps_the_tables(caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler("F", 4)
    switched_off = context(made, LLAMA, disable_radix_cache=True)
    switched_off.params.disable = True
    caplog.set_level(logging.WARNING, "sglang.prefixloom")
    assert type(door.make(switched_off)).__name__ == "UnifiedRadixCache"
    assert "the prefix cache is switched off" in caplog.text


def test_an_allocator_that_nobody_knows_is_refused_by_name() -> None:
    made = scheduler("F", 4)

    class CrossedAllocator(type(made.allocator)):  # type: ignore[misc]
        pass

    made.allocator.__class__ = CrossedAllocator
    with pytest.raises(CompositionError, match="does not know SGLang's allocator CrossedAllocator"):
        door.make(context(made, LLAMA))
