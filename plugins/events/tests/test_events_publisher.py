"""The publisher and its subscribers: replays, snapshots, and that nobody who reads badly is felt by the cache."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from prefixloom import Buffer, Cache, Component, InputError, Manifest, Path, Point, PrefixloomError, compose
from prefixloom.connections import write_keys
from prefixloom_engine import Engine, Polled, ThreeWay
from prefixloom_events import EventFollower, EventPublisher, OrderedEvents, PageLabel
from prefixloom_events import publisher as publishing
from prefixloom_events.follower import ASK_FOR_ALL
from prefixloom_events.publisher import ReplayBuffer
from prefixloom_events.verify import main as verify
from prefixloom_events.wire import decode_batch

ANYWHERE = "tcp://127.0.0.1:0"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


SIX = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
CONTENT = [Buffer("content", (), "int64")]


def small(tokens: int = 400) -> Cache:
    parts = [Component("full", Manifest(CONTENT), Path()), Component("state", Manifest(CONTENT), Point())]
    return compose(None, plugins=parts, page_size=4, capacity={"full": tokens, "state": 12})


def run(cache: Cache, tokens: Any, namespace: str = "") -> None:
    with cache.open(tokens, namespace=namespace) as sequence:
        sequence.grow(len(tokens) - sequence.reserved)
        with cache.step([sequence]) as step:
            step.run_ops()


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


class Pair:
    """A cache that publishes, and a follower."""

    def __init__(self, **options: Any) -> None:
        self.cache = small()
        self.publisher = EventPublisher(self.cache, **{"endpoint": ANYWHERE, **options})
        self.follower = EventFollower(self.publisher.endpoint, self.publisher.replay_endpoint)

    def catch_up(self) -> None:
        """Have the follower know all that was sent."""
        assert self.publisher.flush()
        wait_for(lambda: self.follower.catch_up() and self.follower.stream.expected == self.publisher.counts.batches)

    def same(self) -> None:
        self.catch_up()
        assert self.follower.cache.faults == []
        for user in range(40):
            tokens = [user] * 12
            assert self.follower.cache.boundary(tokens) == self.cache.peek(tokens)

    def forget(self) -> None:
        """Wait until the follower takes nothing for cached, although not everything can be announced."""
        wait_for(lambda: self.follower.catch_up() and not any(self.follower.cache.blocks.values()))

    def close(self) -> None:
        self.follower.close()
        self.publisher.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(**getattr(request, "param", {}))
    yield found
    found.close()


def test_messages_have_the_form_of_the_field(pair: Pair) -> None:
    pair.catch_up()
    run(pair.cache, [1] * 8)
    pair.catch_up()
    (first, payload), (second, more) = pair.follower.answers(0) or ()
    assert (first, second) in ((0, 1), (0, 1))
    for each in (payload, more):
        ts, events, rank = msgspec.msgpack.decode(each)
        assert abs(ts - time.time()) < 60 and rank == 0
        assert all(isinstance(event, dict) for event in events)
    kinds = [event["type"] for event in msgspec.msgpack.decode(payload)[1] + events]
    assert kinds[0] == "AllBlocksCleared" and set(kinds[1:]) == {"BlockStored"}
    required = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert all(required <= event.keys() for event in events)


class FieldStored(msgspec.Struct, tag="BlockStored"):
    """What decoders of the field know of the event, with the types that they declare."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class FieldRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class FieldCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class FieldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[FieldStored | FieldRemoved | FieldCleared]
    data_parallel_rank: int | None = None


def test_a_decoder_that_is_strict_about_types_reads_every_batch(pair: Pair) -> None:
    with pair.cache.open(range(12), extra=[(1, 3, "image")], namespace="tenant") as sequence:
        sequence.grow(12)
        with pair.cache.step([sequence]) as step:
            step.run_ops()
    pair.catch_up()
    pair.cache.evict({"full": 9})
    pair.catch_up()
    pair.cache.flush()
    pair.catch_up()
    decoder = msgspec.msgpack.Decoder(FieldBatch)
    kinds = [type(event) for _, payload in pair.follower.answers(0) or () for event in decoder.decode(payload).events]
    assert {FieldStored, FieldRemoved, FieldCleared} == set(kinds)


@pytest.mark.parametrize("pair", [{}, pytest.param({"endpoint": "tcp://[::1]:0"}, marks=SIX)], indirect=True)
def test_a_follower_has_what_the_cache_has(pair: Pair) -> None:
    for user in range(40):  # more than it holds
        run(pair.cache, [user] * 12)
        pair.publisher.poll()
    pair.same()
    assert pair.cache.stats().components["full"].evicted


def test_a_late_subscriber_asks_for_what_was_before(pair: Pair) -> None:
    for user in range(5):
        run(pair.cache, [user] * 12)
        pair.publisher.flush()
    with EventFollower(pair.publisher.endpoint, pair.publisher.replay_endpoint) as late:
        assert late.catch_up() and late.counts.repaired == pair.publisher.counts.batches
        assert late.cache.boundary([3] * 12) == 12


@pytest.mark.parametrize("pair", [{"buffered": 2}, {"buffered_bytes": 700}], ids=["batches", "bytes"], indirect=True)
def test_a_subscriber_that_missed_more_than_is_kept_gets_a_snapshot(pair: Pair) -> None:
    for user in range(6):
        run(pair.cache, [user] * 12)
        pair.publisher.flush()
    with EventFollower(pair.publisher.endpoint, pair.publisher.replay_endpoint) as late:
        assert late.catch_up()
        assert late.counts.snapshots == 1 and late.cache.faults == []
        assert all(late.cache.boundary([user] * 12) == pair.cache.peek([user] * 12) == 12 for user in range(6))
    (answer,) = pair.follower.answers(ASK_FOR_ALL) or ()
    assert answer[0] == pair.publisher.counts.batches - 1


def test_a_gap_is_seen_and_repaired() -> None:
    cache, stream, sent = small(), OrderedEvents(), []
    with (
        EventPublisher(cache, ANYWHERE) as publisher,
        EventFollower(publisher.endpoint, publisher.replay_endpoint) as reader,
    ):
        for user in range(5):
            run(cache, [user] * 12)
            publisher.flush()
        wait_for(lambda: len(reader.answers(0) or ()) == publisher.counts.batches)
        sent = reader.answers(0) or []
    for number, payload in sent:
        if number != 2:
            stream.receive(number, payload)
    assert (stream.missing, stream.counts.gaps, stream.counts.applied) == (2, 1, 2)
    stream.replayed(*sent[2])
    assert stream.missing is None and stream.expected == len(sent)
    assert all(stream.cache.boundary([user] * 12) == 12 for user in range(5))
    stream.receive(*sent[1])
    assert stream.counts.late == 1
    stream.replayed(len(sent), b"no batch")
    stream.replayed(len(sent) + 5, b"no batch")
    assert stream.counts.malformed == 2 and stream.expected == len(sent) + 1, "it asks for what follows"


def test_a_publisher_that_is_started_again_is_followed() -> None:
    cache = small()
    stream = OrderedEvents()
    for user in range(2):
        with (
            EventPublisher(cache, ANYWHERE) as publisher,
            EventFollower(publisher.endpoint, publisher.replay_endpoint) as reader,
        ):
            run(cache, [user] * 12)
            publisher.flush()
            for number, payload in reader.answers(0) or ():
                stream.receive(number, payload)
    assert stream.cache.faults == [] and stream.counts.late == 0
    assert [stream.cache.boundary([user] * 12) for user in range(2)] == [12, 12]


def test_a_busy_publisher_leaves_changes_in_the_journal_and_begins_again_when_there_are_too_many(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.catch_up()
    go, entered = threading.Event(), threading.Event()
    apply = publishing.Mirror.apply

    def slow(self: Any, changes: Any) -> Any:
        entered.set()
        assert go.wait(60)
        return apply(self, changes)

    monkeypatch.setattr(publishing.Mirror, "apply", slow)
    monkeypatch.setattr("prefixloom.tree.journal.BYTES", 4000)
    run(pair.cache, [0] * 12)
    pair.publisher.poll()
    assert entered.wait(20)
    for user in range(1, 60):  # nothing waits for the thread
        run(pair.cache, [user] * 12)
        pair.publisher.poll()
    go.set()
    pair.same()
    assert pair.publisher.counts.restarts == 2
    monkeypatch.setattr(publishing.Mirror, "apply", apply)


def test_after_an_error_of_the_publishers_thread_subscribers_have_nothing_until_everything_is_announced_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(pair.cache, [0] * 12)
    pair.catch_up()

    def broken(self: Any, changes: Any) -> Any:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(publishing.Mirror, "apply", broken)
        run(pair.cache, [1] * 12)
        pair.publisher.poll()
        wait_for(lambda: pair.publisher.failed is not None)
        pair.cache.evict({"full": 99})
        pair.publisher.poll()
        pair.forget()
    monkeypatch.setattr(publishing, "CONTENTS_SHARE", 1.0)
    run(pair.cache, [2] * 12)
    assert pair.publisher.flush(20) and pair.publisher.counts.restarts >= 2
    pair.same()
    assert "begins again" in caplog.text


def test_all_contents_are_read_for_a_small_share_of_time_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """If changes are lost again and again, the cache's thread does not read everything each time."""
    pair.catch_up()
    reads = 0
    contents = pair.cache.contents

    def counted() -> Any:
        nonlocal reads
        reads += 1
        time.sleep(0.01)
        return contents()

    monkeypatch.setattr(pair.cache, "contents", counted)
    monkeypatch.setattr("prefixloom.tree.journal.BYTES", 10)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        run(pair.cache, [1] * 12)
        pair.cache.flush()
        run(pair.cache, [2] * 12)
        pair.publisher.poll()
    assert reads == 1
    pair.forget()


def test_what_is_handed_in_while_an_error_of_an_answer_is_noted_is_not_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "CONTENTS_SHARE", 1e9)
    run(pair.cache, [1] * 12)
    pair.catch_up()
    noted, go = threading.Event(), threading.Event()
    cache_thread = threading.current_thread()

    def note(sender: Any, is_broken: bool) -> None:
        sender.__dict__["broken"] = is_broken
        if is_broken and threading.current_thread() is not cache_thread:
            noted.set()
            assert go.wait(20)

    def broken(self: Any) -> Any:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(publishing._Sender, "broken", property(lambda sender: sender.__dict__["broken"], note), False)
        patch.setattr(publishing.Mirror, "snapshot", broken)
        assert pair.follower.answers(ASK_FOR_ALL, 0.2) is None and noted.wait(20)
        run(pair.cache, [2] * 12)
        pair.publisher.poll()
        go.set()
        wait_for(lambda: pair.publisher.counts.restarts == 2)
    run(pair.cache, [3] * 12)
    pair.same()


@pytest.mark.parametrize("pair", [{"high_water": 4}], indirect=True)
def test_a_subscriber_that_does_not_read_holds_nobody_up(pair: Pair) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hung = context.socket(zmq.SUB)
    hung.set(zmq.RCVHWM, 1)
    hung.subscribe(b"")
    hung.connect(pair.publisher.endpoint)
    time.sleep(0.2)
    try:
        for user in range(300):
            run(pair.cache, [user % 40] * 12 + [user] * 4)
            assert pair.publisher.flush()
        pair.same()
        assert pair.publisher.counts.restarts == 1
    finally:
        context.destroy(linger=0)


def test_who_asks_too_much_or_nonsense_is_not_answered_and_others_are(pair: Pair) -> None:
    run(pair.cache, [1] * 12)
    pair.catch_up()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stop = threading.Event()

    def flood() -> None:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.SNDHWM, 10)
        dealer.connect(pair.publisher.replay_endpoint)
        at = 0
        while not stop.is_set():
            at += 1
            frames = [[b"", b"\0" * 8], [b"x"], [b"", b"12"], [b"", b"\xff" * 8, b"more"]][at % 4]
            try:
                dealer.send_multipart(frames, zmq.DONTWAIT)
            except zmq.Again:
                time.sleep(0.001)
        dealer.close(linger=0)

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        before = pair.publisher.counts
        begun = time.monotonic()
        wait_for(lambda: pair.publisher.counts.refused > before.refused + 50)
        for user in range(30):
            run(pair.cache, [user] * 12)
            assert pair.publisher.flush()
        with EventFollower(pair.publisher.endpoint, pair.publisher.replay_endpoint) as late:
            assert late.ask(0, 30)
        spent = pair.publisher.counts.seconds - before.seconds
        assert spent < 0.5 * (time.monotonic() - begun), "of the thread's time"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        context.destroy(linger=0)


def test_names_of_namespaces_follow_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "CONTENTS_SHARE", 1.0)
    cache = small()
    with (
        EventPublisher(cache, ANYWHERE) as publisher,
        EventFollower(publisher.endpoint, publisher.replay_endpoint) as reader,
    ):

        def announced(user: int, **named: Any) -> int:
            assert publisher.flush()
            wait_for(lambda: reader.catch_up() and reader.stream.expected == publisher.counts.batches)
            return reader.cache.boundary([user] * 12, **named)

        cache.identity = {"model": "one"}  # type: ignore[assignment]
        run(cache, [1] * 12)
        run(cache, [2] * 12, namespace="tenant")
        assert (announced(1), announced(2), announced(2, salt="tenant")) == (12, 0, 12)
        cache.identity = {"model": "other"}  # type: ignore[assignment]
        run(cache, [3] * 12)
        assert (announced(1), announced(3)) == (0, 12), "what another model computed is not announced as this one's"


def test_names_may_be_the_engines_own() -> None:
    cache = small()

    def label(namespace: str) -> PageLabel:
        salt, _, adapter = namespace.partition("/")
        return PageLabel(salt or None, adapter or None)

    with EventPublisher(cache, ANYWHERE, label=label, topic="kv", rank=3) as publisher:
        run(cache, [1] * 12, namespace="tenant/lora")
        publisher.flush()
        with EventFollower(publisher.endpoint, publisher.replay_endpoint, topic="kv") as reader:
            assert reader.catch_up()
            assert reader.cache.boundary([1] * 12, salt="tenant", lora_name="lora") == 12
            assert {decode_batch(payload).data_parallel_rank for _, payload in reader.answers(0) or ()} == {3}


# ---------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    "place", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://10.0.0.7:5557", "tcp://[::]:0", "ws://127.0.0.1:0"]
)
def test_without_keys_events_stay_on_this_machine_unless_it_is_said(place: str) -> None:
    cache = small()
    for endpoint, replay in ((place, ANYWHERE), (ANYWHERE, place)):
        with pytest.raises(InputError, match="without keys anybody there may read the tokens"):
            EventPublisher(cache, endpoint, replay=replay)
    if place == "tcp://0.0.0.0:0":
        with EventPublisher(cache, place, in_clear=True) as publisher:
            run(cache, [1] * 12)
            port = publisher.replay_endpoint.rpartition(":")[2]
            with EventFollower(publisher.endpoint, f"tcp://127.0.0.1:{port}") as reader:
                wait_for(lambda: publisher.flush() and reader.catch_up() and reader.cache.boundary([1] * 12) == 12)


def test_with_keys_only_who_has_them_reads_events_and_replays(tmp_path: Any) -> None:
    for name in ("mine", "theirs"):
        write_keys(tmp_path / name)
    cache = small()
    with EventPublisher(cache, "tcp://0.0.0.0:0", keys=tmp_path / "mine") as publisher:
        places = [each.replace("0.0.0.0", "127.0.0.1") for each in (publisher.endpoint, publisher.replay_endpoint)]
        friend, *strangers = (
            EventFollower(*places, keys=keys) for keys in (tmp_path / "mine", tmp_path / "theirs", None)
        )
        run(cache, [1] * 12)
        wait_for(lambda: publisher.flush() and friend.catch_up())
        assert friend.cache.boundary([1] * 12) == 12
        run(cache, [2] * 12)
        wait_for(lambda: publisher.flush() and friend.receive(0.1) and friend.cache.boundary([2] * 12) == 12)
        for stranger in strangers:
            assert not stranger.catch_up(0.2) and not stranger.receive(0.1) and stranger.counts.applied == 0
            stranger.close()
        friend.close()


def dropped_by(endpoint: str, kind: int, sends: Callable[[zmq.Socket[bytes]], None]) -> bool:
    """Whether a publisher drops the connection of a socket that sends something."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(kind)
    made.linger = 0
    monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    try:
        made.connect(endpoint)
        assert monitor.poll(20_000)
        monitor.recv_multipart()
        sends(made)
        return bool(monitor.poll(20_000))
    finally:
        made.disable_monitor()
        context.destroy(linger=0)


def test_who_sends_too_much_is_dropped_and_others_follow(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MOST_SUBSCRIPTIONS", 100)
    run(pair.cache, [1] * 12)
    pair.same()
    long = b"x" * 5000

    def many_topics(made: zmq.Socket[bytes]) -> None:
        for number in range(1000):
            made.subscribe(f"{number}")

    assert dropped_by(pair.publisher.endpoint, zmq.SUB, lambda made: made.subscribe(long))
    assert dropped_by(pair.publisher.endpoint, zmq.XSUB, lambda made: made.send(long))
    assert dropped_by(pair.publisher.replay_endpoint, zmq.DEALER, lambda made: made.send_multipart([b"", long]))
    assert pair.publisher.counts.dropped == 0
    assert dropped_by(pair.publisher.endpoint, zmq.SUB, many_topics)
    run(pair.cache, [2] * 12)
    pair.same()
    assert pair.publisher.counts.dropped > 0 and pair.publisher.failed is None
    before = pair.follower.stream.expected
    users = iter(range(3, 40))

    def heard() -> bool:
        run(pair.cache, [next(users)] * 12)
        return pair.publisher.flush() and pair.follower.poll(0.5) and pair.follower.stream.expected > before

    wait_for(heard)  # it has subscribed again by itself


def test_mistakes_are_refused_by_name() -> None:
    cache = small()
    for endpoint in ("localhost", "udp://x:1"):
        with pytest.raises((InputError, PrefixloomError), match=r"endpoint|published at"):
            EventPublisher(cache, endpoint)
    with pytest.raises(InputError, match="buffered is a whole number"):
        EventPublisher(cache, ANYWHERE, buffered=0)
    with EventPublisher(cache, ANYWHERE) as publisher:
        with pytest.raises(PrefixloomError, match="cannot be published at"):
            EventPublisher(cache, publisher.endpoint)
        assert len(cache.core.recorder.journals) == 1
    publisher.close()
    assert not cache.core.recorder.journals, "nothing is recorded any more"
    publisher.poll()


def test_a_buffer_keeps_the_last_batches_within_its_bounds() -> None:
    buffer = ReplayBuffer(3, 100)
    assert buffer.since(0) is None
    for number in range(5):
        buffer.add(number, bytes(10))
    assert [number for number, _ in buffer.since(3) or ()] == [3, 4]
    assert buffer.since(5) == [] and buffer.since(1) is None and buffer.since(6) is None
    buffer.add(5, bytes(95))
    assert [number for number, _ in buffer.since(5) or ()] == [5] and buffer.since(4) is None


class Scripted:
    def __init__(self, fails: bool) -> None:
        self.polls, self.fails = 0, fails

    def poll(self) -> None:
        self.polls += 1
        if self.fails:
            raise RuntimeError("an observer's mistake")


def test_an_engine_polls_its_observers_and_leaves_out_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    model = ThreeWay("tiny")
    cache = compose(model.config, capacity={"full": 1024, "swa": 1024, "mamba": 32})
    good, bad = Scripted(False), Scripted(True)
    with (
        EventPublisher(cache, ANYWHERE) as publisher,
        Engine(model, cache, observers=[Polled(each.poll) for each in (bad, good, publisher)]) as engine,
    ):
        (answer,) = engine.generate([list(range(200))], max_tokens=4)
        publisher.flush()
        with EventFollower(publisher.endpoint, publisher.replay_endpoint) as reader:
            assert reader.catch_up()
            tokens = [*range(200), *answer.tokens]
            ready = cache.peek(tokens, namespace=engine.namespace(""))
            assert reader.cache.boundary(tokens) == ready > 0
    assert bad.polls == 1 and good.polls > 3 and "is told nothing more" in caplog.text


def test_the_verifier_compares_a_stream_with_snapshots(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = small()
    with EventPublisher(cache, ANYWHERE) as publisher:
        for user in range(20):
            run(cache, [user] * 12)
            publisher.flush()
        arguments = [publisher.endpoint, "--replay", publisher.replay_endpoint, "--seconds", "0.3", "--every", "0.1"]
        assert verify(arguments) == 0
        said = capsys.readouterr().out
        assert "of which 0 differ" in said and "pages that lead to a boundary on GPU" in said and "faults 0" in said
        snapshot = publishing.Mirror.snapshot
        monkeypatch.setattr(publishing.Mirror, "snapshot", lambda self: snapshot(self)[:-1])
        run(cache, [20] * 12)
        publisher.flush()
        assert verify(arguments) == 1
        assert "of which 0 differ" not in capsys.readouterr().out
    assert verify(["tcp://127.0.0.1:1", "--seconds", "0.1"]) == 1
