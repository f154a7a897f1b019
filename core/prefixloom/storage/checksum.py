"""Checksums of records: xxh3 where xxhash is installed, else crc32. Each record says which one it has.

A checksum finds damage. It does not stop an attacker, because whoever can write into a store can write a new checksum.
This module knows no record and no store.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable
from typing import Literal

import attrs
from typing_extensions import Buffer

Algorithm = Literal["crc32", "xxh3"]
NUMBERS: dict[Algorithm, int] = {"crc32": 1, "xxh3": 2}
"""The number that stands for an algorithm in a record."""
ALGORITHMS: dict[int, Algorithm] = {number: name for name, number in NUMBERS.items()}


@functools.cache
def function(algorithm: Algorithm) -> Callable[[Buffer], int] | None:
    """Return the function that computes a checksum of a buffer, or None if it is not installed here."""
    if algorithm == "crc32":
        return zlib.crc32
    try:
        found: Callable[[Buffer], int] = importlib.import_module("xxhash").xxh3_64_intdigest
    except ImportError:
        return None
    return found


@functools.cache
def preferred() -> Algorithm:
    """Return the fastest algorithm that is installed."""
    return "xxh3" if function("xxh3") is not None else "crc32"


@attrs.frozen
class Checksum:
    """The checksum of a content under one algorithm."""

    algorithm: Algorithm
    value: int

    @classmethod
    def of(cls, content: Buffer, algorithm: Algorithm | None = None) -> Checksum:
        name = preferred() if algorithm is None else algorithm
        compute = function(name)
        if compute is None:
            raise ValueError(f"{name} cannot be computed: install xxhash")
        return cls(name, compute(content))

    @property
    def known(self) -> bool:
        """Whether this checksum can be computed here."""
        return function(self.algorithm) is not None

    def fits(self, content: Buffer) -> bool:
        """Return whether the content has this checksum; False where the checksum cannot be computed."""
        compute = function(self.algorithm)
        return compute is not None and compute(content) == self.value
