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
from typing import Any

import attrs


@attrs.frozen
class TraceRequest:
    """One request: its tokens, and how many it was answered with."""

    tokens: list[int]
    answer: int


def read(path: Path, most: int | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace, in the order of the file."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    lines = [json.loads(line) for line in text.splitlines()[:most]]
    size = block_size(lines)
    numbers: dict[int, int] = {}
    for count, line in enumerate(lines):
        tokens: list[int] = []
        for each in line["hash_ids"]:
            number = numbers.setdefault(each, len(numbers))
            tokens += [number, *range(size - 1)]
        length = max(1, line["input_length"])
        tokens += [FIRST_LONE + count] * (length - len(tokens))  # what has no id is its own
        yield TraceRequest(tokens[:length], max(1, line["output_length"]))


FIRST_LONE = 1 << 24
"""Tokens from here on belong to one request."""


def block_size(lines: list[Any]) -> int:
    """Tokens of a block: the power of two with which each request has as many blocks as its line says.

    A last block that is not whole may have an id or not.
    """
    for power in range(20):
        size = 1 << power
        if all(len(each["hash_ids"]) - each["input_length"] // size in (0, 1) for each in lines):
            return size
    raise ValueError("the lines do not agree on a size of blocks")
