"""Loads by groups of layers: the first layers of a step run while the last are still copied, and none too early."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Buffer, Component, Manifest, Path, Point, ProtocolError, TierManifest, Window, compose
from prefixloom.cache.cache import Cache
from prefixloom.testing.inside.backdoor import put_transfer_stream, tier_lanes, transfer_streams
from prefixloom.testing.schedules.simulated import Simulation
from prefixloom.tiers.host_copies import layer_groups
from prefixloom_hicache import HostTier
from tests.support.helpers import settle
from tests.support.tiers import copies_by

LAYERS = 6


def kv(name: str, reach: Any, layers: Any) -> Component:
    return Component(name, Manifest([Buffer("data", (2,), "int64", layers=layers)]), reach)


def gated(gates: int, **options: Any) -> Cache:
    """Layers 0 to 5: full at 1, 3 and 5, a window at 0 and 4, a state at 2."""
    parts = [kv("full", Path(), (1, 3, 5)), kv("near", Window(8), (0, 4)), kv("state", Point(), (2,))]
    tier = HostTier(TierManifest(capacity=4096, gates=gates, overlap=True))
    return compose(
        None,
        plugins=[*parts, tier],
        page_size=4,
        capacity={"full": 256, "near": 256, "state": 8},
        debug=True,
        **options,
    )


def served(cache: Cache) -> None:
    """A prompt of which the host has all and the device nothing; every layer's content is its number + 1."""
    with cache.open(range(32)) as sequence:
        sequence.grow(32)
        with cache.step([sequence]) as step:
            step.run_ops()
            for lane in cache.core.shape.lanes:
                data = cache.pool(lane.name).buffers["data"]
                for at, layer in enumerate(cache.composition.parts[lane.index].manifest.buffers[0].layers):
                    data[at] = layer + 1
    for stream in transfer_streams(cache).values():
        stream.record().synchronize()
    cache.poll()
    cache.evict({"full": 99, "near": 99, "state": 9})
    for lane in cache.core.shape.lanes:
        cache.pool(lane.name).buffers["data"].zero_()


def test_layers_are_grouped_as_evenly_as_they_come() -> None:
    cache = gated(1)
    lanes = tier_lanes(cache)
    assert layer_groups(lanes, 1) == ((),)
    assert layer_groups(lanes, 2) == ((0, 3), (3, 6))
    assert layer_groups(lanes, 4) == ((0, 1), (1, 3), (3, 4), (4, 6))
    assert len(layer_groups(lanes, 99)) == LAYERS


def seen(cache: Cache, sequence: Any, layer: int) -> list[int]:
    """What layer ``layer`` finds in its memory of the prompt."""
    for lane in cache.core.shape.lanes:
        layers = cache.composition.parts[lane.index].manifest.buffers[0].layers
        if layer in layers:
            data = cache.pool(lane.name).buffers["data"][layers.index(layer)]
            pages = [page for page in sequence.pages(lane.name)[:8] if page >= 0]
            return sorted(set(data[pages].flatten().tolist()))
    raise AssertionError(layer)


@pytest.mark.parametrize("gates", [1, 2, 3, 6])
def test_each_layer_finds_what_it_needs_and_the_first_do_not_wait_for_the_last(gates: int) -> None:
    simulation = Simulation("up", "forward")
    cache = gated(gates)
    served(cache)
    up, forward = simulation["up"], simulation["forward"]
    put_transfer_stream(cache, "up", up)
    found: dict[int, list[int]] = {}
    with cache.open(range(36)) as sequence:
        assert sequence.restore().ready == 32
        sequence.grow(4)
        with cache.step([sequence]) as step:
            step.run_ops(forward, gated=True)
            for layer in range(LAYERS):
                step.gate(layer)
                forward.run(lambda layer=layer: found.__setitem__(layer, seen(cache, sequence, layer)))  # type: ignore[misc]
        ahead = 0
        while up.pending or forward.pending:  # the layers whenever they can, the copies only where they must
            if forward.ready:
                forward.advance()
            else:
                up.advance()
                ahead = max(ahead, len(found) if up.pending else ahead)
        assert found == {layer: [layer + 1] for layer in range(LAYERS)}
        assert (ahead > 0) == (gates > 1)
    cache.poll()
    settle(cache)


def test_a_gate_that_is_missed_is_told_and_the_step_commits_nothing() -> None:
    cache = gated(3)
    served(cache)
    with cache.open(range(36)) as sequence:
        sequence.restore()
        sequence.grow(4)
        step = cache.step([sequence])
        with pytest.raises(ProtocolError, match="got to layer 1 of 5"), step:
            step.run_ops(gated=True)
            step.gate(0)
            step.gate(1)
        assert sequence.committed == 32


def test_where_an_op_may_read_what_is_loaded_the_whole_load_is_waited_for() -> None:
    cache = gated(3)
    served(cache)
    with cache.open(range(36)) as first, cache.open([7] * 8) as other:
        first.restore()
        first.grow(4)
        other.grow(8)  # its state is to be cleared
        with cache.step([first, other]) as step:
            step.run_ops(gated=True)  # no gate is passed, and none is missed
        assert (first.committed, other.committed) == (36, 8)


def test_gates_are_passed_where_nothing_is_loaded_and_only_after_run_ops() -> None:
    cache = gated(3)
    with cache.open(range(8)) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            with pytest.raises(ProtocolError, match="after run_ops"):
                step.gate(0)
            step.run_ops(gated=True)
            step.gate(0)


def test_a_load_that_fails_ends_the_step_that_was_gated_on_it() -> None:
    def breaking(honest: Any, *given: Any) -> None:
        if len(given) > 4 and given[4] >= 2:
            raise RuntimeError("the last layers never came")
        honest(*given)

    cache = gated(3)
    served(cache)
    with copies_by(breaking):
        sequence = cache.open(range(36))
        sequence.restore()
        sequence.grow(4)
        with cache.step([sequence]) as step:
            step.run_ops(gated=True)
            for layer in range(LAYERS):
                step.gate(layer)
        transfer_streams(cache)["up"].record().synchronize()
    cache.poll()
    assert not sequence.open
    with cache.open(range(36)) as again:
        assert again.restore().ready == 0  # the source is not tried for ever
    settle(cache)
