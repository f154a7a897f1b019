"""Host pools: both layouts show the same tensors and give the same bytes for a slot; what cannot be had is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixloom import Buffer, CompositionError, InputError, InvariantError, Manifest
from prefixloom.contract.manifest import DTYPE_BYTES, LAYOUTS, Layout
from prefixloom.device import host_pool as pool_host
from prefixloom.device.host_pool import DebugHostPool, HostPool, available
from prefixloom.device.pool import Pool, Stage
from tests.support.content import bits, noise

UNEQUAL = Manifest(
    [
        Buffer("flags", (3,), "bool", layers=(0, 4)),
        Buffer("k", (2, 5), "bfloat16", layers=(0, 1, 2)),
        Buffer("v", (7,), "bfloat16", layers=(0, 1, 2)),
        Buffer("scale", (), "float64", layers=(1,), shared={2: 1}),
        Buffer("q", (3,), "int8", layers=(0, 1, 2)),
    ]
)


def host(manifest: Manifest, layout: Layout, capacity: int = 7, unit: str = "page", entries: int = 4) -> HostPool:
    return HostPool("kv", manifest, unit, capacity, entries if unit == "page" else 1, layout=layout)


def filled(manifest: Manifest, layout: Layout, seed: int, **options: Any) -> HostPool:
    made = host(manifest, layout, **options)
    for number, tensor in enumerate(made.buffers.values()):
        tensor.copy_(noise(tensor.shape, tensor.dtype, seed + number))
    return made


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


@pytest.mark.parametrize("unit", ["page", "boundary"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_pool_has_the_buffers_of_any_pool_all_zeros(layout: Layout, unit: str) -> None:
    made = host(UNEQUAL, layout, unit=unit)
    as_ever = Pool("kv", UNEQUAL, unit, made.capacity, made.entries, "cpu")
    assert list(made.buffers) == list(as_ever.buffers)
    for name, tensor in as_ever.buffers.items():
        found = made.buffers[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert not bits(found).any()


@pytest.mark.parametrize("name", DTYPE_BYTES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_lies_where_its_elements_may(layout: Layout, name: str) -> None:
    manifest = Manifest([Buffer("a", (3,), "int8"), Buffer("b", (5,), name, layers=(0, 1)), Buffer("c", (1,), "int16")])
    made = host(manifest, layout, entries=3)
    for tensor in made.buffers.values():
        assert all(tensor[:, slot].data_ptr() % tensor.element_size() == 0 for slot in range(made.capacity))


def test_both_layouts_give_the_bytes_that_the_module_says_and_read_each_others() -> None:
    seen: set[str] = set()
    for seed in range(60):
        choice = random.Random(seed)
        manifest = UNEQUAL if seed == 0 else some_manifest(choice)
        seen |= {b.dtype for b in manifest.buffers}
        options: dict[str, Any] = {"unit": choice.choice(("page", "boundary")), "capacity": choice.randrange(1, 6)}
        pools = [filled(manifest, layout, seed, **options) for layout in LAYOUTS]
        slot = choice.randrange(options["capacity"])
        records = []
        for pool in pools:
            assert pool.slot_bytes == pool.slot_bytes
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_that_does_not_exist_and_a_record_of_another_size_are_refused(layout: Layout) -> None:
    made = filled(UNEQUAL, layout, 1)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_the_host_has_is_refused_before_it_is_touched(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompositionError, match="cannot be had in the host's memory, of which"):
        host(UNEQUAL, layout, entries=1 << 32)
    size = host(UNEQUAL, layout).slot_bytes
    pitch = size if layout == "layer_first" else -(-size // 8) * 8
    monkeypatch.setattr(pool_host, "available", lambda: 7 * pitch)
    host(UNEQUAL, layout)
    monkeypatch.setattr(pool_host, "available", lambda: 7 * pitch - 1)
    with pytest.raises(CompositionError, match="give it less memory"):
        host(UNEQUAL, layout)
    monkeypatch.setattr(pool_host, "available", lambda: None)
    with pytest.raises(CompositionError, match="cannot be had in the host's memory: give"):
        host(UNEQUAL, layout, entries=1 << 52)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pinned_memory_without_cuda_is_refused(layout: Layout) -> None:
    with pytest.raises(CompositionError, match="or else pin=False"):
        HostPool("kv", UNEQUAL, "page", 7, 4, layout=layout, pin=True)


def test_what_is_free_is_the_least_of_the_machines_and_the_control_groups(tmp_path: Path) -> None:
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
