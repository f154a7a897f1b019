"""Lesson 5, polluted_descriptor: moving indices for a copy changed the tree's own record.

A transfer's descriptor was shared by a node and an IO queue, and its indices were moved to the GPU in place. A later
eviction freed host slots with indices of the GPU. The invariant: what the tree holds is not changed by a copy; what a
copy wants elsewhere is a thing of its own, which nobody can free. ``test_lesson_5_tier.py`` holds the tier to it; here
are the parts that it is made of: a copy changes no numbers, a plan cannot be changed.

The second device is a fake: a tensor that says it is elsewhere, and refuses to be read as if it were here.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

from prefixloom import Buffer, Manifest
from prefixloom.contract.manifest import LAYOUTS, Layout
from prefixloom.contract.values import Transfer, TransferPlan
from prefixloom.device import kernels
from prefixloom.device.host_pool import HostPool
from prefixloom.device.kernels import move_slots
from prefixloom.device.pool import Pool
from tests.support.content import bits, noise

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


def move(source: Pool, src: Sequence[int], target: Pool, dst: Sequence[int]) -> None:
    kernels.move_slots(list(source.buffers.values()), src, list(target.buffers.values()), dst)


def content(pool: Pool, slot: int) -> list[list[int]]:
    return [bits(tensor[:, slot]).tolist() for tensor in pool.buffers.values()]


# ---------------------------------------------------------------- a copy changes no numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_free_and_load_leave_every_record_as_it_was(layout: Layout) -> None:
    """``record`` is what a cell holds: numbers as bytes."""
    device, host = two_pools(layout)
    given = [1, 4, 2]
    span = host.mint(3)
    record = array("i", span.ids).tobytes()
    told = bytes(record)
    wanted = [content(device, slot) for slot in given]

    move(device, given, host, array("i", record))
    assert given == [1, 4, 2]
    for tensor in device.buffers.values():
        tensor.zero_()
    move(host, array("i", record), device, [5, 3, 0])
    assert [content(device, slot) for slot in (5, 3, 0)] == wanted
    free = host.free
    span.free()
    assert host.free == free + 3
    assert record == told


# ---------------------------------------------------------------- what a plugin is told


def test_a_plan_of_a_transfer_cannot_be_changed() -> None:
    transfer = Transfer("kv", 0, 8, "device", "host")
    plan = TransferPlan("backup", "", 8, (transfer,))
    for thing, name in ((plan, "transfers"), (plan, "boundary"), (transfer, "start"), (transfer, "end")):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(thing, name, ())
    with pytest.raises(TypeError):
        plan.transfers[0] = transfer  # type: ignore[index]
    assert copy.deepcopy(plan) == plan and hash(plan) == hash(copy.deepcopy(plan))


# ---------------------------------------------------------------- the mistakes, put back


def a_copy_moves_the_callers_indices(patch: pytest.MonkeyPatch) -> None:
    """As it was in the field: ``indices = indices.to(device)``, and the record has them."""

    def moved(source: Any, src: Any, target: Any, dst: Any) -> None:
        move_slots(source, src, target, dst)
        for numbers in (src, dst):
            if isinstance(numbers, list):
                numbers[:] = elsewhere(numbers)  # type: ignore[call-overload]

    patch.setattr(kernels, "move_slots", moved)


def a_plan_can_be_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferPlan, "__setattr__", object.__setattr__)


RECORD = test_write_free_and_load_leave_every_record_as_it_was
KILLED: dict[Mutant, Callable[[pytest.MonkeyPatch], None]] = {
    a_copy_moves_the_callers_indices: lambda patch: RECORD("layer_first"),
    a_plan_can_be_changed: lambda patch: test_a_plan_of_a_transfer_cannot_be_changed(),
}


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_mistakes_of_lesson_5_are_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    seen = (Exception, pytest.fail.Exception)
    with pytest.MonkeyPatch.context() as inner, pytest.raises(seen):
        KILLED[mutant](inner)
