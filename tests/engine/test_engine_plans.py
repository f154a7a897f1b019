"""Whatever an engine plans keeps the rules of a step: small chunks, guesses, ends of answers, and rows that decode."""

from __future__ import annotations

import random

import attrs
import pytest

from prefixloom import Path, Window
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.serving.admission import PageBudget
from prefixloom_engine.threeway import SIZES
from tests.support.engines import Known, cache_for, computed_once, model, plain, prompt, served
from tests.support.helpers import cache_of, part, run
from tests.support.planned_steps import watched

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.mark.parametrize("seed", range(4))
def test_every_planned_step_keeps_its_rules(seed: int) -> None:
    """``served`` watches the plans. Right guesses want to pass each boundary and the end of each answer."""
    rng = random.Random(seed)
    requests = [
        Request(prompt(rng.randrange(4), rng.randrange(1, 40)) + prompt(i, rng.randrange(30)), rng.randrange(1, 40))
        for i in range(9)
    ]
    expected = plain(model(), requests)
    guesser = Known(requests, expected, 0.1)
    out, engine = served(
        model(), requests, cache_for(model()), chunk=rng.choice((16, 32, 48)), max_running=rng.choice((3, 9)),
        speculate=4, guesser=guesser, overlap=seed % 2 == 0,
    )  # fmt: skip
    assert out == expected
    assert engine.counts.accepted > 20


def test_pool_of_as_many_pages_as_the_budget_says_is_enough_for_a_request_alone() -> None:
    """Its prompt comes in chunks, and guesses as deep as may be taken back follow."""
    rng = random.Random(1)
    for _ in range(60):
        page, rewind = rng.choice((1, 2, 4)), rng.randrange(7)
        chunk, length = page * rng.randrange(1, 6), rng.randrange(40, 90)
        window = part("window", Window(rng.randrange(1, 24)))
        options = {"page": page, "max_rewind": rewind}
        budget = PageBudget(cache_of(part("keys", Path()), window, **options), chunk)
        pages = budget.needs.slots(length)["window"]
        cache = cache_of(part("keys", Path()), window, capacity={"window": pages * page}, **options)
        with cache.open(range(length)) as sequence:
            while sequence.reserved < length // 2:
                run(sequence, min(chunk, length // 2 - sequence.reserved))
            while sequence.reserved < length:
                guesses = min(rewind, length - sequence.reserved - 1)
                run(sequence, 1 + guesses)
                sequence.rewind(rng.randrange(guesses + 1))
                if guesses:
                    sequence.append(range(sequence.named, length))


def test_prompts_as_long_as_a_row_of_guesses_are_computed_beside_it() -> None:
    """Both go through one pass, and of the guesses each needs its logits."""
    requests = [Request(prompt(0, 40), 60), *(Request(prompt(i, 5), 1) for i in range(1, 12))]
    expected = plain(model(), requests)
    guesser = Known(requests, expected, 0.0)
    out, engine = served(
        model(), requests, cache_for(model()), chunk=16, max_running=2, speculate=4, guesser=guesser, overlap=False
    )
    assert out == expected
    assert engine.counts.accepted > 20


LAYERS = {
    "states": ("linear_attention", "sliding_attention", "full_attention"),
    "a window": ("full_attention", "sliding_attention"),
    "nothing but a path": ("full_attention",) * 2,
}


def branching(rng: random.Random, count: int, page: int) -> list[Request]:
    """Prompts that continue each other from anywhere, and of which none ends on a boundary."""
    texts: list[list[int]] = []
    while len(texts) < count:
        before = rng.choice(texts)[: rng.randrange(300)] if texts and rng.random() < 0.8 else []
        text = before + prompt(rng.randrange(10**6), rng.randrange(1, 150))
        if len(text) % page:
            texts.append(text)
    return [Request(text, rng.randrange(1, 6), namespace=rng.choice(("", "", "apart"))) for text in texts]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layers", list(LAYERS))
def test_no_page_that_prompts_share_is_computed_twice(layers: str, seed: int) -> None:
    """All are asked at once, in any order; they part inside of chunks, and at more places than there are rows."""
    rng = random.Random(seed)
    it = ThreeWay(attrs.evolve(SIZES["tiny"], layers=LAYERS[layers]), dtype="float64")
    names = ("full", "swa", "mamba")[: len(set(LAYERS[layers])) if layers != "a window" else 2]
    cache = cache_for(it, {name: 256 if name == "mamba" else 16384 for name in names})
    requests = branching(rng, 12, cache.composition.page)
    chunk, rows = rng.choice((64, 256, 512, 1024)), rng.choice((3, 12))
    _, engine = served(it, requests, cache, chunk=chunk, max_running=rows, overlap=seed % 2 == 0)
    assert engine.counts.prefilled == computed_once(requests, cache.composition.page)


def test_prompts_that_share_all_but_their_ends_go_through_two_steps() -> None:
    """The first computes what they share; the others wait for it, and go through one step together."""
    it = ThreeWay(attrs.evolve(SIZES["tiny"], layers=LAYERS["nothing but a path"]), dtype="float64")
    cache = cache_for(it, {"full": 4096})
    requests = [Request([*prompt(1, 224), *prompt(10 + i, 15)], 1) for i in range(16)]
    _, engine = served(it, requests, cache, chunk=64 + 240)
    assert (engine.counts.prefilled, engine.counts.waited) == (224 + 16 * 15, 15)
    assert engine.counts.steps == 2


def test_whole_prompts_go_through_one_step_while_nobody_decodes() -> None:
    """And as many tokens as a chunk has, where somebody does."""
    requests = [Request(prompt(i, 65), 40) for i in range(6)]
    with watched(Engine(model(), cache_for(model()), chunk=128, overlap=False)) as engine:
        first = [engine.add(each) for each in requests[:4]]
        engine.step()
        assert engine.counts.prefilled == 4 * 64  # up to the last boundary, where a state is kept
        engine.step()
        assert engine.counts.prefilled == 4 * 65 and all(len(each.tokens) == 1 for each in first)
        late = [engine.add(each) for each in requests[4:]]
        engine.step()
        assert engine.counts.prefilled == 4 * 65 + 64
        while not all(each.done for each in (*first, *late)):
            engine.step()
    assert [each.tokens for each in (*first, *late)] == plain(model(), requests)
