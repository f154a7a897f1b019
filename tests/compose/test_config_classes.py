"""Config classes: what a published config leaves out is taken from transformers, where it is installed, and said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixloom import CompositionError, compose
from prefixloom.compose.model_config import read_facts
from tests.support.sampling import slow

pytestmark = [
    pytest.mark.usefixtures("config_of"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of its defaults
]


@pytest.fixture(scope="module")
def config_of() -> Callable[[str], Any]:
    """A maker of a config with all defaults of its class. transformers takes seconds: no collection imports it."""
    pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return lambda model_type: CONFIG_MAPPING[model_type]()


GEMMA3: Mapping[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
"""What Gemma 3 4B was published with."""
BERT: Mapping[str, Any] = {
    "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "dtype": "float32",
}  # fmt: skip


def told(source: Any) -> Any:
    """What is read of a config, without what is assumed and what nobody reads; or the reason for its refusal."""
    try:
        facts = read_facts(source)
    except CompositionError as error:
        return str(error).partition("(")[0].partition("' ")[2]
    widths = [facts.widths(layer) for layer in facts.layers if "attention" in layer.kind and "linear" not in layer.kind]
    return facts.layers, widths


APART = ("lfm2_moe", "moshi", "musicgen", "musicgen_melody", "xlnet")
"""Types that are refused where the loaded model has not listed its layers."""
QUICK = ("gemma", "gemma3_text", "gpt_neox", "bert", "mimo_v2_flash", "mllama", "jamba", "git", "xlnet")


def others() -> list[str]:
    from tests.support.hf_tiny import MODEL_TYPES

    return [each for each in MODEL_TYPES if each not in QUICK and each != "gemma4_assistant"]  # which takes no defaults


@pytest.mark.parametrize("types", [lambda: QUICK, slow(others)], ids=["some", "others"])
def test_a_config_that_leaves_out_all_defaults_says_what_the_config_object_says(
    types: Callable[[], Sequence[str]], config_of: Callable[[str], Any]
) -> None:
    from prefixloom_engine.hf.layers import list_layers

    for model_type in types():
        short = {"model_type": model_type, "dtype": "float32"}
        text = config_of(model_type).get_text_config(decoder=True)
        text.dtype = "float32"
        if hasattr(text, "num_hidden_layers"):  # one config of several models has none
            list_layers(text)
        if model_type in APART:
            assert isinstance(told(short), str), model_type
        else:
            assert told(short) == told(text), model_type


def test_the_published_config_of_gemma_3_is_composed_and_what_was_taken_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    cache = compose(tmp_path, capacity=2048, device="meta")
    parts = {part.name: part.manifest.buffers for part in cache.composition.parts}
    assert {name: buffers[0].shape for name, buffers in parts.items()} == {"swa": (4, 256), "full": (4, 256)}
    assert len(parts["full"][0].layers) == 34 // 6
    taken = "'gemma3_text' leaves out num_attention_heads=8, num_key_value_heads=4, head_dim=256: these are"
    assert taken in cache.composition.warnings[0]
    assert taken in caplog.text
    larger = {**GEMMA3["text_config"], "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8}
    assert read_facts({**GEMMA3, "text_config": larger}).head_dim == 256, "and not 240, the quotient"


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert", "eurobert", "distilbert", "xlm"])
@pytest.mark.parametrize("listed", [{}, {"layer_types": ["full_attention"] * 2}])
def test_a_type_that_fills_in_masked_tokens_is_refused(model_type: str, listed: Mapping[str, Any]) -> None:
    for config in ({**BERT, **listed, "model_type": model_type}, {"text_config": BERT, "model_type": model_type}):
        with pytest.raises(CompositionError, match=r"later tokens too \(an encoder, without is_decoder=True"):
            read_facts(config)
    assert len(read_facts({**BERT, **listed, "is_decoder": True}).layers) == 2


def test_what_a_class_makes_of_a_config_is_refused_like_what_the_config_says() -> None:
    with pytest.raises(CompositionError, match=r"attends to later tokens too \(use_bidirectional_attention"):
        read_facts({"model_type": "paligemma", "text_config": {"model_type": "gemma", "num_hidden_layers": 2}})
    with pytest.raises(CompositionError, match=r"another input than its tokens \(cross-attention"):
        read_facts({"model_type": "mllama"})


@pytest.mark.parametrize("model_type", ["mamba", "falcon", "jamba", "bamba"])
def test_what_a_class_computes_itself_may_stand_in_the_config(model_type: str, config_of: Callable[[str], Any]) -> None:
    config = config_of(model_type)
    config.dtype = "float32"
    whole = read_facts(config)
    assert whole.raw["layer_types" if hasattr(config, "layer_types") else "head_dim"]
    assert (read_facts(dict(whole.raw)), whole.warnings) == (whole, ())


def test_a_config_that_its_class_does_not_take_is_read_as_it_stands_and_that_is_said() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    facts = read_facts({**config, "dtype": "torch.float16", "vocab_size": "many"})
    assert (facts.head_dim, facts.num_key_value_heads) == (16, 4)
    assert "'llama': transformers does not take it, so its defaults are not known here: " in facts.warnings[0]
    assert "vocab_size" in facts.warnings[0]


def test_a_transformers_that_lacks_a_table_of_types_is_taken_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones do. What is composed without transformers is composed beside them as well."""
    monkeypatch.delattr("transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert "leaves out head_dim: 16 is taken" in read_facts(config).warnings[1]
