"""Traces: formats, blocks whose size follows from the lines, and errors that name the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from prefixloom import InputError, encode
from prefixloom.lab import BlockPrompt, LabRequest, SeenPrefixes, TokenPrompt, read_trace


def written(folder: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    text = "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def blocks(at: float, length: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": list(ids), **more}


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("big", [0, 1 << 40])
def test_prompts_of_blocks_share_exactly_the_blocks_that_they_have_in_common(size: int, big: int) -> None:
    if size == 1:
        big = 0
    first = BlockPrompt([big + 1, big + 2, big + 3], size, 3 * size)
    second = BlockPrompt([big + 1, big + 2, big + 4], size, 3 * size)
    agree = 4 * 2 * size
    assert first.tokens()[:agree] == second.tokens()[:agree]
    assert first.tokens()[agree:] != second.tokens()[agree:]
    assert first.tokens() == BlockPrompt([big + 1, big + 2, big + 3], size, 3 * size, number=9).tokens()
    assert encode(bytes(first.tokens())) == first.tokens()  # they are tokens that a cache accepts


def test_a_part_of_a_block_and_text_without_an_id_are_not_whole_blocks() -> None:
    whole, part = BlockPrompt([1, 2], 8, 16).tokens(), BlockPrompt([1, 2], 8, 13).tokens()
    assert part.count == 13
    assert part[: 4 * 8] == whole[: 4 * 8]
    assert part[4 * 8 :] != whole[4 * 8 : 4 * 13]
    own, others = BlockPrompt([1], 8, 13, number=1).tokens(), BlockPrompt([1], 8, 13, number=2).tokens()
    assert own[: 4 * 8] == others[: 4 * 8] == whole[: 4 * 8]
    assert own[4 * 8 :] != others[4 * 8 :]


def test_ids_that_are_equal_behind_different_blocks_are_different_text() -> None:
    seen = SeenPrefixes(4)
    assert seen.take(LabRequest(0, BlockPrompt([1, 7], 8, 16))) == 0
    assert seen.take(LabRequest(0, BlockPrompt([2, 7], 8, 16))) == 0
    assert seen.take(LabRequest(0, BlockPrompt([1, 7, 8], 8, 24))) == 16
    assert seen.take(LabRequest(0, BlockPrompt([1, 7], 8, 16), namespace="other")) == 0
    assert seen.take(LabRequest(0, BlockPrompt([1, 7], 8, 16))) == 12  # one token is left to compute


def test_what_was_seen_of_tokens_is_whole_pages_and_answers_count() -> None:
    seen = SeenPrefixes(4)
    prompt, more = encode(range(10)), encode([*range(10), 5, 6, 7, 8, 9])
    assert seen.take(LabRequest(0, TokenPrompt(prompt), whole=TokenPrompt(prompt.extended([5, 6])))) == 0
    assert seen.take(LabRequest(0, TokenPrompt(more))) == 12


@pytest.mark.parametrize(
    ("ids", "size", "length"), [([-1], 8, 8), ([1 << 62], 8, 8), ([1 << 31], 1, 1), ([1, 2], 8, 8), (["a"], 8, 8)]
)
def test_ids_out_of_range_and_too_many_are_refused(ids: list[Any], size: int, length: int) -> None:
    with pytest.raises(InputError, match="ids"):
        BlockPrompt(ids, size, length)


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_of_blocks_is_read_with_its_size_and_its_times(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, blocks(1000, 30, 1, 2), "\n", blocks(3500, 100, 1, 2, 3, 4, 5, 6, 7, conv="a"), name=name)
    trace = read_trace(path)
    assert (trace.format, trace.block) == ("blocks", 16)
    first, second = trace
    assert (first.at, second.at, second.line, second.session, second.output) == (0.0, 2.5, 3, "a", 5)
    assert (first.prompt.count, second.prompt.count) == (30, 100)
    assert [each.line for each in trace] == [1, 3]  # and again
    assert trace.progress.part == 1.0
    assert len(list(read_trace(path, limit=1))) == 1


def test_the_size_of_a_block_follows_where_the_last_one_has_no_id(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, blocks(0, 200, 1, 2, 3), blocks(0, 130, 1, 2), blocks(0, 700, *range(10))))
    assert trace.block == 64
    assert [len(request.prompt.ids) for request in trace if isinstance(request.prompt, BlockPrompt)] == [3, 2, 10]


def test_tokens_and_their_answers_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path, {"tokens": [1, 2, 3], "output": 7}, {"tokens": [4], "output": [5, 6], "at": 2.5, "priority": 3,
                                                       "namespace": "n", "ttl": 60, "session": "s"},
    )  # fmt: skip
    first, second = read_trace(path)
    assert (first.prompt.tokens().tolist(), first.output, first.whole) == ([1, 2, 3], 7, None)
    assert second.whole is not None
    assert (second.whole.tokens().tolist(), second.output) == ([4, 5, 6], 2)
    assert (second.at, second.priority, second.namespace, second.ttl, second.session) == (2.5, 3, "n", 60, "s")


def test_hashes_of_texts_are_blocks(tmp_path: Path) -> None:
    lines = [{"hashes": ["ab", "cd"], "block": 32, "length": 50}, {"hashes": ["ab", "ef"], "at": 1}]
    trace = read_trace(written(tmp_path, *lines))
    first, second = (request.prompt.tokens() for request in trace)
    assert (trace.format, trace.block, first.count, second.count) == ("hashes", 32, 50, 64)
    assert first[: 4 * 32] == second[: 4 * 32]
    assert first[4 * 32 :] != second[4 * 32 : 4 * 50]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json\n", "line 2: a JSON object is expected, got .*not json"),
        ('{"timestamp": 5, "input_le', "line 2: .* ends in this line: it may be cut off"),
        ("[1, 2]\n", r"line 2: a JSON object is expected, got \[1, 2\]"),
        (blocks(-1, 32, 1, 2), "line 2: 'timestamp' is expected to be a time from 0 up, got -1"),
        (blocks(5, "long", 1), "line 2: 'input_length' is expected to be a whole number"),
        (blocks(5, 0), "line 2: the prompt is empty"),
        (blocks(5, 320, 1, 2), "line 2: 320 tokens in blocks of 16 are 20 or 20 ids, got 2"),
        (blocks(5, 32, 1, -2), "line 2: ids of blocks are whole numbers from 0 .* got -2"),
        (blocks(5, 32, 1, "x"), "line 2: ids of blocks are whole numbers from 0 .* got 'x'"),
        ({"timestamp": 5, "input_length": 32}, "line 2: 'hash_ids' is expected to be a list, got nothing"),
        (blocks(5, 32, 1, 2, priority="high"), "line 2: 'priority' is expected"),
        (blocks(5, 32, 1, 2, output_length=-3), "line 2: 'output_length' is expected"),
        (blocks(0, 32, 1, 2), "line 2: the time 0 is before that of the line above: sort the lines by time"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_what_was_expected(line: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected):
        list(read_trace(written(tmp_path, blocks(1, 64, 1, 2, 3, 4), line), block=16))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "has no line"),
        ([{"prompt": "text"}], "line 1: this is no request that is known: .* got the keys 'prompt'"),
        ([blocks(0, 100, 1, 2, 3), blocks(0, 1000, 1)], "no size of blocks fits"),
        ([{"hashes": ["a"]}], "line 1: hashes of texts need a size"),
        ([{"hashes": ["a"], "block": 16}, {"hashes": ["a"], "block": 8}], "line 2: 'block' is 8 here: .* it was 16"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(lines: list[Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected):
        list(read_trace(written(tmp_path, *lines)))


def test_a_file_that_is_missing_cut_off_or_not_compressed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "plain.gz").write_bytes(b"{}\n")
    with pytest.raises(InputError, match="no gzip file"):
        read_trace(tmp_path / "plain.gz")
    lines = [blocks(at, 64, at, 1000 * at, 7, 8) for at in range(3000)]
    whole = written(tmp_path, *lines, name="whole.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"after line \d+: it is cut off"):
        list(read_trace(tmp_path / "cut.gz"))
