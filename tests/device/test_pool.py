"""Pools and spans: shapes, conservation, handles that are poisoned, double frees."""

from __future__ import annotations

import random
import warnings
from array import array
from itertools import pairwise
from typing import Any

import pytest
import torch

from prefixloom import Buffer, Component, InvariantError, Manifest, Path, Point, ProtocolError, compose
from prefixloom.device import layouts
from prefixloom.device.pool import ABSENT_BYTES, DebugPool, PageSpan, Pool, present
from tests.support.helpers import cache_of, finish, part, path_cache, serve, settle

DEVICES = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]


def pool(kind: type[Pool] = DebugPool, capacity: int = 8) -> Pool:
    return kind("kv", Manifest([Buffer("k", (2,), "int64")]), "page", capacity, 4, "cpu")


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_pool_has_layers_then_pages_then_entries_then_the_shape(device: str) -> None:
    manifest = Manifest([Buffer("k", (3, 5), "float16", layers=(0, 4, 9)), Buffer("v", (7,), "int8")])
    cache = compose(
        None, plugins=[Component("kv", manifest, Path())], page_size=8, capacity=100, device=device, debug=True
    )
    buffers = cache.pool("kv").buffers
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in buffers.items()} == {
        "k": ((3, 13, 8, 3, 5), torch.float16, device),
        "v": ((1, 13, 8, 7), torch.int8, device),
    }
    assert cache.pool("kv").slot_bytes == 8 * (3 * 15 * 2 + 7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_pool_has_layers_then_slots_then_the_shape(device: str) -> None:
    manifest = Manifest([Buffer("state", (4, 2), "float32", layers=(1, 2))])
    cache = compose(None, plugins=[Component("s", manifest, Point())], capacity={"s": 5}, device=device, debug=True)
    tensor = cache.pool("s").buffers["state"]
    assert tuple(tensor.shape) == (2, 5, 4, 2)
    assert tensor.device.type == device
    assert cache.pool("s").slot_bytes == 2 * 8 * 4


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_a_page_has_one_entry_for_each_group_of_tokens(group: int) -> None:
    cache = cache_of(part("c", Path(), tokens_per_slot=group), page=8, tokens=64)
    assert tuple(cache.pool("c").buffers["data"].shape) == (1, 8, 8 // group, 2)
    assert cache.pool("c").slot_bytes == 8 // group * 16
    serve(cache, range(40))
    assert cache.peek(range(40)) == 40
    assert cache.stats().components["c"].cached == 5


def test_a_layer_that_shares_takes_no_memory() -> None:
    manifest = Manifest([Buffer("k", (1,), "int64", layers=(0, 2), shared={1: 0, 3: 2})])
    assert Pool("kv", manifest, "page", 2, 4, "cpu").buffers["k"].shape[0] == 2


def test_copy_and_clear_touch_every_layer_of_the_slots_named_and_nothing_else() -> None:
    manifest = Manifest([Buffer("a", (2,), "int64", layers=(0, 1)), Buffer("b", (), "int32")])
    slots = Pool("s", manifest, "boundary", 4, 1, "cpu")
    for tensor in slots.buffers.values():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1)
    before = {name: tensor.clone() for name, tensor in slots.buffers.items()}
    slots.copy((0,), (2,))
    slots.clear((3,))
    for name, tensor in slots.buffers.items():
        assert torch.equal(tensor[:, 2], before[name][:, 0])
        assert torch.equal(tensor[:, :2], before[name][:, :2])
        assert not tensor[:, 3].any()


def test_a_component_that_has_a_pool_attribute_is_given_its_pool() -> None:
    component = part("kv", Path())
    component.pool = None  # type: ignore[attr-defined]
    cache = cache_of(component)
    assert component.pool is cache.pool("kv")  # type: ignore[attr-defined]


# ---------------------------------------------------------------- spans


def test_a_minted_span_owns_pages_that_nobody_else_has() -> None:
    slots = pool()
    first, second = slots.mint(3), slots.mint(4)
    assert len(first) == 3
    assert not set(first.ids) & set(second.ids)
    assert slots.free == 1
    first.free()
    assert slots.free == 4


def test_a_freed_span_is_poisoned_and_cannot_be_freed_again() -> None:
    span = pool().mint(2)
    span.free()
    for use in (span.free, lambda: span.ids, lambda: len(span)):
        with pytest.raises(ProtocolError, match="used after it was freed"):
            use()


@pytest.mark.parametrize("kind", [Pool, DebugPool])
@pytest.mark.parametrize("count", [9, -1, 1 << 40])
def test_no_more_can_be_minted_than_is_free(kind: type[Pool], count: int) -> None:
    slots = pool(kind)
    with pytest.raises(ProtocolError, match=f"has 8 free pages; {count} were asked for"):
        slots.mint(count)
    assert slots.free == 8


def test_an_empty_span_is_possible() -> None:
    slots = pool()
    span = slots.mint(0)
    assert span.ids == ()
    span.free()
    assert slots.free == 8


# ---------------------------------------------------------------- debug


def test_a_forged_handle_cannot_free_what_is_free() -> None:
    slots = pool()
    with pytest.raises(InvariantError, match="slot 3 given back twice"):
        PageSpan(slots, b"\x03\0\0\0").free()
    assert slots.free == 8


def test_giving_twice_is_caught_for_pages_and_for_states() -> None:
    slots = pool()
    ids = slots.take(2)
    slots.give(ids.tobytes())
    with pytest.raises(InvariantError, match=f"slot {ids[0]} given back twice"):
        slots.give(ids.tobytes())
    slot = slots.take(1)[0]
    slots.give_slots([slot])
    with pytest.raises(InvariantError, match=f"slot {slot} given back twice"):
        slots.give_slots([slot])


@pytest.mark.parametrize("slot", [-1, 8, 100])
def test_giving_a_slot_that_does_not_exist_is_caught(slot: int) -> None:
    with pytest.raises(InvariantError, match="never handed out"):
        pool().give_slots([slot])


@pytest.mark.parametrize("count", [0, 9])
def test_taking_what_is_not_free_is_caught(count: int) -> None:
    with pytest.raises(InvariantError, match=f"{count} pages taken with 8 free"):
        pool().take(count)


def test_a_slot_on_the_free_list_that_is_owned_is_caught() -> None:
    slots = pool()
    slot = slots.take(1)[0]
    slots._free[slots.at_hand] = slot
    slots.at_hand += 1
    with pytest.raises(InvariantError, match=f"slot {slot} was on the free list while owned"):
        slots.take(1)


def test_pages_are_conserved_over_random_mints_and_frees() -> None:
    draw = random.Random(1)
    slots = pool(capacity=32)
    spans: list[PageSpan] = []
    for _ in range(3000):
        if draw.random() < 0.5 and slots.free:
            spans.append(slots.mint(draw.randint(1, slots.free)))
        elif spans:
            spans.pop(draw.randrange(len(spans))).free()
        owned = [slot for span in spans for slot in span.ids]
        assert sorted([*owned, *slots.free_ids()]) == list(range(32))


def test_absent_pages_are_not_counted_as_present() -> None:
    assert present(b"") == 0
    assert present(ABSENT_BYTES * 2 + b"\x05\0\0\0" + ABSENT_BYTES) == 1


# ---------------------------------------------------------------- in a cache


def test_a_cache_that_is_full_of_minted_pages_says_that_they_are_running() -> None:
    cache = path_cache(tokens=32)
    span = cache.pool("path").mint(6)
    assert cache.stats().components["path"].running == 6
    sequence = cache.open(range(8))
    finish(sequence)
    with pytest.raises(Exception, match="8 owned by running sequences"):
        sequence.grow(4)
    span.free()
    sequence.close()
    settle(cache)


def test_a_minted_span_that_is_dropped_is_reported_and_its_pages_recovered(caplog: pytest.LogCaptureFixture) -> None:
    cache = path_cache()
    span: Any = cache.pool("path").mint(3)
    del span
    cache.poll()
    assert cache.stats().components["path"].free == 64
    assert "test_pool.py" in caplog.text


@pytest.mark.parametrize("debug", [True, False])
def test_a_span_from_before_a_flush_frees_nothing_of_what_came_after(debug: bool) -> None:
    cache = path_cache(debug=debug)
    span = cache.pool("path").mint(3)
    cache.flush()
    with pytest.raises(ProtocolError, match="minted before the cache was flushed"):
        span.free()
    del span
    cache.poll()
    assert cache.pool("path").free == 64


def test_an_orderly_pool_hands_out_what_lies_together() -> None:
    """Pieces of 1 to 40 pages come and go for long; without order they end as single pages."""

    def pages_in_a_run(orderly: bool) -> float:
        rng = random.Random(3)
        slots = pool(Pool, capacity=2000)
        slots.orderly = orderly
        held: list[array[int]] = []
        pages = runs = 0
        for turn in range(6000):
            count = rng.randrange(1, 41)
            while slots.free < count:  # what goes was taken at about the same time
                at = rng.randrange(max(1, len(held) // 8))
                for piece in held[at : at + 4]:
                    slots.give(piece.tobytes())
                del held[at : at + 4]
            held.append(slots.take(count))
            if turn > 4000:
                pages += count
                runs += 1 + sum(b != a + 1 for a, b in pairwise(held[-1]))
        assert sorted([*slots.free_ids(), *(slot for piece in held for slot in piece)]) == list(range(2000))
        return pages / runs

    ordered, otherwise = pages_in_a_run(True), pages_in_a_run(False)
    assert otherwise < 1.2 and ordered > 2 * otherwise


def test_bringing_order_takes_no_longer_where_more_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        "prefixloom.device.pool.sorted", lambda some: (seen.append(len(some)), sorted(some))[1], raising=False
    )
    slots = pool(Pool, capacity=100_000)
    slots.orderly = True
    slots.give(slots.take(5)[::-1].tobytes())
    assert list(slots.take(3)) == [99_997, 99_998, 99_999]
    slots.take(2000)
    assert seen == [1024, 1024], "nothing was given back since"


def test_a_lent_slot_may_come_once_and_is_here_until_it_is_handed_back() -> None:
    count = 200
    pool = Pool("p", Manifest([Buffer("k", (1,), "uint8", [0])]), "page", 400, 1, "meta", lent=True)
    slots = array("i", range(100, 100 + count))
    assert pool.may_come(slots) and not pool.may_come(slots[:-1] + slots[:1])
    pool.lend(slots)
    assert pool.outside == 400 - count
    assert all(map(pool.has, slots)) and not pool.has(7)
    assert not pool.may_come(slots[-1:] + array("i", range(count - 1)))
    assert [*pool.hand_back()] == [*slots] and pool.may_come(slots) and not any(map(pool.has, slots))


def test_what_torch_warns_of_while_a_pool_is_made_is_shown_but_that_there_is_no_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = layouts.allocate

    def warning(*given: Any) -> Any:
        warnings.warn("Failed to initialize NumPy: none is there", stacklevel=1)
        warnings.warn("this device is too old", stacklevel=1)
        return honest(*given)

    monkeypatch.setattr(layouts, "allocate", warning)
    with pytest.warns(UserWarning) as told:
        pool()
    assert [str(each.message) for each in told] == ["this device is too old"]
