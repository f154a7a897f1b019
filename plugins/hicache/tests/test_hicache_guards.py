"""The guards around a store, with a clock that the tests advance: nothing here sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from prefixloom import CompositionError, Consensus, TierManifest
from prefixloom.storage import Key, Miss, Record, Refused, Stored
from prefixloom.testing.laws.storage import key_of, record_of, same
from prefixloom_hicache import HostTier, MemoryBackend
from prefixloom_hicache.guards import BreakerLimits, Guarded, GuardLimits, StoreCall
from prefixloom_hicache.guards.breaker import Breaker
from tests.support.processes import python

MIB = 1 << 20


class ManualClock:
    """A clock whose time passes only in ``advance``."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class Call:
    """A call to a store, for which a test waits."""

    def __init__(self, guarded: Guarded, call: StoreCall) -> None:
        self.guarded, self.call = guarded, call

    @property
    def over(self) -> bool:
        return self.call.over

    @property
    def answers(self) -> Any:
        return self.call.answers

    def wait(self) -> Any:
        end = time.monotonic() + 30
        while not self.call.over:
            assert time.monotonic() < end, "it is never over"
            self.guarded.poll()
            time.sleep(0.0002)
        return self.call.answers


class Asked(Guarded):
    """Guards whose store is asked as a cache does."""

    def get(
        self, keys: Sequence[Key], into: Sequence[Any] | None = None, released: Callable[[], None] | None = None
    ) -> Call:
        misses = lambda reason, detail: tuple(Miss(key, reason, detail) for key in keys)  # noqa: E731
        size = sum(map(len, into or ()))
        return Call(self, self.ask(lambda store: store.get(keys, into), misses, size=size, released=released))

    def put(self, records: Sequence[Record]) -> Call:
        refusals = lambda reason, detail: tuple(Refused(each.key, reason, detail) for each in records)  # noqa: E731
        size = sum(len(record.payload) for record in records)
        return Call(self, self.ask(lambda store: store.put(records), refusals, writes=True, size=size))


class Moody(MemoryBackend):
    """A store whose reads and writes do what the test says: hang until told, raise, fail, or answer."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(64 * MIB)
        self.clock = clock
        self.mood: Callable[[], object] = lambda: None
        self.asked = 0
        self.let_go = threading.Event()

    def hang(self) -> None:
        """Never come back, while as much time passes as anybody would wait."""
        self.clock.advance(10)
        assert self.let_go.wait(30)

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        self.asked += 1
        answer = self.mood()
        return answer if isinstance(answer, tuple) else super().get(keys, into)

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        self.asked += 1
        answer = self.mood()
        return answer if isinstance(answer, tuple) else super().put(records)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Moody]:
    made = Moody(clock)
    yield made
    made.let_go.set()


def broken() -> None:
    raise OSError("the wire is cut")


# ---------------------------------------------------------------- deadline


def test_what_goes_well_is_what_the_store_answers(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    assert guarded.put([record_of(1), record_of(1)]).wait() == (Stored(key_of(1)), Stored(key_of(1), fresh=False))
    buffer = bytearray(800)
    (found,) = guarded.get([key_of(1)], [buffer]).wait()
    same(found, record_of(1))
    status = guarded.status()
    assert status.ended == {"done": 2}
    assert status.reads_waiting == status.writes_waiting == (0, 0)


def test_a_call_that_never_comes_back_holds_up_nobody(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, GuardLimits(deadline=2), clock)
    guarded.put([record_of(1)]).wait()
    store.mood = store.hang
    call = guarded.get([key_of(1), key_of(2)])
    assert call.wait() == (Miss(key_of(1), "deadline"), Miss(key_of(2), "deadline"))
    assert guarded.status().stuck == 1 and guarded.status().ended == {"done": 1, "deadline": 1}
    store.mood = lambda: None
    same(guarded.get([key_of(1)]).wait()[0], record_of(1))
    assert guarded.status().stuck == 1, "the one before still hangs, and this one went by"


def test_writes_go_on_while_a_read_hangs(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    entered = threading.Event()
    store.mood = lambda: (entered.set(), store.let_go.wait(30))[0]
    hanging = guarded.get([key_of(1)])
    assert entered.wait(30)
    store.mood = lambda: None
    assert guarded.put([record_of(1)]).wait() == (Stored(key_of(1)),)
    assert not hanging.over and hanging.answers is None


def test_buffers_are_the_stores_until_a_late_call_comes_back(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    guarded.put([record_of(1)]).wait()
    back = threading.Event()
    told: list[str] = []
    buffer = bytearray(700)
    store.mood = store.hang
    call = guarded.get([key_of(1)], [buffer], released=lambda: (told.append("released"), back.set())[0])
    assert call.wait()[0] == Miss(key_of(1), "deadline")
    assert told == [] and not any(buffer)
    store.let_go.set()
    assert back.wait(30)
    assert any(buffer), "it did write into the buffer, after the deadline"
    assert call.answers == (Miss(key_of(1), "deadline"),), "and its answer is dropped"
    assert told == ["released"] and guarded.status().late == 1 and guarded.status().stuck == 0


def test_buffers_are_released_once_however_a_call_ends(store: Moody, clock: ManualClock) -> None:
    limits = GuardLimits(backlog_calls=1, breaker=BreakerLimits(failures=1, pause=100))
    guarded = Asked(store, limits, clock)
    told: list[str] = []
    guarded.get([key_of(1)], released=lambda: told.append("answered")).wait()
    store.mood = broken
    guarded.get([key_of(1)], released=lambda: told.append("raised")).wait()
    guarded.get([key_of(1)], released=lambda: told.append("breaker")).wait()
    assert told == ["answered", "raised", "breaker"]
    guarded.close()
    guarded.get([key_of(1)], released=lambda: told.append("closed")).wait()
    assert told[3:] == ["closed"]


def test_with_too_many_calls_stuck_nothing_is_asked_until_one_returns(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, GuardLimits(stuck=1, breaker=BreakerLimits(failures=99)), clock)
    store.mood = store.hang
    for _ in range(2):
        assert guarded.get([key_of(1)]).wait()[0] == Miss(key_of(1), "deadline")
    assert guarded.get([key_of(1)]).wait()[0] == Miss(key_of(1), "backlog")
    assert store.asked == 2 and guarded.status().stuck == 2
    store.mood = lambda: None
    store.let_go.set()
    while guarded.status().stuck:
        threading.Event().wait(0.001)
    assert guarded.get([key_of(1)]).wait()[0] == Miss(key_of(1), "absent")


def test_what_waits_too_long_behind_another_lapses_without_being_asked(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, GuardLimits(breaker=BreakerLimits(failures=2)), clock)
    entered = threading.Event()
    store.mood = lambda: (entered.set(), store.let_go.wait(30))[0]
    calls = [guarded.get([key_of(1)]) for _ in range(3)]
    assert entered.wait(30)
    clock.advance(2)
    guarded.poll()
    assert [call.answers for call in calls] == [(Miss(key_of(1), "deadline"),)] * 3
    assert store.asked == 1 and guarded.breaker.state == "closed", "only one of them says something of the store"
    assert guarded.status().ended == {"deadline": 3}


# ---------------------------------------------------------------- errors


def test_what_a_store_raises_is_an_answer(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    store.mood = broken
    assert guarded.get([key_of(1)]).wait() == (Miss(key_of(1), "error", "OSError: the wire is cut"),)
    assert guarded.put([record_of(1)]).wait() == (Refused(key_of(1), "error", "OSError: the wire is cut"),)
    assert guarded.status().ended == {"error": 2}


def test_an_answer_that_is_none_never_gets_through(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    store.exists = lambda keys: None  # type: ignore[method-assign,assignment,return-value]
    call = guarded.ask(lambda store: store.exists([]), lambda reason, detail: (reason, detail))
    assert Call(guarded, call).wait() == ("error", "TypeError: Moody answered None")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there are no words")


class Nosy:
    @property
    def reason(self) -> str:
        raise RuntimeError("there is no reason")


def mute() -> None:
    raise Mute


@pytest.mark.parametrize(("mood", "detail"), [(mute, "Mute"), (lambda: (Nosy(),), "RuntimeError: there is no reason")])
def test_reads_go_on_when_a_stores_error_or_answer_itself_raises(
    mood: Callable[[], object], detail: str, store: Moody, clock: ManualClock
) -> None:
    guarded = Asked(store, now=clock)
    store.mood = mood
    assert guarded.get([key_of(1)]).wait() == (Miss(key_of(1), "error", detail),)
    store.mood = lambda: None
    assert guarded.get([key_of(1)]).wait() == (Miss(key_of(1), "absent"),)
    assert guarded.status().reads_waiting == (0, 0) and guarded.status().stuck == 0


def test_a_store_that_hangs_in_closing_holds_up_nobody(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    store.close = lambda: store.let_go.wait(30)  # type: ignore[method-assign,assignment]
    guarded.close()
    guarded.close()
    assert guarded.get([key_of(1)]).wait() == (Miss(key_of(1), "closed"),)
    assert guarded.status().stuck == 0, "no call ran"


def test_a_process_that_ends_may_still_call_a_store() -> None:
    told = python(
        "import atexit\n"
        "atexit.register(lambda: print(guarded.ask(lambda store: (1,), lambda *why: why).over))\n"
        "from prefixloom_hicache import HostTier, MemoryBackend\n"
        "from prefixloom_hicache.guards import Guarded\n"
        "guarded = Guarded(MemoryBackend(1 << 20))\n"
        "guarded.ask(lambda store: store.exists([]), lambda *why: why)\n"
    )
    assert told in ("True\n", "False\n")


def test_closing_drops_what_waits(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, now=clock)
    entered = threading.Event()
    store.mood = lambda: (entered.set(), store.let_go.wait(30))[0]
    first = guarded.put([record_of(1)])
    assert entered.wait(30)
    second = guarded.put([record_of(2)])
    guarded.close()
    assert second.answers == (Refused(key_of(2), "closed"),)
    assert (guarded.status().stuck, guarded.status().late) == (1, 0)
    store.let_go.set()
    assert first.wait() is not None
    end = time.monotonic() + 30
    while (guarded.status().stuck, guarded.status().late) != (0, 1):
        assert time.monotonic() < end, guarded.status()


# ---------------------------------------------------------------- breaker


def test_the_breaker_opens_after_failures_in_a_row_and_probes_with_one_call(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, GuardLimits(breaker=BreakerLimits(failures=3, pause=5)), clock)
    store.mood = broken
    for _ in range(3):
        assert guarded.breaker.state == "closed"
        guarded.get([key_of(1)]).wait()
    assert guarded.breaker.state == "open" and store.asked == 3
    assert guarded.get([key_of(1)]).wait() == (Miss(key_of(1), "breaker"),)
    assert guarded.put([record_of(1)]).wait() == (Refused(key_of(1), "breaker"),)
    assert store.asked == 3 and guarded.status().ended == {"error": 3, "breaker": 2}
    clock.advance(5)
    assert guarded.breaker.state == "half_open"
    store.mood = lambda: None
    assert guarded.put([record_of(1)]).wait() == (Stored(key_of(1)),)
    assert guarded.breaker.state == "closed" and guarded.status().trips == 1


def test_a_store_that_says_io_is_failing_and_one_that_misses_is_not(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, GuardLimits(breaker=BreakerLimits(failures=2)), clock)
    for reason, state in (("absent", "closed"), ("corrupt", "closed"), ("io", "open")):
        store.mood = lambda reason=reason: (Miss(key_of(1), reason), Miss(key_of(2), "absent"))  # type: ignore[misc]
        for _ in range(2):
            guarded.get([key_of(1), key_of(2)]).wait()
        assert guarded.breaker.state == state, reason


def end(breaker: Breaker, well: bool) -> None:
    """Make one call."""
    token = breaker.allow()
    assert token is not None
    breaker.ended(token, well)


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    made = Breaker(BreakerLimits(failures=2, pause=1, longest=3), clock)
    for _ in range(2):
        end(made, False)
    return made


def test_only_one_call_probes(breaker: Breaker, clock: ManualClock) -> None:
    assert breaker.allow() is None
    clock.advance(1)
    probe = breaker.allow()
    assert probe is not None and breaker.allow() is None
    breaker.ended(probe, None)
    assert breaker.state == "half_open"
    probe = breaker.allow()
    assert probe is not None
    breaker.ended(probe, True)
    assert breaker.state == "closed" and breaker.allow() is not None


def test_a_failed_probe_doubles_the_pause_up_to_the_longest(breaker: Breaker, clock: ManualClock) -> None:
    for pause in (1, 2, 3, 3):
        clock.advance(pause - 0.01)
        assert breaker.allow() is None
        clock.advance(0.02)
        end(breaker, False)
    assert breaker.trips == 5
    clock.advance(3.1)
    end(breaker, True)
    for _ in range(2):
        end(breaker, False)
    clock.advance(1.01)
    assert breaker.state == "half_open", "after a success the pause is the first one again"


def test_calls_from_before_it_opened_say_nothing(clock: ManualClock) -> None:
    breaker = Breaker(BreakerLimits(failures=2, pause=1), clock)
    early = breaker.allow()
    assert early is not None
    for _ in range(2):
        end(breaker, False)
    breaker.ended(early, True)
    breaker.ended(early, False)
    assert breaker.state == "open" and breaker.trips == 1


def test_a_success_forgets_the_failures_before_it(clock: ManualClock) -> None:
    breaker = Breaker(BreakerLimits(failures=2), clock)
    for _ in range(5):
        end(breaker, False)
        end(breaker, True)
    assert breaker.state == "closed"


# ---------------------------------------------------------------- backlog


def test_writes_above_the_backlog_are_dropped_and_counted(store: Moody, clock: ManualClock) -> None:
    guarded = Asked(store, GuardLimits(backlog_calls=3, backlog_bytes=2000), clock)
    entered = threading.Event()
    store.mood = lambda: (entered.set(), store.let_go.wait(30))[0]
    calls = [guarded.put([record_of(1, 900)])]
    assert entered.wait(30)
    calls += [guarded.put([record_of(seed, 900)]) for seed in (2, 3, 4)]
    assert [call.over for call in calls] == [False, False, True, True]
    assert calls[3].answers == (Refused(key_of(4), "backlog"),)
    assert guarded.status().writes_waiting == (2, 1800) and guarded.status().ended == {"backlog": 2}
    store.let_go.set()
    assert [call.wait()[0] for call in calls[:2]] == [Stored(key_of(1)), Stored(key_of(2))]
    assert guarded.status().writes_waiting == (0, 0)
    assert guarded.put([record_of(5, 5000)]).wait() == (Stored(key_of(5)),), "alone, it may be larger"


# ---------------------------------------------------------------- time


def test_a_call_lapses_by_the_systems_clock() -> None:
    store = Moody(ManualClock())
    store.mood = lambda: store.let_go.wait(30)
    guarded, before = Asked(store, GuardLimits(deadline=0.05)), time.monotonic()
    assert guarded.get([key_of(1)]).wait() == (Miss(key_of(1), "deadline"),)
    store.let_go.set()
    assert 0.05 <= time.monotonic() - before < 20


@pytest.mark.parametrize(
    ("kind", "name", "given"),
    [
        (GuardLimits, "deadline", -1),
        (GuardLimits, "stuck", "x"),
        (GuardLimits, "backlog_calls", 0.5),
        (GuardLimits, "breaker", 5),
        (BreakerLimits, "failures", 0),
        (BreakerLimits, "pause", float("nan")),
        (HostTier, "limits", 5),
        (HostTier, "consensus", Consensus),
        (HostTier, "fetch_base", "x"),
        (HostTier, "fetch_at_least", 1.5),
    ],
)
def test_limits_of_another_type_or_range_are_refused_by_name(kind: Any, name: str, given: Any) -> None:
    manifest = {"manifest": TierManifest(capacity=8)} if kind is HostTier else {}
    with pytest.raises(CompositionError, match=f"{name} must be .*got"):
        kind(**manifest, **{name: given})
