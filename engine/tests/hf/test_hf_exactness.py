"""The models of the matrix are exact over a cache: what is restored is what was live, and the cache changes no logit.

Float64 throughout. Restored against live, and cached against uncached with the same passes, are compared bitwise.
Against the whole prompt in one pass, in which other rows go together, the figure is ``hf_models.figure``. Negative
controls show what one zeroed page or state of one layer moves.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch

from prefixloom import TierManifest
from prefixloom.contract.manifest import LAYOUTS, Layout
from prefixloom.testing.inside.witness import Witness
from prefixloom_hicache import HostTier
from tests.support.hf_models import MATRIX, Served, distance, figure, model_of, prompt

MOVED = 1e-4
"""What a zeroed piece moves at least; measured: 3.5e-4 and more."""
TOKENS = 160

EACH = pytest.mark.parametrize("name", MATRIX)
pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- restored equals live


@EACH
def test_what_is_restored_is_what_was_live_bit_for_bit(name: str) -> None:
    served, tokens = Served(name), prompt(1, TOKENS)
    witness = Witness(served.cache)
    with served.cache.open(tokens) as live:
        for cut in (64, 128, TOKENS):
            served.compute(live, tokens, (cut,))
            witness.live(live)
            live.publish()
    for asked in (tokens, tokens[:128] + prompt(2, 40), tokens[:64] + prompt(3, 40)):
        with served.cache.open(asked, leave=1) as restored:
            assert restored.ready >= 64
            assert witness.restored(restored) == 0
            served.compute(restored, asked, (len(asked),))
            witness.live(restored)
    assert witness.compared > 8 // len(served.components)
    assert witness.states > 2 or not served.states
    served.settled()


@EACH
def test_the_witness_sees_a_page_or_a_state_that_changed(name: str) -> None:
    served, tokens = Served(name), prompt(1, TOKENS)
    witness = Witness(served.cache)
    with served.cache.open(tokens) as live:
        served.compute(live, tokens, (128,))
        witness.live(live)
    for component in served.components:
        slot = served.cache.match(tokens, leave=1).pages(component)[-1]
        for content in served.cache.pool(component).buffers.values():
            content[0, slot] += 1e-15
    with served.cache.open(tokens, leave=1) as restored:
        assert witness.restored(restored) >= len(served.components)


def hosted(name: str, layout: Layout = "layer_first") -> Served:
    manifest = TierManifest(memory="8MiB", write="through", layout=layout)
    return Served(name, plugins=[HostTier(manifest)], layout=layout)


@EACH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_back_from_the_host_is_what_was_live_bit_for_bit(name: str, layout: Layout) -> None:
    """All of it, and each component alone while the others are still on the device."""
    tokens = prompt(1, TOKENS)
    expected = Served(name).plain(tokens, (64, 128, TOKENS))[128:]
    everything = Served(name).components
    for lost in (everything, *([component] for component in everything)):
        served = hosted(name, layout)
        witness = Witness(served.cache)
        with served.cache.open(tokens) as live:
            for cut in (64, 128):
                served.compute(live, tokens, (cut,))
                witness.live(live)
                live.publish()
            live.abort()
        served.cache.poll()
        served.cache.evict(dict.fromkeys(lost, 10_000))
        with served.cache.open(tokens, leave=1) as restored:
            assert restored.ready == 0
            assert restored.restore().ready == restored.ready == 128
            assert witness.restored(restored) == 0
            assert torch.equal(served.compute(restored, tokens, (TOKENS,)), expected)
        assert witness.compared >= 8 and (witness.states or not served.states)
        assert served.cache.stats().tier.restored_tokens == 128
        served.settled()


# ---------------------------------------------------------------- cached equals uncached


@EACH
def test_a_resumed_prefill_is_that_of_the_same_passes_without_a_cache_to_the_bit(name: str) -> None:
    served, tokens = Served(name), prompt(1, TOKENS)
    served.published(tokens, (128,))
    with served.cache.open(tokens, leave=1) as sequence:
        assert sequence.ready == 128
        found = served.compute(sequence, tokens, (TOKENS,))
    assert torch.equal(found, served.plain(tokens, (128, TOKENS))[128:])
    assert distance(found, served.plain(tokens, (TOKENS,))[128:]) < figure(name)


@EACH
@pytest.mark.parametrize("cuts", [(64, 128, TOKENS), (128, 144, TOKENS), (1, 2, 37, 90, 101, 102, TOKENS)], ids=str)
def test_a_prefill_in_chunks_is_exact(name: str, cuts: tuple[int, ...]) -> None:
    served, tokens = Served(name), prompt(4, TOKENS)
    with served.cache.open(tokens) as sequence:
        found = served.compute(sequence, tokens, cuts)
    assert torch.equal(found, served.plain(tokens, cuts))
    assert distance(found, served.plain(tokens, (TOKENS,))) < figure(name)


@EACH
def test_single_tokens_after_a_hit_are_exact(name: str) -> None:
    """The kernels of decoding, over what was restored."""
    served, tokens = Served(name), prompt(5, 140)
    served.published(tokens, (128,))
    with served.cache.open(tokens, leave=1) as sequence:
        found = served.compute(sequence, tokens, range(sequence.ready + 1, 141))
    assert torch.equal(found, served.plain(tokens, (128, *range(129, 141)))[128:])
    assert distance(found, served.plain(tokens, (140,))[128:]) < figure(name)


@EACH
def test_branches_are_exact_and_hit_where_they_part(name: str) -> None:
    served, trunk = Served(name), prompt(6, 192)
    served.published(trunk, (192,))
    branch = trunk[:128] + prompt(7, 40)
    with served.cache.open(branch, leave=1) as sequence:
        assert (sequence.ready, sequence.branch) == ((0, 128) if served.states else (128, None))
        cuts = (128, len(branch)) if served.states else (len(branch),)
        start = sequence.ready
        rows = []
        for cut in cuts:
            rows.append(served.compute(sequence, branch, (cut,)))
            sequence.publish()
        assert torch.equal(torch.cat(rows), served.plain(branch, (128, len(branch)))[start:])
    other = trunk[:128] + prompt(8, 30)
    for asked, expected in ((other, 128), (branch, 160 if not served.states or served.page == 16 else 128)):
        with served.cache.open(asked, leave=1) as sequence:
            assert sequence.ready in (expected, 128)
            found = served.compute(sequence, asked, (len(asked),))
            cut = sequence.ready
            assert torch.equal(found, served.plain(asked, tuple(sorted({128, cut, len(asked)})))[cut:])
            sequence.abort()
    served.settled()


# ---------------------------------------------------------------- what is lost, and what is taken back


@EACH
def test_each_component_may_be_evicted_alone(name: str) -> None:
    """Some of it, and all of it: the hit is shorter, or is not, and what is computed is the same."""
    tokens = prompt(9, TOKENS)
    for component in Served(name).components:
        for count in (1, 3, 10_000):
            served = Served(name)
            served.published(tokens, (64, 128))
            freed = served.cache.evict({component: count})
            assert freed[component] >= 1
            with served.cache.open(tokens, leave=1) as sequence:
                start = sequence.ready
                assert start == 0 or count < 10_000
                cuts = tuple(cut for cut in (64, 128, TOKENS) if cut > start)
                found = served.compute(sequence, tokens, cuts)
                alone = tuple(sorted({start, *cuts} - {0}))
                assert torch.equal(found, served.plain(tokens, alone)[start:])
            served.settled()


@EACH
def test_a_rewind_is_exact_in_every_component(name: str) -> None:
    """A speculated run of four, of which two are kept; then others follow."""
    served, tokens = Served(name, max_rewind=3, max_running=4), prompt(10, 132)
    for wrong in (False, True) if served.states else (False,):  # pages are there whatever is taken back
        with served.cache.open(tokens) as sequence:
            served.compute(sequence, tokens, (128, 132))
            for state in served.states:
                steps = sequence.rewind_slots(state)
                if wrong:
                    served.cache.pool(state).copy((steps[0],), (steps[1],))
            sequence.rewind(2)
            kept = [*tokens[:130], 5, 6, 7]
            sequence.append(kept[130:])
            found = served.compute(sequence, kept, (131, 132, 133))
            expected = served.plain(kept, (128, 129, 130, 131, 132, 133))[130:]
            if wrong:
                assert distance(found, expected) > MOVED
            else:
                assert distance(found, expected) < figure(name)
            sequence.abort()
    served.settled()


# ---------------------------------------------------------------- negative controls


def pieces(served: Served) -> list[tuple[str, str, int]]:
    """(component, buffer, row of a layer) of all that a model remembers."""
    return [
        (part.name, buffer.name, row)
        for part in served.cache.composition.parts
        for buffer in part.manifest.buffers
        for row in range(len(buffer.layers))
    ]


@EACH
def test_one_zeroed_page_or_state_of_one_layer_moves_the_logits(name: str) -> None:
    served, tokens = Served(name), prompt(1, TOKENS)
    served.published(tokens, (128,))
    expected = served.plain(tokens, (128, TOKENS))[128:]
    least = {}
    for component, buffer, row in pieces(served):
        with served.cache.open(tokens, leave=1) as sequence:
            slot = served.cache.match(tokens, leave=1).pages(component)[-1]
            content = served.cache.pool(component).buffers[buffer][row, slot]
            kept = content.clone()
            content.zero_()
            least[component, buffer, row] = distance(served.compute(sequence, tokens, (TOKENS,)), expected)
            content.copy_(kept)
            sequence.abort()
    assert min(least.values()) > MOVED, least
    with served.cache.open(tokens, leave=1) as sequence:  # and with all of them back, nothing does
        assert torch.equal(served.compute(sequence, tokens, (TOKENS,)), expected)


@EACH
def test_the_memory_of_another_prompt_moves_the_logits(name: str) -> None:
    served, ours, theirs = Served(name), prompt(1, TOKENS), prompt(2, TOKENS)
    for tokens in (ours, theirs):
        served.published(tokens, (128,))
    expected = served.plain(ours, (128, TOKENS))[128:]
    for component in served.components:
        mine, other = (served.cache.match(tokens, leave=1).pages(component)[-1] for tokens in (ours, theirs))
        served.cache.pool(component).copy((other,), (mine,))
        with served.cache.open(ours, leave=1) as sequence:
            assert distance(served.compute(sequence, ours, (TOKENS,)), expected) > MOVED
            sequence.abort()


def test_what_is_compared_depends_on_every_token() -> None:
    """One other token far back moves the last logits of every model."""
    for name in MATRIX:
        model: Any = model_of(name)
        with torch.no_grad():
            one, two = (
                model(torch.tensor([[first, *prompt(1, 90)]]), use_cache=False).logits[0, -1] for first in (5, 6)
            )
        assert distance(one, two) > MOVED, name
