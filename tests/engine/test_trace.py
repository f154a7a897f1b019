"""Traces and observers: they say what the engine did, whatever becomes of its requests, the disk and the process."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prefixloom import Activity, InputError, ProtocolError, TierManifest, compose
from prefixloom_engine import Engine, Observer, Request, StepFacts, Trace
from prefixloom_engine.contract.observer import Polled
from prefixloom_engine.threeway import BoundThreeWay
from prefixloom_engine.tracing.events import TraceEvents
from prefixloom_hicache import FileBackend, HostTier
from tests.support.engines import AMPLE, CAPACITY, cache_for, mixed, model, prompt, served
from tests.support.traces import ReadTrace, TracedSpan, read_trace

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def total(spans: list[TracedSpan], value: str) -> int:
    return sum(int(span.values.get(value, 0)) for span in spans)


def agrees(trace: ReadTrace, engine: Engine, requests: int) -> None:
    """The sums of a trace are the counts of its engine, and every request has what a request has."""
    counts, steps, asked = engine.counts, trace.spans("steps"), trace.spans("request")
    assert [span.values["step"] for span in steps] == list(range(1, counts.steps + 1))
    told = {"prefill": counts.prefilled, "decode": counts.decoded, "drafted": counts.drafted, "arrived": counts.arrived}
    assert {name: total(steps, name) for name in told} == told
    assert len(trace.spans("engine", "plan")) == counts.steps
    assert sorted(span.values["request"] for span in asked) == list(range(requests))
    agrees_of_requests(asked, engine)
    assert total(asked, "accepted") == counts.accepted
    for span in asked:
        assert span.inside[0].begin == span.begin and span.inside[-1].end == span.end
        assert all(one.end == other.begin for one, other in pairwise(span.inside)), "one after the other"


def agrees_of_requests(asked: list[TracedSpan], engine: Engine) -> None:
    """Each request is queued, then restoring, as often as it was admitted."""
    phases = [phase for span in asked for phase in span.inside]
    assert all(span.inside[0].name == "queued" for span in asked)
    admitted = [before.name for span in asked for before, phase in pairwise(span.inside) if phase.name == "restoring"]
    assert admitted == ["queued"] * engine.counts.admitted
    assert sum("retracted" in phase.values for phase in phases) == engine.counts.retracted
    assert total(phases, "restored") == engine.counts.restored


@pytest.mark.parametrize(("overlap", "speculate"), [(True, 3), (False, 0)])
def test_trace_agrees_with_the_counts_of_its_engine(overlap: bool, speculate: int, tmp_path: Path) -> None:
    it, requests = model(), mixed(12)
    with Trace(tmp_path / "trace") as trace:
        cache = cache_for(it, CAPACITY)
        answers, engine = served(it, requests, cache, overlap=overlap, speculate=speculate, observers=[trace])
    read = read_trace(tmp_path / "trace")
    agrees(read, engine, len(requests))
    assert trace.dropped == 0 and trace.error == ""
    by_number = {span.values["request"]: span.values for span in read.spans("request")}
    for number, (request, tokens) in enumerate(zip(requests, answers, strict=True)):
        values = by_number[number]
        assert (values["prompt"], values["tokens"]) == (len(request.tokens), len(tokens))
        assert values["reason"] in ("length", "stop")


def test_trace_shows_when_a_request_waits_is_computed_and_answers(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace") as trace, Engine(model(), cache_for(model()), chunk=64, observers=[trace]) as engine:
        (first,) = engine.generate([Request(prompt(1, 200), 5)])
        engine.generate([Request([*prompt(1, 200), *first.tokens, 1], 5)])
    read = read_trace(tmp_path / "trace")
    cold, warm = read.spans("request")
    chunks = [phase for phase in cold.inside if phase.name == "prefill"]
    names = [phase.name for phase in cold.inside if phase.name != "waiting"]
    assert names == ["queued", "restoring", *["prefill"] * len(chunks), "decode"]
    assert [phase.name for phase in cold.inside[-2:]] == ["prefill", "decode"], "it waits for no turn then"
    assert chunks[0].values["from"] == 0 and chunks[-1].values["to"] == 200
    assert all(one.values["to"] == other.values["from"] for one, other in pairwise(chunks))
    steps = {span.values["step"]: span for span in read.spans("steps")}
    for chunk in chunks:
        step = steps[chunk.values["step"]]
        assert step.values["prefill"] == int(chunk.values["to"]) - int(chunk.values["from"])
        assert cold.begin <= step.begin <= step.end <= cold.end  # a fast step may be over before it is told
    assert cold.values["hit"] == 0 and warm.values["hit"] == 192
    assert len(read.spans("engine", "wait for the device")) == len(steps)


def test_trace_has_copies_and_calls_of_a_store(tmp_path: Path) -> None:
    for run in ("cold", "warm"):
        store = FileBackend(tmp_path / "store", capacity=1 << 28)
        manifest = TierManifest(capacity=4096, overlap=True)
        host = HostTier(manifest, identity={"model": "m", "weights": "1"}, fetch="wait")
        cache = compose(model().config, plugins=[host], capacity=AMPLE, max_rewind=4)
        host.attach(store)
        with Trace(tmp_path / run) as trace, Engine(model(), cache, observers=[trace]) as engine:
            (answer,) = engine.generate([Request(prompt(2, 200), 4)])
            while cache.stats().tier.to_store:  # type: ignore[union-attr]
                engine.step()
                time.sleep(0.001)
            engine.step()
            tier = cache.stats().tier
        store.close()
        assert tier is not None and answer.hit == (0 if run == "cold" else 192)
        read = read_trace(tmp_path / run)
        agrees(read, engine, 1)
        down = read.spans("host tier, down: copies", "copy to the host")
        pages = sum(int(v) for span in down for k, v in span.values.items() if k.startswith("pages of"))
        assert pages == tier.backed_up and (tier.backed_up > 0) == (run == "cold")
        assert {span.name for span in read.spans("store")} >= {"search", "write" if run == "cold" else "read"}
    assert read.spans("host tier, up: copies", "copy to the device")
    assert read.spans("host tier, down: copies", "from the store")
    (request,) = read.spans("request")
    (restoring,) = [phase for phase in request.inside if phase.name == "restoring"]
    searches = read.spans("store", "search")
    assert restoring.begin <= searches[0].begin and searches[-1].end <= restoring.end
    assert total(request.inside, "restored") == 192


@pytest.mark.parametrize("seed", range(2))
def test_spans_nest_and_end_whatever_becomes_of_requests(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Aborts, finishes, failing steps, flushes and retractions, in any order."""
    caplog.set_level(logging.CRITICAL)
    it, rng, faults = model(), random.Random(seed), random.Random(seed)
    cache, honest = cache_for(it, CAPACITY), BoundThreeWay.forward

    def flaky(self: BoundThreeWay, batch: Any) -> Any:
        if faults.random() < 0.06:
            raise RuntimeError("a pass fails")
        return honest(self, batch)

    monkeypatch.setattr(BoundThreeWay, "forward", flaky)
    with Trace(tmp_path / "trace") as trace:
        engine = Engine(it, cache, chunk=96, max_running=4, overlap=seed % 2 == 0, observers=[trace])
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
        running = sum(not answer.done for answer in open_)
        engine.close()
    read = read_trace(tmp_path / "trace")
    spans = read.spans("request")
    assert len(spans) == asked
    assert {span.values["step"] for span in read.spans("steps")} <= set(range(1, engine.counts.steps + 1))
    assert len(read.spans("engine", "plan")) == engine.counts.steps
    assert sum(span.values["reason"] == "aborted" for span in spans) >= running
    agrees_of_requests(spans, engine)
    assert engine.counts.failed and any("starts over" in phase.values for span in spans for phase in span.inside)


def test_trace_shows_a_retracted_request_that_queues_again(tmp_path: Path) -> None:
    cache = cache_for(model(), {"full": 256, "swa": 512, "mamba": 28})
    with Trace(tmp_path / "trace") as trace:
        requests = [Request(prompt(number, 40), 60, stops=[]) for number in range(4)]
        _, engine = served(model(), requests, cache, observers=[trace])
    assert engine.counts.retracted
    agrees(read_trace(tmp_path / "trace"), engine, 4)


def test_calls_of_a_store_that_ran_at_the_same_time_have_tracks_of_their_own(tmp_path: Path) -> None:
    """Timelines tell them in the order of their ends."""
    now, times = time.perf_counter(), [(1, 2), (2, 4), (3, 5), (0, 6), (6, 7), (5, 8)]
    calls = [Activity("read", "store", now, now + begun, now + ended, {}, 0, False) for begun, ended in times]
    events = TraceEvents()
    made = [event for call in calls for event in events.activity(call)]
    spans = [event for event in made if event["ph"] == "X"]
    assert sorted(round(event["dur"] / 1e6) for event in spans) == [1, 1, 2, 2, 3, 6]
    assert len({event["tid"] for event in spans}) == 3
    for one, other in pairwise(sorted(spans, key=lambda event: (event["tid"], event["ts"]))):
        assert one["tid"] != other["tid"] or one["ts"] + one["dur"] <= other["ts"] + 0.01


def test_trace_has_no_token_and_no_label(tmp_path: Path) -> None:
    asked = Request(prompt(3, 100), 4, label="a label that names a person", namespace="a tenant that nobody may know")
    with Trace(tmp_path / "trace") as trace, Engine(model(), cache_for(model()), observers=[trace]) as engine:
        engine.generate([asked])
    read, data = read_trace(tmp_path / "trace"), (tmp_path / "trace").read_bytes()
    assert b"person" not in data and b"tenant" not in data
    spans = [each for track in read.tracks.values() for span in track for each in (span, *span.inside)]
    assert {value for span in spans for value in span.values.values() if isinstance(value, str)} <= {"length", "stop"}
    assert len({span.name for span in spans}) < 16


# ---------------------------------------------------------------- what may go wrong


def test_file_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    """What the system was given before is what a killed process leaves, and the last write may be cut off."""
    with (
        Trace(tmp_path / "trace", seconds=0.001) as trace,
        Engine(model(), cache_for(model()), observers=[trace]) as it,
    ):
        it.generate([Request(prompt(1, 60), 20)])
        until, data = time.monotonic() + 20, b""
        while data.count(b'"decode", "ts"') < 15 and time.monotonic() < until:
            data = (tmp_path / "trace").read_bytes()
    for cut in range(len(data) - 60, len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        assert len(read_trace(tmp_path / "cut", killed=True).spans("steps")) > 10


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """The limit of a file's size stands in for a disk: a write beyond it is cut off, and the next one fails."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize(("disk", "size", "told"), [(3000, 1 << 30, "File too large"), (1 << 30, 4096, "4096")])
def test_full_disk_or_the_greatest_size_ends_a_trace_and_changes_nothing(
    disk: int, size: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it, requests, path = model(), mixed(6), tmp_path / "trace"
    caplog.set_level(logging.WARNING, "prefixloom.engine")
    with disk_of(disk), Trace(path, size=size, seconds=0.01) as trace:
        answers, _ = served(it, requests, cache_for(it), observers=[trace])
    assert answers == served(it, requests, cache_for(it))[0]
    assert told in trace.error
    assert [str(path) in record.message for record in caplog.records] == [True]
    assert 0 < path.stat().st_size <= min(disk, size)
    read_trace(path, killed=True)


def test_disk_that_hangs_costs_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write, path = threading.Event(), os.write, tmp_path / "trace"
    trace = Trace(path, most=40, seconds=0.001)

    def hanging(file: int, data: Any) -> int:
        if threading.current_thread().name == "prefixloom trace":
            assert gate.wait(60)
        return write(file, data)

    monkeypatch.setattr(os, "write", hanging)
    _, engine = served(model(), mixed(8), cache_for(model()), observers=[trace])
    assert trace.dropped > 20
    gate.set()
    trace.close()
    read = read_trace(path)
    assert {each.name for each in read.instants} == {"events were left out"}
    assert total(read.instants, "events") == trace.dropped
    assert 0 < len(read.spans("steps")) < engine.counts.steps
    assert all(span.values["reason"] in ("length", "stop") for span in read.spans("request"))


@pytest.mark.parametrize(
    ("where", "options", "told"),
    [
        *((where, {}, "trace cannot be written") for where in ("no/such/folder", "", "nul\0l")),
        *(("trace", options, "whole number from 1 up") for options in ({"size": 0}, {"most": -1}, {"size": 1.5})),
    ],
)
def test_trace_without_a_place_or_room_is_refused(where: str, options: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        Trace(tmp_path / where, **options)
    assert not (tmp_path / "trace").exists()


def test_trace_follows_one_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Trace(tmp_path / "trace") as trace:
        for _ in range(2):
            with Engine(model(), cache_for(model()), observers=[trace]) as engine:
                engine.generate([prompt(1, 20)], 2)
    assert isinstance(caplog.records[0].exc_info[1], ProtocolError)  # type: ignore[index]
    assert len(read_trace(tmp_path / "trace").spans("request")) == 1


@pytest.mark.parametrize(
    ("lost", "told"),
    [('"ph": "e", "name": "request"', "no end"), ('"ph": "b", "name": "request"', "an end of nothing"),
     ('"thread_name"', "nobody named")],
)  # fmt: skip
def test_reader_of_these_tests_sees_an_event_that_is_missing(lost: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with Trace(path) as trace, Engine(model(), cache_for(model()), observers=[trace]) as engine:
        engine.generate([prompt(1, 40)], 3)
    path.write_text("\n".join(line for line in path.read_text().split("\n") if lost not in line))
    with pytest.raises(AssertionError, match=told):
        read_trace(path)


# ---------------------------------------------------------------- observers


class Noting(Observer):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def queued(self, number: int, answer: Any) -> None:
        self.told.append(("queued", number))

    def launched(self, step: StepFacts) -> None:
        self.told.append(("launched", step.number))

    def over(self, step: StepFacts) -> None:
        self.told.append(("over", step.number))
        assert step.planned <= step.launched and step.begun <= step.ended <= step.read

    def ended(self, number: int, answer: Any) -> None:
        self.told.append(("ended", number, answer.reason))

    def closed(self) -> None:
        self.told.append(("closed",))

    def of(self, kind: str) -> list[Any]:
        return [each[1:] for each in self.told if each[0] == kind]


def test_observer_is_told_in_order_and_of_every_step_once() -> None:
    noting = Noting()
    with Engine(model(), cache_for(model()), observers=[noting]) as engine:
        engine.generate([prompt(1, 40)], 3)
        engine.add(Request(prompt(2, 40), 9))
        engine.step()
    assert noting.of("over") == noting.of("launched") == [(n + 1,) for n in range(engine.counts.steps)]
    assert noting.told[0] == ("queued", 0) and noting.told[-1] == ("closed",)
    assert noting.of("ended") == [(0, "length"), (1, "aborted")]


def test_observer_is_told_of_a_step_in_which_there_was_nothing_to_do() -> None:
    stepped: list[bool] = []
    with Engine(model(), cache_for(model()), observers=[Polled(lambda: stepped.append(True))]) as engine:
        for count in (1, 2):
            assert not engine.step() and len(stepped) == count


def test_observer_that_raises_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Noting):
        def launched(self, step: StepFacts) -> None:
            raise ValueError("I am broken")

    broken, noting = Broken(), Noting()
    with Engine(model(), cache_for(model()), observers=[broken, noting]) as engine:
        (answer,) = engine.generate([prompt(1, 40)], 3)
    assert answer.reason == "length"
    assert ["told nothing more" in record.message for record in caplog.records] == [True]
    assert {each[0] for each in broken.told} == {"queued"}
    assert len(noting.of("over")) == engine.counts.steps
    with pytest.raises(InputError, match="an observer is a"):
        Engine(model(), cache_for(model()), observers=["a file"])  # type: ignore[list-item]
