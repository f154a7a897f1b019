"""What SGLang holds in place of tree nodes."""

from __future__ import annotations

import pytest

from prefixloom import Buffer, Cache, Component, Manifest, Path, ProtocolError, compose, encode
from prefixloom_sglang.prefix import Prefix, depth_first


def books() -> Cache:
    kv = Manifest([Buffer("k", (2,), "float32")])
    return compose(
        None, plugins=[Component("full", kv, Path())], page_size=2, capacity=64, slots="lent", device="meta", debug=True
    )


def prefix_of(cache: Cache, tokens: list[int], namespace: str = "") -> Prefix:
    encoded = encode(tokens)
    return Prefix(cache, cache.match(encoded, namespace=namespace), encoded)


def test_a_locked_prefix_keeps_its_pages_and_an_unlocked_one_does_not() -> None:
    cache = books()
    cache.insert(range(8), {"full": [1, 2, 3, 4]})
    prefix = prefix_of(cache, [*range(6), 99])
    prefix.lock()
    prefix.lock()
    assert cache.evict({"full": 4}) == {"full": 1}
    prefix.unlock()
    assert cache.evict({"full": 4}) == {"full": 0}
    assert list(prefix.pages("full")) == [1, 2, 3]
    prefix.unlock()
    assert cache.evict({"full": 4}) == {"full": 3}


def test_what_was_evicted_since_it_was_matched_cannot_be_locked() -> None:
    cache = books()
    cache.insert(range(8), {"full": [1, 2, 3, 4]})
    prefix = prefix_of(cache, list(range(8)))
    cache.evict({"full": 4})
    with pytest.raises(ProtocolError, match="resumed at 0 only"):
        prefix.lock()


def test_a_prefix_of_no_tokens_locks_nothing() -> None:
    cache = books()
    for prefix in (Prefix(cache), prefix_of(cache, [1, 2, 3])):
        prefix.lock()
        prefix.unlock()
        assert (prefix.length, list(prefix.pages("full"))) == (0, [])


def test_depth_first_begins_with_the_heaviest_branch_and_ends_with_the_branch_itself() -> None:
    cache = books()
    fresh = iter(range(1, 32))
    for tokens in ([1, 1, 2, 2], [1, 1, 3, 3], [4, 4], [1, 1, 3, 3, 5, 5]):
        start = cache.match(tokens).ready
        cache.insert(tokens, {"full": [next(fresh) for _ in tokens[start::2]]}, start=start)
    cache.insert([1, 1], {"full": [next(fresh)]}, namespace="another")
    asked = [[4, 4], [1, 1], [1, 1, 2, 2], [1, 1, 3, 3], [7, 7], [1, 1, 3, 3, 5, 5], [1, 1, 3, 3]]
    prefixes = [*(prefix_of(cache, tokens) for tokens in asked), prefix_of(cache, [1, 1], "another")]
    order = depth_first(prefixes)
    assert sorted(order) == list(range(len(prefixes)))
    names = [[*asked, ["another"]][i] for i in order]
    # of the branch [1, 1] first [3, 3] with what is below it, then [2, 2], and then the branch itself
    first = names[names.index([1, 1, 3, 3, 5, 5]) :]
    assert first[:5] == [[1, 1, 3, 3, 5, 5], [1, 1, 3, 3], [1, 1, 3, 3], [1, 1, 2, 2], [1, 1]]
    assert names[:5] == first[:5], "the heaviest branch comes first of all"


def test_depth_first_of_equal_prefixes_is_any_order_of_them() -> None:
    cache = books()
    assert sorted(depth_first([Prefix(cache) for _ in range(4)])) == [0, 1, 2, 3]
    assert depth_first([]) == []
