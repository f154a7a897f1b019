"""The engine over a tier below the device: the same tokens as without a cache, whatever had to be brought back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefixloom import Cache, ProtocolError, ThreadStream, TierManifest
from prefixloom.device.flight import Gates
from prefixloom.testing.inside.backdoor import put_transfer_stream, tier_lanes
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.serving.admission import cached_tokens
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from tests.support.engines import cache_for, mixed, model, nothing_left, plain, prompt, served
from tests.support.stores import write_out
from tests.support.stream_helpers import LateStream
from tests.support.transports import two

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
TINY = {"full": 480, "swa": 480, "mamba": 20}
"""Room for two or three of the requests."""
HOST = {"full": 8192, "swa": 8192, "mamba": 256}
AHEAD = pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])


def tiered(write: str = "back", capacity: Any = TINY, it: ThreeWay | None = None, **facts: Any) -> Cache:
    host = {name: HOST.get(name, 8192) for name in capacity}
    manifest = TierManifest(capacity=host, write=write, **facts)  # type: ignore[arg-type]
    return cache_for(it or model(), capacity, plugins=[HostTier(manifest)])


def again(requests: list[Request]) -> list[Request]:
    """All of them twice: when the second comes, the device has lost the first."""
    return [*requests, *requests]


# ---------------------------------------------------------------- a prefill process


@pytest.mark.parametrize(("more", "asked"), [(18, 0), (150, 1)])
def test_decode_process_asks_for_no_more_than_its_tier_lacks(more: int, asked: int) -> None:
    first, others = Request(prompt(1, 300), 3), [Request(prompt(n, 300), 3) for n in range(2, 6)]
    with two(cache=tiered("through")) as both:
        received = []
        for requests in ([first], others, [Request([*first.tokens, *prompt(9, more)], 3)]):
            before = both.decode.received
            assert both.tokens(*requests) == plain(model(), requests)
            received.append(both.decode.received - before)
        assert both.decode.engine.counts.restored >= 256
        assert both.decode.handed_over == 5 + asked
        assert received[2] < received[0], "the beginning is here already"


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize(("write", "overlap"), [("back", True), ("through", False), ("selective", True)])
def test_answers_are_those_without_a_cache(write: str, overlap: bool) -> None:
    requests = again(mixed(6))
    cache = tiered(write)
    out, engine = served(model(), requests, cache, overlap=overlap, speculate=2)
    tier = cache.stats().tier
    assert tier is not None
    assert engine.counts.restored == tier.restored_tokens > 0
    assert out == plain(model(), requests)


def test_answers_depend_on_what_is_brought_back_of_each_component() -> None:
    requests = [Request(prompt(i, 330), 1, logprobs=True) for i in range(2)]
    right: list[float] = []
    for spoiled in ("", "full", "swa", "mamba"):
        cache = tiered()
        with Engine(model(), cache) as engine:
            engine.generate(requests)
            engine.drain()
            cache.evict({part.name: part.capacity for part in cache.composition.parts})
            for lane in tier_lanes(cache):
                for buffer in lane.pool.buffers.values():
                    if lane.device.name == spoiled:
                        buffer.zero_()
            answers = engine.generate(requests)
        assert [answer.restored for answer in answers] == [320, 320]
        found = [answer.logprobs[0] for answer in answers]
        right = right or found
        moved = max(abs(a - b) for a, b in zip(found, right, strict=True))
        assert (moved > 1e-6) == (spoiled != ""), (spoiled, moved)


# ---------------------------------------------------------------- retraction


def test_retracted_request_resumes_from_the_host() -> None:
    """No two prompts share anything: what is brought back can only be what a retracted request had computed."""
    requests = [Request(prompt(i, 100), 80) for i in range(4)]
    small = {"full": 400, "swa": 400, "mamba": 48}
    out, engine = served(model(), requests, tiered(capacity=small))
    assert engine.counts.retracted > 0
    assert engine.counts.restored > 0
    assert out == plain(model(), requests)


def test_what_the_host_has_counts_as_cached_for_whoever_admits() -> None:
    cache = tiered()
    with Engine(model(), cache) as engine:
        engine.generate([Request(prompt(1, 200), 1)])
        cache.evict({part.name: part.capacity for part in cache.composition.parts})
        engine.add(Request(prompt(1, 200), 1))
        (job,) = engine._scheduler.waiting
        assert cache.peek(job.key, leave=1) == 0
        assert cached_tokens(job, cache) == 192


# ---------------------------------------------------------------- layer by layer


def gated(threads: Callable[..., ThreadStream], it: ThreeWay, capacity: Any) -> Cache:
    """A cache whose loads come a group of layers at a time, each of them late."""
    cache = tiered(capacity=capacity, it=it, gates=3, overlap=True)
    put_transfer_stream(cache, "up", threads("up", lambda name: LateStream(name, lambda: 0.002)))
    return cache


@pytest.mark.parametrize("draft", [False, True], ids=["", "with a draft"])
def test_layers_wait_for_their_own_loads(draft: bool, threads: Callable[..., ThreadStream]) -> None:
    it = ThreeWay("tiny", dtype="float64", draft=draft)
    request = Request(prompt(1, 330), 4)
    cache = gated(threads, it, TINY | ({"draft": 480} if draft else {}))
    passed: list[int] = []
    honest = Gates.open

    def opened(self: Any, layer: int) -> None:
        if self._works:
            passed.append(layer)
        honest(self, layer)

    with pytest.MonkeyPatch.context() as patch, Engine(it, cache, overlap=False, speculate=2 * draft) as engine:
        engine.generate([request])
        cache.evict({part.name: part.capacity for part in cache.composition.parts})
        patch.setattr(Gates, "open", opened)
        (answer,) = engine.generate([request])
    assert answer.restored == 320
    assert set(passed) == set(range(len(it.sizes.layers) + draft)), "every layer asked, while a load was under way"
    assert [answer.tokens] == plain(model(), [request])
    nothing_left(cache)


def test_a_model_that_asks_at_no_gate_is_told(threads: Callable[..., ThreadStream]) -> None:
    cache = gated(threads, model(), TINY)
    request = Request(prompt(1, 330), 4)
    with Engine(model(), cache, overlap=False) as engine:
        engine.generate([request])
        cache.evict({part.name: part.capacity for part in cache.composition.parts})
        engine._forward.runner = Deaf(engine._forward.runner)
        with pytest.raises(ProtocolError, match="was to pass a gate before each layer"):
            engine.generate([request])
        engine._forward.runner = engine._forward.runner.honest
        (answer,) = engine.generate([request])
    assert [answer.tokens] == plain(model(), [request])
    nothing_left(cache)


class Deaf:
    """A runner that does not call ``Batch.gate``."""

    def __init__(self, honest: Any) -> None:
        self.honest, self.groups = honest, honest.groups

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.honest.forward(type(batch)(*[getattr(batch, n) for n in batch.__slots__[:5]]))
        return logits


# ---------------------------------------------------------------- a store


class Slow(MemoryBackend):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(capacity=1 << 26)
        self.open = threading.Event()
        self.open.set()

    def exists(self, keys: Any) -> Any:
        assert self.open.wait(20)
        return super().exists(keys)


def process(store: MemoryBackend, overlap: bool = False) -> tuple[Cache, HostTier]:
    host = HostTier(
        TierManifest(capacity=HOST, overlap=overlap),
        identity={"model": "ThreeWay", "weights": "seed 0"},
        fetch="wait",
        fetch_at_least=128,
        limits=GuardLimits(60.0),
    )
    cache = cache_for(model(), plugins=[host])
    host.attach(store)
    cache.poll()
    return cache, host


@AHEAD
def test_a_request_whose_fetch_is_not_over_waits_and_others_run(overlap: bool) -> None:
    stored, other = Request(prompt(1, 330), 6), Request(prompt(2, 90), 6)
    right = plain(model(), [stored, other])
    store = Slow()
    cache, _ = process(store)
    with Engine(model(), cache, overlap=overlap) as engine:
        engine.generate([stored])
        write_out(cache)
    cache, host = process(store)
    with Engine(model(), cache, overlap=overlap) as engine:
        store.open.clear()
        waiting = engine.add(stored)
        (answer,) = engine.generate([other])
        assert [answer.tokens] == right[1:]
        assert (waiting.tokens, engine.counts.admitted) == ([], 2)
        for _ in range(3):
            assert engine.step(), "there is something to wait for"
        gone = engine.add(Request(prompt(1, 330), 6))
        engine.step()
        engine.abort(gone)
        store.open.set()
        while not waiting.done:
            engine.step()
    assert (waiting.hit, waiting.restored) == (320, 320)
    assert [waiting.tokens] == right[:1]
    host.detach()
    nothing_left(cache)
