"""A part of the KL check of ``ThreeWay``; the whole is ``python -m tests.random.kl_threeway --requests 200``."""

from __future__ import annotations

import pytest

from tests.random.kl_threeway import Traffic

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def test_what_is_said_with_the_cache_is_what_is_said_without() -> None:
    told = Traffic(seed=2).run(25)
    assert told.sound(), told
    assert min(told.hit, told.restored, told.evicted) > 0, told
    assert told.agreed == told.tokens
