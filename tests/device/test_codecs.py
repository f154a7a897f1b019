"""Codecs: content comes back within the law's bound and then changes no more; manifests, slots and temporaries."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixloom import Buffer, Codec, CompositionError, InputError, Manifest
from prefixloom.device.codecs import Coder
from tests.support.coding import coder, measure, tensors
from tests.support.content import Made, bits, noise

FLOATS = ["bfloat16", "float16", "float32", "float64"]
CODED = [("int8", live) for live in FLOATS] + [
    ("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float64"), ("float16", "float64"),
    ("float32", "float64"),
]  # fmt: skip
PAIRS = pytest.mark.parametrize(("rests", "live"), CODED, ids=lambda name: name)


pytestmark = pytest.mark.usefixtures("one_thread")


def there_and_back(it: Coder, values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One buffer's slots encoded and decoded."""
    slots = range(values.shape[1])
    stored = tensors(it.stored, len(slots))
    it.encode({"x": values}, slots, stored, slots)
    back = torch.full_like(values, 1)
    it.decode(stored, slots, {"x": back}, slots)
    return stored, back


def rows(values: Any, rests: str = "int8", live: str = "float32") -> tuple[dict[str, Tensor], Tensor]:
    """States of one layer, whose content is one row."""
    made = torch.tensor(values, dtype=torch.float64).to(getattr(torch, live))[None]
    return there_and_back(coder(rests, Buffer("x", made.shape[2:], live)), made)


def wild(live: str, rests: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Rows of many sizes, from close to the smallest normal number to close to the largest, with zeros in them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    low, high = (-11, 12) if "float16" in (live, rests) else (-115, 115)
    power = torch.randint(low, high, shape[:-1], generator=generator, dtype=torch.float64)
    values *= torch.exp2(power)[..., None]
    values *= torch.rand(shape, generator=generator) < 0.9
    return values.to(getattr(torch, live))


# ---------------------------------------------------------------- int8, by hand


def test_a_row_is_coded_by_127ths_of_its_largest_value_which_stays_exact() -> None:
    stored, back = rows([[0.3, -127.0, 63.5, 0.0, 1.4, -0.6]])
    assert stored["x"].tolist() == [[[0, -127, 64, 0, 1, -1]]]
    assert stored["x_largest"].tolist() == [[127.0]]
    assert back.tolist() == [[[0.0, -127.0, 64.0, 0.0, 1.0, -1.0]]]


def test_a_tie_goes_to_the_even_code() -> None:
    stored, _ = rows([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert stored["x"].tolist() == [[[127, 0, 2, 2, 0, -2, -2]]]


def test_each_row_has_a_measure_of_its_own_in_each_layer_slot_and_leading_extent() -> None:
    values = torch.stack([torch.full((2, 3, 4), 10.0**n) for n in range(5)], 1)  # (2 layers, 5 slots, 3, 4)
    values[1] *= 3
    values[:, :, 1] *= 1e-4
    values[:, :, 2, 1:] = 0
    it = coder("int8", Buffer("x", (3, 4), "float32", layers=(4, 9)))
    stored, back = there_and_back(it, values)
    assert torch.equal(stored["x_largest"], values[..., 0])
    assert torch.equal(stored["x"], (values != 0).to(torch.int8) * 127)
    assert torch.equal(back, values)


def test_values_of_one_sign_come_back_on_both_sides_of_zero() -> None:
    _, back = rows([[-4.0, -2.0], [4.0, 2.0], [-4.0, 2.0]])
    assert back[0, :, 0].tolist() == [-4.0, 4.0, -4.0]
    assert back[0, :, 1].sign().tolist() == [-1.0, 1.0, 1.0]


@pytest.mark.parametrize("live", FLOATS)
def test_zeros_stay_zeros_and_a_row_of_them_too(live: str) -> None:
    stored, back = rows([[0.0, -0.0, 0.0, 0.0, 0.0], [1.0, 0.0, -0.0, 0.0, 0.0]], live=live)
    assert back.tolist() == [[[0.0] * 5, [1.0] + [0.0] * 4]]
    assert not back.signbit().any()
    assert stored["x_largest"].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("live", FLOATS)
def test_the_largest_and_the_smallest_numbers_of_a_dtype_come_back(live: str) -> None:
    facts = torch.finfo(getattr(torch, live))
    values = [[facts.max, -facts.max, 0.0, 0.0, 0.0], [facts.smallest_normal] * 5, [facts.smallest_normal, *[0.0] * 4]]
    for sign in (1, -1):
        _, back = rows([[sign * value for value in row] for row in values], live=live)
        assert back.tolist() == [[[sign * value for value in row] for row in values]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("live", FLOATS)
def test_a_row_that_is_not_finite_comes_back_as_nan_and_others_as_they_were(live: str, bad: float) -> None:
    stored, back = rows([[1.0, 0.5, bad, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0]], live=live)
    assert torch.equal(bits(back[0, 0]), bits(torch.full_like(back[0, 0], math.nan)))  # the plain one
    assert back[0, 1].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert stored["x"][0, 0].tolist() == [0] * 5
    assert stored["x_largest"][0].isnan().tolist() == [True, False]


# ---------------------------------------------------------------- casts, by hand


@pytest.mark.parametrize(("rests", "top"), [("float16", 65504.0), ("bfloat16", torch.finfo(torch.bfloat16).max)])
def test_a_cast_rounds_and_what_is_too_large_becomes_the_largest(rests: str, top: float) -> None:
    most = torch.finfo(torch.float32).max
    _, back = rows([[1.0 + 2**-12, most, -most, 0.0, math.inf, -math.inf, math.nan]], rests)
    assert back[0, 0, :6].tolist() == [1.0, top, -top, 0.0, math.inf, -math.inf]
    assert back[0, 0, 6].isnan()


@pytest.mark.parametrize("rests", ["float16", "bfloat16"])
def test_a_cast_keeps_every_number_that_the_dtype_has(rests: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(getattr(torch, rests)).float()
    every = every[~every.isnan()].view(1, 1, -1)
    _, back = there_and_back(coder(rests, Buffer("x", every.shape[2:], "float32")), every)
    assert torch.equal(bits(back), bits(every))


# ---------------------------------------------------------------- the law


@PAIRS
def test_every_value_comes_back_within_the_bound_and_nearly_uses_it_up(rests: str, live: str) -> None:
    it = coder(rests, Buffer("x", (1000, 64), live))
    found = measure(it, {"x": wild(live, rests, (1, 8, 1000, 64), 1)})
    assert found.error <= it.bound and found.repeats, found
    worst = found.error
    # A row that is made to come off worst: values right between two that can be had.
    finest = torch.finfo(getattr(torch, "float64" if rests == "int8" else rests)).eps
    steps = torch.arange(0.5, 127) / 127 if rests == "int8" else 1 + torch.arange(63) * finest + finest / 2
    hard = torch.cat([torch.tensor([1.0 if rests == "int8" else 1.5]), steps.double()[:63]]).double()
    scales = torch.exp2(torch.arange(0, 1, 1 / 512, dtype=torch.float64)) if rests == "int8" else torch.ones(1).double()
    values = (hard * scales[:, None]).to(getattr(torch, live))[None, None]
    found = measure(coder(rests, Buffer("x", values.shape[2:], live)), {"x": values})
    worst = max(worst, found.error)
    assert found.error <= it.bound and found.repeats, found
    assert worst > (0.6 if rests == "int8" else 0.9) * it.bound


def test_the_bounds_are_these() -> None:
    said = {pair: coder(pair[0], Buffer("x", (64,), pair[1])).bound for pair in CODED}
    assert said == {
        ("int8", "bfloat16"): pytest.approx(1 / 254 + 1 / 256, rel=1e-4),
        ("int8", "float16"): pytest.approx(1 / 254 + 1 / 2048, rel=1e-4),
        ("int8", "float32"): pytest.approx(1 / 254, rel=1e-4),
        ("int8", "float64"): pytest.approx(1 / 254, rel=1e-4),
        ("bfloat16", "float32"): pytest.approx(1 / 256, rel=1e-4),
        ("bfloat16", "float64"): pytest.approx(1 / 256, rel=1e-4),
        ("float16", "float32"): pytest.approx(1 / 2048, rel=1e-3),
        ("float16", "float64"): pytest.approx(1 / 2048, rel=1e-3),
        ("float32", "float64"): 2**-24,
    }


@pytest.mark.parametrize("live", ["bfloat16", "float16"])
def test_every_code_of_every_normal_largest_value_comes_back_to_itself(live: str) -> None:
    """All that int8 can store of a row of these dtypes, one by one: nothing drifts."""
    dtype = getattr(torch, live)
    every = torch.arange(0, 1 << 15).to(torch.int16).view(dtype)
    normal = every[every.isfinite() & (every >= torch.finfo(dtype).smallest_normal)]
    codes = torch.arange(-127, 128).to(torch.int8)
    it = coder("int8", Buffer("x", (len(normal), 255), live))
    stored = {"x": codes.repeat(1, 1, len(normal), 1), "x_largest": normal[None, None]}
    back = {"x": torch.empty(1, 1, len(normal), 255, dtype=dtype)}
    it.decode(stored, [0], back, [0])
    again = tensors(it.stored, 1)
    it.encode(back, [0], again, [0])
    assert all(torch.equal(bits(again[name]), bits(stored[name])) for name in stored)


@pytest.mark.parametrize(("live", "most"), [("bfloat16", 128), ("float16", 1024), ("float32", 600), ("float64", 600)])
def test_every_row_of_subnormal_numbers_comes_back_to_itself_from_the_first_time_on(live: str, most: int) -> None:
    dtype = getattr(torch, live)
    ints = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32, "float64": torch.int64}[live]
    numbers = torch.arange(most, dtype=ints)
    values = torch.minimum(numbers.repeat(most, 1), numbers[:, None]).view(dtype)  # row m has 0, 1, ... m, m
    found = measure(coder("int8", Buffer("x", values.shape, live)), {"x": values[None, None]})
    assert found.repeats
    assert found.error <= 1 / 127


@PAIRS
def test_encoding_what_was_decoded_gives_the_same_bits_for_any_content(rests: str, live: str) -> None:
    """Random bits, with infinities and NaNs of all payloads."""
    it = coder(rests, Buffer("x", (400, 5), live))
    values = noise((1, 6, 400, 5), getattr(torch, live), 1)
    first, back = there_and_back(it, values)
    second, again = there_and_back(it, back)
    assert all(torch.equal(bits(first[name]), bits(second[name])) for name in first)
    assert torch.equal(bits(back), bits(again))
    assert torch.equal(values.isfinite().all(-1), back.isfinite().all(-1))


def test_measure_finds_a_codec_that_loses_what_is_small_in_range_of_the_live_dtype_only() -> None:
    """Below 2 ** -14, float16 has fewer digits: the law does not hold there, and the measured error says so."""
    it = coder("float16", Buffer("x", (2,), "float32"))
    assert measure(it, {"x": torch.full((1, 1, 2), 2.0**-14 * (1 + 2**-11))}).error <= it.bound
    assert measure(it, {"x": torch.full((1, 1, 2), 2.0**-24 * 1.49)}).error > 0.3
    assert measure(it, {"x": torch.full((1, 1, 2), 2.0**-30)}).error == 1
    assert measure(it, {"x": torch.full((1, 1, 2), 131008.0)}).error == 0.5


class Wrong(Coder):
    """A coder with a fault that a test names."""

    def __init__(self, fault: str, *buffers: Buffer) -> None:
        super().__init__(Manifest(buffers, stored_as=Codec("int8", 1.0)))
        self.fault = fault

    def decode(self, stored: Any, slots: Any, live: Any, into: Any) -> None:
        super().decode(stored, slots, live, into)
        if self.fault == "heals":
            live["x"].nan_to_num_(0.0)
        elif self.fault == "drifts":
            live["x"].mul_(1.001)
        elif self.fault == "fills":
            live["x"].masked_fill_(live["x"] == 0, 1e-9)
        elif self.fault == "kept":
            live["n"][0, 0] += 1
        elif self.fault == "breaks":
            live["x"][0, 0, 0] = torch.nan


@pytest.mark.parametrize("fault", ["heals", "fills", "kept", "breaks", "drifts", "none"])
def test_measure_finds_each_fault(fault: str) -> None:
    it = Wrong(fault, Buffer("x", (3,), "float32"), Buffer("n", (2,), "int64"))
    values = torch.zeros(1, 4, 3)
    values[0, 1, 1], values[0, 2, 2] = torch.nan, 5.0
    found = measure(it, {"x": values, "n": torch.arange(8).view(1, 4, 2)})
    if fault in ("none", "drifts"):
        assert found.repeats is (fault == "none") and found.error <= 0.001001
    else:
        assert math.isinf(found.error)
        assert found.where == ("n[0]" if fault == "kept" else found.where)


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
