"""The scheduling thread never reads a tensor: not to plan, not to run a step, not to publish what a step has computed.

Shown twice: on the meta device, where there is nothing to read, so that whoever tries is told; and with real tensors,
where every way of reading one is an error in this thread, and every torch operation of this thread is known to read
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefixloom import Buffer, Codec, Component, Manifest, Path, Point, Window, compose
from prefixloom.cache.cache import Cache
from prefixloom.device.streams import InlineStream, Stream, ThreadStream
from prefixloom.operations.step import Step
from tests.support.helpers import part

READS = ("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__", "__array__", "__contains__")
HARMLESS = {
    "aten.empty.memory_format", "aten.slice.Tensor", "aten.select.int", "aten.zeros.default", "aten.alias.default",
    "aten.detach.default", "aten.lift_fresh.default", "aten.unsqueeze.default", "aten.view.default",
}  # fmt: skip
"""They make a tensor, or look at one from another side."""


class Told(TorchDispatchMode):
    """Every torch operation of the thread that it is on in."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reading(patch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    me = threading.get_ident()

    def guarded(name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == me:
                raise AssertionError(f"Tensor.{name} in the scheduling thread")
            return honest(self, *args, **kwargs)

        return read

    with patch.context() as inner, Told() as told:
        for name in READS:
            inner.setattr(torch.Tensor, name, guarded(name, getattr(torch.Tensor, name)))
        yield told.names


def cache_on(device: str) -> Cache:
    coded = Component(
        "coded", Manifest([Buffer("h", (4,), "float32")], max_rewind=2, stored_as=Codec("int8", 0.004)), Point()
    )
    return compose(
        None,
        plugins=[
            part("path", Path()), part("near", Window(10)), coded,
            part("state", Point(), checkpoint_every=8, max_rewind=2),
        ],
        page_size=4,
        capacity={"path": 160, "near": 160, "state": 30, "coded": 30},
        max_rewind=2,
        max_running=4,
        device=device,
        debug=device == "cpu",
    )  # fmt: skip


def drive(cache: Cache, stream: Stream, kept: torch.Tensor) -> None:
    """Each way through the cache that a scheduler has."""

    def step(*sequences: Any, role: Any = "target", accept: bool = False) -> Step:
        with cache.step(sequences, role=role) as step:
            step.run_ops(stream)
            for name in ("path", "near", "state", "coded"):
                step.table(name)
            step.rewind_table("state")
            stream.run(lambda: None)
            if accept:
                step.accept(kept)
        return step

    prompt = list(range(60))
    for turn in range(6):
        first, second = cache.open(prompt, leave=1), cache.open([turn, *prompt[1:]], namespace="b")
        while first.committed < first.named or second.committed < second.named:
            for sequence in (first, second):
                sequence.grow(min(8, sequence.named - sequence.reserved))
            step(second, first)
            first.publish()
            cache.poll()
        for sequence in (first, second):
            sequence.append([1, 2])
            sequence.grow(sequence.named - sequence.reserved)
        step(first, second, role="draft")
        step(first, second, accept=True)
        for sequence in (first, second):
            sequence.rewind(1)
        step(first)
        cache.match(prompt).pages("path")
        cache.evict(12)
        first.close()
        second.abort() if turn % 2 else second.close()
        cache.poll()
        assert f"{cache.stats().in_flight} steps in flight" in str(cache.stats())
    assert cache.stats().components["path"].evicted
    assert cache.stats().hit_tokens


def test_the_meta_device_has_nothing_to_read() -> None:
    drive(cache_on("meta"), InlineStream("nowhere"), torch.empty(2, dtype=torch.int64, device="meta"))


def test_the_scheduling_thread_reads_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, stream, kept = cache_on("cpu"), ThreadStream("forward"), torch.tensor([1, 1])
    with no_reading(monkeypatch) as names:
        drive(cache, stream, kept)
        stream.record().synchronize()
        cache.poll()
    stream.close()
    assert cache.stats().in_flight == 0
    assert "aten.empty.memory_format" in names, "the tables were not seen"
    assert names <= HARMLESS


@pytest.mark.parametrize("read", [lambda t: t.tolist(), lambda t: int(t[0]), lambda t: t.sum(), lambda t: t[0] == 1])
def test_whoever_reads_is_found(monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.Tensor], object]) -> None:
    honest = Step.accept

    def reading(self: Step, kept: torch.Tensor) -> None:
        read(kept)
        honest(self, kept)

    monkeypatch.setattr(Step, "accept", reading)
    with pytest.raises(AssertionError):
        test_the_scheduling_thread_reads_no_tensor(monkeypatch)
