"""What the tests of all packages share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.support import outside
from tests.support.sampling import mark_slow

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: a second thread of one only takes from another
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices: a second thread only waits, and where the machine is busy it waits long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: a collection of garbage need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before the mark expression deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    outside.skip_if_missing(item)
