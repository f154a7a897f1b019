"""Checksums of records: xxh3 where xxhash is installed, else crc32. Each record says which one it has.

They find damage; they do not resist an attacker: who may write into a store may write anything.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable
from typing import Any, Literal

import attrs

Algorithm = Literal["crc32", "xxh3"]
NUMBERS: dict[Algorithm, int] = {"crc32": 1, "xxh3": 2}
"""How an algorithm is written in a record."""
ALGORITHMS: dict[int, Algorithm] = {number: name for name, number in NUMBERS.items()}


@functools.cache
def function(algorithm: Algorithm) -> Callable[[Any], int] | None:
    """The checksum of a buffer; None where it cannot be computed here."""
    if algorithm == "crc32":
        return zlib.crc32
    try:
        found: Callable[[Any], int] = importlib.import_module("xxhash").xxh3_64_intdigest
    except ImportError:
        return None
    return found


@functools.cache
def preferred() -> Algorithm:
    """The fastest one that there is."""
    return "xxh3" if function("xxh3") is not None else "crc32"


@attrs.frozen
class Checksum:
    """What a content came to under one algorithm."""

    algorithm: Algorithm
    value: int

    @classmethod
    def of(cls, content: Any, algorithm: Algorithm | None = None) -> Checksum:
        name = preferred() if algorithm is None else algorithm
        compute = function(name)
        if compute is None:
            raise ValueError(f"{name} cannot be computed: install xxhash")
        return cls(name, compute(content))

    @property
    def known(self) -> bool:
        """Whether it can be computed here."""
        return function(self.algorithm) is not None

    def fits(self, content: Any) -> bool:
        """Whether the content is what it was. False where that cannot be told."""
        compute = function(self.algorithm)
        return compute is not None and compute(content) == self.value
