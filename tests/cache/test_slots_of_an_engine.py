"""Slots and memory that an engine has: what it hands in, gets back, and is refused.

Random inserts beside all other operations are in the random model (compositions "lent ..." of tests.support.setups).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prefixloom import (
    BrokenError,
    Buffer,
    Cache,
    Claim,
    Codec,
    Component,
    CompositionError,
    InputError,
    Manifest,
    Path,
    PluginError,
    Point,
    ProtocolError,
    TierManifest,
    Window,
    compose,
    hookimpl,
)  # fmt: skip
from prefixloom.testing.schedules.simulated import Simulation
from prefixloom_hicache import HostTier
from tests.support.tiers import simulated

KV = Manifest([Buffer("k", (2,), "float32", (0, 1, 2)), Buffer("v", (3,), "float64", (0, 2))])
GRID = np.array([[0, 1], [2, 3]], np.int32)
STATE = Manifest([Buffer("state", (4,), "float32", (1,))])


def components() -> list[Component]:
    return [Component("full", KV, Path()), Component("swa", KV, Window(6)), Component("mamba", STATE, Point())]


def lent(**options: Any) -> Cache:
    capacity = {"full": 64, "swa": 64, "mamba": 8}
    return compose(
        None, plugins=components(), page_size=2, capacity=capacity, slots="lent", device="meta", debug=True, **options
    )


def taken_back(cache: Cache) -> dict[str, list[int]]:
    return {name: slots.tolist() for name, slots in cache.take_back().items()}


def test_what_is_handed_in_hits_and_comes_back_when_it_is_evicted() -> None:
    cache = lent()
    first = cache.insert(range(8), {"full": [5, 6, 7, 8], "swa": [-1, 3, 2, 1], "mamba": [4]})
    assert (first.ready, first.length, first.taken) == (0, 8, {"full": 4, "swa": 3, "mamba": 1})
    assert cache.take_back() == {}
    again = cache.insert(range(8), {"full": [15, 16, 17, 18], "swa": [14, 13, 12, 11], "mamba": [5]})
    assert (again.ready, again.length, again.returned) == (8, 8, {"full": 4, "swa": 4, "mamba": 1})
    assert taken_back(cache) == {"full": [15, 16, 17, 18], "swa": [14, 13, 12, 11], "mamba": [5]}
    with cache.lease(cache.match(range(12)), exact=True) as lease:
        assert [lease.pages(name).tolist() for name in ("full", "swa", "mamba")] == [[5, 6, 7, 8], [-1, 3, 2, 1], [4]]
        longer = {"full": [20, 21, 22], "swa": [20, 21, 22], "mamba": [6]}
        assert cache.insert(range(13), longer, start=8).length == 12, "the last page is not whole"
        assert taken_back(cache) == {"full": [22], "swa": [22]}
        assert cache.evict({"full": 64, "swa": 64, "mamba": 8}) == {"full": 2, "swa": 2, "mamba": 1}
        assert cache.peek(range(13)) == 8
    assert cache.evict({"full": 64}) == {"full": 4}
    returned = cache.take_back()
    assert sorted(returned["full"]) == [5, 6, 7, 8, 20, 21]
    assert all(figures.outside == figures.capacity for figures in cache.stats().components.values())
    assert "32 with the engine" in str(cache.stats())


def test_whoever_has_copied_a_state_may_read_on_without_it() -> None:
    cache = lent()
    cache.insert(range(8), {"full": range(4), "swa": range(4), "mamba": [0]})
    lease, other = (cache.lease(cache.match(range(8)), exact=True) for _ in range(2))
    lease.uncover_states()
    lease.uncover_states()
    assert cache.evict({"mamba": 1}) == {"mamba": 0}, "the other lease covers it"
    other.release()
    assert cache.evict({"full": 8, "swa": 8, "mamba": 1}) == {"full": 0, "swa": 1, "mamba": 1}
    assert [lease.pages(name).tolist() for name in ("full", "swa")] == [[0, 1, 2, 3], [-1, 1, 2, 3]]
    with pytest.raises(ProtocolError, match="does not cover the state of 'mamba' any more"):
        lease.pages("mamba")
    lease.release()
    with pytest.raises(ProtocolError, match="was released already"):
        lease.uncover_states()
    assert cache.evict({"full": 8}) == {"full": 4}


def test_after_a_flush_a_lease_has_no_states_to_uncover() -> None:
    cache = lent()
    cache.insert(range(8), {"full": range(4), "swa": range(4), "mamba": [0]})
    lease = cache.lease(cache.match(range(8)), exact=True)
    cache.flush()
    lease.uncover_states()
    figures = cache.stats().components["mamba"]
    assert (figures.leased, figures.evictable) == (0, 0)


class Keeping(Component):
    """Keeps the first page of what is published; a hook that raises when it is told to."""

    raising = ""

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim:
        if self.raising == "commit_insert":
            raise RuntimeError("a hook")
        return Claim(keep=((0, 2),))

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> None:
        if self.raising == "acquire_component_lock":
            raise RuntimeError("a hook")


@pytest.mark.parametrize("hook", ["commit_insert", "acquire_component_lock", "an interrupt"])
def test_after_an_error_that_is_no_refusal_the_slots_are_the_caches(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if hook == "an interrupt":
        monkeypatch.setattr("prefixloom.operations.insert._hold", interrupted)
    keeping = Keeping("swa", KV, Window(6))
    kinds = [Component("full", KV, Path()), keeping]
    cache = compose(None, plugins=kinds, page_size=2, capacity=64, slots="lent", device="meta", debug=True)
    keeping.raising = hook
    slots = {"full": list(range(4)), "swa": list(range(4))}
    taken = {"full": 0, "swa": 0}
    try:
        taken = cache.insert(range(8), slots).taken
    except PluginError:
        pass
    except KeyboardInterrupt:
        with pytest.raises(BrokenError):
            cache.take_back()
        cache.flush()
    else:
        assert hook != "an interrupt", "it goes on to the caller"
    returned = {name: len(found) for name, found in cache.take_back().items()}
    assert {name: taken[name] + returned.get(name, 0) for name in slots} == {"full": 4, "swa": 4}


def test_a_lease_from_before_a_flush_has_no_pages() -> None:
    cache = lent()
    cache.insert(range(8), {"full": range(4), "swa": range(4), "mamba": [0]})
    with cache.lease(cache.match(range(8))) as lease:
        cache.flush()
        with pytest.raises(ProtocolError, match="before the cache was flushed"):
            lease.pages("full")


def test_sequences_run_in_what_was_lent() -> None:
    cache = lent()
    cache.lend({"full": range(4), "swa": range(4), "mamba": [7]})
    with cache.open(range(8)) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            step.run_ops()
    assert cache.peek(range(9)) == 8
    assert taken_back(cache) == {"swa": [0]}, "no boundary from 8 on needs it"


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda c: c.insert(range(4), {"full": [0, 0]}), ProtocolError, "slot 0 of 'full' is given twice"),
        (lambda c: c.insert(range(4), {"full": [30, 31]}), ProtocolError, "slot 31 of 'full' is the cache's already"),
        (lambda c: c.insert(range(4), {"full": [0, 32]}), InputError, "from 0 to 31, or -1 for none; got 32"),
        (lambda c: c.insert(range(4), {"full": [0, True]}), InputError, "from 0 to 31, or -1 for none; got True"),
        (lambda c: c.insert(range(4), {"full": array("f", [0, 1])}), InputError, "from 0 to 31, or .* got 0.0"),
        (lambda c: c.insert(range(4), {"full": [0, 1, 2]}), InputError, "3 pages of 'full' .* more than 4 tokens"),
        (lambda c: c.insert(range(4), {"full": torch.tensor(1)}), InputError, "a list of numbers, got tensor"),
        (lambda c: c.insert(range(4), {"full": GRID}), InputError, "from 0 to 31, or .* got \\[0, 1\\]"),
        (lambda c: c.insert(range(4), {"full": GRID.T}), InputError, "from 0 to 31, or .* got \\[0, 2\\]"),
        (lambda c: c.insert(range(4), {"full": None}), InputError, "a list of numbers, got None"),
        (lambda c: c.insert(range(4), {"mamba": [0, 1]}), InputError, "takes one slot"),
        (lambda c: c.insert(range(4), {"ful": [0, 1]}), InputError, "no component 'ful' here"),
        (lambda c: c.insert(range(4), [0, 1]), InputError, "a mapping by component"),
        (lambda c: c.insert(range(4), {}, start=1), InputError, "start is a boundary, a multiple of 2, got 1"),
        (lambda c: c.insert(range(4), {}, start=2.0), InputError, "start is a boundary, a multiple of 2, got 2.0"),
        (lambda c: c.insert(range(4), {}, priority="high"), InputError, "a priority is a whole number"),
        (lambda c: c.lend({"full": [0, -1]}), InputError, "-1 stands for no slot"),
        (lambda c: c.lend({"swa": [0], "full": [31]}), ProtocolError, "slot 31 of 'full' is the cache's already"),
    ],
)
def test_a_mistake_is_refused_and_nothing_was_taken(call: Callable[[Cache], Any], error: Any, told: str) -> None:
    cache = lent()
    cache.insert(range(100, 102), {"full": [31]})
    before = cache.stats()
    with pytest.raises(error, match=told):
        call(cache)
    assert cache.stats() == before


def test_only_where_slots_are_lent() -> None:
    cache = compose(None, plugins=components(), page_size=2, capacity=64, device="meta")
    for call in (cache.take_back, lambda: cache.lend({}), lambda: cache.insert([1, 2], {"full": [0]})):
        with pytest.raises(ProtocolError, match="compose it with slots='lent'"):
            call()  # type: ignore[operator]
    with pytest.raises(CompositionError, match="slots must be 'own' or 'lent', got 'mine'"):
        compose(None, plugins=components(), capacity=64, slots="mine")  # type: ignore[arg-type]
    coded = Component("mamba", Manifest(STATE.buffers, stored_as=Codec("int8", 0.1)), Point())
    with pytest.raises(CompositionError, match=r"another form .* which no engine lends"):
        compose(None, plugins=[coded], capacity=64, slots="lent", max_running=1)


# ---------------------------------------------------------------- memory of an engine


def memory(pages: int, states: int) -> dict[str, dict[str, Any]]:
    """Tensors as engines have them: one for each layer, keys and values of a page side by side, or one for all."""
    both = [torch.zeros(pages + 1, 2, 2, 2) for _ in range(3)]
    return {
        "full": {
            "k": [layer[:, 0] for layer in both],
            "v": [torch.zeros(pages, 2, 3, dtype=torch.float64) for _ in "02"],
        },
        "swa": {"k": torch.zeros(3, pages, 2, 2), "v": torch.zeros(2, pages, 2, 3, dtype=torch.float64)},
        "mamba": {"state": (torch.zeros(states, 4),)},
    }


def test_content_in_an_engines_tensors_goes_down_and_comes_back_as_in_the_caches_own() -> None:
    found = []
    for given in (None, memory(32, 8)):
        host = HostTier(TierManifest(capacity={"full": 256, "swa": 256, "mamba": 16}, write="back"))
        capacity = {"full": 64, "swa": 64, "mamba": 8}
        cache = compose(None, plugins=[*components(), host], page_size=2, capacity=capacity, tensors=given, debug=True)
        pools = {name: cache.pool(name) for name in capacity}
        if given is not None:
            assert pools["full"].buffers["k"][1].data_ptr() == given["full"]["k"][1].data_ptr()
        for user in range(4):  # of four conversations the device holds three
            with cache.open([user] * 20) as sequence:
                sequence.grow(20)
                with cache.step([sequence]) as step:
                    step.run_ops()
                    for name, pool in pools.items():
                        slots = [slot for slot in sequence.pages(name) if slot >= 0]
                        for buffer in pool.buffers.values():
                            for number, layer in enumerate(buffer):
                                for place, slot in enumerate(slots):
                                    layer[slot] = 100 * user + 10 * number + place
        with cache.open([0] * 24, leave=1) as sequence:
            assert sequence.ready == 0 and sequence.restore().ready == 20
            sequence.grow(4)
            with cache.step([sequence]) as step:
                step.run_ops()
                read = {
                    name: [
                        [layer[slot].clone() for slot in sequence.pages(name)[:10] if slot >= 0]
                        for buffer in pool.buffers.values()
                        for layer in buffer
                    ]
                    for name, pool in pools.items()
                }
            sequence.abort()
        found.append(read)
    own, given_ = found
    assert own.keys() == given_.keys()
    for name in own:
        for one, other in zip(own[name], given_[name], strict=True):
            assert len(one) == len(other) > 0
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert float(own["full"][1][9].max()) == 19.0, "layer 1, page 9, of the first conversation"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t["full"].pop("v"), "'full' cannot lie .* its buffers are k, v, and tensors were given for k"),
        (lambda t: t["full"]["k"].pop(), "buffer 'k' has 3 layers, and 2 were given"),
        (lambda t: t["full"].update(k=torch.zeros(3, 31, 2, 2)), r"layers of float32 \(32, 2, 2\), or more slots"),
        (lambda t: t["full"]["k"].append(t["full"]["k"].pop()[1:32]), r"layers of float32 \(32, 2, 2\), or more slots"),
        (lambda t: t["swa"].update(v=torch.zeros(2, 32, 2, 3)), "of float64 .* and one of torch.float32"),
        (lambda t: t["swa"].update(k=torch.zeros(3, 2, 32, 2).transpose(1, 2)), "must be contiguous"),
        (lambda t: t["mamba"].update(state=[torch.zeros(8, 8)[:, ::2]]), "must be contiguous"),
        (lambda t: t["mamba"].update(state=[torch.zeros(8, 4, device="meta")]), "lies on meta, and the cache on cpu"),
        (lambda t: t["full"].update(k=5), "takes a tensor .* or a list with one for each layer, got a int"),
        (lambda t: t["full"].update(k=[[1.0]] * 3), "or a list with one for each layer, got a list"),
        (lambda t: t["full"].update(k=torch.zeros(3, 1, 2, 2).expand(3, 32, 2, 2)), "must be contiguous"),
        (lambda t: t.update(full=3), "'full' cannot lie .* tensors were given for 3"),
        (lambda t: t.update(fool={}), "tensors were given for 'fool'; there are full, swa, mamba"),
    ],
)
def test_memory_that_does_not_fit_is_refused(change: Callable[[Any], Any], told: str) -> None:
    given = memory(32, 8)
    change(given)
    capacity = {"full": 64, "swa": 64, "mamba": 8}
    with pytest.raises(CompositionError, match=told):
        compose(None, plugins=components(), page_size=2, capacity=capacity, tensors=given)


def test_memory_is_given_by_component_for_pages_layer_by_layer() -> None:
    with pytest.raises(CompositionError, match="a mapping by component, got 3"):
        compose(None, plugins=components(), capacity=64, tensors=3)  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="the layout 'page_first'"):
        compose(None, plugins=components(), capacity=64, layout="page_first", tensors=memory(4, 16))


def hand_in_early(cache: Cache, memory_: Any, sim: Simulation, number: int) -> None:
    """An engine's pass that writes pages 0 to 3 runs on the stream "forward"; they are handed in before it is over."""
    cache.lend({"full": range(8, 32)})
    sim["forward"].run(lambda: [layer[:4].fill_(number) for layers in memory_["full"].values() for layer in layers])
    assert cache.insert(range(8), {"full": range(4)}, stream=sim["forward"]).length == 8


def in_tensors(*plugins: Any) -> tuple[Cache, Any]:
    given = {"full": memory(32, 8)["full"]}
    pair = compose(
        None, plugins=[components()[0], *plugins], page_size=2, capacity=64, slots="lent", tensors=given, debug=True
    )
    return pair, given


def test_a_step_on_another_stream_comes_after_the_pass_that_writes_what_was_handed_in() -> None:
    cache, given = in_tensors()
    sim = Simulation("forward", "other")
    hand_in_early(cache, given, sim, 5)
    other = sim["other"]
    read = []
    with cache.open(range(10), leave=1) as sequence:
        assert sequence.ready == 8
        sequence.grow(2)
        with cache.step([sequence]) as step:
            step.run_ops(other)
            other.run(lambda: read.append(given["full"]["k"][0][:4].clone()))
        assert not other.ready, "it waits"
        sim.drain()
        cache.poll()
    assert (read[0] == 5).all()


def test_a_tier_copies_down_what_was_handed_in_when_it_is_written() -> None:
    cache, given = in_tensors(HostTier(TierManifest(capacity={"full": 64}, write="through")))
    sim = simulated(cache)
    hand_in_early(cache, given, sim, 5)
    assert not sim["down"].ready, "the copy waits"
    sim.drain()
    cache.poll()
    cache.evict({"full": 64})
    for layers in given["full"].values():
        for layer in layers:
            layer.fill_(9)
    with cache.open(range(10), leave=1) as sequence:
        assert (sequence.ready, sequence.restore().ready) == (0, 8)
        sim.drain()
        cache.poll()
        pages = sequence.pages("full")[:4]
        assert all((layer[pages] == 5).all() for layers in given["full"].values() for layer in layers)


def test_what_a_pass_may_still_write_is_not_taken_back_also_after_an_error() -> None:
    keeping = Keeping("swa", KV, Window(6))
    kinds = [Component("full", KV, Path()), keeping]
    cache = compose(None, plugins=kinds, page_size=2, capacity=64, slots="lent", device="meta", debug=True)
    keeping.raising = "acquire_component_lock"
    stream = Simulation("forward")["forward"]
    stream.run(lambda: None)
    with pytest.raises(PluginError):
        cache.insert(range(8), {"full": range(4), "swa": range(4)}, stream=stream)
    assert cache.take_back() == {}
    while stream.ready:
        stream.advance()
    assert {name: sorted(slots) for name, slots in cache.take_back().items()} == {
        "full": [*range(4)],
        "swa": [*range(4)],
    }
