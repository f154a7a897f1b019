"""Traces: what a trace says is what the engine did, whatever becomes of its requests, its disk and its process."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prefixloom import Activity, InputError, ProtocolError, TierManifest, compose
from prefixloom_engine import Engine, Observer, Request, StepFacts, Trace
from prefixloom_engine.contract.observer import Polled
from prefixloom_engine.threeway import BoundThreeWay
from prefixloom_engine.tracing.packets import varint
from prefixloom_engine.tracing.timetable import Timetable
from prefixloom_hicache import HostTier
from tests.support.engines import AMPLE, CAPACITY, cache_for, mixed, model, nothing_left, prompt, served
from tests.support.traces import ReadTrace, TracedSpan, inside, read_trace, whole_packets


def total(spans: list[TracedSpan], value: str) -> int:
    return sum(int(span.values.get(value, 0)) for span in spans)


def agrees(trace: ReadTrace, engine: Engine, requests: int) -> None:
    """The sums of a trace are the counts of its engine, and every request has what a request has."""
    counts, steps, asked = engine.counts, trace.spans("steps"), trace.spans("request")
    assert [span.values["step"] for span in steps] == list(range(1, counts.steps + 1))
    assert total(steps, "prefill") == counts.prefilled
    assert total(steps, "decode") == counts.decoded
    assert total(steps, "drafted") == counts.drafted
    assert total(steps, "arrived") == counts.arrived
    assert len(trace.spans("engine", "plan")) == counts.steps
    assert sorted(span.values["request"] for span in asked) == list(range(requests))
    phases = [phase for span in asked for phase in span.inside]
    assert admissions(asked) == counts.admitted
    assert sum("retracted" in phase.values for phase in phases) == counts.retracted
    assert sum(int(phase.values.get("restored", 0)) for phase in phases) == counts.restored
    assert total(asked, "accepted") == counts.accepted
    for span in asked:
        assert span.inside[0].name == "queued" and span.inside[0].begin == span.begin
        assert span.inside[-1].end == span.end
        ends = [phase.end for phase in span.inside]
        assert [phase.begin for phase in span.inside[1:]] == ends[:-1]  # one after the other, without a gap
    for name in ("steps", "engine"):
        spans = trace.spans(name)
        assert all(not span.inside for span in spans)
        assert all(one.end <= other.begin for one, other in pairwise(spans))


def admissions(asked: list[TracedSpan]) -> int:
    """How often requests were admitted: each time they had been queued."""
    found = 0
    for span in asked:
        for before, phase in pairwise(span.inside):
            if phase.name == "restoring":
                assert before.name == "queued"
                found += 1
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculate", [0, 3])
def test_a_trace_agrees_with_the_counts_of_its_engine(overlap: bool, speculate: int, tmp_path: Path) -> None:
    it, requests = model(), mixed(12)
    with Trace(tmp_path / "trace") as trace:
        answers, engine = served(
            it, requests, cache_for(it, CAPACITY), overlap=overlap, speculate=speculate, observers=[trace]
        )
    read = read_trace(tmp_path / "trace")
    agrees(read, engine, len(requests))
    assert trace.dropped == 0 and trace.error == ""
    by_number = {span.values["request"]: span for span in read.spans("request")}
    for number, (request, tokens) in enumerate(zip(requests, answers, strict=True)):
        values = by_number[number].values
        assert (values["prompt"], values["tokens"]) == (len(request.tokens), len(tokens))
        assert values["reason"] in ("length", "stop")


def test_a_request_is_seen_to_wait_to_be_computed_and_to_answer(tmp_path: Path) -> None:
    it = model()
    cache = cache_for(it)
    with Trace(tmp_path / "trace") as trace, Engine(it, cache, chunk=64, observers=[trace]) as engine:
        (first,) = engine.generate([Request(prompt(1, 200), 5)])
        engine.generate([Request([*prompt(1, 200), *first.tokens, 1], 5)])
    read = read_trace(tmp_path / "trace")
    cold, warm = read.spans("request")
    names = [phase.name for phase in cold.inside if phase.name != "waiting"]
    chunks = [phase for phase in cold.inside if phase.name == "prefill"]
    assert names == ["queued", "restoring", *["prefill"] * len(chunks), "decode"]
    assert chunks[0].values["from"] == 0 and chunks[-1].values["to"] == 200
    assert all(one.values["to"] == other.values["from"] for one, other in pairwise(chunks))
    steps = {span.values["step"]: span for span in read.spans("steps")}
    for chunk in chunks:
        step = steps[chunk.values["step"]]
        assert step.values["prefill"] == int(chunk.values["to"]) - int(chunk.values["from"])
        assert cold.begin <= step.begin <= step.end <= cold.end  # a fast step may be over before it is told
    assert cold.values["hit"] == 0 and warm.values["hit"] == 192
    waits = read.spans("engine", "wait for the device")
    assert len(waits) == len(steps)
    assert read.parents["request"] == "requests" and read.parents["steps"] == "prefixloom"
    nothing_left(cache)


def test_copies_and_calls_of_a_store_are_in_the_trace(tmp_path: Path) -> None:
    from prefixloom_hicache import FileBackend

    it = model()

    def engine_over(store: FileBackend, trace: Trace) -> Engine:
        host = HostTier(
            TierManifest(capacity=4096, overlap=True), identity={"model": "m", "weights": "1"}, fetch="wait"
        )
        cache = compose(it.config, plugins=[host], capacity=AMPLE, max_rewind=4)
        host.attach(store)
        return Engine(it, cache, observers=[trace])

    for run in ("cold", "warm"):
        store = FileBackend(tmp_path / "store", capacity=1 << 28)
        with Trace(tmp_path / run) as trace, engine_over(store, trace) as engine:
            (answer,) = engine.generate([Request(prompt(2, 200), 4)])
            while engine.cache.stats().tier.to_store:  # type: ignore[union-attr]
                engine.step()
                time.sleep(0.001)
            engine.step()
            tier = engine.cache.stats().tier
        store.close()
        assert tier is not None and answer.hit == (0 if run == "cold" else 192)
        read = read_trace(tmp_path / run)
        agrees(read, engine, 1)
        down = read.spans("host tier, down: copies", "copy to the host")
        pages = [sum(int(v) for k, v in span.values.items() if k.startswith("pages of")) for span in down]
        assert sum(pages) == tier.backed_up and (tier.backed_up > 0) == (run == "cold")
        calls = read.spans("store")
        assert {span.name for span in calls} >= ({"search", "write"} if run == "cold" else {"search", "read"})
    assert read.spans("host tier, up: copies", "copy to the device")
    assert read.spans("host tier, down: copies", "from the store")
    (request,) = read.spans("request")
    (restoring,) = [phase for phase in request.inside if phase.name == "restoring"]
    searches = read.spans("store", "search")
    assert restoring.begin <= searches[0].begin and searches[-1].end <= restoring.end
    assert any(int(phase.values.get("restored", 0)) == 192 for phase in request.inside)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_requests_spans_nest_and_end(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts, finishes, failing steps, flushes and retractions, in any order."""
    it, rng, faults = model(), random.Random(seed), random.Random(seed)
    cache = cache_for(it, CAPACITY)
    with Trace(tmp_path / "trace") as trace:
        engine = Engine(it, cache, chunk=96, max_running=4, overlap=seed % 2 == 0, observers=[trace])
        honest = BoundThreeWay.forward

        def flaky(self: BoundThreeWay, batch: Any) -> Any:
            if faults.random() < 0.06:
                raise RuntimeError("a pass fails")
            return honest(self, batch)

        monkeypatch.setattr(BoundThreeWay, "forward", flaky)
        logging.disable(logging.WARNING)
        try:
            open_, asked = [], 0
            for _ in range(60):
                if asked < 16 and rng.random() < 0.5:
                    open_.append(engine.add(mixed(1, seed=seed * 100 + asked)[0]))
                    asked += 1
                if open_ and rng.random() < 0.1:
                    rng.choice((engine.abort, engine.finish))(open_.pop(rng.randrange(len(open_))))
                if rng.random() < 0.03:
                    cache.flush()
                engine.step()
        finally:
            logging.disable(logging.NOTSET)
        running = sum(not answer.done for answer in open_)
        engine.close()
    read = read_trace(tmp_path / "trace")
    asked_spans = read.spans("request")
    assert len(asked_spans) == asked
    assert {span.values["step"] for span in read.spans("steps")} <= set(range(1, engine.counts.steps + 1))
    assert len(read.spans("engine", "plan")) == engine.counts.steps
    assert sum(span.values["reason"] == "aborted" for span in asked_spans) >= running
    phases = [phase for span in asked_spans for phase in span.inside]
    assert admissions(asked_spans) == engine.counts.admitted
    assert sum("retracted" in phase.values for phase in phases) == engine.counts.retracted
    assert engine.counts.failed and any("starts over" in phase.values for phase in phases)


def test_a_retracted_request_is_seen_to_queue_again(tmp_path: Path) -> None:
    it = model()
    cache = cache_for(it, {"full": 256, "swa": 512, "mamba": 28})
    requests = [Request(prompt(number, 40), 60, stops=[]) for number in range(4)]
    with Trace(tmp_path / "trace") as trace:
        _, engine = served(it, requests, cache, observers=[trace])
    assert engine.counts.retracted
    agrees(read_trace(tmp_path / "trace"), engine, 4)


def test_calls_of_a_store_that_ran_at_the_same_time_stand_side_by_side(tmp_path: Path) -> None:
    """Timelines tell them in the order of their ends."""
    table, now = Timetable(), time.perf_counter()
    times = [(1, 2), (2, 4), (3, 5), (0, 6), (6, 7), (5, 8)]
    calls = [Activity("read", "store", now, now + begun, now + ended, {}, 0, False) for begun, ended in times]
    (tmp_path / "trace").write_bytes(table.first + b"".join(map(table.activity, calls)))
    spans = read_trace(tmp_path / "trace").spans("store")
    assert len(spans) == len(calls) and not any(span.inside for span in spans)
    assert sorted(round((span.end - span.begin) / 1e9) for span in spans) == [1, 1, 2, 2, 3, 6]


def test_a_trace_has_no_token_and_no_label(tmp_path: Path) -> None:
    it = model()
    secret = "a label that names a person"
    with Trace(tmp_path / "trace") as trace, Engine(it, cache_for(it), observers=[trace]) as engine:
        engine.generate([Request(prompt(3, 100), 4, label=secret, namespace="a tenant that nobody may know")])
    read = read_trace(tmp_path / "trace")
    data = (tmp_path / "trace").read_bytes()
    assert b"person" not in data and b"tenant" not in data
    texts = {
        str(v)
        for spans in read.tracks.values()
        for each in inside(spans)
        for v in each.values.values()
        if v.__class__ is str
    }
    assert texts <= {"length", "stop"}
    assert len({each.name for spans in read.tracks.values() for each in inside(spans)}) < 16


# ---------------------------------------------------------------- what may go wrong


SERVE = """
import sys
from prefixloom_engine import Engine, Request, Trace
from tests.support.engines import cache_for, model, prompt
it = model()
trace = Trace(sys.argv[1], seconds=0.01)
engine = Engine(it, cache_for(it), observers=[trace])
for number in range(10**6):
    engine.generate([Request(prompt(number % 50, 60), 20)])
    if number == 3:
        print("goes on", flush=True)
"""


def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "goes on\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    read = read_trace(path, killed=True)
    assert len(read.spans("steps")) > 20 and len(read.spans("request")) >= 3
    assert all(span.end > 0 for span in read.spans("steps"))
    data = path.read_bytes()
    for cut in range(len(data) - 60, len(data)):  # wherever the last write was cut off
        (tmp_path / "cut").write_bytes(data[:cut])
        again = read_trace(tmp_path / "cut", killed=True)
        assert len(again.spans("steps")) in range(len(read.spans("steps")) - 3, len(read.spans("steps")) + 1)


def test_a_full_disk_is_told_once_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit of a file's size stands in for the disk: a write that passes it is cut off, and the next one fails."""
    it, requests = model(), mixed(6)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with caplog.at_level(logging.WARNING, "prefixloom.engine"):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
            with Trace(tmp_path / "trace", seconds=0.01) as trace:
                answers, _ = served(it, requests, cache_for(it), observers=[trace])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
    assert answers == served(it, requests, cache_for(it))[0]
    assert "File too large" in trace.error
    assert [str(tmp_path / "trace") in record.message for record in caplog.records] == [True]
    assert 0 < (tmp_path / "trace").stat().st_size <= 3000
    assert read_trace(tmp_path / "trace", killed=True).rest == 0  # cut back to what is whole


def test_a_trace_ends_at_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = model()
    caplog.set_level(logging.WARNING, "prefixloom.engine")
    with Trace(tmp_path / "trace", size=4096, seconds=0.01) as trace:
        served(it, mixed(6), cache_for(it), observers=[trace])
    assert (tmp_path / "trace").stat().st_size <= 4096 and "4096" in trace.error
    assert len(caplog.records) == 1
    read_trace(tmp_path / "trace", killed=True)


def test_a_disk_that_hangs_costs_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = model()
    gate, write = threading.Event(), os.write
    path = tmp_path / "trace"
    trace = Trace(path, most=40, seconds=0.001)

    def hanging(file: int, data: Any) -> int:
        if threading.current_thread().name == "prefixloom trace":
            assert gate.wait(60)
        return write(file, data)

    monkeypatch.setattr(os, "write", hanging)
    requests = mixed(8)
    _, engine = served(it, requests, cache_for(it), observers=[trace])
    assert trace.dropped > 20
    gate.set()
    trace.close()
    read = read_trace(path)
    (missing,) = {each.name for each in read.instants}
    assert missing == "events were left out" and total(read.instants, "events") == trace.dropped
    assert 0 < len(read.spans("steps")) < engine.counts.steps
    assert all(span.values["reason"] in ("length", "stop") for span in read.spans("request"))


@pytest.mark.parametrize("where", ["no/such/folder", "", "nul\0l"])
def test_a_trace_that_cannot_be_written_is_refused(where: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trace cannot be written"):
        Trace(tmp_path / where)


@pytest.mark.parametrize("options", [{"size": 0}, {"most": -1}, {"size": 1.5}])
def test_a_trace_without_room_is_refused(options: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="whole number from 1 up"):
        Trace(tmp_path / "trace", **options)
    assert not (tmp_path / "trace").exists()


def test_a_trace_follows_one_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = model()
    caplog.set_level(logging.ERROR, "prefixloom.engine")
    with (
        Trace(tmp_path / "trace") as trace,
        Engine(it, cache_for(it), observers=[trace]),
        Engine(it, cache_for(it), observers=[trace]) as other,
    ):
        other.generate([prompt(1, 20)], 2)
    assert isinstance(caplog.records[0].exc_info[1], ProtocolError)  # type: ignore[index]
    assert read_trace(tmp_path / "trace").spans("request") == []


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**21, 2**28 - 1, 2**31, 2**63, 2**64 - 1])
def test_whole_numbers_are_written_as_protobuf_does(number: int) -> None:
    from google.protobuf.internal.encoder import _VarintBytes

    assert varint(number) == _VarintBytes(number)


def test_a_reader_of_this_test_sees_what_is_wrong(tmp_path: Path) -> None:
    """Each assertion of ``read_trace`` fails for a file that is spoiled for it."""
    it, path = model(), tmp_path / "trace"
    with Trace(path) as trace, Engine(it, cache_for(it), observers=[trace]) as engine:
        engine.generate([prompt(1, 40)], 3)
    packets, _ = whole_packets(path.read_bytes())

    def spoiled(keep: Any) -> None:
        kept = [each.SerializeToString() for at, each in enumerate(packets) if keep(at, each)]
        path.write_bytes(b"".join(b"\x0a" + varint(len(each)) + each for each in kept))
        read_trace(path)

    spoiled(lambda at, packet: True)
    events = [at for at, packet in enumerate(packets) if packet.HasField("track_event")]
    with pytest.raises(AssertionError, match="no end"):
        last = max(at for at in events if packets[at].track_event.type == 2)
        spoiled(lambda at, packet: at != last)
    with pytest.raises(AssertionError, match=r"an end of nothing|no end"):
        spoiled(lambda at, packet: at != events[0])
    with pytest.raises(AssertionError, match="nobody described"):
        spoiled(lambda at, packet: packet.track_descriptor.name != "steps")


# ---------------------------------------------------------------- observers


class Noting(Observer):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def queued(self, number: int, answer: Any) -> None:
        self.told.append(("queued", number))

    def launched(self, step: StepFacts) -> None:
        self.told.append(("launched", step.number, step.ended))

    def over(self, step: StepFacts) -> None:
        self.told.append(("over", step.number))
        assert step.planned <= step.launched and step.begun <= step.ended <= step.read

    def ended(self, number: int, answer: Any) -> None:
        self.told.append(("ended", number, answer.reason))

    def closed(self) -> None:
        self.told.append(("closed",))


def test_an_observer_is_told_in_order_and_every_step_once() -> None:
    it, noting = model(), Noting()
    with Engine(it, cache_for(it), observers=[noting]) as engine:
        engine.generate([prompt(1, 40)], 3)
        left = engine.add(Request(prompt(2, 40), 9))
        engine.step()
    steps = [each[1] for each in noting.told if each[0] == "over"]
    assert (
        steps == [each[1] for each in noting.told if each[0] == "launched"] == list(range(1, engine.counts.steps + 1))
    )
    assert noting.told[0] == ("queued", 0) and noting.told[-1] == ("closed",)
    assert [each for each in noting.told if each[0] == "ended"] == [("ended", 0, "length"), ("ended", 1, "aborted")]
    assert left.reason == "aborted"


def test_an_observer_is_told_of_a_step_in_which_there_was_nothing_to_do() -> None:
    stepped: list[bool] = []
    with Engine(model(), cache_for(model()), observers=[Polled(lambda: stepped.append(True))]) as engine:
        for count in (1, 2):
            assert not engine.step() and len(stepped) == count


def test_an_observer_that_raises_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Noting):
        def launched(self, step: StepFacts) -> None:
            raise ValueError("I am broken")

    it, broken, noting = model(), Broken(), Noting()
    requests = mixed(4)
    with caplog.at_level(logging.ERROR, "prefixloom.engine"):
        answers, engine = served(it, requests, cache_for(it), observers=[broken, noting])
    assert answers == served(it, requests, cache_for(it))[0]
    assert len(caplog.records) == 1 and "told nothing more" in caplog.records[0].message
    assert {each[0] for each in broken.told} == {"queued"}
    assert len([each for each in noting.told if each[0] == "over"]) == engine.counts.steps


def test_something_else_is_no_observer() -> None:
    with pytest.raises(InputError, match="an observer is a"):
        Engine(model(), cache_for(model()), observers=["a file"])  # type: ignore[list-item]
