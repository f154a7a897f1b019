"""Requests of a trace file: lines of JSON with ``input_length``, ``output_length`` and ``hash_ids``.

A hash id stands for a block of tokens and all tokens before it. So two requests share a prefix of whole blocks where
their first ids agree. The last block of a request may be partial. Tokens are made from the ids: the content of a block
tells it from every other block.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import attrs


@attrs.frozen
class TraceRequest:
    """One request: its tokens, and how many it was answered with."""

    tokens: list[int]
    answer: int


def read(path: Path, most: int | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace, in the order of the file."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        lines = [json.loads(line) for _, line in zip(range(most or 1 << 60), file, strict=False)]
    size = block_size(lines)
    numbers: dict[int, int] = {}
    for line in lines:
        tokens: list[int] = []
        for each in line["hash_ids"]:
            number = numbers.setdefault(each, len(numbers))
            tokens += [number, *range(size - 1)]
        yield TraceRequest(tokens[: max(1, line["input_length"])], max(1, line["output_length"]))


def block_size(lines: list[dict[str, list[int] | int]]) -> int:
    """Tokens of a block: the smallest power of two with which each request has as many blocks as its line says."""
    for power in range(20):
        if all(-(-line["input_length"] // (1 << power)) == len(line["hash_ids"]) for line in lines):  # type: ignore[arg-type,operator]
            return 1 << power
    raise ValueError("the lines do not agree on a size of blocks")
