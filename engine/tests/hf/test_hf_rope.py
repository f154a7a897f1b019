"""Rotary embeddings that depend on the length: what was computed in one regime is never found in another."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefixloom import InputError, compose
from prefixloom_engine import Engine, Request
from prefixloom_engine.hf import HFModel, session
from tests.support.engines import nothing_left
from tests.support.hf_models import COMMON, ROUNDING, prompt

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = 64
PARTS = {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 11.0], "original_max_position_embeddings": LIMIT}
KINDS: dict[str, Any] = {
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, **PARTS},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "default": {"rope_type": "default", "rope_theta": 10000.0},
}
LONGEST = {"longrope": 4 * LIMIT, "dynamic": LIMIT + 1, "default": 4 * LIMIT}
"""``max_position_embeddings`` of each kind, so that its first regime ends at 64 tokens."""


def made(kind: str, model_type: str = "llama") -> Any:
    torch.manual_seed(0)
    sizes = {**COMMON, "max_position_embeddings": LONGEST[kind], "rope_parameters": copy.deepcopy(KINDS[kind])}
    if model_type != "llama":
        sizes["original_max_position_embeddings"] = LIMIT
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model.eval()


def logits(model: Any, tokens: list[int], cache: Any = None, start: int = 0) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([tokens[start:]]), past_key_values=cache).logits[0, -1]
    return out


def resumed(model: Any, cache: Any, tokens: list[int], chunk: int | None = None) -> tuple[int, torch.Tensor]:
    with session(cache, model, tokens, chunk=chunk) as s:
        return s.ready, logits(model, tokens, s.cache, s.cache.get_seq_length())


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("lengths", [(60, 90), (90, 60), (90, 60, 100, 62)])
def test_each_regime_of_longrope_finds_its_own(lengths: tuple[int, ...], chunk: int | None) -> None:
    model = made("longrope")
    cache = compose(HFModel(model).config, capacity={"full": 512}, debug=True)
    tokens = prompt(1, 120)
    longest = {False: 0, True: 0}
    for length in lengths:
        expected = logits(model, tokens[:length])
        ready, found = resumed(model, cache, tokens[:length], chunk)
        long = length > LIMIT
        assert ready == min(longest[long], length - 1) // 16 * 16
        assert (found - expected).abs().max() < ROUNDING
        longest[long] = max(longest[long], length)
    nothing_left(cache)


def test_the_regimes_of_longrope_differ() -> None:
    model, tokens = made("longrope"), prompt(1, 90)
    with torch.no_grad():
        short = model(torch.tensor([tokens[:60]]), output_hidden_states=True).hidden_states[-1]
        long = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][:, :60]
    assert (short - long).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_sequence_that_grows_out_of_its_regime_is_refused(kind: str) -> None:
    model = made(kind)
    cache = compose(HFModel(model).config, capacity={"full": 512}, debug=True)
    tokens = prompt(2, 70)
    with session(cache, model, tokens[:60]) as s:
        logits(model, tokens[:60], s.cache)
        with pytest.raises(InputError, match="grows past 64 tokens"):
            logits(model, tokens, s.cache, 60)
    expected = logits(model, tokens[:62])
    assert (resumed(model, cache, tokens[:62])[1] - expected).abs().max() < ROUNDING
    nothing_left(cache)


def test_a_long_prompt_in_short_passes_is_refused() -> None:
    model = made("longrope")
    cache = compose(HFModel(model).config, capacity={"full": 512}, debug=True)
    told = pytest.raises(InputError, match="must end past 64 tokens, and this one ends at 30")
    with session(cache, model, prompt(3, 90)) as s, told:
        logits(model, prompt(3, 90)[:30], s.cache)


def test_a_prompt_that_is_too_long_for_dynamic_frequencies_is_refused() -> None:
    model = made("dynamic")
    cache = compose(HFModel(model).config, capacity={"full": 512}, debug=True)
    with pytest.raises(InputError, match=r"a prompt of 65 tokens cannot be served: past 64 tokens.*\('dynamic'\)"):
        session(cache, model, prompt(4, 65))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_an_engine_serves_the_first_regime_and_refuses_the_other(kind: str) -> None:
    model = made(kind)
    cache = compose(HFModel(model).config, capacity={"full": 512}, debug=True)
    with Engine(HFModel(model), cache) as engine:
        short = Request(prompt(5, 40), 10, stops=())
        expected = model.generate(
            torch.tensor([short.tokens]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        (answer,) = engine.generate([short])
        assert [*short.tokens, *answer.tokens] == expected
        for tokens, count in ((80, 4), (60, 40)):
            with pytest.raises(InputError, match="grows past 64 tokens"):
                engine.add(Request(prompt(6, tokens), count, stops=()))
    nothing_left(cache)


@pytest.mark.parametrize("kind", ["longrope", "default"])
@pytest.mark.parametrize("length", [LIMIT - 3, LIMIT, LIMIT + 1, 2 * LIMIT - 1])
def test_phi_keeps_what_it_computes_past_its_original_length(kind: str, length: int) -> None:
    """Its own code gives up a cache there, and goes on without the session; this is right if the frequencies change."""
    model = made(kind, "phi3")
    cache = compose(HFModel(model).config, capacity={"full": 512}, debug=True)
    ids, hits = torch.tensor([prompt(7, length)]), []

    def generated(past: Any = None) -> torch.Tensor:
        out: torch.Tensor = model.generate(
            ids, past_key_values=past, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return out

    for _ in range(3):
        expected = generated()
        with session(cache, model, ids) as s:
            assert torch.equal(generated(s.cache), expected)
        hits.append(s.ready)
        ids = torch.cat([expected, torch.tensor([[5]])], dim=1)
    first = 0 if kind == "longrope" and length <= LIMIT else (length + 8) // 16 * 16
    assert hits == [0, first, (length + 18) // 16 * 16]
    nothing_left(cache)
