"""States that rest in another form: two pools, encode and decode as ops, bounds, no drift, shortages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixloom import (
    Buffer,
    CapacityError,
    Claim,
    Codec,
    Component,
    CompositionError,
    Manifest,
    Path,
    Point,
    Traffic,
    WorkError,
    compose,
    hookimpl,
)
from prefixloom.cache.cache import Cache
from prefixloom.device.codecs import Coder
from tests.support.helpers import part, run, settle

TOKENS = list(range(40))
INT8 = Codec("int8", tolerance=0.004)


def state(codec: Codec = INT8, **facts: Any) -> Component:
    return Component("state", Manifest([Buffer("h", (3, 8), "float32")], stored_as=codec, **facts), Point())


def cache_of(codec: Codec = INT8, *, slots: int = 12, running: int = 2, **facts: Any) -> Cache:
    return compose(
        None,
        plugins=[part("path", Path()), state(codec, **facts)],
        page_size=4,
        capacity={"path": 400, "state": slots},
        max_running=running,
        debug=True,
    )


def put(cache: Cache, sequence: Any, seed: int) -> torch.Tensor:
    """A running state as layers would leave it."""
    content = torch.randn((1, 3, 8), generator=torch.Generator().manual_seed(seed))
    cache.pool("state").buffers["h"][:, sequence.pages("state")[0]] = content
    return content


def taken(cache: Cache, sequence: Any) -> torch.Tensor:
    """The running state after the ops of a step that computes nothing."""
    with cache.step([sequence]) as step:
        step.run_ops()
    content: torch.Tensor = cache.pool("state").buffers["h"][:, sequence.pages("state")[0]].clone()
    return content


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest value of its row."""
    return float(((a - b).abs() / a.abs().amax(-1, keepdim=True)).max())


@pytest.mark.parametrize("codec", [INT8, Codec("bfloat16", 0.004), Codec("float16", 0.0005)], ids=lambda c: c.dtype)
def test_what_comes_back_is_within_the_tolerance_and_does_not_drift(codec: Codec) -> None:
    cache = cache_of(codec)
    with cache.open(TOKENS) as sequence:
        run(sequence, 8)
        live = put(cache, sequence, 1)
    seen = []
    for end in range(8, 40, 4):  # each takes the state, and publishes it again four tokens on
        with cache.open(TOKENS[: end + 4]) as sequence:
            assert sequence.ready == end
            seen.append(taken(cache, sequence))
            run(sequence, 4)
    assert 0 < off(live, seen[0]) <= codec.tolerance
    assert all(torch.equal(each, seen[0]) for each in seen)
    settle(cache)


def test_a_match_decodes_and_a_publication_encodes() -> None:
    cache = cache_of()
    with cache.open(TOKENS) as sequence:
        run(sequence, 8)
        (slot,) = sequence.pages("state")
        sequence.publish()
        assert sequence.pages("state") == [slot], "nothing is donated: the sequence goes on with its own slot"
        assert cache.step([sequence]).ops == ()
    with cache.open(TOKENS) as sequence:
        assert [op.kind for op in cache.step([sequence]).ops] == ["decode"]
        sequence.abort()
    settle(cache)


def test_what_is_tracked_rests_in_the_same_form() -> None:
    cache = cache_of(checkpoint_every=8)
    with cache.open(TOKENS[:19]) as sequence:
        for _ in range(4):
            sequence.grow(4)
            with cache.step([sequence]) as step:
                step.run_ops()
                live = put(cache, sequence, sequence.reserved)
                assert step.ops == ()
        run(sequence, 2)
    with cache.open(TOKENS) as sequence:
        assert sequence.ready == 16
        assert off(live, taken(cache, sequence)) <= INT8.tolerance
    settle(cache)


def test_an_abort_encodes_nothing_and_a_close_publishes_the_last_state() -> None:
    cache = cache_of()
    for end in ("abort", "close"):
        sequence = cache.open(TOKENS)
        run(sequence, 8)
        getattr(sequence, end)()
        assert cache.peek(TOKENS) == (8 if end == "close" else 0)
    settle(cache)


def test_the_two_pools_are_told_apart() -> None:
    cache = cache_of(slots=10, running=3, max_rewind=2)
    figures = cache.stats().components["state"]
    live = cache.pool("state")
    assert (figures.capacity, live.capacity, figures.page_bytes) == (10, 3, 96)
    assert figures.rest_bytes == Coder(state().manifest).stored.slot_bytes == 3 * (8 + 4)
    assert "96 bytes each (36 at rest)" in str(figures)


def test_too_many_running_is_a_shortage_of_running_slots_and_nothing_is_lost() -> None:
    cache = cache_of(slots=3, running=2)
    with cache.open(TOKENS) as first, cache.open(TOKENS):
        with pytest.raises(CapacityError, match=r"open a sequence: state: needs 1 .* 0 free"):
            cache.open(TOKENS)
        run(first, 8)
    assert cache.peek(TOKENS) == 8
    with cache.open([7] * 40) as other, cache.open([7] * 40):
        run(other, 6)
        other.publish()
    assert cache.peek(TOKENS) == 8, "a publication without a state needs no slot to go on with"
    settle(cache)


def test_a_checkpoint_without_room_at_rest_is_left_out_and_counted() -> None:
    cache = cache_of(slots=3, running=2)  # one slot at rest
    with cache.open(TOKENS) as first:
        run(first, 8)
        live = put(cache, first, 3)
    holder = cache.open(TOKENS)  # covers the only one: it has yet to be decoded
    with cache.open([7] * 40) as other:
        run(other, 8)
        assert other.publish() == 8
    assert (cache.peek([7] * 40), cache.stats().skipped_checkpoints) == (0, 1)
    assert off(live, taken(cache, holder)) <= INT8.tolerance
    holder.close()
    with cache.open([7] * 40) as other:  # now the old one may go
        run(other, 8)
    assert (cache.peek([7] * 40), cache.peek(TOKENS)) == (8, 0)
    settle(cache)


def test_an_encode_that_fails_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    sequence = cache.open(TOKENS)
    run(sequence, 8)

    def broken(*args: object) -> None:
        raise ArithmeticError("no encoding today")

    monkeypatch.setattr(Coder, "encode", broken)
    with pytest.raises(WorkError, match="no encoding today"):
        sequence.publish()
    monkeypatch.undo()
    sequence.abort()
    assert cache.peek(TOKENS) == 0
    settle(cache)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"codec": Codec("int8", tolerance=0.001)}, "which stored_as does not tolerate"),
        ({"codec": Codec("int16", tolerance=1.0)}, "content rests as one of int8"),
        ({"running": None}, "Say how many sequences run at once"),
        ({"slots": 2}, "2 running sequences need 3"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_composed(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(CompositionError, match=words):
        cache_of(**facts)


def test_memory_is_shared_out_by_what_states_weigh_where_they_rest() -> None:
    def slots(codec: Codec | None) -> int:
        manifest = Manifest([Buffer("h", (64, 64), "float32")], stored_as=codec)
        cache = compose(
            None, plugins=[part("path", Path()), Component("state", manifest, Point())],
            memory="4MiB", traffic=Traffic(running=4, prompt=64, output=16), device="meta",
        )  # fmt: skip
        assert ("at rest" in "".join(cache.stats().sizing)) == (codec is not None)
        return cache.stats().components["state"].capacity

    assert slots(INT8) > 2 * slots(None)


@pytest.mark.parametrize("debug", [False, True])
def test_no_slot_to_run_in_is_a_shortage_also_where_a_plugin_claims(debug: bool) -> None:
    class Claiming(Component):
        @hookimpl
        def finalize_match_result(self, walk: Any) -> Claim:
            return Claim()

    kv = Manifest([Buffer("kv", (), "float32")])
    cache = compose(
        None, plugins=[Claiming("path", kv, Path()), state()], page_size=4, capacity={"path": 400, "state": 12},
        max_running=2, debug=debug,
    )  # fmt: skip
    running = [cache.open(TOKENS) for _ in range(2)]
    with pytest.raises(CapacityError, match="state"):
        cache.open(TOKENS)
    for sequence in running:
        sequence.abort()
    assert cache.open(TOKENS).owned("state") == 1
