"""The toy model and the witness: what they compute, and what they refuse to do in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prefixloom
from prefixloom import (
    Buffer,
    CapacityError,
    Component,
    CompositionError,
    InvariantError,
    Manifest,
    Path,
    Point,
    Reach,
    Window,
)
from prefixloom.cache.cache import Cache
from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import COMPOSITIONS, DELTA_RULE, ToyModel, composition, toy_config
from prefixloom.testing.toy.layers import LAYERS, PageStore, PlainStore
from prefixloom.testing.toy.layers import LayerStore as Store

MODEL = ToyModel(toy_config())
TOKENS = list(range(40))


pytestmark = pytest.mark.usefixtures("one_thread")


def keys_and_values(name: str = "kv", layers: tuple[int, ...] = (0, 1), reach: Reach | None = None) -> Component:
    buffers = [Buffer(buffer, (2, 8), "float64", layers) for buffer in ("k", "v")]
    return Component(name, Manifest(buffers), reach or Path())


def cache_of(*components: Component, page_size: int = 4, capacity: int = 256) -> Cache:
    return prefixloom.compose(None, plugins=components, page_size=page_size, capacity=capacity, debug=True)


def test_the_same_seed_makes_the_same_model_and_another_makes_another() -> None:
    logits = MODEL.reference(TOKENS)
    assert torch.equal(ToyModel(toy_config()).reference(TOKENS), logits)
    assert not torch.allclose(ToyModel(toy_config(), seed=1).reference(TOKENS), logits, atol=0.1)


def test_logits_depend_on_the_order_of_earlier_tokens() -> None:
    """One layer, so that positions alone can tell the order."""
    model = ToyModel(toy_config(["full_attention"]))
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert float((model.reference(swapped)[-1] - model.reference(TOKENS)[-1]).abs().max()) > 1e-4


def test_layers_may_be_served_by_several_components() -> None:
    cache = cache_of(keys_and_values("a", (0,)), keys_and_values("b", (1,)))
    for expected in (0, 36):
        run = MODEL.run(cache, TOKENS, decode=3)
        assert run.ready == expected
        assert len(run.tokens) == 43
        assert float((run.logits - MODEL.reference(run.tokens)[expected:-1]).abs().max()) < 1e-12


def test_a_shared_layer_reads_its_owners_entries() -> None:
    """Layer 1 computes its own entries over layer 0's, in the same slots: as if the model were another, but exactly."""
    buffers = [Buffer(buffer, (2, 8), "float64", (0,), {1: 0}) for buffer in ("k", "v")]
    cache = cache_of(Component("kv", Manifest(buffers), Path()))
    assert cache.pool("kv").buffers["k"].shape[0] == 1
    stores = [PageStore(cache.pool("kv"), 4, torch.tensor([3, 1]), layer) for layer in (0, 1)]
    stores[0].write("k", 2, torch.ones(4, 2, 8, dtype=torch.float64))
    assert torch.equal(stores[1].read("k", 2, 6), torch.ones(4, 2, 8, dtype=torch.float64))


def test_a_plugin_may_bring_its_own_layer() -> None:
    class Doubling:
        buffers = ("seen",)

        def __init__(self, *_: Any) -> None:
            pass

        def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
            store.write("seen", start, x)
            return store.read("seen", 0, start + len(x)).cumsum(0)[start:]

    model = ToyModel(toy_config(["running_sum"]), layers={**LAYERS, "running_sum": Doubling})
    cache = cache_of(Component("sums", Manifest([Buffer("seen", (32,), "float64")]), Path()))
    for expected in (0, 36):
        run = model.run(cache, TOKENS)
        assert run.ready == expected
        assert float((run.logits - model.reference(TOKENS)[expected:]).abs().max()) < 1e-12


def test_a_layer_that_nobody_computes_is_refused() -> None:
    with pytest.raises(CompositionError, match="cannot compute layers of kind hyena"):
        ToyModel(toy_config(["full_attention", "hyena"]))


@pytest.mark.parametrize("components", [[("a", (0,))], [("a", (0, 1)), ("b", (1,))]])
def test_a_layer_is_served_by_exactly_one_component(components: list[tuple[str, tuple[int, ...]]]) -> None:
    cache = cache_of(*(keys_and_values(name, layers) for name, layers in components))
    with pytest.raises(CompositionError, match="layer 1 keeps k and v, and one component"):
        MODEL.run(cache, TOKENS)
    assert cache.stats().sequences == 0


def test_reading_what_was_given_back_is_refused_and_not_answered_with_somebody_elses() -> None:
    """A path layer over a component that keeps a window only."""
    cache = cache_of(keys_and_values(reach=Window(8)))
    tight = [cache.pool("kv").mint(cache.pool("kv").capacity - 12)]  # no room to keep what is older than the window
    with pytest.raises(InvariantError, match="absent pages are used"):
        MODEL.run(cache, TOKENS, chunk=8)
    tight.pop().free()
    assert cache.stats().components["kv"].running == 0


def test_reading_past_the_table_is_refused() -> None:
    store = PageStore(cache_of(keys_and_values()).pool("kv"), 4, torch.tensor([0, 1]), 0)
    with pytest.raises(InvariantError, match="page 2 of a sequence is used, and its table has 2"):
        store.read("k", 0, 9)


def test_a_plain_store_takes_no_gaps() -> None:
    store = PlainStore()
    store.write("k", 0, torch.zeros(3, 1))
    with pytest.raises(InvariantError, match="holds 3 entries of 'k' and was given more from 4 on"):
        store.write("k", 4, torch.zeros(1, 1))


def test_a_prompt_that_finds_no_room_leaves_nothing_behind() -> None:
    cache = cache_of(keys_and_values(), capacity=48)
    with cache.open(range(30), leave=1) as other:
        MODEL.compute(cache, other)
        with pytest.raises(CapacityError):
            MODEL.run(cache, range(50, 90))
        assert cache.stats().sequences == 1


# ---------------------------------------------------------------- the witness


def test_the_witness_sees_a_changed_bit_and_nothing_else() -> None:
    cache = cache_of(keys_and_values())
    witness = Witness(cache)
    with cache.open(TOKENS) as live:
        MODEL.compute(cache, live)
        witness.live(live)
    with cache.open(TOKENS) as restored:
        assert (witness.restored(restored), witness.compared) == (0, 10)
        slot = restored.pages("kv")[3]
        entries = cache.pool("kv").buffers["v"]
        kept = entries[1, slot, 0, 0, 0].clone()
        entries[1, slot, 0, 0, 0] = torch.nextafter(kept, kept + 1)
        assert witness.restored(restored) == 1
        entries[1, slot, 0, 0, 0] = kept
        assert witness.restored(restored) == 0
    assert (witness.compared, witness.wrong) == (30, 1)


def test_the_witness_sees_the_page_of_another_prompt() -> None:
    cache = cache_of(keys_and_values())
    witness = Witness(cache)
    for tokens in (TOKENS, TOKENS[::-1]):
        with cache.open(tokens) as live:
            MODEL.compute(cache, live)
            witness.live(live)
    with cache.open(TOKENS) as ours, cache.open(TOKENS[::-1]) as theirs:
        cache.pool("kv").copy(theirs.pages("kv")[:3], ours.pages("kv")[:3])
        assert (witness.restored(ours), witness.restored(theirs)) == (3, 0)


def test_the_witness_knows_no_page_that_no_live_sequence_had() -> None:
    cache = cache_of(keys_and_values())
    MODEL.run(cache, TOKENS)
    MODEL.run(cache, TOKENS, namespace="b")
    witness = Witness(cache)
    with cache.open(TOKENS, namespace="b") as sequence:
        witness.live(sequence)
    with cache.open(TOKENS) as sequence:
        assert witness.restored(sequence) == 10, "equal content of another namespace does not count"


# ---------------------------------------------------------------- further kinds of memory


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_composition_computes_the_same_in_chunks_and_sees_the_past_only(name: str) -> None:
    model = ToyModel(composition(name))
    logits = model.reference(TOKENS)
    assert float((model.reference(TOKENS, chunk=7) - logits).abs().max()) < 1e-12
    changed = model.reference([*TOKENS[:30], 96, *TOKENS[31:]])
    assert torch.allclose(changed[:30], logits[:30], rtol=0, atol=1e-12)
    assert float((changed[30:34] - logits[30:34]).abs().amax(dim=1).min()) > 1e-4


@pytest.mark.parametrize(
    ("kind", "changes", "sees"),
    [
        ("full_attention", {}, range(40)),
        ("linear_attention", {}, range(40)),
        ("linear_attention", DELTA_RULE, range(40)),
        ("sliding_attention", {"sliding_window": 9}, range(31, 40)),
        ("chunked_attention", {"attention_chunk_size": 16}, range(32, 40)),
        ("conv", {"conv_L_cache": 3}, range(37, 40)),
    ],
)
def test_a_layer_sees_as_far_as_its_config_says_and_no_further(kind: str, changes: dict[str, Any], sees: range) -> None:
    model = ToyModel(toy_config([kind], **changes))
    logits = model.reference(TOKENS)[-1]
    for at in range(40):
        moved = float((model.reference([*TOKENS[:at], 96, *TOKENS[at + 1 :]])[-1] - logits).abs().max())
        assert moved > 1e-4 if at in sees else moved == 0, at


def test_a_recurrence_that_the_config_does_not_tell_is_refused() -> None:
    config = toy_config(["linear_attention"])
    del config["mamba_d_state"]
    with pytest.raises(CompositionError, match="layer 0 is recurrent, and the toy model computes a selective scan"):
        ToyModel(config)


def test_a_layer_over_the_other_kind_of_component_is_refused() -> None:
    buffers = [Buffer(buffer, (2, 8), "float64", (0, 1)) for buffer in ("k", "v")]
    states = cache_of(Component("kv", Manifest(buffers), Point()), capacity=4096)
    with pytest.raises(InvariantError, match="component 'kv' keeps 'k' in states; the layer uses it otherwise"):
        MODEL.run(states, TOKENS)
    model = ToyModel(toy_config(["conv"]))
    pages = cache_of(Component("conv", Manifest([Buffer("conv", (32, 3), "float64")]), Path()))
    with pytest.raises(InvariantError, match="component 'conv' keeps 'conv' in pages; the layer uses it otherwise"):
        model.run(pages, TOKENS)
    wide = cache_of(Component("conv", Manifest([Buffer("conv", (32, 4), "float64")]), Point()), capacity=4096)
    with pytest.raises(InvariantError, match=r"'conv' of 'conv' is \(32, 4\); the layer keeps \(32, 3\)"):
        model.run(wide, TOKENS)


def test_the_witness_sees_a_changed_bit_of_a_state_also_before_it_is_copied() -> None:
    model = ToyModel(toy_config(["conv"]))
    cache = cache_of(Component("conv", Manifest([Buffer("conv", (32, 3), "float64")]), Point()), capacity=4096)
    witness = Witness(cache)
    with cache.open(TOKENS) as live:
        model.compute(cache, live)
        witness.live(live)
    slot = int(cache.match(TOKENS).pages("conv")[0])
    entries = cache.pool("conv").buffers["conv"]
    with cache.open([*TOKENS, 1]) as restored:
        assert (witness.restored(restored), witness.states) == (0, 1)
        kept = entries[0, slot, 0, 0].clone()
        entries[0, slot, 0, 0] = torch.nextafter(kept, kept + 1)
        assert witness.restored(restored) == 1
        entries[0, slot, 0, 0] = kept
        with cache.step([restored]) as step:
            step.run_ops()
        entries[0, slot, 0, 0] = torch.nextafter(kept, kept + 1)
        assert witness.restored(restored) == 0, "its own copy"
        entries[0, slot, 0, 0] = kept
        restored.abort()
    model.run(cache, TOKENS, namespace="b")
    with cache.open([*TOKENS, 1], namespace="b") as other:
        assert (other.ready, witness.restored(other)) == (40, 1), "equal content of another namespace does not count"
