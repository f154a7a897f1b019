"""Draft entries that depend on the token after their own: with a lookahead of 1 they are exact, and without it wrong.

The draft of the toy model makes its entry of position p of the token at p + 1, as EAGLE and MTP do. What holds of the
model's own logits is asked of the draft's guesses too: restored equals live, bitwise; cached equals uncached.
"""

from __future__ import annotations

import random
from functools import cache as once
from typing import Any

import pytest

from prefixloom import Buffer, Component, CompositionError, Manifest, Path, ProtocolError
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.insight.debug import Debug
from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import composition
from prefixloom.testing.toy.draft import DraftedModel
from prefixloom_full import FullComponent
from tests.support.sampling import slow
from tests.support.traffic import TOLERANCE, Traffic, composed, distance, prompt

MOVED = 1e-4
"""What one wrong entry moves at least; measured: 0.02 and more."""
PAGES = pytest.mark.parametrize("page", [slow(1), 4, slow(16)])
EACH = pytest.mark.parametrize("name", ["F", "FS", "FM", "FSM"])


pytestmark = pytest.mark.usefixtures("one_thread")


@once
def drafted(name: str) -> DraftedModel:
    return DraftedModel(composition(name))


def cache_of(name: str, page: int, *, lookahead: int = 1, tokens: int = 512, **options: Any) -> Cache:
    """The cache of a composition, and a component for the draft beside it."""
    draft = FullComponent(
        "draft", layers=[drafted(name).draft_layer], kv_heads=2, k_dim=8, dtype="float64", lookahead=lookahead
    )
    return composed(composition(name), page, tokens=tokens, plugins=[draft], more={"draft": tokens}, **options)


class DraftTraffic(Traffic):
    """Checks the guesses too."""

    model: DraftedModel
    guessed = 0

    def name(self, sequence: Sequence, tokens: list[int]) -> None:
        super().name(sequence, tokens)
        self.witness.live(sequence)  # the entry that waited for the first of them

    def check(self, sequence: Sequence) -> None:
        got = self.model.guesses(sequence)
        if len(got):
            tokens = sequence.tokens.tolist()[: sequence.ready + len(got) + 1]
            assert distance(got, self.model.reference_guesses(tokens)[sequence.ready :]) < TOLERANCE
            self.guessed += len(got)
        super().check(sequence)


# ---------------------------------------------------------------- exact


@PAGES
@EACH
def test_over_random_traffic_drafts_are_exact(name: str, page: int) -> None:
    cache = cache_of(name, page, tokens=208, slots=9, debug=False)
    traffic = DraftTraffic(cache, drafted(name), f"draft {name} {page}")
    traffic.run(600 if page == 16 else 150)
    settled(traffic)


@pytest.mark.parametrize("name", ["F", "FSM"])
@pytest.mark.parametrize("page", [slow(1), 4])
def test_drafts_of_tokens_that_were_taken_back_are_written_again(name: str, page: int) -> None:
    """Speculation: up to four tokens are computed at once, and some of them taken back."""
    cache = cache_of(name, page, tokens=208, slots=30, max_rewind=3, debug=False)
    traffic = DraftTraffic(cache, drafted(name), f"speculation {name} {page}", rewind=3)
    traffic.run(150)
    settled(traffic)
    assert traffic.counts["rewound"] > 4, traffic.counts


def settled(traffic: DraftTraffic) -> None:
    Debug(traffic.cache.core).check("the traffic")
    assert traffic.witness.wrong == 0
    assert min(traffic.counts[what] for what in ("hit", "computed", "evicted")) > 2, traffic.counts
    assert traffic.guessed > 100
    for figures in traffic.cache.stats().components.values():
        assert (figures.leased, figures.running) == (0, 0)


# ---------------------------------------------------------------- it really depends on the next token


@pytest.mark.parametrize("lookahead", [0, 1])
def test_without_the_lookahead_the_entry_of_another_token_is_restored(lookahead: int) -> None:
    """Negative control: a manifest that does not say what the content depends on gives wrong guesses, in silence."""
    cache, model = cache_of("F", 4, lookahead=lookahead), drafted("F")
    tokens = prompt(random.Random(6), 50)
    other = [*tokens[:48], (tokens[48] + 1) % 97, 7]
    model.run(cache, tokens)
    with cache.open(other, leave=1) as sequence:
        model.compute(cache, sequence)
        moved = distance(model.guesses(sequence), model.reference_guesses(other)[sequence.ready :])
        assert (moved > MOVED, sequence.ready) == ((False, 44) if lookahead else (True, 48))


def test_the_witness_sees_an_entry_that_was_made_of_another_token() -> None:
    """It names a page of the draft by one token more, so that the same tokens up to its end are not the same page."""
    cache, model = cache_of("F", 4), drafted("F")
    witness, tokens = Witness(cache), prompt(random.Random(7), 30)
    with cache.open(tokens) as sequence:
        model.compute(cache, sequence)
        witness.live(sequence)
    other = [*tokens[:12], (tokens[12] + 1) % 97, *tokens[13:]]
    with cache.open(other) as sequence:
        model.compute(cache, sequence)
        witness.live(sequence)
    ours, theirs = (cache.match(asked, leave=1).pages("draft")[2] for asked in (tokens, other))
    assert ours != theirs, "both have a page of [8, 12)"
    cache.pool("draft").copy((int(theirs),), (int(ours),))
    with cache.open(tokens, leave=1) as sequence:
        assert witness.restored(sequence) == 1
        sequence.abort()


@pytest.mark.parametrize("buffer", ["k", "v"])
def test_a_zeroed_draft_page_moves_the_guesses_and_not_the_logits(buffer: str) -> None:
    cache, model, tokens = cache_of("F", 4), drafted("F"), prompt(random.Random(5), 50)
    model.run(cache, tokens)
    with cache.open(tokens, leave=1) as sequence:
        assert sequence.ready == 48
        cache.pool("draft").buffers[buffer][:, sequence.pages("draft")[-1]] = 0
        assert distance(model.compute(cache, sequence), model.reference(tokens)[48:]) < TOLERANCE
        assert distance(model.guesses(sequence), model.reference_guesses(tokens)[48:]) > MOVED
        sequence.abort()


def test_an_entry_that_is_not_written_again_after_a_rewind_moves_the_guesses() -> None:
    cache, model = cache_of("F", 4), drafted("F")
    tokens = prompt(random.Random(8), 24)
    other = [*tokens[:22], 5, 6, 7]
    for honest in (True, False):
        with cache.open(tokens, namespace=str(honest)) as sequence:
            model.compute(cache, sequence)
            sequence.rewind(2)
            if honest:
                model.append(cache, sequence, [5, 6, 7])
            else:
                model.append(cache, sequence, [5])
                stale = cache.pool("draft").buffers["k"][:, sequence.pages("draft")[21 // 4], 21 % 4]
                stale.zero_()
                model.append(cache, sequence, [6, 7])
            model.compute(cache, sequence)
            moved = distance(model.guesses(sequence)[22:], model.reference_guesses(other)[22:])
            assert moved < TOLERANCE if honest else moved > MOVED


def test_a_guess_depends_on_its_own_next_token_and_on_no_later_one() -> None:
    model, tokens = drafted("F"), prompt(random.Random(9), 20)
    guesses = model.reference_guesses(tokens)
    assert len(guesses) == 19
    for at in range(1, 20):
        changed = model.reference_guesses([*tokens[:at], (tokens[at] + 1) % 97, *tokens[at + 1 :]])
        if at > 1:
            assert distance(changed[: at - 1], guesses[: at - 1]) < 1e-12
        assert float((changed[at - 1 :] - guesses[at - 1 :]).abs().amax(dim=1).min()) > MOVED


def test_what_a_published_draft_depends_on_cannot_be_taken_back() -> None:
    cache, model, tokens = cache_of("F", 4), drafted("F"), prompt(random.Random(4), 25)
    with cache.open(tokens) as sequence:
        model.compute(cache, sequence)
        assert sequence.publish() == 24
        with pytest.raises(ProtocolError, match="depend on 1 tokens more"):
            sequence.rewind(1)


def test_a_draft_that_no_component_serves_is_refused() -> None:
    cache = composed(
        composition("F"), 4, plugins=[Component("x", Manifest([Buffer("k", (1,))]), Path())], more={"x": 64}
    )
    with pytest.raises(CompositionError, match=r"layer 2 keeps k and v, and one component of .* must have them for it"):
        drafted("F").run(cache, range(8))
