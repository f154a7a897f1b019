"""Lesson 5, polluted_descriptor: moving indices for a copy changed the tree's own record.

A transfer's descriptor was shared by a node and an IO queue, and its indices were moved to the GPU in place. A later
eviction freed host slots with indices of the GPU. The invariant: what the tree holds is immutable; what a copy wants
elsewhere is a thing of its own, which nobody can store or free.

The second device is a fake: a tensor that says it is elsewhere, and refuses to be read as if it were here.
"""

from __future__ import annotations

import copy
import pickle
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from content import bits, noise
from prefixloom import Buffer, InputError, Manifest, ProtocolError, slots
from prefixloom.contract.manifest import LAYOUTS, Layout
from prefixloom.device import kernels
from prefixloom.device.host_pool import HostPool
from prefixloom.device.pool import Pool
from prefixloom.slots import DeviceSlots, HostSlots, ResolvedTransfer, Slots, resolve

MANIFEST = Manifest([Buffer("k", (3,), "bfloat16", layers=(0, 1)), Buffer("v", (5,), "int8", layers=(0, 1))])
Mutant = Callable[[pytest.MonkeyPatch], None]


class Elsewhere(torch.Tensor):
    """A vector of another device's: its content cannot be seen from here."""

    @property
    def device(self) -> Any:
        return "elsewhere:0"

    def tolist(self) -> Any:
        raise RuntimeError("content of another device was read")

    __iter__ = __array__ = __bytes__ = tolist  # type: ignore[assignment]


def elsewhere(numbers: list[int]) -> Elsewhere:
    return torch.tensor(numbers).as_subclass(Elsewhere)


def two_pools(layout: Layout) -> tuple[Pool, HostPool]:
    device, host = Pool("kv", MANIFEST, "page", 6, 4, "cpu"), HostPool("kv", MANIFEST, "page", 9, 4, layout=layout)
    for number, tensor in enumerate([*device.buffers.values(), *host.buffers.values()]):
        tensor.copy_(noise(tensor.shape, tensor.dtype, number))
    return device, host


def content(pool: Pool, slot: int) -> list[list[int]]:
    return [bits(tensor[:, slot]).tolist() for tensor in pool.buffers.values()]


def indices_go_elsewhere(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What a copy wants of numbers is on another device, as with CUDA. The copies themselves see through it."""
    made: list[torch.Tensor] = []
    honest = kernels.index_of

    def index_of(numbers: Any, tensors: Any) -> Any:
        made.append(elsewhere(list(numbers)))
        return honest(numbers, tensors)

    patch.setattr(kernels, "index_of", index_of)
    patch.setattr(kernels, "FEW", 0)  # everything goes by index
    return made


# ---------------------------------------------------------------- the types


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_evict_free_and_load_leave_every_descriptor_as_it_was(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = indices_go_elsewhere(monkeypatch)
    device, host = two_pools(layout)
    given = [1, 4, 2]
    span = host.mint(3)
    kept = {"device": DeviceSlots(device, given), "host": HostSlots(host, span.ids)}
    told = {name: (each.data, each.ids, hash(each)) for name, each in kept.items()}
    wanted = [content(device, slot) for slot in given]

    backup = resolve(kept["device"], kept["host"])
    given[:] = [0, 0, 0]  # the caller's array is the caller's
    backup.run()
    for tensor in device.buffers.values():
        bits(tensor).zero_()
        tensor.zero_()
    fresh = DeviceSlots(device, array("i", [5, 3, 0]))
    load = resolve(kept["host"], fresh)
    for layer in (1, 0):
        load.run(slice(layer, layer + 1))
    assert [content(device, slot) for slot in fresh.ids] == wanted
    assert made, "no index went anywhere"

    free = host.free
    span.free()
    assert host.free == free + 3
    assert {name: (each.data, each.ids, hash(each)) for name, each in kept.items()} == told


def test_slots_are_of_the_side_that_their_pool_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = two_pools("layer_first")
    with pytest.raises(ProtocolError, match="is no host pool: its slots are DeviceSlots"):
        HostSlots(device, [1])
    with pytest.raises(ProtocolError, match="is a host pool: its slots are HostSlots"):
        DeviceSlots(host, [1])
    with pytest.raises(ProtocolError, match="make HostSlots or DeviceSlots"):
        Slots(device, [1])
    DeviceSlots(Pool("kv", MANIFEST, "page", 6, 4, "meta"), [1])
    for pool, kind in ((device, DeviceSlots), (host, HostSlots)):
        pool.buffers["v"] = pool.buffers["v"].to("meta")
        with pytest.raises(ProtocolError, match="is on cpu, and has memory on meta"):
            kind(pool, [1])


@pytest.mark.parametrize("side", ["device", "host"])
def test_numbers_of_another_device_are_never_a_descriptors(side: str) -> None:
    device, host = two_pools("page_first")
    kind, pool = (DeviceSlots, device) if side == "device" else (HostSlots, host)
    for numbers in (elsewhere([1, 2]), torch.empty(2, dtype=torch.int64, device="meta")):
        with pytest.raises(ProtocolError, match="numbers of slots are kept on the CPU, and these are on"):
            kind(pool, numbers)
    assert kind(pool, torch.tensor([1, 2])) == kind(pool, [1, 2])


def test_a_descriptor_has_a_copy_that_nobody_can_change() -> None:
    host = two_pools("page_first")[1]
    for given in ([3, 1], array("i", [3, 1]), torch.tensor([3, 1])):
        made = HostSlots(host, given)
        given[0] = 2
        assert made.ids == (3, 1) and len(made) == 2
    for change in (
        lambda: setattr(made, "data", b""),
        lambda: setattr(made, "pool", None),
        lambda: setattr(made, "more", 1),
        lambda: delattr(made, "data"),
    ):
        with pytest.raises(ProtocolError, match="cannot be changed"):
            change()
    with pytest.raises(TypeError):
        made.data[0] = 1  # type: ignore[index]
    assert made != HostSlots(host, [1, 3]) and made != (3, 1)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [([9], "slot 9 does not exist"), ([0, -1], "slot -1"), ([1.5], "whole numbers"), ([1 << 40], "whole numbers")],
    ids=str,
)
def test_slots_that_do_not_exist_are_no_descriptors(numbers: list[int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        HostSlots(two_pools("page_first")[1], numbers)


def test_a_resolved_transfer_cannot_be_stored_freed_copied_or_taken_for_slots() -> None:
    device, host = two_pools("page_first")
    load = resolve(HostSlots(host, [1, 2]), DeviceSlots(device, [3, 4]))
    assert isinstance(load, ResolvedTransfer) and load.count == 2 and not isinstance(load, Slots)
    uses: list[Callable[[], Any]] = [
        lambda: HostSlots(host, load),  # type: ignore[arg-type]
        lambda: resolve(load, DeviceSlots(device, [3])),  # type: ignore[arg-type]
        lambda: host.give(load),  # type: ignore[arg-type]
        lambda: bytes(load),  # type: ignore[call-overload]
        lambda: list(load),  # type: ignore[call-overload]
        lambda: copy.copy(load),
        lambda: pickle.dumps(load),
    ]
    free = list(host.free_ids())
    for use in uses:
        with pytest.raises((ProtocolError, InputError, TypeError)):
            use()
    assert list(host.free_ids()) == free


def test_a_transfer_goes_from_one_side_to_the_other_between_pools_of_one_manifest() -> None:
    device, host = two_pools("page_first")
    other = HostPool("kv", Manifest([Buffer("k", (3,), "bfloat16", layers=(0, 1))]), "page", 9, 4)
    with pytest.raises(ProtocolError, match="not from HostSlots to HostSlots"):
        resolve(HostSlots(host, [1]), HostSlots(other, [1]))
    with pytest.raises(ProtocolError, match="not from DeviceSlots to DeviceSlots"):
        resolve(DeviceSlots(device, [1]), DeviceSlots(device, [2]))
    with pytest.raises(ProtocolError, match="nothing can be moved between them"):
        resolve(DeviceSlots(device, [1]), HostSlots(other, [1]))
    with pytest.raises(InputError, match="2 and 1 slots"):
        resolve(DeviceSlots(device, [1, 2]), HostSlots(host, [1]))


# ---------------------------------------------------------------- the mistakes, put back


def the_descriptor_keeps_the_callers_array(patch: pytest.MonkeyPatch) -> None:
    def init(self: Slots, pool: Pool, numbers: Any) -> None:
        object.__setattr__(self, "pool", pool)
        object.__setattr__(self, "data", numbers)

    patch.setattr(Slots, "__init__", init)
    patch.setattr(Slots, "ids", property(lambda self: tuple(self.data)))


def resolving_moves_the_descriptors_own_indices(patch: pytest.MonkeyPatch) -> None:
    """As it was in the field: ``indices = indices.to(device)``, and the node has them."""
    honest = slots.resolve

    def resolved(source: Slots, target: Slots) -> ResolvedTransfer:
        made = honest(source, target)
        for side in (source, target):
            object.__setattr__(side, "data", elsewhere(list(side.ids)))
        return made

    patch.setitem(globals(), "resolve", resolved)


def sides_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    for kind in (HostSlots, DeviceSlots):
        patch.setattr(kind, "_check_pool", lambda self, pool: None)


def numbers_are_read_wherever_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slots, "_numbers", lambda given: array("i", torch.zeros(len(given)).int().tolist()).tobytes())


def descriptors_can_be_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "__setattr__", object.__setattr__)


def a_resolved_transfer_gives_its_indices_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResolvedTransfer, "__iter__", lambda self: iter(self._move._src), raising=False)


KILLED: dict[Mutant, Callable[[pytest.MonkeyPatch], None]] = {
    the_descriptor_keeps_the_callers_array: lambda patch: test_a_descriptor_has_a_copy_that_nobody_can_change(),
    resolving_moves_the_descriptors_own_indices: lambda patch: (
        test_write_evict_free_and_load_leave_every_descriptor_as_it_was("page_first", patch)
    ),
    sides_are_not_checked: test_slots_are_of_the_side_that_their_pool_is_on,
    numbers_are_read_wherever_they_are: lambda patch: test_numbers_of_another_device_are_never_a_descriptors("host"),
    descriptors_can_be_changed: lambda patch: test_a_descriptor_has_a_copy_that_nobody_can_change(),
    a_resolved_transfer_gives_its_indices_away: lambda patch: (
        test_a_resolved_transfer_cannot_be_stored_freed_copied_or_taken_for_slots()
    ),
}


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_mistakes_of_lesson_5_are_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    seen = (AssertionError, pytest.fail.Exception, RuntimeError)  # the last one is the fake device's
    with pytest.MonkeyPatch.context() as inner, pytest.raises(seen):
        KILLED[mutant](inner)
