"""Prompts with images, in sessions and in the engine: exact, never another's image, and encoded only where needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from torch import Tensor

from prefixloom import InputError, TierManifest
from prefixloom_engine import Engine, Request
from prefixloom_engine.hf import load, session
from prefixloom_engine.hf.images import FAMILIES
from prefixloom_hicache import HostTier
from tests.support.hf_images import (
    CONFIGS,
    IMAGE,
    alone,
    answered,
    beside_ids,
    inputs_of,
    model_with_images,
    picture,
)
from tests.support.hf_models import Served, distance, prompt
from tests.support.sampling import sampled

pytestmark = pytest.mark.usefixtures("one_thread")
EACH = pytest.mark.parametrize("name", CONFIGS)
ROUNDING = 1e-10
OWN = dict.fromkeys(("glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), 1e-5)
OWN |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 1e-4)
"""Of models with a recurrence or rotary frequencies in float32, as in ``hf_models.OWN``."""


def text(seed: int, count: int) -> list[int]:
    return [3 + token % 80 for token in prompt(seed, count)]


def served_by(name: str, **options: Any) -> Served:
    return Served(name, model=model_with_images(name), **options)


def computed(served: Served, inputs: dict[str, Tensor], ready: int | None = None) -> float:
    """Run a prompt in a session from its hit on, and check the hit; how far the logits are from those without cache."""
    ids = inputs["input_ids"]
    with session(served.cache, served.hf, inputs) as s, torch.no_grad():
        if ready is not None:
            assert s.ready == ready
        start = s.cache.get_seq_length()
        found = served.model(ids[:, start:], past_key_values=s.cache).logits[0]
    return distance(found, alone(served.model, inputs)[start:])


@pytest.fixture(params=sampled(CONFIGS, 3))
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_every_family_is_tried_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


# ---------------------------------------------------------------- sessions


@EACH
def test_a_prompt_with_images_hits_and_is_exact(name: str) -> None:
    """The control is another image at the same token ids: it shares what stands before the image, and no more."""
    served, one, other = served_by(name), picture(name, 1), picture(name, 2)
    before, behind = text(1, 40), text(2, 60)
    inputs = inputs_of(name, before, one, behind)
    control = inputs_of(name, before, other, behind)
    assert torch.equal(inputs["input_ids"], control["input_ids"])
    moved = distance(alone(served.model, inputs)[-1], alone(served.model, control)[-1])
    error = computed(served, inputs, ready=0)
    last = (inputs["input_ids"].shape[1] - 1) // served.page * served.page
    error = max(error, computed(served, inputs, ready=last))
    error = max(error, computed(served, control, ready=0 if served.states else 32))
    error = max(error, computed(served, control, ready=last), computed(served, inputs, ready=last))
    assert error < OWN.get(name, ROUNDING) and moved > 100 * error
    served.cache.poll()
    served.settled()


@pytest.mark.parametrize("name", sampled(CONFIGS, 2, 1))
def test_a_conversation_with_images_is_answered_as_without_a_cache(name: str) -> None:
    """By ``generate``, with images again and with the ids alone, turn by turn, and other images between."""
    served = served_by(name)
    pieces: list[Any] = [text(1, 20), picture(name, 1), text(2, 30)]
    said = 0
    for turn in range(3):
        inputs = inputs_of(name, *pieces)
        expected = answered(served.model, inputs)
        answered(served.model, inputs_of(name, text(7, 9), picture(name, 9, 3, 2)))  # it leaves its positions behind
        with session(served.cache, served.hf, inputs) as s:
            assert s.ready >= said // served.page * served.page or served.states
            given = inputs if turn % 2 else {"input_ids": inputs["input_ids"]}
            assert answered(served.model, given, cache=s.cache) == expected
        said = inputs["input_ids"].shape[1]
        pieces += [expected, picture(name, 3 + turn, 3, 2), text(5 + turn, 25)]
    words = inputs_of(name, text(8, 50))
    with session(served.cache, served.hf, words) as s:
        assert answered(served.model, words, cache=s.cache) == answered(served.model, words)


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen3_vl"])
@pytest.mark.parametrize("chunk", [7, 20])
def test_passes_may_end_inside_an_image_unless_its_tokens_see_each_other(name: str, chunk: int) -> None:
    served = served_by(name)
    inputs = inputs_of(name, text(1, 20), picture(name, 1), picture(name, 2), text(2, 30), picture(name, 3))
    with session(served.cache, served.hf, inputs, chunk=chunk) as s:
        assert answered(served.model, inputs, cache=s.cache) == answered(served.model, inputs)
    assert computed(served, inputs) < OWN.get(name, ROUNDING)
    other = inputs_of(name, text(1, 20), picture(name, 1), text(3, 30))
    assert computed(served, other, ready=16 if name == "qwen3_vl" else 32) < OWN.get(name, ROUNDING)


def test_an_image_whose_tokens_see_each_other_is_computed_in_one_pass() -> None:
    served = served_by("gemma3")
    inputs = inputs_of("gemma3", text(1, 20), picture("gemma3", 1), text(2, 30))
    ids = inputs["input_ids"]
    with session(served.cache, served.hf, inputs) as s, torch.no_grad():
        with pytest.raises(InputError, match="inside an image"):
            served.model(ids[:, :30], past_key_values=s.cache)
        found = served.model(ids, past_key_values=s.cache).logits[0]
    assert distance(found, alone(served.model, inputs)) < ROUNDING


def test_neighbours_whose_tokens_see_each_other_depend_on_each_other() -> None:
    """Two images without a token between: what is kept of the first depends on the second, and so does its key."""
    served = Served("gemma3", model=model_with_images("gemma3", window=40))
    bare = {seed: ([IMAGE] * 16, picture("gemma3", seed)[1]) for seed in (1, 2, 3)}
    for second, ready in ((2, 0), (3, 16), (2, 80)):
        inputs = inputs_of("gemma3", text(1, 20), bare[1], bare[second], text(2, 30))
        assert computed(served, inputs, ready) < ROUNDING


def test_what_is_seen_at_once_must_fit_the_window() -> None:
    served, bare = served_by("gemma3"), ([IMAGE] * 16, picture("gemma3", 1)[1])
    with pytest.raises(InputError, match="32 tokens that see each other, and the model's window has 24"):
        session(served.cache, served.hf, inputs_of("gemma3", text(1, 20), bare, bare, text(2, 30)))


def test_an_image_is_encoded_once_and_not_where_it_hits(name: str) -> None:
    served, count = served_by(name), 0
    encode = served.model.base_model.get_image_features

    def counted(**given: Any) -> Any:
        nonlocal count
        count += 1
        return encode(**given)

    inputs = inputs_of(name, text(1, 20), picture(name, 1), text(2, 60))
    longer = inputs_of(name, text(1, 20), picture(name, 1), text(2, 60), picture(name, 2), text(3, 30))
    with patch.object(served.model.base_model, "get_image_features", counted):
        for given, expected in ((inputs, 1), (inputs, 1), (longer, 2)):
            with session(served.cache, served.hf, given, chunk=23) as s, torch.no_grad():
                served.model(given["input_ids"][:, s.cache.get_seq_length() :], past_key_values=s.cache)
            assert count == expected


@pytest.mark.parametrize("kept", ["tensor", "array", "negative"])
def test_pixels_that_change_after_they_were_given_change_nothing(kept: str) -> None:
    """What is encoded is what the key is made of, whatever the caller does with its tensors in between."""
    served = served_by("llava")
    inputs = inputs_of("llava", text(1, 20), picture("llava", 1), text(2, 30))
    mine = inputs["pixel_values"].clone()
    given: Any = mine.numpy() if kept == "array" else torch._neg_view(mine) if kept == "negative" else mine
    with Engine(served.hf, served.cache) as engine:
        asked = [engine.add(Request(inputs["input_ids"][0], 4, stops=(), inputs={"pixel_values": given}))]
        opened = session(served.cache, served.hf, {**inputs, "pixel_values": given}, namespace="session")
        mine.zero_()
        while not asked[0].done:
            engine.step()
    with opened as s, torch.no_grad():
        served.model(inputs["input_ids"], past_key_values=s.cache)
    if kept == "negative":
        assert computed(served, inputs, ready=16) < ROUNDING
        inputs["pixel_values"].neg_()
    assert computed(served, inputs, ready=64) < ROUNDING
    with session(served.cache, served.hf, inputs, namespace="session") as s, torch.no_grad():
        assert s.ready == 64
        found = served.model(inputs["input_ids"][:, 64:], past_key_values=s.cache).logits[0]
    assert distance(found, alone(served.model, inputs)[64:]) < ROUNDING


def test_passes_may_ask_for_features_in_any_order() -> None:
    """A request that was retracted begins again before images that it had passed."""
    served = served_by("llava")
    inputs = inputs_of("llava", *(picture("llava", seed) for seed in (1, 2, 3)))
    tokens = inputs["input_ids"][0].tolist()
    whole, parts = (served.hf.media(tokens, inputs) for _ in range(2))

    def features(images: Any, start: int, end: int) -> Tensor:
        found: Tensor = images.inputs(served.model, start, end)["mm_encoder_outputs"]["image"]["pooler_output"][0]
        return found

    expected = features(whole, 0, len(tokens))
    for start, end, rows in ((40, 54, slice(35, 48)), (20, 40, slice(17, 35)), (0, 5, slice(0, 4))):
        assert distance(features(parts, start, end), expected[rows]) < ROUNDING


def test_images_come_back_from_the_host(name: str) -> None:
    served = served_by(name, plugins=[HostTier(TierManifest(memory="8MiB", write="through"))])
    prompts = [inputs_of(name, text(1, 20), picture(name, seed), text(2, 60)) for seed in (1, 2)]
    last = (prompts[0]["input_ids"].shape[1] - 1) // served.page * served.page
    for ready in (None, last):
        for inputs in prompts:
            assert computed(served, inputs, ready) < OWN.get(name, ROUNDING)
            served.cache.poll()
        served.cache.evict(dict.fromkeys(served.components, 10_000))


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("name", sampled(CONFIGS, 2))
def test_the_engine_answers_prompts_with_images_as_generate_does(name: str) -> None:
    """Together: two images at the same ids, one conversation and its next turn, and text alone. Then all again."""
    model, served = model_with_images(name), served_by(name)
    one, other, third = picture(name, 1), picture(name, 2), picture(name, 3, 3, 2)
    prompts = [
        inputs_of(name, text(1, 40), one, text(2, 60)),
        inputs_of(name, text(1, 40), other, text(2, 60)),
        inputs_of(name, text(1, 40), one, text(2, 60), third, text(3, 40)),
        inputs_of(name, text(1, 40), text(4, 60)),
        inputs_of(name, third, text(4, 60), one),
    ]
    expected = [answered(model, inputs) for inputs in prompts]
    with Engine(served.hf, served.cache, chunk=48, max_running=3) as engine:
        for again in (False, True):
            asked = [Request(each["input_ids"][0], 6, stops=(), inputs=beside_ids(each)) for each in prompts]
            answers = engine.generate(asked)
            assert [answer.tokens for answer in answers] == expected
            assert not again or all(answer.hit for answer in answers)


def test_prompts_of_one_length_may_carry_different_images_in_one_step(name: str) -> None:
    served = served_by(name)
    prompts = [inputs_of(name, text(seed, 30), picture(name, seed), text(seed, 30)) for seed in (1, 2, 3)]
    with Engine(served.hf, served.cache, chunk=512) as engine:
        answers = engine.generate([Request(p["input_ids"][0], 4, stops=(), inputs=beside_ids(p)) for p in prompts])
        assert engine.counts.failed == 0
    assert [answer.tokens for answer in answers] == [answered(served.model, p, 4) for p in prompts]


def test_who_waits_for_another_image_is_not_taken_for_who_shares_it() -> None:
    """Two prompts of the same ids at once: neither waits for the other one's checkpoint behind the image."""
    name = "qwen3_5"
    served = served_by(name)
    prompts = [inputs_of(name, text(1, 70), picture(name, seed), text(2, 60)) for seed in (1, 2)]
    with Engine(served.hf, served.cache, chunk=512) as engine:
        answers = engine.generate([Request(p["input_ids"][0], 4, stops=(), inputs=beside_ids(p)) for p in prompts])
        assert [answer.hit for answer in answers] == [0, 64]
    assert [answer.tokens for answer in answers] == [answered(served.model, p, 4) for p in prompts]


@pytest.mark.parametrize("name", sampled(CONFIGS, 4))
def test_a_model_with_images_is_loaded_from_a_folder(name: str, tmp_path: Path) -> None:
    model, inputs = model_with_images(name), inputs_of(name, text(1, 20), picture(name, 1))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    if name.endswith("_moe"):
        loaded.model.set_experts_implementation("eager")  # the grouped one has no kernel for float64
    assert distance(alone(loaded.model, inputs), alone(model, inputs)) < OWN.get(name, ROUNDING)
    assert loaded.identity.weights == served_by(name).hf.identity.weights


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen3_vl", "qwen3_5"])
def test_an_image_token_in_an_answer_has_no_image(name: str) -> None:
    """A request that is retracted computes its answer anew, and with it a token that stands for no image."""
    served = Served(name, model=copy.deepcopy(model_with_images(name)))
    inputs = inputs_of(name, text(1, 20), picture(name, 1), text(2, 30))

    def prefer_image(model: Any, args: Any, output: Any) -> Any:
        output.logits[..., IMAGE] += 1e3
        return output

    served.model.register_forward_hook(prefer_image)
    with Engine(served.hf, served.cache, overlap=False) as engine:
        answer = engine.add(Request(inputs["input_ids"][0], 6, stops=(), inputs=beside_ids(inputs)))
        while len(answer.tokens) < 3:
            engine.step()
        for job in list(engine._scheduler.running):
            engine._scheduler.retract(job)
        served.cache.evict(dict.fromkeys(served.components, 10_000))
        while not answer.done:
            engine.step()
    assert answer.tokens == answered(served.model, inputs) == [IMAGE] * 6


def test_a_retracted_request_ends_when_the_encoder_changes() -> None:
    """It has features of its images, and these are of the old weights."""
    served = Served("llava", model=copy.deepcopy(model_with_images("llava")))
    inputs = inputs_of("llava", text(1, 20), picture("llava", 1), picture("llava", 2), text(2, 30))
    request = Request(inputs["input_ids"][0], 4, stops=(), inputs=beside_ids(inputs))
    with Engine(served.hf, served.cache, chunk=32, overlap=False) as engine:
        answer = engine.add(request)
        engine.step()
        for job in list(engine._scheduler.running):
            engine._scheduler.retract(job)
        with torch.no_grad():
            for weight in served.model.base_model.vision_tower.parameters():
                weight.mul_(1.5)
        while engine.step():
            pass
        assert answer.reason == "error" and "weights or adapters have changed" in str(answer.error)
        (again,) = engine.generate([request])
    assert again.hit == 0 and again.tokens == answered(served.model, inputs, 4)
    assert computed(served, inputs) < ROUNDING


# ---------------------------------------------------------------- refusals


def changed(inputs: dict[str, Tensor], **tensors: Any) -> dict[str, Any]:
    return {key: value for key, value in {**inputs, **tensors}.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("llava", {"pixel_values": torch.zeros(3, 3, 16, 16)}, "3 images cannot share 16 places"),
        ("llava", {"pixel_values": torch.zeros(0, 3, 16, 16)}, "0 images cannot share 16 places"),
        ("llava", {"input_ids": torch.tensor([text(1, 68)])}, "1 images cannot share 0 places"),
        ("llava", {"pixel_values": torch.zeros(16, 16)}, r"has 4 dimensions, and here is of shape \(16, 16\)"),
        ("llava", {"pixel_values": "pixels"}, "pixel_values must be a tensor, got 'pixels'"),
        ("llava", {"pixel_values": torch.zeros(1, 3, 16, 16, device="meta")}, "pixel_values must be a tensor"),
        ("llava", {"image_sizes": torch.ones(1, 2)}, "the prompt has image_sizes, and .* 'llava' takes pixel_values"),
        ("llava", {"attention_mask": torch.zeros(1, 4)}, "must be all ones"),
        ("llava", {"attention_mask": torch.ones(1, 1, 68, 68)}, "must be all ones, one for each token"),
        ("gemma3", {"pixel_values": None}, "has token_type_ids, and lacks pixel_values"),
        ("idefics3", {"pixel_values": torch.zeros(1, 2, 3, 16, 16)}, "a tile of the images is all zeros"),
        ("idefics3", {"pixel_values": torch.ones(2, 2, 3, 16, 16)}, r"different numbers of images: \[1, 2\]"),
        ("mistral3", {"image_sizes": torch.tensor([[16, 16]] * 2)}, r"different numbers of images: \[1, 2\]"),
        ("mistral3", {"image_sizes": torch.tensor([[-16, -16]])}, "image_sizes are the heights and widths"),
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 3, 4]])}, "multiples of 2"),
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, -2, -8]])}, "whole numbers from 1 up"),
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[4, 4]])}, "a time, a height and a width"),
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[1.0, 4.0, 4.0]])}, "whole numbers"),
        (
            "idefics3",
            {"pixel_attention_mask": torch.ones(1, 2, 8, 16)},
            r"mask is of \(8, 16\), and the tiles of \(16, 16\)",
        ),
        ("qwen2_vl", {"image_grid_thw": None}, "lacks image_grid_thw"),
        ("qwen2_vl", {"mm_token_type_ids": None}, "lacks mm_token_type_ids"),
        ("gemma3", {"token_type_ids": None}, "lacks token_type_ids"),
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 4, 2]])}, "tells of 8 patches, and pixel_values has 16"),
        ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 8, 2]])}, None),
        ("qwen2_vl", {"mm_token_type_ids": torch.ones(1, 9)}, "mm_token_type_ids must mark the image tokens"),
        ("qwen2_vl", {"pixel_values_videos": torch.ones(1, 9)}, "the prompt has pixel_values_videos"),
        ("mistral3", {"image_sizes": torch.tensor([[32, 32]])}, "has 4 places for images, and 1 images that take 16"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, wrong: dict[str, Any], words: str | None) -> None:
    served = served_by(name)
    inputs = changed(inputs_of(name, text(1, 20), picture(name, 1), text(2, 30)), **wrong)
    request = Request(inputs["input_ids"][0], 4, inputs=beside_ids(inputs))
    with Engine(served.hf, served.cache) as engine:
        if words is None:
            engine.add(request)
            return
        with pytest.raises(InputError, match=words):
            engine.add(request)
        with pytest.raises(InputError, match=words):
            session(served.cache, served.hf, inputs)
    assert served.cache.stats().opened == 0


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_images_with_positions_of_their_own_stand_apart(name: str) -> None:
    """Otherwise the model would take a run of image tokens for one image, and what is between for a part of it."""
    served, small, large = served_by(name), picture(name, 1)[1], picture(name, 2, 3, 4)[1]
    for runs in ((12, 4), (16, 0), (2, 14)):
        first, second = ([IMAGE] * run for run in runs)
        inputs = inputs_of(name, text(1, 20), (first, small), text(2, 9), (second, large), text(3, 30))
        with pytest.raises(InputError, match="the places of an image must stand together, and other tokens between"):
            session(served.cache, served.hf, inputs)
    inputs = inputs_of(name, text(1, 20), picture(name, 1), text(2, 30))
    inputs["mm_token_type_ids"][0, 3:7] = 2  # a video
    with pytest.raises(InputError, match="with 1, and all others with 0"):
        session(served.cache, served.hf, inputs)


def test_models_of_other_types_are_served_with_tokens_only() -> None:
    served = Served("llama")
    with pytest.raises(InputError, match=r"pixel_values, and a model of type 'llama' is served with tokens only"):
        session(served.cache, served.hf, {"input_ids": [5, 6], "pixel_values": torch.zeros(1)})
    inputs = {"attention_mask": torch.ones(1, 2), "token_type_ids": torch.zeros(1, 2)}
    with session(served.cache, served.hf, {"input_ids": [5, 6], **inputs}) as s, torch.no_grad():
        served.model(torch.tensor([[5, 6]]), past_key_values=s.cache)


def test_generate_cannot_be_given_other_images_than_its_session(name: str) -> None:
    served = served_by(name)
    mine, other = (inputs_of(name, text(1, 20), picture(name, seed), text(2, 30)) for seed in (1, 2))
    with session(served.cache, served.hf, mine) as s:
        with pytest.raises(InputError, match="other images than its session"):
            answered(served.model, other, cache=s.cache)
        with pytest.raises(InputError, match="other images than its session"), torch.no_grad():
            served.model(**other, past_key_values=s.cache)
        with pytest.raises(InputError, match="num_beams and num_return_sequences must be 1"):
            served.model.generate(**mine, past_key_values=s.cache, num_beams=2, max_new_tokens=2, pad_token_id=0)
        assert answered(served.model, mine, cache=s.cache) == answered(served.model, mine)
    with (
        session(served.cache, served.hf, mine["input_ids"]) as s,
        pytest.raises(InputError, match=r"known by token ids alone|the session's tokens"),
    ):
        answered(served.model, mine, cache=s.cache)


def test_an_engine_refuses_an_image_that_no_step_can_hold() -> None:
    served = served_by("gemma3", page_size=8)
    inputs = inputs_of("gemma3", text(1, 20), picture("gemma3", 1))
    with Engine(served.hf, served.cache, chunk=8) as engine, pytest.raises(InputError, match="chunk=16 or more"):
        engine.add(Request(inputs["input_ids"][0], 4, inputs=beside_ids(inputs)))


def test_only_the_request_with_a_bad_image_ends() -> None:
    name = "llava"
    served = served_by(name)
    good = inputs_of(name, text(1, 20), picture(name, 1), text(2, 30))
    bad = changed(good, pixel_values=torch.full_like(good["pixel_values"], torch.nan))
    small = changed(good, pixel_values=good["pixel_values"][..., :8])
    with Engine(served.hf, served.cache) as engine:
        answers = engine.generate(
            [Request(p["input_ids"][0], 4, stops=(), inputs=beside_ids(p)) for p in (bad, good, small)]
        )
    assert [answer.reason for answer in answers] == ["error", "length", "error"]
    assert answers[1].tokens == answered(served.model, good, 4)


@pytest.mark.parametrize("inputs", [[1], "pixels", 5, {5: 5}])
def test_a_request_with_inputs_of_no_names_is_not_made(inputs: Any) -> None:
    with pytest.raises(InputError, match="by name"):
        Request([1, 2], 4, inputs=inputs)


def test_images_are_not_handed_over() -> None:
    with pytest.raises(InputError, match="carries pixel_values beside its tokens, and asks for a handover"):
        Request([1, 2], 1, inputs={"pixel_values": torch.zeros(1)}, hand_over=0)
