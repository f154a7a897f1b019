"""Every composition of the real plugins is exact: what is restored is what was live, and the cache changes no logit.

A toy model in float64 runs through the cache as an engine would. Restored against live is compared bitwise, pages and
states; cached against uncached bitwise where the same rows go together, within 1e-10 otherwise. Negative controls show
that one wrong page, one wrong window page and one wrong state of any layer move the logits by far more.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from prefixloom import AdmissionPolicy
from prefixloom.insight.debug import Debug
from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import COMPOSITIONS, composition
from tests.support.sampling import sampled_rows, slow
from tests.support.traffic import NO_ROWS, TOLERANCE, Traffic, composed, distance, model_of, prompt

MOVED = 1e-4
"""What one wrong page or state moves at least; measured: 0.0018 and more."""
PAGES = pytest.mark.parametrize("page", [slow(1), 4, slow(16)])
EACH = pytest.mark.parametrize("name", COMPOSITIONS)
STEPS = 200


pytestmark = pytest.mark.usefixtures("one_thread")


def settled(traffic: Traffic) -> None:
    """It met what it is for, nothing was wrong, and nothing is owned by nobody.

    The second set of books is read once: after every operation it would take most of the time.
    """
    Debug(traffic.cache.core).check("the traffic")
    told = traffic.cache.stats()
    assert traffic.witness.wrong == 0
    assert min(traffic.counts[what] for what in ("hit", "computed", "evicted")) > 2, traffic.counts
    assert told.sequences == 0
    for figures in told.components.values():
        assert (figures.leased, figures.running) == (0, 0)
        assert figures.free + figures.cached == figures.capacity


# ---------------------------------------------------------------- random traffic


@PAGES
@EACH
def test_over_random_traffic_every_composition_is_exact(name: str, page: int) -> None:
    cache = composed(composition(name), page, tokens=208, slots=9, debug=False)
    traffic = Traffic(cache, model_of(name), f"{name} {page}")
    traffic.run(3 * STEPS if page == 16 else STEPS)  # few of these prompts meet a long page where another ended
    settled(traffic)
    points = [part for part in cache.composition.parts if not part.page_tokens]
    assert traffic.witness.compared > 300 // page or len(points) == len(cache.composition.parts)
    assert traffic.witness.states > 5 or not points
    assert traffic.counts["split"] or page == 16, traffic.counts  # few long edges there


def every(tokens: int, **more: Any) -> dict[str, Any]:
    return {"mamba": {"checkpoint_every": tokens, **more}}


ODD = AdmissionPolicy("odd", admit=lambda state: bool(state.last or state.boundary % 8))
OPTIONS: list[tuple[str, int, int, int, dict[str, Any]]] = [
    # rewinds: a step of up to four tokens leaves the state after each, and any of them may be taken back
    *((name, page, 30, 3, {}) for name in ("M", "SM", "FSM", "two kinds of state") for page in (1, 4)),
    # checkpoints: what a sequence publishes at its end may be the state of an earlier boundary
    *(
        (name, 4, 36 if rewind else 18, rewind, changes)
        for name, changes in (
            ("SM", every(8)), ("FSM", every(4)),
            ("two kinds of state", every(12) | {"mamba_conv": {"checkpoint_every": 8}}),
            ("FM", every(4, admit=ODD)), ("M", every(8, admit="branch-and-last")),
        )
        for rewind in (0, 3)
    ),
    # pages and grids of their own
    ("FS", 4, 14, 0, {"full": {"page_size": 2}, "swa": {"page_size": 8}}),
    ("FSM", 4, 14, 0, {"full": {"page_size": 6}, "swa": {"page_size": 4}} | every(12)),
    ("two windows", 4, 14, 0, {"full": {"page_size": 1}, "swa_9": {"page_size": 4}, "swa_22": {"page_size": 8}}),
    ("latents and an indexer", 4, 14, 0, {"full": {"page_size": 4}, "full_indexer": {"page_size": 8}}),
    ("attention beside a state", 4, 14, 0, {"mamba": {"grid": 8}, "swa": {"keep_windows": "last"}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "page", "slots", "rewind", "changes"), sampled_rows(OPTIONS, 2))
def test_rewinds_checkpoints_and_pages_of_their_own_are_exact(
    name: str, page: int, slots: int, rewind: int, changes: dict[str, Any]
) -> None:
    cache = composed(composition(name), page, tokens=208, slots=slots, changes=changes, max_rewind=rewind, debug=False)
    traffic = Traffic(cache, model_of(name), f"{name} {page} {rewind} {slots}", rewind=rewind)
    traffic.run(STEPS)
    settled(traffic)
    assert traffic.counts["rewound"] > 4 or not rewind, traffic.counts
    assert traffic.witness.states > 20 or slots not in (18, 36)


# ---------------------------------------------------------------- the same rows, the same bits


@PAGES
@EACH
def test_with_the_same_row_partition_the_cache_changes_no_bit(name: str, page: int) -> None:
    """A page at a time, also where a window, a path or a state was evicted from under the others."""
    model, rng = model_of(name), random.Random(page)
    cache = composed(composition(name), page, tokens=320, slots=12, debug=False)
    known = [prompt(rng, 40)]
    hits = 0
    for _ in range(12):
        base = rng.choice(known[-3:])
        kept = rng.choice((len(base), rng.randrange(len(base) + 1)))
        tokens = (base[:kept] + prompt(rng, rng.randrange(1, 30)))[:90]
        known.append(tokens)
        with cache.open(tokens, leave=1) as sequence:
            start = sequence.ready
            hits += start > 0
            rows = [NO_ROWS]
            for end in (rng.randrange(start, len(tokens)) // page * page, len(tokens) // page * page, len(tokens)):
                rows.append(model.compute(cache, sequence, chunk=page, upto=max(end, sequence.committed)))
                sequence.publish()
            assert torch.equal(torch.cat(rows), model.reference(tokens, chunk=page)[start:])
        if rng.random() < 0.3:
            cache.evict({rng.choice(cache.composition.parts).name: 3})
    assert hits > 2


# ---------------------------------------------------------------- negative controls


def pieces(name: str) -> list[tuple[str, str, str, int]]:
    """(composition, component, buffer, row of a layer) of all that a composition remembers."""
    parts = composed(composition(name), 4).composition.parts
    return [
        (name, part.name, buffer.name, row)
        for part in parts
        for buffer in part.manifest.buffers
        for row in range(len(buffer.layers))
    ]


@pytest.mark.parametrize(
    ("name", "component", "buffer", "layer"), [piece for name in COMPOSITIONS for piece in pieces(name)]
)
def test_one_zeroed_page_or_state_of_one_layer_moves_the_logits(
    name: str, component: str, buffer: str, layer: int
) -> None:
    cache, tokens, model = composed(composition(name), 4), prompt(random.Random(5), 50), model_of(name)
    expected = model.reference(tokens)[48:]
    witness = Witness(cache)
    with cache.open(tokens) as sequence:
        model.compute(cache, sequence, upto=48)
        witness.live(sequence)
        sequence.publish()
    with cache.open(tokens, leave=1) as sequence:
        assert sequence.ready == 48
        assert distance(model.compute(cache, sequence), expected) < TOLERANCE
        sequence.abort()
    with cache.open(tokens, leave=1) as sequence:
        plan = cache.match(tokens, leave=1)
        slot = plan.pages(component)[-1]
        cache.pool(component).buffers[buffer][layer, int(slot)] = 0
        assert witness.restored(sequence) == 1
        assert distance(model.compute(cache, sequence), expected) > MOVED
        sequence.abort()


def test_a_state_that_is_not_copied_or_not_cleared_moves_the_logits() -> None:
    cache, model, tokens = composed(composition("FSM"), 4), model_of("FSM"), prompt(random.Random(1), 50)
    expected = model.reference(tokens)
    for start in (0, 48):
        with cache.open(tokens, leave=1) as sequence:
            assert sequence.ready == start
            with cache.step([sequence]) as step:
                step.run_ops()
            for buffer in cache.pool("mamba").buffers.values():
                buffer[:, sequence.pages("mamba")[0]] = 0.5
            assert distance(model.compute(cache, sequence), expected[start:]) > MOVED
            sequence.abort()
        with cache.open(tokens, leave=1) as sequence:
            model.compute(cache, sequence, upto=48)


def test_a_state_of_one_token_earlier_moves_the_logits() -> None:
    """After a rewind: the state of a neighbouring token, as a wrong index would give."""
    cache, model = composed(composition("FSM"), 4, slots=30, max_rewind=3), model_of("FSM")
    tokens = prompt(random.Random(3), 24)
    for wrong in (False, True):
        with cache.open(tokens) as sequence:
            model.compute(cache, sequence, upto=20)
            model.compute(cache, sequence)  # four tokens: the state after each
            steps = sequence.rewind_slots("mamba")
            if wrong:
                cache.pool("mamba").copy((steps[0],), (steps[1],))
            sequence.rewind(2)
            sequence.append([5, 6])
            moved = distance(model.compute(cache, sequence), model.reference([*tokens[:22], 5, 6])[22:])
            assert moved > MOVED if wrong else moved < TOLERANCE
            sequence.abort()
