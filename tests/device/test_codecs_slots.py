"""Codecs: the manifest of what is stored, which slots are touched, and no temporary the size of the data."""

from __future__ import annotations

import math
import random

import pytest
import torch

from prefixloom import Buffer, CompositionError, InputError, Manifest
from prefixloom.device.codecs import Coder
from tests.support.coding import coder, tensors
from tests.support.content import Made, bits, noise

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- manifests


def test_the_stored_manifest_has_the_coded_buffers_and_their_largest_values() -> None:
    layers, shared = (1, 3), {5: 3}
    it = coder(
        "int8",
        Buffer("ssm", (4, 8, 16), "bfloat16", layers, shared),
        Buffer("conv", (12, 3), "float32", layers),
        Buffer("steps", (7,), "int32", layers),
    )
    assert it.stored.buffers == (
        Buffer("ssm", (4, 8, 16), "int8", layers, shared),
        Buffer("ssm_largest", (4, 8), "bfloat16", layers, shared),
        Buffer("conv", (12, 3), "int8", layers),
        Buffer("conv_largest", (12,), "float32", layers),
        Buffer("steps", (7,), "int32", layers),
    )
    assert it.stored.slot_bytes == 2 * (4 * 8 * (16 + 2) + 12 * (3 + 4) + 7 * 4)
    assert it.stored.stored_as is None and it.changes
    assert it.stored.grid == it.live.grid


def test_a_buffer_that_would_not_become_smaller_is_kept() -> None:
    kept = [
        Buffer("a", (2,), "bfloat16"),  # 2 bytes and the largest value's 2
        Buffer("b", (), "float32"),
        Buffer("c", (9,), "int16"),
        Buffer("d", (9,), "float8_e4m3fn"),
        Buffer("e", (9,), "complex64"),
        Buffer("f", (1,), "float32"),
    ]
    it = coder("int8", *kept)
    assert it.stored.buffers == tuple(kept) and not it.changes and it.bound == 0
    assert coder("float16", Buffer("x", (9,), "bfloat16")).changes is False
    assert coder("int8", Buffer("x", (3,), "bfloat16")).changes
    assert coder("int8", Buffer("x", (2,), "float32")).changes


def test_the_name_of_the_largest_values_makes_room_for_a_buffer_that_has_it() -> None:
    it = coder("int8", Buffer("x", (9,), "float32"), Buffer("x_largest", (9,), "int32"))
    assert [buffer.name for buffer in it.stored.buffers] == ["x", "x_largest_", "x_largest"]


def test_a_codec_that_tolerates_less_than_the_law_is_refused_with_both_numbers() -> None:
    with pytest.raises(CompositionError, match=r"'x' of bfloat16 comes back from int8 within 0.00784 .* it says 0.005"):
        coder("int8", Buffer("x", (9,), "bfloat16"), tolerance=0.005)
    assert coder("int8", Buffer("x", (9,), "bfloat16"), tolerance=0.00785).bound <= 0.00785
    assert not coder("bfloat16", Buffer("x", (9,), "bfloat16"), tolerance=0.0).changes
    assert coder("bfloat16", Buffer("x", (9,), "float64"), tolerance=2**-8 + 2**-24).bound == 2**-8 + 2**-24
    mixed = Buffer("x", (9,), "float32"), Buffer("y", (9,), "bfloat16"), Buffer("z", (9,), "int32")
    assert coder("int8", *mixed).bound == coder("int8", mixed[1]).bound


def test_other_dtypes_and_a_manifest_without_a_codec_are_refused() -> None:
    with pytest.raises(CompositionError, match="rests as one of int8, bfloat16, float16, float32, not as 'uint8'"):
        coder("uint8", Buffer("x", (9,), "bfloat16"))
    with pytest.raises(CompositionError, match="has no stored_as"):
        Coder(Manifest([Buffer("x", (9,), "bfloat16")]))


# ---------------------------------------------------------------- slots, pieces, memory


MIXED = (
    Buffer("x", (3, 5), "float32", (0, 1)),
    Buffer("y", (7,), "bfloat16", (0, 1, 2)),
    Buffer("z", (), "float32"),
    Buffer("n", (2,), "int64"),
    Buffer("b", (3,), "bool"),
)


@pytest.mark.parametrize("entries", [None, 4])
@pytest.mark.parametrize("rests", ["int8", "float16"])
def test_slots_go_where_they_are_told_and_nothing_else_is_touched(rests: str, entries: int | None) -> None:
    """In any order, some slots give what all of them give."""
    it = coder(rests, *MIXED)
    live = tensors(it.live, 20, entries)
    for seed, (name, tensor) in enumerate(live.items()):
        live[name] = noise(tensor.shape, tensor.dtype, seed)
    whole, back = tensors(it.stored, 20, entries), tensors(it.live, 20, entries)
    it.encode(live, range(20), whole, range(20))
    it.decode(whole, range(20), back, range(20))
    for seed in range(8):
        choice = random.Random(seed)
        count = choice.choice((0, 1, 5, 9))
        slots, into = [choice.randrange(20) for _ in range(count)], choice.sample(range(9), count)
        last = choice.sample(range(15), count)
        stored, found = tensors(it.stored, 9, entries), tensors(it.live, 15, entries)
        it.encode(live, slots, stored, into)
        it.decode(stored, into, found, last)
        for got, wanted, made, order in (
            (stored, whole, tensors(it.stored, 9, entries), into),
            (found, back, tensors(it.live, 15, entries), last),
        ):
            for name, tensor in made.items():
                for slot, place in zip(slots, order, strict=True):
                    tensor[:, place] = wanted[name][:, slot]
                assert torch.equal(bits(got[name]), bits(tensor)), name


@pytest.mark.parametrize(("slots", "into"), [([1], [20]), ([5], [1]), ([-1], [1]), ([1], [-1])])
def test_a_slot_that_does_not_exist_is_refused(slots: list[int], into: list[int]) -> None:
    it = coder("int8", MIXED[0])
    with pytest.raises(InputError, match="does not exist"):
        it.encode(tensors(it.live, 5), slots, tensors(it.stored, 20), into)


@pytest.mark.parametrize("into", [[1], [1, 1]])
def test_as_many_different_slots_are_needed(into: list[int]) -> None:
    it = coder("int8", MIXED[0])
    with pytest.raises(InputError, match="as many different slots are needed as there are sources"):
        it.decode(tensors(it.stored, 5), [0, 1], tensors(it.live, 5), into)


def test_other_layers_are_refused() -> None:
    it = coder("int8", MIXED[0])
    one = {"x": torch.ones(1, 5, 3, 5), "x_largest": torch.ones(1, 5, 3)}
    with pytest.raises(InputError, match="2 layers cannot become 1"):
        it.encode(tensors(it.live, 5), [0], one, [0])


def test_tensors_without_content_are_nothing_to_do() -> None:
    it = coder("int8", Buffer("x", (9,), "float32"))
    live, stored = (
        {b.name: torch.empty(1, 4, *b.shape, device="meta") for b in m.buffers} for m in (it.live, it.stored)
    )
    it.encode(live, [1], stored, [2])
    it.decode(stored, [1], live, [2])


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 1024), (1 << 18,), (64,)], ids=str)
@pytest.mark.parametrize("rests", ["int8", "bfloat16"])
def test_no_temporary_is_larger_than_a_layer_of_a_slot(rests: str, shape: tuple[int, ...]) -> None:
    it = coder(rests, Buffer("x", shape, "float32", (0, 1)))
    count = 8
    live, stored = tensors(it.live, count), tensors(it.stored, count)
    with Made() as made:
        it.encode(live, range(count), stored, range(count))
        it.decode(stored, range(count), live, range(count))
    assert 0 < max(made.sizes) <= 4 * math.prod(shape)
