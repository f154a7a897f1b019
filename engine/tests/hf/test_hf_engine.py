"""The engine serves transformers' models: the tokens that plain greedy decoding gives, whatever it does meanwhile."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefixloom import InputError, compose
from prefixloom_engine import Answer, Engine, Request
from prefixloom_engine.contract.model import Span
from prefixloom_engine.hf import HFModel
from prefixloom_engine.hf.runner import joined
from tests.random.kl import Traffic
from tests.support.hf_models import MATRIX, Served, model_of, own_cache, prompt
from tests.support.sampling import sampled, slow

EACH = pytest.mark.parametrize("name", MATRIX)
pytestmark = pytest.mark.usefixtures("one_thread")
SYSTEM = 100


@pytest.mark.parametrize(("further", "passes"), [(0, [[1, 0]]), (8192, [[1, 0]]), (200_000, [[1], [0]])])
def test_rows_go_through_one_pass_where_what_is_padded_costs_less(further: int, passes: list[list[int]]) -> None:
    """A row of the one is as long as the longest of the pass, so rows that stand far apart go apart."""
    for near, far in (((0, 1), (further, further + 2)), ((further, further + 1), (0, 2))):
        assert joined([[0], [1]], [Span(*near), Span(*far)]) == passes
    further = 80_000  # what a group is padded by costs nothing more
    assert joined([[0, 1], [2]], [Span(0, 1), Span(further, further + 1), Span(further, further + 2)]) == [[2, 0, 1]]


@functools.cache
def plain(name: str, tokens: tuple[int, ...], count: int) -> list[int]:
    """Greedy decoding with transformers' own cache, one request at a time."""
    model, past, fed, out = model_of(name), own_cache(model_of(name)), list(tokens), []
    with torch.no_grad():
        for _ in range(count):
            at = len(tokens) + len(out) - len(fed)
            more = {} if name == "mamba2" else {"position_ids": torch.arange(at, at + len(fed))[None]}
            cache = {"cache_params" if name == "mamba2" else "past_key_values": past}
            logits = model(torch.tensor([fed]), use_cache=True, **cache, **more).logits[0, -1]
            fed = [int(logits.argmax())]
            out += fed
    return out


def requests(count: int, **more: Any) -> list[Request]:
    """Of which every second has the same beginning."""
    rng = random.Random(3)
    return [
        Request(
            prompt(99, SYSTEM) * (seed % 2) + prompt(seed, rng.randrange(5, 60)), rng.randrange(2, 24), stops=(), **more
        )
        for seed in range(count)
    ]


class Knowing:
    """Guesses what plain decoding says, and every now and then the first, second or third token wrong."""

    def __init__(self, name: str, asked: list[Request]) -> None:
        self.texts = [[*each.tokens, *plain(name, tuple(each.tokens), each.max_tokens)] for each in asked]

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        known = list(tokens)
        (text,) = (text for text in self.texts if text[: len(known)] == known)
        out = text[len(known) : len(known) + most]
        wrong = len(known) % 4
        if wrong < len(out):
            out[wrong] = (out[wrong] + 1) % 97
        return out


def check(name: str, answers: list[Answer], served: Served) -> None:
    for answer in answers:
        assert answer.error is None
        asked = answer.request
        assert answer.tokens == plain(name, tuple(asked.tokens), asked.max_tokens)
    served.cache.poll()
    served.settled()


@EACH
@pytest.mark.parametrize("overlap", [True, slow(False)], ids=["ahead", "not ahead"])
def test_answers_are_those_of_plain_decoding(name: str, overlap: bool) -> None:
    served = Served(name, capacity=320, max_running=5)
    with Engine(served.hf, served.cache, overlap=overlap, chunk=128, max_running=5) as engine:
        answers = engine.generate(requests(10))
    check(name, answers, served)
    told = served.cache.stats()
    assert told.hit_tokens > 0
    assert any(figures.evicted for figures in told.components.values())


@pytest.mark.parametrize("name", sampled(MATRIX, 2, 1))
def test_guesses_change_no_token(name: str) -> None:
    """Recurrent models too: the state after each guessed token is kept, and the one behind the last right one taken."""
    served, asked = Served(name, max_rewind=3, capacity=1600, max_running=5), requests(6)
    with Engine(served.hf, served.cache, speculate=3, max_running=4, guesser=Knowing(name, asked)) as engine:
        answers = engine.generate(asked)
        counts = engine.counts
    check(name, answers, served)
    assert counts.drafted > counts.accepted > 0.3 * counts.drafted


@pytest.mark.parametrize("name", sampled(MATRIX, 3))
def test_mixed_traffic_in_float32_says_what_a_run_without_a_cache_says(name: str) -> None:
    """A part of ``python -m tests.random.kl``."""
    told = Traffic(name).run(24)
    assert told.sound(), told
    assert told.agreed == told.tokens
    assert told.hit > told.asked // 3
    assert min(told.evicted, told.aborted) > 0


def test_the_next_turn_hits_at_its_full_length_rounded_to_the_grid() -> None:
    served, tokens = Served("qwen3_5_text"), prompt(1, 100)
    with Engine(HFModel(model_of("qwen3_5_text")), served.cache) as engine:
        for count in (40, 90):
            (answer,) = engine.generate([Request(tokens, count, stops=())])
            tokens = [*tokens, *answer.tokens]
            assert served.cache.peek([*tokens, 5], leave=1) == (len(tokens) - 1) // 64 * 64
            tokens += prompt(count, 20)


def test_the_models_own_stops_end_an_answer() -> None:
    served, tokens = Served("llama"), prompt(1, 30)
    expected = plain("llama", tuple(tokens), 12)
    served.model.generation_config.eos_token_id = expected[4]
    try:
        with Engine(served.hf, served.cache) as engine:
            (answer,) = engine.generate([Request(tokens, 12)])
    finally:
        served.model.generation_config.eos_token_id = 2
    assert (answer.tokens, answer.reason) == (expected[: expected.index(expected[4]) + 1], "stop")


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_prompt_beyond_the_learned_positions_is_refused_when_it_is_added(kind: str) -> None:
    config = AutoConfig.for_model(
        kind, n_positions=64, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=97, ffn_dim=48, word_embed_proj_dim=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = HFModel(AutoModelForCausalLM.from_config(config).eval())
    with Engine(model, compose(model.config, capacity=512)) as engine:
        (answer,) = engine.generate([Request(prompt(1, 50), 15, stops=())])
        assert (answer.reason, len(answer.tokens)) == ("length", 15)
        with pytest.raises(
            InputError, match=r"may come to 65 tokens, which the model refuses: .* learned 64 positions"
        ):
            engine.add(Request(prompt(1, 50), 16, stops=()))
        assert not engine.step()
