"""The tree: splits keep the lower half, plans and leases stay true, bare nodes go, depth costs no stack, no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from prefixloom import CapacityError, Chunk, Path, Point, Sinks, Window
from prefixloom.contract.policy import BUILT_IN
from prefixloom.insight.debug import Debug
from prefixloom.tree.radix import Node, Tree
from tests.support.helpers import (
    cache_of,
    every_reach,
    held,
    part,
    run,
    serve,
    settle,
)


def key(*pages: int) -> bytes:
    """One byte-ish token per position, pages of two tokens."""
    return b"".join(bytes([page, 0, 0, 0, page, 1, 0, 0]) for page in pages)


def test_an_only_child_is_compared_whole_and_several_are_told_apart_by_their_first_pages() -> None:
    tree = Tree(2, 4, 1)
    root = tree.root("")
    first = tree.attach(root, key(1, 2), 4)
    assert root.kids is first
    assert (first.first, first.rest, first.key, root.forks) == (b"", key(1, 2), key(1, 2), False)
    second = tree.attach(root, key(3, 4), 4)
    assert root.kids == {key(1): first, key(3): second}
    assert (first.first, first.rest, first.key, root.forks) == (key(1), key(2), key(1, 2), True)
    for node in (first, second):
        assert tree.walk(root, node.key) == (node, 4, node)
    tree.prune(first)
    assert (root.kids, root.forks) == ({key(3): second}, False)
    assert tree.walk(root, key(3, 4)) == (second, 4, second)
    assert tree.walk(root, key(1, 2)) == (root, 0, root)
    tree.prune(second)
    assert root.kids is None
    assert tree.attach(root, key(1), 2) is root.kids


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("cut", [2, 4])
def test_a_split_of_an_only_child_and_of_one_of_several(alone: bool, cut: int) -> None:
    tree = Tree(2, 4, 1)
    root = tree.root("")
    node = tree.attach(root, key(1, 2, 3), 6)
    if not alone:
        tree.attach(root, key(7), 2)
    upper = tree.split(node, cut)
    assert (upper.key, node.key) == (key(*range(1, cut // 2 + 1)), key(*range(cut // 2 + 1, 4)))
    assert upper.kids is node
    assert (root.kids is upper) == alone
    assert tree.walk(root, key(1, 2, 3)) == (node, 6, node)
    assert tree.walk(root, key(1, 9)) == ((upper, 2, upper) if cut == 2 else (upper, 2, root))
    assert tree.walk(root, key(1, 2)) == ((node, 4, upper) if cut == 2 else (upper, 4, upper))
    lower = tree.attach(upper, key(9), cut + 2)
    assert upper.children == [node, lower]
    assert tree.walk(root, upper.key + key(9)) == (lower, cut + 2, lower)


@pytest.mark.parametrize("page", [1, 2, 4, 16, 256])
def test_agreed_finds_the_first_page_that_differs_wherever_it_is(page: int) -> None:
    tree = Tree(page, 4, 1)
    size = tree.page_bytes
    pages = 40
    edge = b"".join(bytes([i]) * size for i in range(1, pages + 1))
    for at in (0, size, 3 * size):
        prefix = b"\x77" * at
        for same in range(pages + 1):
            for byte in (0, size - 1):
                other = bytearray(edge)
                if same < pages:
                    other[same * size + byte] ^= 0xFF
                assert tree.agreed(prefix + bytes(other), at, edge) == same * size
            assert tree.agreed(prefix + edge[: same * size], at, edge) == same * size, "a key that ends inside"
        assert tree.agreed(prefix + edge + b"more", at, edge) == pages * size


def test_a_walk_stops_inside_of_an_edge_at_a_page() -> None:
    tree = Tree(2, 4, 1)
    root = tree.root("")
    node = tree.attach(root, key(1, 2, 3), 6)
    assert tree.walk(root, key(1, 2, 9)) == (node, 4, root)
    assert tree.walk(root, key(1, 2, 3, 4)) == (node, 6, node)
    assert tree.walk(root, key(1, 2)[:-1]) == (node, 2, root)
    assert tree.walk(root, key(9)) == (root, 0, root)
    assert tree.walk(root, b"") == (root, 0, root)


def test_prune_unlinks_bare_nodes_upward_and_stops_at_what_is_kept() -> None:
    tree = Tree(2, 4, 1)
    root = tree.root("")
    first = tree.attach(root, key(1), 2)
    second = tree.attach(first, key(2), 4)
    third = tree.attach(second, key(3), 6)
    first.leases = 1
    tree.prune(second)
    assert tree.nodes == 3, "a node with a kid stays"
    tree.prune(third)
    assert tree.nodes == 1
    assert first.kids is None
    first.leases = 0
    tree.prune(first)
    assert tree.nodes == 0
    assert root.kids is None
    tree.prune(third)
    assert tree.nodes == 0, "what is unlinked already stays unlinked"


def test_a_walk_goes_down_5000_nodes_and_all_of_it_is_evicted_without_recursion() -> None:
    cache = cache_of(
        part("path", Path()), part("window", Window(10)), page=1, tokens=6000, debug=False, capacity={"path": 6000}
    )
    tokens = list(range(5000))
    with cache.open(tokens) as sequence:
        for _ in range(5000):
            run(sequence, 1)
            sequence.publish()
        assert cache.stats().nodes == 5000
        lease = cache.lease(cache.match(tokens))
    books = Debug(cache.core)
    books.leased(lease)
    books.check("a deep chain")
    assert held(cache, tokens) == 5000
    other = cache.open([*tokens[:2500], 7, 7])
    assert other.ready == 2500
    other.abort()
    lease.release()
    assert cache.evict(6000)["path"] == 5000
    assert cache.stats().nodes == 0
    for give_up in (cache.flush, lambda: cache.drop_namespace("")):
        with cache.open(tokens) as sequence:
            for _ in range(1500):  # deeper than Python may recurse
                run(sequence, 1)
                sequence.publish()
            sequence.abort()
        give_up()
        assert cache.stats().nodes == 0
    settle(cache)


# ---------------------------------------------------------------- garbage


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("policy", BUILT_IN)
def test_whole_requests_make_no_cyclic_garbage(policy: str) -> None:
    cache = cache_of(
        *(part(name, reach) for name, reach in every_reach().items()), tokens=128, slots=3, debug=False, policy=policy
    )
    gc.collect()
    for i in range(30):
        serve(cache, [i % 7] * 40 + [i] * 20, chunk=20)
        cache.lease(cache.match([i % 7] * 40)).release()
        cache.open([i] * 8).abort()
        with pytest.raises(CapacityError), cache.open([i] * 8) as sequence:
            sequence.grow(124)
            cache.open([1]).grow(8)
        del sequence
    cache.evict(128)
    assert gc.collect() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_namespace_that_empties_makes_no_cyclic_garbage() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), debug=False)
    gc.collect()
    for i in range(10):
        cache.open([1], namespace=f"short {i}").close()
        serve(cache, range(20), namespace=f"long {i}")
    cache.evict(256)
    assert cache.stats().namespaces == 0
    assert gc.collect() == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", ["flush", "drop_namespace"])
def test_giving_up_a_tree_makes_no_cyclic_garbage(end: str) -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), debug=False)
    for i in range(6):
        serve(cache, [1] * 8 + [i] * 20, namespace="one", chunk=8)
    gc.collect()
    cache.flush() if end == "flush" else cache.drop_namespace("one")
    assert gc.collect() == 0


def test_an_interrupt_in_the_midst_of_pruning_leaves_the_count_right() -> None:
    tree = Tree(2, 4, 1)
    root = tree.root("")
    first, second = tree.attach(root, key(1), 2), tree.attach(root, key(2), 2)

    def interrupted() -> Iterator[Node]:
        yield first
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tree.prune_all(interrupted())
    assert root.children == [second]
    assert tree.nodes == 1
    assert tree.prune_all([first, second]) == 1
    assert tree.nodes == 0


def test_a_union_that_needs_nothing_at_the_start_of_a_chunk_is_resumed_there_amid_what_was_lost() -> None:
    cache = cache_of(part("path", Path()), part("union", Sinks(2) | Chunk(12)))
    tokens = list(range(25))
    with cache.open(tokens) as sequence:
        for count in (8, 12, 4):
            run(sequence, count)
            sequence.publish()
    cache.lease(cache.match(tokens[:8])).release()  # what the sinks are in goes last
    cache.evict({"union": 3})
    assert [cache.match(tokens[:length]).ready for length in (12, 16, 20, 24)] == [12, 12, 12, 24]
