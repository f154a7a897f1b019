"""Models that cannot be served, by name and reason; and folders that hold no model, or half of one."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from prefixloom import CompositionError, compose
from prefixloom_engine.hf import HFModel, load, session
from prefixloom_engine.hf.refusals import OUTSIDE, REFUSED, refuse
from prefixloom_engine.hf.runner import scans_from_zero
from tests.support.hf_images import model_with_images
from tests.support.hf_models import COMMON, config_of, distance, model_of, prompt
from tests.support.hf_tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
WRONG = 1e-3
"""How far from right at least; measured: 2.3e-3 and more, where what is right is within 1.5e-7."""
STEPS: dict[str, dict[str, Any]] = {
    "zamba2": {
        "time_step_min": 2.0, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_headdim": 16,
        "mamba_ngroups": 1, "chunk_size": 16, "mamba_d_state": 8,
    },
    "nemotron_h": {"time_step_min": 2.0, "layers_block_type": ["mamba", "attention"] * 2},
    "mamba2": {"time_step_limit": (2.0, math.inf)},
}  # fmt: skip
"""Time steps that the clamp does move."""


@functools.cache
def tiny(name: str) -> Any:
    if name != "zamba2":  # its sizes depend on each other, so that a shrunk default is none
        return tiny_model(name, **STEPS.get(name, {}))
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **STEPS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model


def test_every_refusal_names_the_model_the_reason_and_what_to_do() -> None:
    for model_type, reason in REFUSED.items():
        config = config_of("llama")
        config.model_type = model_type
        with pytest.raises(CompositionError) as told:
            refuse(config)
        assert str(told.value).startswith(f"model type {model_type!r} cannot be served: {reason}")
        assert "Use another architecture" in str(told.value)


TELLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "config": ("llama", lambda model: setattr(model.config, "is_causal", False)),
    "config of another type": ("qwen2", lambda model: setattr(model.config, "is_causal", False)),
    "config of a part": ("llava", lambda model: setattr(model.config.text_config, "is_causal", False)),
    "config alone": ("gemma3_text", lambda model: setattr(model.config, "use_bidirectional_attention", True)),
    "attention": ("qwen3", lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False)),
}


@pytest.mark.parametrize("name", TELLS)
def test_attention_to_later_tokens_is_refused_wherever_it_is_said_and_whenever(name: str) -> None:
    """Though the model was known before, and in the midst of a session."""
    model_type, say = TELLS[name]
    model = copy.deepcopy(model_with_images("llava") if model_type == "llava" else tiny_model(model_type))
    served, ids = HFModel(model), torch.tensor([prompt(1, 40)])
    cache = compose(served.config, memory="4MiB")
    told = r"attends to later tokens too \(is_causal, use_bidirectional_attention\).*Use a causal model"
    right = model(ids).logits
    with session(cache, model, ids) as opened, torch.no_grad():
        model(ids[:, :20], past_key_values=opened.cache)
        if name == "attention":
            say(model)
            with pytest.raises(CompositionError, match=told):
                model(ids[:, 20:], past_key_values=opened.cache)
    say(model)
    assert name in ("attention", "config alone") or not torch.equal(model(ids).logits[:, :20], right[:, :20])
    for ask in (
        lambda: session(cache, served, ids).__enter__(),
        lambda: session(cache, model, ids),
        lambda: HFModel(model),
    ):
        with pytest.raises(CompositionError, match=told):
            ask()


def split(name: str, cuts: tuple[int, ...]) -> float:
    """How far a prompt in passes is from the same in one, with transformers' own cache and nothing of ours."""
    model = tiny(name)
    takes = inspect.signature(model.forward).parameters
    key = "past_key_values" if "past_key_values" in takes else "cache_params"
    past, start, rows = DynamicCache(config=model.config), 0, []
    with torch.no_grad():
        ids = torch.tensor([prompt(1, cuts[-1])])
        for cut in cuts:
            rows.append(model(ids[:, start:cut], use_cache=True, **{key: past}).logits)
            start = cut
        return distance(torch.cat(rows, dim=1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba", "zamba"])
def test_what_goes_on_token_by_token_starts_from_zero_with_several_in_transformers(name: str) -> None:
    """If this fails, transformers has mended it: take ``scans_from_zero`` away."""
    assert scans_from_zero(tiny(name))
    assert split(name, (20, 40)) > WRONG
    assert split(name, (20, *range(21, 41))) < 1e-6  # and nothing else is wrong there


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h", "mamba2"])
def test_what_is_refused_for_not_clamping_does_not_in_transformers(name: str) -> None:
    assert split(name, (32, *range(33, 41))) > WRONG
    assert split(name, (20, 40)) < 1e-6


def test_a_time_step_that_has_limits_is_refused_whatever_the_architecture() -> None:
    with pytest.raises(CompositionError, match=r"'mamba2' cannot be served with time steps from 2.0 to inf: "):
        HFModel(tiny("mamba2"))
    model = AutoModelForCausalLM.from_config(config_of("bamba")).eval()
    assert HFModel(model)
    model.model.layers[0].mamba.time_step_limit = (0.0, 0.1)
    with pytest.raises(CompositionError, match=r"'bamba' cannot be served with time steps from 0.0 to 0.1"):
        HFModel(model)


def test_what_is_refused_for_a_state_outside_of_the_cache_keeps_it_there() -> None:
    """What another prompt left is gone on from, in the one; the other takes no cache at all."""
    model, one, two = tiny("recurrent_gemma"), torch.tensor([prompt(1, 20)]), torch.tensor([prompt(2, 20)])
    with torch.no_grad():
        found = []
        for between in (False, True):
            past = DynamicCache(config=model.config)
            model(one, past_key_values=past, use_cache=True)
            if between:
                model(two, past_key_values=DynamicCache(config=model.config), use_cache=True)
            at = torch.tensor([[20]])
            found.append(model(one[:, :1], past_key_values=past, use_cache=True, position_ids=at).logits)
    assert distance(*found) > WRONG
    assert not {"past_key_values", "cache_params"} & set(inspect.signature(tiny("rwkv").forward).parameters)
    assert [name for name in REFUSED if REFUSED[name] == OUTSIDE] == ["recurrent_gemma", "rwkv"]


def test_a_loaded_model_is_refused_as_its_config_is() -> None:
    with pytest.raises(CompositionError, match="'recurrent_gemma' cannot be served"):
        HFModel(tiny("recurrent_gemma"))


def test_recurrences_with_one_decay_for_each_head_go_on_with_several_tokens() -> None:
    assert not any(scans_from_zero(model_of(name)) for name in ("llama", "mamba2", "qwen3_5_text", "kimi_linear"))


# ---------------------------------------------------------------- wrappers


class PeftModel(torch.nn.Module):
    """As PEFT's: it answers for the model inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config

    def get_base_model(self) -> Any:
        return self.base_model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def test_a_wrapper_is_refused_and_told_what_to_pass_in_its_place() -> None:
    model = model_of("llama")
    with pytest.raises(
        CompositionError, match=r"got OptimizedModule, .*torch.compile.*pass the model that was compiled"
    ):
        HFModel(torch.compile(model, backend="eager"))
    with pytest.raises(CompositionError, match=r"got PeftModel, .*pass model.merge_and_unload\(\)"):
        HFModel(PeftModel(model))
    with pytest.raises(CompositionError, match=r"got DataParallel, .*pass the model inside"):
        HFModel(torch.nn.DataParallel(model))


# ---------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model_of("llama").save_pretrained(folder)
    return folder


def test_a_model_from_a_folder_is_the_one_that_was_saved(saved: Path) -> None:
    ids = torch.tensor([prompt(1, 20)])
    loaded = load(saved)
    assert loaded.model.dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model_of("llama")(ids).logits)
    assert load(str(saved), dtype="float32").model.dtype == torch.float32


def config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: void(folder.joinpath(name).write_bytes(data))


def void(_: object) -> None:
    """A value that nobody wants."""


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: folder.joinpath("config.json").unlink(), "has no config.json: it is not the folder"),
    "no JSON": (write("config.json", b"{"), "has a config.json that cannot be read: Expecting property name"),
    "no text": (write("config.json", b"\xff\xfe\x00"), "has a config.json that cannot be read: 'utf-8' codec"),
    "no object": (write("config.json", b"[]"), "has a config.json without a model_type"),
    "no type": (config(model_type=""), "has a config.json without a model_type"),
    "unknown type": (config(model_type="zorp"), "is of model type 'zorp', .* does not recognize this architecture"),
    "its own code": (config(model_type="zorp", auto_map={"AutoConfig": "x.Y"}), "contains custom code"),
    "refused": (config(model_type="rwkv"), "'rwkv' cannot be served: transformers keeps its state outside"),
    "encoder-decoder": (config(model_type="t5"), "'t5' is an encoder-decoder model"),
    "no language": (config(model_type="vit"), "cannot be loaded: Unrecognized configuration class .*ViTConfig"),
    "wrong number": (config(num_attention_heads="x"), "cannot read its config: .*num_attention_heads.*int, got str"),
    "no weights": (lambda folder: folder.joinpath("model.safetensors").unlink(), "no file named model.safetensors"),
    "half of a file": (cut, "cannot be loaded: .*deserializing header"),
    "no such file": (write("model.safetensors", b"hello"), "cannot be loaded: .*deserializing header"),
    "more layers": (config(num_hidden_layers=6), r"lacks weights: model.layers.4.*, .* and 15 more. Download or save"),
    "other widths": (config(intermediate_size=64), "has weights of other shapes: model.layers.0.mlp.down_proj.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_told_in_a_sentence(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    change, told = BROKEN[name]
    change(folder)
    with pytest.raises(CompositionError, match=told) as found:
        load(folder)
    text = str(found.value)
    assert "\n" not in text and len(text) < 600
    assert name in ("refused", "encoder-decoder") or str(folder) in text


def test_a_folder_that_is_not_there_a_dtype_and_a_device_that_are_none(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CompositionError, match="is not there: nothing is downloaded"):
        load(tmp_path / "nowhere")
    with pytest.raises(CompositionError, match="is not there: nothing is downloaded"):
        load("somebody/some-model")
    with pytest.raises(CompositionError, match=r"config\.json' is a file: pass the folder"):
        load(saved / "config.json")
    with pytest.raises(CompositionError, match="dtype='floaty' is none of torch's"):
        load(saved, dtype="floaty")
    with pytest.raises(CompositionError, match="cannot be put on device 'nowhere'"):
        load(saved, device="nowhere")
