"""What the tests of filling alone share: a small hybrid cache, and what its running states hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixloom import Path, Point, Window
from tests.support.helpers import cache_of, part, run

TOKENS = list(range(40))
DEBUG_OR_NOT = pytest.mark.parametrize("debug", [True, False], ids=["debug", "plain"])


def hybrid(**options: Any) -> Any:
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


def content(cache: Any, sequence: Any, name: str = "state") -> torch.Tensor:
    slot = sequence.pages(name)[0]
    found: torch.Tensor = cache.pool(name).buffers["data"][:, slot]
    return found


def cached(cache: Any, tokens: list[int], value: int) -> None:
    """A state for all of ``tokens``, which holds ``value``."""
    with cache.open(tokens) as sequence:
        run(sequence, len(tokens) - sequence.reserved)
        content(cache, sequence).fill_(value)
