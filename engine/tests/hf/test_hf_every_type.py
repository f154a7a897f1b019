"""Every causal model type of the installed transformers is exact over a composed cache, or refused with a sentence."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import transformers

from prefixloom import CompositionError
from tests.support.hf_outcome import SINGLE, Outcome, grouped, measured, outcome_of
from tests.support.hf_table import PAGE, told, verdict, written
from tests.support.hf_tiny import MODEL_TYPES, tiny_model
from tests.support.sampling import only

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of configs that are tiny
]
QUICK = ("dots3_note_text", "gpt_neo", "hy_v4", "jetmoe", "longcat_flash", "mimo_v2_flash", "qwen4_exp_text", "zaya")
QUICK += ("mamba", "falcon_mamba", "jamba", "zamba")  # whose selective scans go on from a hit token by token
"""Model types whose composition, or whose way of using the cache, is like that of no other."""
GROUPED = (
    "git",
    "moss_transcribe_diarize",
    "gpt_neox_japanese",
    "bloom",
    "mamba",
    "gemma3_text",
    "qwen3_5_text",
    "opt",
)
"""Model types whose code takes padding, or a mask, as that of no other."""


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_type_is_exact_or_refused_as_the_page_says(model_type: str) -> None:
    found = verdict(model_type)
    version, rows = written(PAGE)
    if version == transformers.__version__ and not found.startswith("not tried"):
        assert found == rows[model_type]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model_type", QUICK)
def test_what_is_composed_from_a_config_is_what_the_modules_write(model_type: str) -> None:
    assert told(outcome_of(model_type)).startswith("exact")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model_type", only(MODEL_TYPES, *GROUPED))
def test_rows_of_other_lengths_and_counts_are_exact_in_the_groups_in_which_they_are_computed(model_type: str) -> None:
    try:
        error, _ = grouped(tiny_model(model_type))
    except (CompositionError, ImportError, AttributeError, ValueError) as why:
        pytest.skip(f"no such model is served: {why}")
    assert error < SINGLE


@pytest.mark.parametrize(("model_type", "passes"), [("llama", 3), ("bloom", 3), ("lfm3", 8), ("git", 15)])
def test_rows_of_other_counts_go_through_one_pass_where_padding_changes_nothing(model_type: str, passes: int) -> None:
    assert grouped(tiny_model(model_type))[1] == passes


ENCODERS = ("bert", "big_bird", "megatron-bert", "rembert", "roformer")
POSITIONED = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xmod")


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_that_was_trained_as_a_decoder_is_served(model_type: str) -> None:
    assert told(outcome_of(model_type, is_decoder=True)).startswith("exact")


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        *((each, {}, "is an encoder with is_decoder=False") for each in ENCODERS),
        *((each, {"is_decoder": True}, "counts its positions from behind the pad token") for each in POSITIONED),
        ("bart", {}, "is an encoder-decoder model"),
        ("blt", {}, "is made of parts with caches of their own"),
        ("cpmant", {}, "its code computes tokens of its own before those that it is given"),
        ("deepseek_v4", {}, "'heavily_compressed_attention'"),
        ("gemma4_assistant", {}, "all its layers read what the model that it assists keeps"),
        ("inkling_text", {}, "keeps 4 convolution states in one layer"),
        ("mllama", {}, "has attention to another input than its tokens"),
        ("moshi", {}, "has a window that transformers' cache keeps to and transformers' attention does not"),
        ("openai-gpt", {}, "takes none of past_key_values, cache_params"),
        ("xlm", {}, "takes none of past_key_values, cache_params"),
        ("xlstm", {}, "takes a cache of a class of its own, xLSTMCache"),
    ],
)
def test_a_model_type_is_refused_for_its_own_reason(model_type: str, options: dict[str, bool], reason: str) -> None:
    assert reason in outcome_of(model_type, **options).refused


def test_an_outcome_that_is_wrong_is_neither_exact_nor_told() -> None:
    wrong = [
        Outcome(error=1e-3, moved={"full": 0.1}),
        Outcome(error=0.0, moved={"full": 0.0}),
        Outcome(error=0.0, moved={"full": 0.1}, unwritten=("full.k of layer 0",)),
        Outcome(error=0.0, moved={"full": 0.1}, same_tokens=False),
    ]
    for found in wrong:
        with pytest.raises(AssertionError, match="neither exact nor refused"):
            told(found)
    assert told(Outcome(error=0.0, moved={"full": 0.1})) == "exact"


def test_the_measurement_sees_a_model_whose_code_forgets() -> None:
    """A control: half of what a layer remembers is lost on the way into its attention."""
    model = tiny_model("llama")
    model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, args, out: out * (1.0 if out.shape[1] > 32 else 0.5)
    )
    assert measured(model).error > 1e-4 or not measured(model).same_tokens


def test_the_page_names_every_causal_model_type_of_its_version_of_transformers() -> None:
    version, rows = written(PAGE)
    assert version
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, and {transformers.__version__} is installed")
    assert list(rows) == sorted(MODEL_TYPES)
    assert all(row.startswith(("exact", "refused: ", "not tried: ")) for row in rows.values())
