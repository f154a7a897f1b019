"""Announcements: which changes are handed on, and what happens when the code that makes events raises an error."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import Buffer, Cache, Change, Component, Manifest, Path, compose
from prefixloom_resumable import Announcements

log = logging.getLogger("tests.announcements")


class Engine:
    """A cache whose announcements are its changes themselves, and the changes that a subscriber has after them."""

    def __init__(self, *, debug: bool = False, most: int = 1 << 16) -> None:
        part = Component("full", Manifest([Buffer("content", (), "int64")]), Path())
        self.cache: Cache = compose(None, plugins=[part], page_size=4, capacity=256, debug=debug)
        journal = self.cache.journal
        self.cache.journal = lambda: journal(most)  # type: ignore[method-assign, assignment]
        self.errors = 0
        """How many of the next calls of ``announce`` fail."""
        self.withdraw_errors = 0
        self.calls = 0
        self.withdrawals = 0
        self.known: set[bytes] = set()
        self.announcements = Announcements(self.cache, self.announce, self.withdraw, log)

    def announce(self, changes: list[Change]) -> list[Any]:
        self.calls += 1
        if self.errors:
            self.errors -= 1
            raise ValueError("the sink is broken")
        return changes

    def withdraw(self) -> list[Any]:
        if self.withdraw_errors:
            self.withdraw_errors -= 1
            raise ValueError("nothing can be withdrawn")
        self.withdrawals += 1
        return [Change("cleared")]

    def run(self, user: int) -> None:
        with self.cache.open([user] * 8) as sequence:
            sequence.grow(8)
            with self.cache.step([sequence]) as step:
                step.run_ops()

    def take(self) -> list[str]:
        """The kinds of events, after which the subscriber has what they say."""
        events = self.announcements.take()
        for event in events:
            if event.kind == "cleared":
                self.known = set()
            elif event.kind == "stored":
                assert event.tokens not in self.known
                self.known.add(event.tokens)
            else:
                self.known.remove(event.tokens)
        return [event.kind for event in events]

    @property
    def cached(self) -> set[bytes]:
        return {change.tokens for change in self.cache.contents()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that stands still, unless a test moves it or contents are read: that takes a second."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("prefixloom_resumable.announcements.time", SimpleNamespace(monotonic=lambda: clock.now))
    contents = Cache.contents

    def slow(cache: Cache) -> list[Change]:
        clock.now += 1.0
        return contents(cache)

    monkeypatch.setattr(Cache, "contents", slow)
    return clock


def test_the_first_call_says_all_there_is_and_the_next_ones_what_has_changed() -> None:
    engine = Engine()
    engine.run(1)
    assert engine.take() == ["cleared", "stored"]
    engine.run(2)
    assert engine.take() == ["stored"]
    engine.cache.evict({"full": 99})
    assert engine.take() == ["removed", "removed"] and engine.take() == []
    assert engine.known == engine.cached == set()


def test_after_an_error_everything_is_withdrawn_and_announced_again(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.run(1)
    engine.take()
    clock.now += 1000
    engine.run(2)
    engine.errors = 1
    with caplog.at_level(logging.DEBUG, log.name):
        assert engine.take() == ["cleared", "cleared", "stored", "stored"]
    assert engine.known == engine.cached and engine.announcements.failures == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info and "the sink is broken" in caplog.text
    engine.run(3)
    assert engine.take() == ["stored"] and engine.known == engine.cached, "and goes on as usual"


def test_an_error_that_stays_is_logged_once_and_tried_for_a_hundredth_of_the_time(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.run(1)
    engine.take()
    engine.errors = 1 << 30
    began, reads = clock.now, 0.0
    with caplog.at_level(logging.INFO, log.name):
        for _ in range(1000):
            engine.run(2)
            engine.cache.evict({"full": 99})
            before = clock.now
            engine.take()
            reads += clock.now - before
            assert engine.known <= engine.cached, "subscribers have nothing that is not there"
            clock.now += 1.0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert engine.announcements.failures == engine.calls - 1 > 1
    assert 0 < reads <= 0.011 * (clock.now - began) + 1.0
    engine.errors = 0
    clock.now += 1000
    engine.run(1)
    assert engine.take() == ["cleared", "cleared", "stored"] or engine.known == engine.cached
    assert engine.known == engine.cached


def test_what_the_journal_could_not_keep_is_announced_anew_but_not_too_often(clock: SimpleNamespace) -> None:
    engine = Engine(most=2)
    engine.take()
    clock.now += 1000
    for user in range(4):
        engine.run(user)
    assert engine.take() == ["cleared"] + 4 * ["stored"] and not engine.withdrawals
    for user in range(4, 8):
        engine.run(user)
    assert engine.take() == ["cleared"] and engine.withdrawals == 1, "subscribers are not left with what is old"
    assert engine.take() == [] and engine.take() == []
    clock.now += 1000
    assert engine.take() == ["cleared"] + 8 * ["stored"] and engine.known == engine.cached
    assert not engine.announcements.failures


def test_what_cannot_be_withdrawn_is_withdrawn_later(clock: SimpleNamespace) -> None:
    engine = Engine()
    engine.run(1)
    engine.take()
    engine.errors, engine.withdraw_errors = 1, 2
    engine.cache.evict({"full": 99})
    assert engine.take() == [] and engine.take() == []
    assert engine.take() == ["cleared"] and engine.known == set()
    clock.now += 1000
    engine.run(2)
    assert engine.take() == ["cleared", "stored"] and engine.known == engine.cached


def test_if_everything_cannot_be_announced_anew_it_is_withdrawn_at_once(clock: SimpleNamespace) -> None:
    engine = Engine(most=2)
    engine.run(1)
    engine.take()
    clock.now += 1000
    engine.cache.evict({"full": 99})
    for user in range(2, 6):
        engine.run(user)
    engine.errors = 1
    assert engine.take() == ["cleared"] and engine.announcements.failures == 1
    clock.now += 1000
    assert engine.take()[-4:] == 4 * ["stored"] and engine.known == engine.cached


def test_in_debug_mode_an_error_is_raised(clock: SimpleNamespace) -> None:
    engine = Engine(debug=True)
    engine.run(1)
    engine.take()
    clock.now += 1000
    engine.run(2)
    engine.errors = 1
    with pytest.raises(ValueError, match="the sink is broken"):
        engine.take()
    assert engine.take() == ["cleared", "cleared", "stored", "stored"], "and what it left wrong is withdrawn"
    with pytest.raises(ValueError, match="of a block"), engine.announcements.guard():
        raise ValueError("of a block")


def test_only_errors_are_kept_from_the_engine() -> None:
    engine = Engine()
    engine.take()
    with engine.announcements.guard():
        raise ValueError("of a block that is for events alone")
    assert engine.announcements.failures == 1 and engine.take()[0] == "cleared"
    with engine.announcements.guard(harms=False):
        raise ValueError("of a block that leaves nothing wrong")
    assert engine.announcements.failures == 2 and engine.take() == []
    with pytest.raises(KeyboardInterrupt), engine.announcements.guard():
        raise KeyboardInterrupt
