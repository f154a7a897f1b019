"""What a router knows of its replicas: from their events, and from what it sent where these cannot be gone by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import attrs
import pytest

from prefixloom import Buffer, Cache, Component, Manifest, Path, Point, SequenceNeeds, compose
from prefixloom_events import EventPublisher
from prefixloom_fleet.deploy.calls import RoutedCall
from prefixloom_fleet.knowledge import followed
from prefixloom_fleet.knowledge.followed import FollowedEvents
from prefixloom_fleet.knowledge.replicas import TrackedReplica, TrackedReplicas
from prefixloom_fleet.knowledge.sent_prompts import PAGE, SentPrompts, links_of
from prefixloom_fleet.routing.contract import RoutingRequest
from prefixloom_fleet.routing.decode_room import DecodeRoom
from prefixloom_fleet.routing.prefix_affinity import PrefixAffinity
from prefixloom_fleet.routing.resumable_boundary import ResumableBoundary

BUFFER = [Buffer("content", (), "int64")]
HYBRID = [Component("kv", Manifest(BUFFER), Path()), Component("state", Manifest(BUFFER), Point())]


def asked(tokens: range, namespace: str = "") -> RoutingRequest:
    return RoutingRequest(tuple(tokens), len(tokens), 0, namespace, "", links_of(tokens, namespace), PAGE)


class Publishing:
    """A cache of a hybrid with its publisher, as one replica has them."""

    def __init__(self) -> None:
        self.cache: Cache = compose(None, plugins=HYBRID, page_size=16, capacity={"kv": 1024, "state": 16})
        self.publisher = EventPublisher(self.cache, "tcp://127.0.0.1:0")

    def compute(self, tokens: range, *stops: int) -> None:
        """Compute a prompt. A state is kept at ``stops`` alone."""
        with self.cache.open(tokens, leave=1) as sequence:
            for end in (*stops, len(tokens)):
                sequence.grow(end - sequence.reserved)
                with self.cache.step([sequence]) as step:
                    step.run_ops()
                if end in stops:
                    sequence.publish()
        assert self.publisher.flush()

    @property
    def metadata(self) -> dict[str, str]:
        return {"events": self.publisher.endpoint, "replay": self.publisher.replay_endpoint}


@pytest.fixture
def replica() -> Iterator[Publishing]:
    made = Publishing()
    yield made
    made.publisher.close()


def followed_of(replica: Publishing) -> FollowedEvents:
    return FollowedEvents("one", replica.publisher.endpoint, replica.publisher.replay_endpoint)


def soon(what: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.01)


def test_a_router_that_comes_late_learns_what_was_cached_before(replica: Publishing) -> None:
    replica.compute(range(200), 64, 128)
    events = followed_of(replica)
    try:
        soon(lambda: events.boundary(range(200), "") == 128)
        assert events.boundary(range(200), "other") == 0
        replica.compute(range(1000, 1100), 96)
        soon(lambda: events.boundary(range(1000, 1100), "") == 96)
    finally:
        events.close()


def test_pages_without_a_state_are_matched_and_not_preferred(replica: Publishing) -> None:
    """A router for full attention counts the pages, and the policy ``resumable`` the boundaries."""
    other = Publishing()
    shallow, deep = TrackedReplica("pages alone"), TrackedReplica("fewer pages, and a state")
    request = asked(range(500))
    try:
        shallow.heard(replica.metadata, {}, follow=True)
        deep.heard(other.metadata, {}, follow=True)
        replica.compute(range(490), 32)
        other.compute(range(360), 352)
        soon(lambda: shallow.matched(request) == 480 and deep.matched(request) == 352)
        assert (shallow.resumable(request), deep.resumable(request)) == (32, 352)
        both = [shallow, deep]
        assert PrefixAffinity().order(request, both)[0] is shallow
        assert ResumableBoundary().order(request, both)[0] is deep
    finally:
        shallow.close()
        deep.close()
        other.publisher.close()


def test_events_that_do_not_come_are_doubted_until_they_do(
    replica: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LATE_SECONDS", 0.2)
    events = followed_of(replica)
    try:
        soon(lambda: not events.doubt)
        replica.compute(range(100), 96)
        soon(lambda: events.boundary(range(100), "") == 96)
        events.told(replica.publisher.counts.batches + 5)  # the replica says it has sent what never comes
        soon(lambda: events.doubt == "its events are late")
        assert events.boundary(range(100), "") is None
    finally:
        events.close()


def test_a_publisher_that_ends_leaves_its_replica_to_what_was_sent(
    replica: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LATE_SECONDS", 0.2)
    known = TrackedReplica("one")
    known.heard(replica.metadata, {"batches": 0}, follow=True)
    request = asked(range(100))
    try:
        soon(lambda: not known.doubt)
        sent = known.begin(request)
        known.end(sent, 0)
        replica.publisher.close()
        known.heard(replica.metadata, {"batches": replica.publisher.counts.batches + 1}, follow=True)
        soon(lambda: bool(known.doubt))
        assert known.resumable(request) == 96, "what was sent there counts"
        assert known.resumable(asked(range(5, 105))) == 0
    finally:
        known.close()


def test_a_replica_whose_prompts_hit_less_than_promised_is_not_believed(replica: Publishing) -> None:
    replica.compute(range(200), 192)
    known = TrackedReplica("one")
    known.heard(replica.metadata, {}, follow=True)
    request = asked(range(200))
    try:
        soon(lambda: known.resumable(request) == 192)
        for _ in range(30):
            known.end(known.begin(request), 192)
        assert known.doubt == "", "all that was promised hit"
        for _ in range(20):
            known.end(known.begin(request), 0)
        assert known.doubt == "requests hit less than its events promised"
    finally:
        known.close()


def test_load_is_what_was_sent_and_what_others_sent() -> None:
    known = TrackedReplica("one")
    first, second = known.begin(asked(range(100))), known.begin(asked(range(1000, 1050)))
    assert (known.tokens_ahead, known.running) == (150, 2)
    known.first_byte(first)
    assert (known.tokens_ahead, known.running) == (50, 2)
    known.heard({}, {"tokens_ahead": 400, "running": 7, "free": {"kv": 0.25}}, follow=False)
    assert (known.tokens_ahead, known.running, known.free) == (400, 7, {"kv": 0.25})
    known.heard({}, {}, follow=False)
    known.end(first, None)
    known.end(second, None)
    known.end(second, None)
    assert (known.tokens_ahead, known.running) == (0, 0)


def test_free_is_what_a_replica_said_or_what_the_requests_leave_that_were_sent(replica: Publishing) -> None:
    """Of 64 pages for 1024 tokens and 16 states, a request of 256 tokens and 256 of an answer holds a half, and 1."""
    known = TrackedReplica("one")
    request = attrs.evolve(asked(range(256)), output=256)
    assert known.needs(request) == {}, "nothing is known of its pools"
    metadata = {"needs": SequenceNeeds.of(replica.cache.composition, 64)}
    known.heard(metadata, {"free": {"kv": 0.9, "state": 0.9}}, follow=False)
    assert known.needs(request) == {"kv": 0.5, "state": 1 / 16}
    first = known.begin(request)
    assert known.free == {"kv": 0.5, "state": 0.9}
    second = known.begin(request)
    assert known.free == {"kv": 0.0, "state": 0.875}
    known.end(first, None)
    known.heard(metadata, {"free": {"kv": 0.4, "state": 0.9}}, follow=False)
    assert known.free == {"kv": 0.4, "state": 0.9}, "others use it as well"
    known.end(second, None)


def test_a_burst_goes_where_room_is_before_any_replica_tells_of_it(replica: Publishing) -> None:
    """The first prompt is long. Others go to the other replica, though more requests run there then."""
    replicas = [TrackedReplica(name) for name in "ab"]
    for each in replicas:
        metadata = {"needs": SequenceNeeds.of(replica.cache.composition, 64)}
        each.heard(metadata, {"free": {"kv": 1.0, "state": 1.0}}, follow=False)
    policy, sent = DecodeRoom(), []
    for number, length in enumerate((480, 32, 32, 32)):
        request = asked(range(1000 * number, 1000 * number + length))
        best = policy.order(request, replicas)[0]
        sent.append(best.name)
        next(each for each in replicas if each is best).begin(request)
    assert sent == ["a", "b", "b", "b"]


def test_who_only_looks_at_who_is_there_follows_no_events_until_it_asks(replica: Publishing) -> None:
    known = TrackedReplicas(follow=False)
    known.update([("one", replica.metadata, {})])
    assert known.get("one").events is None
    known.follow_events()
    first = known.get("one").events
    known.follow_events()
    known.update([("one", replica.metadata, {}), ("two", replica.metadata, {})])
    assert first is not None and known.get("one").events is first
    assert known.get("two").events is not None, "one that comes later is followed as well"
    known.close()


def test_replicas_that_have_gone_are_forgotten_and_their_threads_end(replica: Publishing) -> None:
    known = TrackedReplicas()
    known.update([("one", replica.metadata, {}), ("two", {}, {})])
    one = known.get("one")
    assert one.events is not None
    known.update([("two", {}, {})])
    assert [each.name for each in known.all()] == ["two"]
    thread = one.events._thread
    soon(lambda: not thread.is_alive())
    known.close()


def test_what_was_sent_is_remembered_up_to_a_bound() -> None:
    sent = SentPrompts(most=10)
    sent.add(asked(range(96)))
    assert sent.matched(asked(range(96 + 50))) == sent.resumable(asked(range(96 + 50))) == 96
    assert (sent.matched(asked(range(64))), sent.resumable(asked(range(64)))) == (64, 0), "no prompt ended there"
    assert sent.matched(asked(range(96), "other")) == 0
    sent.add(asked(range(1000, 1160)))
    assert sent.matched(asked(range(96))) == 0
    assert sent.matched(asked(range(1000, 1160))) == 160


def test_a_try_that_is_over_counts_at_no_replica_whatever_the_router_says_later() -> None:
    """Ray looks for another replica when one dies, also for a request that nobody waits for any more."""
    first, second = TrackedReplica("first"), TrackedReplica("second")
    call = RoutedCall(asked(range(100)))
    call.goes_to(first)
    assert (first.under_way, second.under_way) == (1, 0)
    call.goes_to(second)
    assert (first.under_way, second.under_way) == (0, 1)
    call.end(None)
    call.goes_to(first)
    assert (first.under_way, second.under_way) == (0, 0)
