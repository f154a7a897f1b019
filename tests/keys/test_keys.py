"""Keys: every kind of tokens that is accepted, every kind that is refused, lookahead elements, extra keys."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from prefixloom import InputError, Tokens, encode
from prefixloom.keys.elements import KeyMaker
from prefixloom.keys.tokens import TOKEN_LIMIT
from prefixloom.testing.inside.backdoor import extra_numbers
from tests.support.helpers import finish, path_cache, run, serve
from tests.support.names import stable

VALUES = [0, 1, 77, 100, 127]
LARGE = [0, 40_000, 151_643, TOKEN_LIMIT - 1]
SIGNED = "bhilq"


def packed(values: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", value) for value in values)


def views() -> Iterator[tuple[Any, list[int]]]:
    """Yield every kind of tokens, and the numbers that they are."""
    for make in (list, tuple, iter, encode, lambda v: (t for t in v)):
        yield make(VALUES), VALUES
    yield range(3, 9), [*range(3, 9)]
    yield [np.int64(5), np.uint8(6)], [5, 6]
    for code in "bBhHiIlLqQ":
        for values in (VALUES, []):
            yield array(code, values), values
    for code in "hHiIlLqQ":
        yield memoryview(array(code, VALUES)), VALUES
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        yield np.array(VALUES, dtype), VALUES
        yield np.array([], dtype), []
        yield np.array([[7, *VALUES], [9, *VALUES]], dtype)[1, 1:], VALUES
        yield np.array(VALUES * 2, dtype)[::2], (VALUES * 2)[::2]
    for kind in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        yield torch.tensor(VALUES * 2, dtype=kind)[::2], (VALUES * 2)[::2]
    raw = packed(LARGE)
    for each in (raw, bytearray(raw), memoryview(raw), memoryview(raw).cast("c")):
        yield each, LARGE


def test_tokens_of_every_kind_are_encoded() -> None:
    for tokens, values in views():
        assert encode(tokens) == packed(values), tokens


def test_encoded_tokens_pass_through_uncopied() -> None:
    tokens = encode(LARGE)
    assert encode(tokens) is tokens
    assert tokens.tolist() == LARGE
    assert tokens.count == len(LARGE)
    assert tokens.part(1, 3).tolist() == LARGE[1:3]
    assert tokens.extended([5]).tolist() == [*LARGE, 5]
    assert isinstance(tokens.extended([5]), Tokens)


def test_what_was_encoded_does_not_change_with_its_source() -> None:
    source = bytearray(packed(VALUES))
    tokens = encode(source)
    source[0] = 99
    numbers = np.array(VALUES)
    second = encode(numbers)
    numbers[0] = 99
    assert tokens == second == packed(VALUES)


@pytest.mark.parametrize("wrong", [-1, TOKEN_LIMIT, TOKEN_LIMIT + 1, 1 << 32, (1 << 32) + 5, 1 << 63, -(1 << 31)])
def test_a_token_out_of_range_is_refused_with_its_place_and_value(wrong: int) -> None:
    sources: list[Any] = [[3, wrong, 4], (3, wrong, 4)]
    for code in "iIlq":
        try:
            sources += [array(code, [3, wrong, 4]), np.array([3, wrong, 4], np.dtype(code))]
        except OverflowError:
            continue
    if -(1 << 63) <= wrong < 1 << 63:
        sources += [torch.tensor([3, wrong, 4]), array("q", [3, wrong, 4])]
    for source in sources:
        with pytest.raises(InputError, match=rf"token 1 is {wrong}; tokens must lie between 0 and {TOKEN_LIMIT - 1}"):
            encode(source)


def test_raw_bytes_with_the_upper_bit_set_are_refused() -> None:
    with pytest.raises(InputError, match="token 1 is"):
        encode(packed([3, TOKEN_LIMIT + 3]))


@pytest.mark.parametrize("wrong", [1.0, "7", None, [4], np.float32(2), 1j, b"x", object()])
def test_a_token_that_is_no_whole_number_is_refused_with_its_place(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"token 2 is .*tokens must be whole numbers"):
        encode([1, 2, wrong, 3])


@pytest.mark.parametrize(
    "wrong",
    [
        "some text", None, 5, 3.5, object(), np.zeros(3), np.zeros((2, 2), int), np.array(5), np.array(["a", "b"]),
        np.array([True, False]), np.array([1], ">i4"), np.array([1], object), np.array(["2020"], "datetime64[D]"),
        array("f", [1]), array("d", [1]), torch.zeros(3), torch.zeros((2, 2), dtype=torch.int64), torch.tensor(5),
        torch.zeros(2, dtype=torch.complex64), [[1, 2], [3, 4]], {1: 2, 3: 4}, {1, 2, 3}, torch.tensor([True]),
    ],
    ids=stable,
)  # fmt: skip
def test_what_is_no_sequence_of_whole_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"tokens? "):
        encode(wrong)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_bytes_that_are_no_whole_tokens_are_refused(count: int) -> None:
    for kind in (bytes, bytearray, memoryview):
        with pytest.raises(InputError, match=f"whole int32 values; got {count} bytes"):
            encode(kind(bytes(count)))


def test_tokens_on_another_device_are_refused_since_reading_them_would_wait() -> None:
    with pytest.raises(InputError, match=r"tokens lie on meta.*pass a CPU copy"):
        encode(torch.zeros(3, dtype=torch.int64, device="meta"))

    class OnCuda:
        """As much of a CUDA tensor as is looked at."""

        device = torch.device("cuda", 1)

        def detach(self) -> None: ...

        def tolist(self) -> list[int]:
            raise AssertionError("read back from the device")

    with pytest.raises(InputError, match="tokens lie on cuda:1"):
        encode(OnCuda())


def test_every_kind_of_tokens_finds_what_a_list_published() -> None:
    cache = path_cache()
    tokens = list(range(20))
    serve(cache, tokens)
    raw = packed(tokens)
    same: list[Any] = [tuple(tokens), range(20), array("q", tokens), np.array(tokens, "uint16"), raw, bytearray(raw)]
    for kind in [*same, memoryview(raw), torch.tensor(tokens), encode(tokens)]:
        assert cache.peek(kind) == 20


# ---------------------------------------------------------------- extra keys


def test_the_same_tokens_with_other_images_never_share_past_the_image() -> None:
    cache = path_cache()
    prompt = [1] * 8 + [0] * 8 + [2] * 8
    serve(cache, prompt, extra=[(8, 16, "cat")])
    assert cache.match(prompt, extra=[(8, 16, "cat")]).ready == 24
    assert cache.match(prompt, extra=[(8, 16, "dog")]).ready == 8
    assert cache.match(prompt).ready == 8


def test_two_equal_images_side_by_side_are_not_one_long_image() -> None:
    cache = path_cache()
    prompt = [0] * 16
    serve(cache, prompt, extra=[(0, 8, "cat"), (8, 16, "cat")])
    assert cache.match(prompt, extra=[(0, 16, "cat")]).ready == 8
    assert cache.match(prompt, extra=[(0, 8, "cat"), (8, 16, "cat")]).ready == 16
    assert cache.match(prompt, extra=[(0, 4, "cat"), (4, 16, "cat")]).ready == 4


@pytest.mark.parametrize(
    "wrap",
    [lambda key: key, lambda key: ("image", (key, 2))],
    ids=["key", "in tuples"],
)
def test_extra_keys_that_are_equal_to_python_alone_share_nothing(wrap: Any) -> None:
    cache = path_cache()
    keys = [1, True, 1.0, "1"]
    for at, key in enumerate(keys):
        assert cache.match([0] * 8, extra=[(0, 8, wrap(key))]).ready == 0, keys[:at]
        serve(cache, [0] * 8, extra=[(0, 8, wrap(key))])
    assert [cache.peek([0] * 8, extra=[(0, 8, wrap(key))]) for key in keys] == [8] * 4


def test_a_match_leaves_nothing_behind_and_its_plan_can_be_opened() -> None:
    cache = path_cache()
    for number in range(100):
        assert cache.peek(range(16), extra=[(0, 16, number)]) == 0
    assert extra_numbers(cache) == {}
    plan = cache.match(range(16), extra=[(0, 16, "cat")])
    for _ in range(2):
        with cache.open(plan) as sequence:
            run(sequence, 16 - sequence.reserved)
    assert cache.peek(range(16), extra=[(0, 16, "cat")]) == 16
    assert cache.peek(range(16), extra=[(0, 16, "dog")]) == cache.peek(range(16)) == 0


def test_extra_keys_that_nothing_uses_are_forgotten_and_the_others_hit() -> None:
    cache = path_cache(tokens=1024, page=16)
    for number in range(500):
        serve(cache, range(16), extra=[(0, 16, number)])
        assert len(extra_numbers(cache)) <= 3 * 1024
    kept = [number for number in range(500) if cache.peek(range(16), extra=[(0, 16, number)])]
    assert kept == list(range(500 - len(kept), 500))
    assert len(kept) == 64


def test_extra_keys_of_appended_tokens_are_forgotten_too_but_not_those_of_a_running_sequence() -> None:
    cache = path_cache(tokens=64)
    running = cache.open([1, 2], extra=[(0, 2, "sun")])
    for number in range(2000):
        with cache.open([1, 2]) as sequence:
            sequence.append([9] * 6, extra=[(0, 6, number)])
    assert len(extra_numbers(cache)) <= 3 * 1024
    running.append([3, 4])
    run(running, 4)
    running.close()
    assert cache.peek([1, 2, 3, 4], extra=[(0, 2, "sun")]) == 4


def test_numbers_that_are_in_use_are_looked_at_again_when_there_are_twice_as_many() -> None:
    maker = KeyMaker(0)
    numbers = {*struct.unpack("<2000i", maker.name(encode(range(2000)).keyed([(0, 2000, "cat")])))}
    assert maker.crowded(0)
    maker.keep(numbers)
    maker.name(encode(range(2000)).keyed([(0, 2000, "dog")]))
    assert not maker.crowded(0)
    maker.name(encode([1]).keyed([(0, 1, "owl")]))
    assert maker.crowded(0)


@pytest.mark.parametrize("seed", range(20))
def test_keyed_tokens_have_the_spans_that_a_cache_hands_out_however_they_were_given(seed: int) -> None:
    chance, cache, spans = random.Random(seed), path_cache(), []
    cuts = iter(sorted(chance.choices(range(17), k=8)))
    for start, end in zip(cuts, cuts, strict=True):
        spans += [(start, end, chance.choice(["cat", "dog"]))] * (start < end)
    chance.shuffle(spans)
    serve(cache, range(16), extra=spans)
    (change,) = cache.contents()
    assert encode(range(16)).keyed(spans).extra == change.tokens.extra
    assert change.tokens.keyed(change.tokens.extra).extra == change.tokens.extra, "what is in both counts once"


@pytest.mark.parametrize("span", [(-1, 3, "k"), (3, 3, "k"), (4, 2, "k"), (0, 9, "k"), (8, 12, "k")])
def test_an_extra_span_outside_of_the_tokens_is_refused(span: tuple[int, int, str]) -> None:
    with pytest.raises(InputError, match="lies outside of the 8 tokens"):
        path_cache().match(range(8), extra=[span])
    with path_cache().open([1, 2]) as sequence, pytest.raises(InputError, match="lies outside of the 8 tokens"):
        sequence.append(range(8), extra=[span])


@pytest.mark.parametrize("extra", [5, [5], [(0, 8)], [("a", 8, "k")], [(0, 8.0, "k")], [(0, 8, "k", 1)], "ab"])
def test_extra_keys_of_the_wrong_form_are_refused(extra: Any) -> None:
    with pytest.raises(InputError, match="extra"):
        path_cache().match(range(8), extra=extra)
    with path_cache().open([1, 2]) as sequence, pytest.raises(InputError, match="extra"):
        sequence.append(range(8), extra=extra)


@pytest.mark.parametrize("key", [["cat"], object(), frozenset({1}), 1j, ("cat", [1]), np.int64(1)], ids=stable)
def test_an_extra_key_that_means_nothing_to_other_processes_is_refused(key: Any) -> None:
    with pytest.raises(InputError, match="an extra key is text, bytes, a number, None or a tuple of such, got"):
        path_cache().match(range(8), extra=[(0, 8, key)])


@pytest.mark.parametrize("extra", [[(0, 4, "a"), (3, 8, "b")], [(2, 3, "b"), (0, 8, "a")], [(0, 8, 1), (0, 8, True)]])
def test_extra_keys_that_overlap_are_refused_with_what_to_do_instead(extra: Any) -> None:
    with pytest.raises(InputError, match=r"overlap: give one span for both, with a tuple of both keys"):
        path_cache().match(range(8), extra=extra)
    with path_cache().open(range(8), extra=extra[:1]) as sequence, pytest.raises(InputError, match="overlap"):
        path_cache().match(sequence.tokens, extra=extra[1:])


@pytest.mark.parametrize(
    "make", [lambda values: np.array(values, "int64"), lambda values: array("q", values)], ids=stable
)
def test_many_tokens_of_eight_bytes_are_encoded_and_checked_at_once(make: Any) -> None:
    values = [(i * 7919) % TOKEN_LIMIT for i in range(300)]
    values[-1] = TOKEN_LIMIT - 1
    assert encode(make(values)) == packed(values)
    for wrong in (-1, TOKEN_LIMIT):
        with pytest.raises(InputError, match=rf"token 298 is {wrong}; tokens must lie between"):
            encode(make([*values[:298], wrong, 1]))


def test_text_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="not text: run the tokenizer first"):
        encode("some text")


def test_a_sequences_tokens_are_the_next_turns_prompt_with_their_keys() -> None:
    prompt, image, cat = [1, 2, 3, 4, 5], [9] * 7, [(5, 12, "cat")]
    cache, whole = path_cache(), [*prompt, *image, 6]
    with cache.open(whole, extra=cat) as sequence:
        finish(sequence)
        sequence.append([*image, 7, 8, 9], extra=[(0, 7, "dog")])
        finish(sequence)
        tokens = sequence.tokens
    assert tokens.extra == (*cat, (13, 20, "dog"))
    assert cache.peek(tokens) == cache.match(tokens).ready == 20
    assert cache.peek(tokens, extra=tokens.extra) == 20, "what is said twice counts once"
    assert cache.peek(tokens.tolist()) == 4
    with cache.open(tokens.extended([4] * 5), extra=[(23, 25, "sun")]) as sequence:
        assert sequence.ready == 20
        assert sequence.tokens.extra == (*tokens.extra, (23, 25, "sun"))
    with cache.open(prompt) as sequence:
        sequence.append(tokens.part(5))
        assert sequence.tokens.extra == tokens.extra
        finish(sequence)
    assert cache.stats().components["path"].cached == 5, "what it published was there"
