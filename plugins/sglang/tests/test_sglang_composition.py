"""From a model's config and SGLang's pools to the books."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import CompositionError
from prefixloom_sglang.composition import FULL, STATE, SWA, Pools, books_for, pools_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "dtype": "float32",
}  # fmt: skip
WINDOWS = LLAMA | {
    "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
STATES = LLAMA | {
    "model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def names(cache: Any) -> list[str]:
    return [part.name for part in cache.composition.parts]


def test_each_kind_of_slot_is_one_component_with_room_for_sglangs_page_numbers() -> None:
    cache = books_for(WINDOWS, Pools(16, 100, 50, window=31))
    assert names(cache) == [FULL, SWA]
    figures = cache.stats().components
    assert (figures[FULL].capacity, figures[SWA].capacity) == (101, 51), "page 0 is SGLang's padding"
    assert figures[FULL].page_bytes == 16 * 2 * 2 * 16 * 4, "keys and values of one layer"
    assert figures[SWA].page_bytes == 2 * figures[FULL].page_bytes, "of two layers"
    assert cache.composition.lent and cache.composition.device == "meta" and cache.composition.page == 16
    assert names(books_for(STATES, Pools(1, 100, states=7))) == [FULL, STATE]


def test_windows_reach_as_far_as_sglang_keeps_them() -> None:
    """A draft model may read more of the window than the model does."""
    for given, hit in ((39, 0), (40, 60)):
        cache = books_for(WINDOWS, Pools(1, 100, 100, window=40))
        cache.insert(range(60), {FULL: range(1, 61), SWA: [-1] * (60 - given) + list(range(1, given + 1))})
        assert cache.peek(range(60)) == hit


def test_without_a_pool_for_windows_they_lie_under_the_slots_of_full_attention() -> None:
    cache = books_for(WINDOWS, Pools(1, 100))
    assert names(cache) == [FULL]
    assert cache.stats().components[FULL].page_bytes == 3 * 2 * 2 * 16 * 4


def test_eagle_looks_one_token_ahead() -> None:
    assert books_for(LLAMA, Pools(1, 100), bigrams=True).composition.lookahead == 1


@pytest.mark.parametrize(
    ("config", "pools", "sentence"),
    [
        (LLAMA, Pools(1, 100, 100, window=31), "SGLang keeps windows for this model, and its config has no windows"),
        (WINDOWS, Pools(1, 100, 100, window=30), "reads 31 tokens back, and SGLang keeps 30"),
        (LLAMA, Pools(1, 100, states=8), "SGLang keeps states for this model, and its config has none"),
        (STATES, Pools(1, 100), "the model's config has states, and SGLang keeps none for it"),
        (LLAMA | {"layer_types": ["full_attention", "hyena"]}, Pools(1, 100), "'hyena'"),
    ],
)
def test_what_does_not_fit_together_is_refused(config: dict[str, Any], pools: Pools, sentence: str) -> None:
    with pytest.raises(CompositionError, match=sentence):
        books_for(config, pools)


def test_the_pools_are_read_from_sglangs_parameters() -> None:
    allocator = SimpleNamespace(size_full=160, size_swa=80)
    requests = SimpleNamespace(mamba_allocator=SimpleNamespace(size=9))
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, page_size=16, req_to_token_pool=requests, sliding_window_size=31
    )
    assert pools_of(params, windows=False, states=False) == Pools(16, 10)
    params.draft_swa_window = 40
    assert pools_of(params, windows=True, states=True) == Pools(16, 10, 5, 40, 9)


@pytest.mark.parametrize(
    ("config", "pools", "sentence"),
    [
        (LLAMA, Pools(16, 0), "SGLang has 0 pages for tokens, .* --max-total-tokens"),
        (LLAMA, Pools(0, 8), "SGLang has 0 tokens for a page, .* --page-size"),
        (WINDOWS, Pools(1, 8, 0, window=31), "SGLang has 0 pages for windows, .* --swa-full-tokens-ratio"),
        (WINDOWS, Pools(1, 8, 8, window=0), "SGLang keeps 0 tokens of a window"),
        (STATES, Pools(1, 8, states=0), "SGLang has 0 slots for states, .* --max-mamba-cache-size"),
    ],
)
def test_a_pool_of_no_size_is_refused_with_the_flag_that_gives_it_more(
    config: dict[str, Any], pools: Pools, sentence: str
) -> None:
    with pytest.raises(CompositionError, match=sentence):
        books_for(config, pools)
