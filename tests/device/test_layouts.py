"""Layouts of pools: tensors lie in memory in two ways, and slots are copied, moved, written out and read back."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path as File
from typing import Any

import pytest
import torch

from prefixloom import (
    Buffer,
    Component,
    CompositionError,
    InputError,
    InvariantError,
    Manifest,
    Path,
    Point,
    TierManifest,
    compose,
)
from prefixloom.contract.manifest import DTYPE_BYTES, LAYOUTS, Layout
from prefixloom.device import host_pool as pool_host
from prefixloom.device.host_pool import DebugHostPool, HostPool, available, in_one_piece
from prefixloom.device.pool import Pool, Stage
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom.tiers import host_copies as lane_host
from prefixloom.tiers.host_copies import copy_between
from prefixloom_hicache import HostTier
from tests.support.composing import paths, refused, state
from tests.support.content import bits, noise
from tests.support.helpers import cache_of, part

EACH = pytest.mark.parametrize("layout", LAYOUTS)
BOTH = pytest.mark.parametrize("layouts", list(product(LAYOUTS, LAYOUTS)), ids=" to ".join)
UNEQUAL = Manifest(
    [
        Buffer("flags", (3,), "bool", layers=(0, 4)),
        Buffer("k", (2, 5), "bfloat16", layers=(0, 1, 2)),
        Buffer("v", (7,), "bfloat16", layers=(0, 1, 2)),
        Buffer("scale", (), "float64", layers=(1,), shared={2: 1}),
        Buffer("q", (3,), "int8", layers=(0, 1, 2)),
    ]
)


def pool(layout: Layout, capacity: int = 9, device: str = "cpu", manifest: Manifest = UNEQUAL) -> Pool:
    return Pool("kv", manifest, "page", capacity, 4, device, layout=layout)


def below(
    layout: Layout, capacity: int = 11, entries: int = 4, manifest: Manifest = UNEQUAL, unit: str = "page"
) -> HostPool:
    return HostPool("host kv", manifest, unit, capacity, entries, layout=layout)


def fill(of: Pool, seed: int) -> dict[str, torch.Tensor]:
    """Noise in all of a pool; what it has now."""
    for number, tensor in enumerate(of.buffers.values()):
        tensor.copy_(noise(tensor.shape, tensor.dtype, seed + number))
    return {name: tensor.clone() for name, tensor in of.buffers.items()}


def holds(of: Pool, wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(bits(of.buffers[name]), bits(tensor)) for name, tensor in wanted.items())


# ---------------------------------------------------------------- what lies where


def test_pools_of_both_tiers_have_the_same_buffers_all_zeros_and_no_two_elements_share_memory() -> None:
    first, *others = (*(pool(layout) for layout in LAYOUTS), *(below(layout, 9) for layout in LAYOUTS))
    for second in others:
        assert list(first.buffers) == list(second.buffers)
        for name, tensor in first.buffers.items():
            other = second.buffers[name]
            assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
            assert not bits(other).any()
            assert tensor.is_contiguous()
            assert other[0, 0].is_contiguous()
    for each in (first, *others):
        assert holds(each, fill(each, 1)), "what is written to one buffer is not read in another"


def test_a_page_first_slot_is_one_piece_and_every_element_lies_where_it_may() -> None:
    made = pool("page_first")
    (block,) = made.blocks
    start, pitch = block.data_ptr(), block.stride(1)
    assert made.slot_bytes <= pitch < made.slot_bytes + 8
    for tensor in made.buffers.values():
        for layer, slot in product(range(len(tensor)), range(made.capacity)):
            here = tensor[layer, slot]
            assert start + slot * pitch <= here.data_ptr()
            assert here.data_ptr() + here.numel() * here.element_size() <= start + slot * pitch + made.slot_bytes
            assert here.data_ptr() % here.element_size() == 0


@EACH
def test_a_pool_without_content_has_shapes(layout: Layout) -> None:
    made = pool(layout, device="meta")
    assert {name: t.shape for name, t in made.buffers.items()} == {n: t.shape for n, t in pool(layout).buffers.items()}
    made.copy([1], [2])
    made.clear([1])


# ---------------------------------------------------------------- within a pool


@EACH
def test_slots_are_copied_selected_and_cleared_as_tensors_are(layout: Layout) -> None:
    for seed in range(20):
        rng, made = random.Random(seed), pool(layout, capacity=40)
        wanted = fill(made, seed)
        src, dst = ([rng.randrange(40) for _ in range(rng.choice((1, 3, 20)))] for _ in range(2))
        dst = (dst * 20)[: len(src)]
        made.copy(src, dst)
        for tensor in wanted.values():
            for s, d in zip(src, dst, strict=True):
                tensor[:, d] = tensor[:, s].clone()
        assert holds(made, wanted)
        rows = [[rng.randrange(40) for _ in range(3)] for _ in dst]
        chosen = torch.tensor([rng.randrange(3) for _ in dst])
        made.select(rows, chosen, dst)
        for tensor in wanted.values():
            for row, index, d in zip(rows, chosen.tolist(), dst, strict=True):
                tensor[:, d] = tensor[:, row[index]].clone()
        assert holds(made, wanted)
        made.clear(dst)
        for tensor in wanted.values():
            tensor[:, dst] = 0
        assert holds(made, wanted)


# ---------------------------------------------------------------- between pools


@BOTH
def test_content_moves_whole_and_by_layers_whatever_the_layouts(layouts: tuple[Layout, Layout]) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        sides: list[Any] = [pool(layouts[0], capacity=40), below(layouts[1], capacity=40)]
        rng.shuffle(sides)
        source, target = sides
        count = rng.choice((1, 5, 30))
        src, dst = rng.sample(range(40), count), rng.sample(range(40), count)
        low, high = rng.choice(((0, 9), (0, 2), (1, 5), (3, 4)))
        before, wanted = fill(source, seed), fill(target, seed + 10)
        copy_between(source, src, target, dst, low, high)
        for buffer in UNEQUAL.buffers:
            for at, layer in enumerate(buffer.layers):
                if low <= layer < high:
                    wanted[buffer.name][at, dst] = before[buffer.name][at, src]
        assert holds(target, wanted)
        assert holds(source, before)


def test_a_page_goes_in_one_piece_where_both_sides_keep_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(lane_host, "move_slots", lambda source, *more, **parts: moved.append(len(source)))
    for ours, theirs in product(LAYOUTS, LAYOUTS):
        copy_between(pool(ours), [1], below(theirs), [2])
    assert moved == [1] * (3 * len(UNEQUAL.buffers) + 1), "buffer by buffer, and once all of it"


def test_other_pages_are_no_single_piece() -> None:
    ours = pool("page_first")
    more = Manifest([*UNEQUAL.buffers, Buffer("more", (1,), "int8", layers=(0,))])
    assert in_one_piece(ours, below("page_first"))
    assert not in_one_piece(ours, below("layer_first"))
    assert not in_one_piece(pool("layer_first"), below("page_first"))
    assert not in_one_piece(ours, below("page_first", entries=8))
    assert not in_one_piece(ours, below("page_first", manifest=more))
    with pytest.raises(InputError, match="cannot be moved into"):
        copy_between(ours, [1], below("page_first", entries=8), [1])


# ---------------------------------------------------------------- composed


def test_pages_have_the_layout_that_is_asked_for_and_states_lie_layer_by_layer() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()), layout="page_first")
    assert cache.composition.layout == "page_first"
    assert {name: cache.pool(name).layout for name in ("path", "state")} == {
        "path": "page_first", "state": "layer_first",
    }  # fmt: skip
    assert cache_of(part("path", Path())).pool("path").layout == "layer_first"


def test_memory_that_is_said_is_not_exceeded_by_where_pages_begin() -> None:
    """A page of 13 bytes begins at a multiple of 8: on the device and below it."""
    odd = Component("odd", Manifest([Buffer("data", (13,), "int8")]), Path())
    for layout, size in (("layer_first", 13), ("page_first", 16)):
        tier = HostTier(TierManifest(memory=1 << 20, layout="page_first"))
        cache = compose(None, plugins=[odd, tier], page_size=1, memory=1 << 20, layout=layout)  # type: ignore[arg-type]
        made = cache.pool("odd")
        assert made.capacity == (1 << 20) // size
        assert sum(block.numel() for block in made.blocks) <= 1 << 20
        assert sum(block.numel() for block in tier_lanes(cache)[0].pool.blocks) <= 1 << 20


def test_nothing_is_copied_where_there_is_no_content() -> None:
    copy_between(pool("page_first", device="meta"), [1], below("page_first"), [1])
    copy_between(below("layer_first"), [1], pool("layer_first", device="meta"), [1])


@pytest.mark.parametrize("layout", ["", "token_first", None, 1])
def test_a_layout_that_does_not_exist_is_refused(layout: Any) -> None:
    refused("layout must be one of layer_first, page_first, got", paths(), state(), layout=layout)


# ---------------------------------------------------------------- records of the host's slots


def some_manifest(choice: random.Random) -> Manifest:
    return Manifest(
        [
            Buffer(
                f"b{number}",
                tuple(choice.randrange(1, 5) for _ in range(choice.randrange(3))),
                choice.choice(list(DTYPE_BYTES)),
                layers=tuple(choice.sample(range(9), choice.randrange(1, 5))),
            )
            for number in range(choice.randrange(1, 5))
        ]
    )


def spelled(pool: HostPool, slot: int) -> bytes:
    """A record as the module says it is made, from the tensors."""
    order = sorted(pool.manifest.buffers, key=lambda b: -DTYPE_BYTES[b.dtype])
    return b"".join(bytes(bits(pool.buffers[b.name][:, slot]).tolist()) for b in order)


@pytest.mark.parametrize("name", DTYPE_BYTES)
@EACH
def test_every_dtype_lies_where_its_elements_may(layout: Layout, name: str) -> None:
    manifest = Manifest([Buffer("a", (3,), "int8"), Buffer("b", (5,), name, layers=(0, 1)), Buffer("c", (1,), "int16")])
    made = below(layout, 7, 3, manifest)
    for tensor in made.buffers.values():
        assert all(tensor[:, slot].data_ptr() % tensor.element_size() == 0 for slot in range(made.capacity))


def test_both_layouts_give_the_bytes_that_the_module_says_and_read_each_others() -> None:
    seen: set[str] = set()
    for seed in range(60):
        choice = random.Random(seed)
        manifest = UNEQUAL if seed == 0 else some_manifest(choice)
        seen |= {b.dtype for b in manifest.buffers}
        unit, entries = choice.choice((("page", 4), ("boundary", 1)))
        options: dict[str, Any] = {"unit": unit, "entries": entries, "capacity": choice.randrange(1, 6)}
        pools = [below(layout, manifest=manifest, **options) for layout in LAYOUTS]
        for pool in pools:
            fill(pool, seed)
        slot = choice.randrange(options["capacity"])
        records = []
        for pool in pools:
            record = bytearray(b"\xee" * pool.slot_bytes)
            pool.read_into(slot, record)
            records.append(bytes(record))
        assert records[0] == records[1] == spelled(pools[0], slot)
        for pool in pools:
            other = choice.randrange(options["capacity"])
            wanted = {name: tensor.clone() for name, tensor in pool.buffers.items()}
            for tensor in wanted.values():
                tensor[:, other] = tensor[:, slot]
            pool.write_from(other, memoryview(records[0]))
            for name, tensor in pool.buffers.items():
                assert torch.equal(bits(tensor), bits(wanted[name]))
    assert seen == set(DTYPE_BYTES)


@EACH
def test_a_slot_that_does_not_exist_and_a_record_of_another_size_are_refused(layout: Layout) -> None:
    made = below(layout, 7)
    fill(made, 1)
    before = [spelled(made, slot) for slot in range(made.capacity)]
    content = bytearray(made.slot_bytes)
    for slot in (-1, 7, True):
        for call in (made.read_into, made.write_from):
            with pytest.raises(InputError, match="does not exist: there are 7"):
                call(slot, content)
    for size in (0, made.slot_bytes - 1, made.slot_bytes + 1):
        for call in (made.read_into, made.write_from):
            with pytest.raises(InputError, match=f"has {made.slot_bytes} bytes, and {size} were given"):
                call(1, bytearray(size))
    assert [spelled(made, slot) for slot in range(made.capacity)] == before


@EACH
def test_more_than_the_host_has_is_refused_before_it_is_touched(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompositionError, match="cannot be had in the host's memory, of which"):
        below(layout, entries=1 << 32)
    size = below(layout).slot_bytes
    pitch = size if layout == "layer_first" else -(-size // 8) * 8
    monkeypatch.setattr(pool_host, "available", lambda: 7 * pitch)
    below(layout, 7)
    monkeypatch.setattr(pool_host, "available", lambda: 7 * pitch - 1)
    with pytest.raises(CompositionError, match="give it less memory"):
        below(layout, 7)
    monkeypatch.setattr(pool_host, "available", lambda: None)
    with pytest.raises(CompositionError, match="cannot be had in the host's memory: give"):
        below(layout, entries=1 << 52)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@EACH
def test_pinned_memory_without_cuda_is_refused(layout: Layout) -> None:
    with pytest.raises(CompositionError, match="or else pin=False"):
        HostPool("kv", UNEQUAL, "page", 7, 4, layout=layout, pin=True)


def test_what_is_free_is_the_least_of_the_machines_and_the_control_groups(tmp_path: File) -> None:
    assert available(str(tmp_path)) is None
    proc, group = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    proc.mkdir()
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable:   100 kB\n")
    assert available(str(tmp_path)) == 102400
    (group / "memory.max").write_text("90000\n")
    (group / "memory.current").write_text("50000\n")
    assert available(str(tmp_path)) == 40000
    (group / "memory.stat").write_text("anon 40000\ninactive_file 5000\n")
    assert available(str(tmp_path)) == 45000
    (group / "memory.max").write_text("max\n")
    assert available(str(tmp_path)) == 102400
    (group / "memory.max").write_text("10\n")
    assert available(str(tmp_path)) == 0
    here = available()
    assert here is None or here > 1 << 20


def test_in_debug_mode_a_host_pool_knows_the_stages_of_its_slots() -> None:
    made = DebugHostPool("kv", UNEQUAL, "page", 4, 4, layout="page_first")
    span = made.mint(2)
    assert {made.stage_of(slot) for slot in span.ids} == {Stage.RESERVED}
    made.write_from(span.ids[0], bytes(made.slot_bytes))
    with pytest.raises(InvariantError, match="is RESERVED, and was to become PUBLISHED"):
        made.enter(span.ids, Stage.PUBLISHED)
    span.free()
    assert made.free == 4
