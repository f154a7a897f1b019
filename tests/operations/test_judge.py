"""Part of a step fails: the sequences that its verdict names end, with who read from them, and the others go on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from prefixloom import Cache, InputError, ProtocolError, Stream, ThreadStream, TierManifest, compose
from prefixloom_full import FullComponent
from prefixloom_hicache import HostTier, MemoryBackend
from prefixloom_mamba import MambaComponent
from tests.support.engines import nothing_left
from tests.support.stores import write_out

KV = {"layers": (0,), "kv_heads": 1, "k_dim": 1, "v_dim": 1}
WRONG = ArithmeticError("not a number")


@pytest.fixture(params=["inline", "thread"])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream | None]:
    made = ThreadStream("forward") if request.param == "thread" else None
    yield made
    if made is not None:
        made.close()


def settle(cache: Cache, stream: Stream | None) -> None:
    if stream is not None:
        stream.record().synchronize()
    cache.poll()


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("failing", list(itertools.product([False, True], repeat=3)), ids=str)
def test_the_sequences_that_a_verdict_names_end_and_what_they_published_goes(
    failing: tuple[bool, ...], closed: bool, stream: Stream | None
) -> None:
    """Three sequences in one step after another; what the step before had published stays. Each has a reader."""
    parts = [FullComponent(**KV), MambaComponent(conv=(1, 1), recurrent=(1,))]
    cache = compose(None, plugins=parts, page_size=16, capacity={"full": 1024, "mamba": 30}, debug=True)
    prompts = [[number] * 64 for number in range(3)]
    sequences = [cache.open(tokens) for tokens in prompts]
    for end, errors in ((32, [None] * 3), (64, [WRONG if fails else None for fails in failing])):
        for sequence in sequences:
            sequence.grow(end - sequence.reserved)
        with cache.step(sequences) as step:
            step.run_ops(stream)
            step.judge(lambda errors=errors: errors)  # type: ignore[misc]
            if stream is not None:
                stream.run(lambda: time.sleep(0.05))
        for sequence in sequences:
            sequence.publish()
    readers = [cache.open([*tokens, 9]) for tokens in prompts]
    assert [reader.ready for reader in readers] == [64] * 3
    if closed:
        for sequence in sequences:
            sequence.close()
    settle(cache, stream)
    for tokens, sequence, reader, fails in zip(prompts, sequences, readers, failing, strict=True):
        assert (sequence.failed is WRONG, reader.failed is WRONG) == (fails, fails)
        assert (sequence.open, reader.open) == (not closed and not fails, not fails)
        assert cache.peek(tokens) == (32 if fails else 64)
        sequence.close()
        reader.abort()
    nothing_left(cache)


def test_a_verdict_that_raises_or_is_short_fails_the_whole_step_and_one_of_a_step_that_failed_is_not_asked(
    stream: Stream | None,
) -> None:
    cache = compose(None, plugins=[FullComponent(**KV)], page_size=16, capacity=1024, debug=True)
    for verdict in (lambda: [None], lambda: [None, 1 / 0]):
        sequences = [cache.open([number] * 32) for number in (1, 2)]
        for sequence in sequences:
            sequence.grow(32)
        with cache.step(sequences) as step:
            step.run_ops(stream)
            step.judge(verdict)  # type: ignore[arg-type]
        settle(cache, stream)
        assert not any(sequence.open for sequence in sequences)
    with cache.open([3] * 32) as sequence:
        sequence.grow(32)
        with pytest.raises(InputError), cache.step([sequence]) as step:
            step.run_ops(stream)
            step.judge(lambda: [WRONG])
            raise InputError("half-way")
        settle(cache, stream)
        assert sequence.open
        with pytest.raises(ProtocolError, match="judge belongs inside of the step's with block"):
            step.judge(list)
    nothing_left(cache)


def test_what_a_verdict_takes_back_is_not_stored(stream: Stream | None) -> None:
    """Neither is what a copy down has brought to the host. The others of the step are stored.

    The store is asked to write while the step still runs.
    """
    host, store = (
        HostTier(TierManifest(capacity=1024), identity={"model": "m", "weights": "1"}, fetch="wait"),
        MemoryBackend(capacity=1 << 20),
    )
    cache = compose(None, plugins=[FullComponent(**KV), host], page_size=16, capacity=1024, debug=True)
    host.attach(store)
    cache.poll()
    sequences = [cache.open([number] * 64) for number in (1, 2)]
    for sequence in sequences:
        sequence.grow(64)
    with cache.step(sequences) as step:
        step.run_ops(stream)
        step.judge(lambda: [None, WRONG])
        if stream is not None:
            stream.run(lambda: time.sleep(0.2))
    for sequence in sequences:
        sequence.publish()
    write_out(cache)
    assert store.status().records == 4
    sequences[0].close()
    cache.flush()
    for tokens, ready in (([1] * 64, 64), ([2] * 64, 0)):
        with cache.open([*tokens, 9]) as sequence:
            told = sequence.restore()
            while not told.over:
                cache.poll()
            assert told.ready == ready
    host.detach()
    store.close()
