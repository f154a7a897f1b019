"""The batch kernels: bitwise what a loop over pairs does, on every path, without a temporary the size of the data."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixloom import InputError
from prefixloom.device import kernels
from prefixloom.device.kernels import clear_slots, copy_slots, select_slots
from tests.support.content import Made, bits, noise, on_gpu
from tests.support.interpreter import INTERPRETED, pass_interpreted

DTYPES = [
    torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float16, torch.bool, torch.complex64, torch.uint8,
    torch.int64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (1,), (3,), (4,), (2, 5), (16,), (3, 2, 7)]


def with_triton() -> ModuleType:
    from prefixloom.device import kernels_triton

    return kernels_triton


PATHS: dict[str, dict[str, Any]] = {
    "as it comes": {},
}
if INTERPRETED:
    PATHS["triton"] = {"triton_for": lambda tensor: with_triton()}
    PATHS["triton in small blocks"] = {"triton_for": lambda tensor: with_triton(), "BLOCK": 4}
elif torch.cuda.is_available():
    PATHS["on a GPU"] = {"noise": on_gpu}
    PATHS["on a GPU in small blocks"] = {"noise": on_gpu, "BLOCK": 4}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in PATHS[request.param].items():
        module = with_triton() if name == "BLOCK" else sys.modules[__name__] if name == "noise" else kernels
        monkeypatch.setattr(module, name, value)
    return str(request.param)


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(f), bits(w)) for f, w in zip(found, wanted, strict=True))


def naive(tensors: Sequence[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    for tensor in tensors:
        for s, d in zip(src, dst, strict=True):
            tensor[:, d] = tensor[:, s].clone()


def some_tensors(choice: random.Random, capacity: int) -> list[Tensor]:
    """One to four buffers, two of them of one shape more often than not, each at any place of its memory."""
    made = []
    for _ in range(choice.randrange(1, 4)):
        shape = (choice.randrange(1, 4), capacity, *choice.choice(SHAPES))
        dtype = choice.choice(DTYPES)
        for _ in range(choice.choice((1, 2))):
            at = choice.randrange(9)
            made.append(noise((at + prod(shape),), dtype, choice.randrange(1 << 30))[at:].view(shape))
    return made


def check(tensors: Sequence[Tensor], kernel: Callable[[], object], src: Sequence[int], dst: Sequence[int]) -> None:
    wanted = [tensor.clone() for tensor in tensors]
    naive(wanted, src, dst)
    kernel()
    assert same(tensors, wanted), (src, dst, [(t.shape, t.dtype) for t in tensors])


CASES = 20 if INTERPRETED else 120


# ---------------------------------------------------------------- copy


def test_a_copy_is_bitwise_what_a_loop_does_with_chains_and_repeats(path: str) -> None:
    for seed in range(CASES):
        choice = random.Random(seed)
        capacity = choice.choice((1, 2, 4, 30))
        count = choice.choice((0, 1, 2, 5, 40))
        src = [choice.randrange(capacity) for _ in range(count)]
        dst = [choice.randrange(capacity) for _ in range(count)]
        tensors = some_tensors(choice, capacity)
        check(tensors, lambda t=tensors, s=src, d=dst: copy_slots(t, s, d), src, dst)  # type: ignore[misc]


def test_a_copy_of_many_slots_to_others_is_bitwise(path: str) -> None:
    for seed in range(CASES // 4):
        choice = random.Random(seed)
        both = choice.sample(range(64), 60)
        tensors = some_tensors(choice, 64)
        check(tensors, lambda t=tensors, b=both: copy_slots(t, b[:30], b[30:]), both[:30], both[30:])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([0, 1, 2], [1, 2, 3]),  # a chain: all become slot 0
        ([2, 1, 0], [3, 2, 1]),  # a shift: each moves on
        ([0, 1, 3], [3, 0, 1]),  # two change places through a third
        ([0, 1], [2, 2]),  # the last one stays
        ([0, 2, 1], [2, 3, 2]),  # what was read between two writes
        ([1, 1, 1], [0, 2, 3]),
        ([1], [1]),
        ([], []),
    ],
)
def test_pairs_take_effect_in_order(path: str, src: list[int], dst: list[int]) -> None:
    tensors = [noise((2, 4, 3), torch.float32, 1), noise((1, 4), torch.int8, 2)]
    check(tensors, lambda: copy_slots(tensors, src, dst), src, dst)


def test_other_slots_are_not_touched_where_tensors_are_parts_of_one(path: str) -> None:
    """A buffer may start in the middle of an allocation, at an address that no word divides."""
    whole = noise((301,), torch.int8, 3)
    before = whole.clone()
    tensor = whole[5:293].view(2, 9, 16)
    copy_slots([tensor], [1, 2], [3, 4])
    wanted = before.clone()
    naive([wanted[5:293].view(2, 9, 16)], [1, 2], [3, 4])
    assert torch.equal(whole, wanted) and not torch.equal(whole, before)


def test_pairs_that_go_together_may_go_in_any_order() -> None:
    """A launch runs them all at once: none writes what another one reads or writes."""
    together = 0
    for seed in range(2000):
        choice = random.Random(seed)
        count = choice.randrange(1, 9)
        reads = [[choice.randrange(12) for _ in range(choice.choice((1, 1, 2)))] for _ in range(count)]
        dst = [choice.randrange(12) for _ in range(count)]
        waves = list(kernels._waves(reads, dst))
        assert [number for wave in waves for number in range(*wave)] == list(range(count))
        for wave in waves:
            for one in range(*wave):
                for other in range(*wave):
                    assert one == other or dst[one] not in (dst[other], *reads[other])
                    together += 1
    assert together > 10_000


# ---------------------------------------------------------------- clear


def test_a_clear_leaves_zero_bits_there_and_nothing_else_changed(path: str) -> None:
    for seed in range(CASES):
        choice = random.Random(seed)
        capacity = choice.choice((1, 2, 4, 30))
        dst = [choice.randrange(capacity) for _ in range(choice.choice((0, 1, 2, 5, 40)))]
        tensors = some_tensors(choice, capacity)
        wanted = [tensor.clone() for tensor in tensors]
        for tensor in wanted:
            for d in dst:
                tensor[:, d] = 0
        clear_slots(tensors, dst)
        assert same(tensors, wanted), (dst, [(t.shape, t.dtype) for t in tensors])


# ---------------------------------------------------------------- select


@pytest.mark.parametrize("ints", [torch.int32, torch.int64], ids=str)
def test_a_select_copies_what_the_selector_says(path: str, ints: torch.dtype) -> None:
    for seed in range(CASES // 2):
        choice = random.Random(seed)
        capacity = choice.choice((2, 4, 30, 60))
        count, width = choice.choice((0, 1, 2, 5, 10)), choice.choice((1, 2, 5))
        choices = [[choice.randrange(capacity) for _ in range(width)] for _ in range(count)]
        picked = [choice.randrange(width) for _ in range(count)]
        dst = [choice.randrange(capacity) for _ in range(count)]
        src = [row[index] for row, index in zip(choices, picked, strict=True)]
        tensors = some_tensors(choice, capacity)
        selector = torch.tensor(picked, dtype=ints, device=tensors[0].device)
        check(tensors, lambda t=tensors, c=choices, s=selector, d=dst: select_slots(t, c, s, d), src, dst)  # type: ignore[misc]


def test_a_selector_out_of_range_is_refused_where_it_is_read() -> None:
    tensor = noise((1, 4), torch.float32, 1)
    for index in (-1, 2):
        with pytest.raises(RuntimeError, match="out of bounds"):
            select_slots([tensor], [[0, 1]], torch.tensor([index]), [2])


def test_a_select_of_other_lengths_is_refused() -> None:
    tensor = noise((1, 4), torch.float32, 1)
    with pytest.raises(InputError, match="2 slots are to be filled: got 1 choices, 1 selected"):
        select_slots([tensor], [[0, 1]], torch.tensor([0]), [2, 3])


# ---------------------------------------------------------------- bounds, meta, nothing


@pytest.mark.parametrize("bad", [-1, 4])
def test_a_slot_that_does_not_exist_is_refused_before_anything_changes(path: str, bad: int) -> None:
    tensors = [noise((2, 9, 3), torch.float32, 1), noise((2, 4, 3), torch.float32, 1)]
    before = [tensor.clone() for tensor in tensors]
    calls: list[Callable[[], None]] = [
        lambda: copy_slots(tensors, [0, bad], [2, 3]),
        lambda: copy_slots(tensors, [0, 1], [2, bad]),
        lambda: clear_slots(tensors, [0, bad]),
        lambda: select_slots(tensors, [[0, 1], [1, bad]], torch.tensor([0, 0]), [2, 3]),
        lambda: select_slots(tensors, [[0, 1], [1, 0]], torch.tensor([0, 0]), [2, bad]),
    ]
    for call in calls:
        with pytest.raises(InputError, match=f"slot {bad} does not exist: there are 4"):
            call()
    assert same(tensors, before)


def test_slots_that_are_not_contiguous_are_refused(path: str) -> None:
    with pytest.raises(InputError, match="what a slot has in a layer must be contiguous"):
        copy_slots([noise((4, 2, 6), torch.float32, 1)[:, :, ::2]], [0], [1])


def test_something_else_may_lie_between_two_slots(path: str) -> None:
    whole = noise((2, 20, 6), torch.float32, 1)
    before = whole.clone()
    slots = whole[:, :, 2:5]
    many = list(range(16))
    copy_slots([slots], [0, *many], [17, *many])
    clear_slots([slots], [18])
    select_slots([slots], [[1, 2]], torch.tensor([1]), [19])
    for slot, wanted in ((17, before[:, 0, 2:5]), (18, torch.zeros(2, 3)), (19, before[:, 2, 2:5])):
        assert torch.equal(whole[:, slot, 2:5], wanted)
        whole[:, slot, 2:5] = before[:, slot, 2:5]
    assert torch.equal(whole, before)


def test_tensors_without_content_and_no_tensors_are_nothing_to_do() -> None:
    meta = torch.empty((2, 4, 3), device="meta")
    for tensors in ([meta], []):
        copy_slots(tensors, [0], [1])
        clear_slots(tensors, [0])
        select_slots(tensors, [[0, 1]], torch.empty(1, dtype=torch.int64, device="meta"), [1])
        select_slots(tensors, [[0, 1]], torch.tensor([1]), [1])


# ---------------------------------------------------------------- memory, and the device


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 256, 512), torch.float32),
        ((1, 1 << 12, 32), torch.float32),
        ((2, 8, 1 << 18), torch.float32),
        ((4, 1 << 12), torch.uint8),
    ],
    ids=str,
)
def test_no_temporary_is_larger_than_a_slot_but_the_slots_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Up to 8 MiB are moved, in slots of many sizes."""
    tensors = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    half, slot = shape[1] // 2, tensors[0][:, 0].nbytes
    src, dst = list(range(half)), list(range(half, 2 * half))
    selector = torch.ones(half, dtype=torch.int32)
    choices = [[0, s] for s in src]
    calls: list[Callable[[], None]] = [
        lambda: copy_slots(tensors, src, dst),
        lambda: clear_slots(tensors, dst),
        lambda: select_slots(tensors, choices, selector, dst),
    ]
    for call in calls:
        with Made() as made:
            call()
        assert max(made.sizes, default=0) <= max(slot, 2 * 8 * half)


def test_nothing_that_a_device_holds_is_ever_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device stand for a device's: they have no content, and whoever asks for it raises."""
    launched: list[int] = []
    note = lambda tensors, *slots, within=True: launched.append(len(slots))  # noqa: E731
    monkeypatch.setattr(kernels, "_live", list)
    monkeypatch.setattr(kernels, "triton_for", lambda tensor: SimpleNamespace(move=note, clear=note))
    tensors = [torch.empty((2, 40, 300_000), device="meta"), torch.empty((2, 40, 3), device="meta")]
    selector = torch.empty(4, dtype=torch.int32, device="meta")
    select_slots(tensors, [[0, 1], [1, 2], [3, 4], [0, 5]], selector, [7, 8, 7, 9])
    copy_slots(tensors, [0, 1, 7], [7, 8, 9])
    clear_slots(tensors, range(30))
    assert launched == [2, 2, 2, 2, 1], "in two waves each, and at once"
    for read in (selector.tolist, selector[0].item):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"):
            read()


def test_the_widest_words_that_divide_every_address_are_copied() -> None:
    whole = torch.zeros(2 * 4 * 16 + 8, dtype=torch.uint8)
    found = [kernels.words(*[whole[start : start + 128].view(2, 4, 16)] * 2)[0] for start in (0, 1, 2, 4)]
    assert [(each.dtype.itemsize, each.shape[2]) for each in found] == [(8, 2), (1, 16), (2, 8), (4, 4)]
    assert kernels.words(*[whole[:48].view(2, 4, 6)] * 2)[1].dtype == torch.int16


@pytest.mark.skipif(INTERPRETED, reason="this is that run")
def test_the_kernels_for_triton_do_the_same_in_its_interpreter() -> None:
    pass_interpreted(__file__, "triton and not interpreter")
