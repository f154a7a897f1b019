"""Real model configs: each gives the component set, layer map, sizes and grid that the model's own cache has.

``configs/*.json`` is what transformers 5.23.0 writes for its defaults, with a dtype, and with some attention layers
where the defaults have none (granitemoehybrid, bamba) or nothing else (lfm2). Ling and Ring are there as
bailing_hybrid; their older types (bailing_moe_linear) are unknown to transformers and refused here. The table was not
taken from our output: layers and windows are those of ``DynamicCache(config)``, shapes and dtypes those of its tensors
after each model, cut down to a few layers and experts, had run in bfloat16; the grid is the chunk in its modeling file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path as File
from typing import Any

import pytest

from prefixloom import Chunk, CompositionError, Path, Point, Window, compose
from prefixloom.compose.registry import Registry
from prefixloom.contract.composition import Composition, Part

CONFIGS = File(__file__).parents[1] / "configs"
KINDS = ("full", "swa", "mamba")
CLAMPLESS = ("zamba2", "nemotron_h")
Expected = tuple[Any, tuple[int, ...], dict[str, tuple[tuple[int, ...], str]], int, int]
"""(reach, layers, {buffer: (shape, dtype)}, bytes of a token or a state, grid)."""


def but(count: int, others: Iterable[int]) -> tuple[int, ...]:
    return tuple(index for index in range(count) if index not in set(others))


def kv(heads: int, dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"k": ((heads, dim), "bfloat16"), "v": ((heads, dim), "bfloat16")}


def zamba2_layers() -> list[str]:
    return ["hybrid" if index in EVERY["zamba2"] else "linear_attention" for index in range(54)]


def latent(rank: int, rope: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"latent": ((rank,), "bfloat16"), "rope": ((rope,), "bfloat16")}


def states(conv: tuple[int, int], recurrent: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"conv": (conv, "bfloat16"), "recurrent": (recurrent, "float32")}


EVERY = {
    "sixth of 26": (5, 11, 17, 23), "sixth of 30": (5, 11, 17, 23, 29), "fourth of 32": tuple(range(3, 32, 4)),
    "fourth of 48": tuple(range(3, 48, 4)), "tenth of 40": (5, 15, 25, 35), "ninth of 32": (9, 18, 27),
    "eighth of 32": (4, 12, 20, 28), "fourth of 27": (4, 8, 12, 16, 20, 24), "lfm2": (2, 5, 8, 10, 12, 14),
    "sixth of 42": tuple(range(5, 42, 6)), "zamba2": (6, 12, 18, 24, 30, 36, 42, 47, 51),
}  # fmt: skip
LFM3 = {"whole": (2, 6, 10, 14, 18, 22), "near": (4, 8, 12, 16, 20)}

TABLE: Mapping[str, tuple[int, dict[str, Expected]]] = {
    "gemma2": (16, {
        "swa": (Window(4096), tuple(range(0, 26, 2)), kv(4, 256), 53_248, 1),
        "full": (Path(), tuple(range(1, 26, 2)), kv(4, 256), 53_248, 1),
    }),
    "gemma3": (16, {
        "swa": (Window(4096), but(26, EVERY["sixth of 26"]), kv(4, 256), 90_112, 1),
        "full": (Path(), EVERY["sixth of 26"], kv(4, 256), 16_384, 1),
    }),
    "gemma4": (16, {
        "swa": (Window(512), but(30, EVERY["sixth of 30"]), kv(4, 256), 102_400, 1),
        "full": (Path(), EVERY["sixth of 30"], kv(4, 512), 40_960, 1),
    }),
    "gpt_oss": (16, {
        "swa": (Window(128), tuple(range(0, 36, 2)), kv(8, 64), 36_864, 1),
        "full": (Path(), tuple(range(1, 36, 2)), kv(8, 64), 36_864, 1),
    }),
    "olmo3": (16, {
        "swa": (Window(4096), but(32, EVERY["fourth of 32"]), kv(32, 128), 393_216, 1),
        "full": (Path(), EVERY["fourth of 32"], kv(32, 128), 131_072, 1),
    }),
    "mistral": (16, {"swa": (Window(4096), tuple(range(32)), kv(8, 128), 131_072, 1)}),
    "llama4": (16, {
        "swa": (Chunk(8192), but(48, EVERY["fourth of 48"]), kv(8, 128), 147_456, 1),
        "full": (Path(), EVERY["fourth of 48"], kv(8, 128), 49_152, 1),
    }),
    "lfm2": (16, {
        "mamba": (Point(), but(16, EVERY["lfm2"]), {"conv": ((2560, 3), "bfloat16")}, 153_600, 1),
        "full": (Path(), EVERY["lfm2"], kv(8, 80), 15_360, 1),
    }),
    "lfm3": (16, {
        "mamba": (
            Point(), but(24, LFM3["whole"] + LFM3["near"]), {"conv": ((2048, 7), "bfloat16")}, 372_736, 1
        ),
        "full": (Path(), LFM3["whole"], kv(4, 128), 12_288, 1),
        "swa": (Window(256), LFM3["near"], kv(4, 128), 10_240, 1),
    }),
    "qwen3_next": (64, {
        "mamba": (
            Point(), but(48, EVERY["fourth of 48"]), states((8192, 4), (32, 128, 128)), 77_856_768, 64
        ),
        "full": (Path(), EVERY["fourth of 48"], kv(2, 256), 24_576, 1),
    }),
    "qwen3_5": (64, {
        "mamba": (
            Point(), but(32, EVERY["fourth of 32"]), states((8192, 4), (32, 128, 128)), 51_904_512, 64
        ),
        "full": (Path(), EVERY["fourth of 32"], kv(4, 256), 32_768, 1),
    }),
    "granitemoehybrid": (256, {
        "mamba": (
            Point(), but(40, EVERY["tenth of 40"]), states((8704, 4), (128, 64, 256)), 304_496_640, 256
        ),
        "full": (Path(), EVERY["tenth of 40"], kv(8, 128), 16_384, 1),
    }),
    "bamba": (256, {
        "mamba": (
            Point(), but(32, EVERY["ninth of 32"]), states((8704, 4), (128, 64, 256)), 245_288_960, 256
        ),
        "full": (Path(), EVERY["ninth of 32"], kv(8, 128), 12_288, 1),
    }),
    "falcon_h1": (256, {
        "full": (Path(), tuple(range(32)), kv(8, 128), 131_072, 1),
        "mamba": (Point(), tuple(range(32)), states((1536, 4), (128, 8, 256)), 33_947_648, 256),
    }),
    "kimi_linear": (64, {
        "mamba": (
            Point(), but(27, EVERY["fourth of 27"]), states((12288, 4), (32, 128, 128)), 46_104_576, 64
        ),
        "full": (Path(), EVERY["fourth of 27"], latent(512, 64), 6_912, 1),
    }),
    "jamba": (16, {
        "mamba": (Point(), but(32, EVERY["eighth of 32"]), states((8192, 4), (8192, 16)), 16_515_072, 1),
        "full": (Path(), EVERY["eighth of 32"], kv(8, 128), 16_384, 1),
    }),
    "deepseek_v3": (16, {"full": (Path(), tuple(range(61)), latent(512, 64), 70_272, 1)}),
    "deepseek_v32": (16, {
        "full": (Path(), tuple(range(61)), latent(512, 64), 70_272, 1),
        "full_indexer": (Path(), tuple(range(61)), {"index": ((128,), "bfloat16")}, 15_616, 1),
    }),
    "minimax": (256, {
        "full": (Path(), tuple(range(0, 32, 2)), kv(8, 128), 65_536, 1),
        "mamba": (
            Point(), tuple(range(1, 32, 2)), {"recurrent": ((32, 128, 128), "bfloat16")}, 16_777_216, 256
        ),
    }),
    "zamba2": (256, {
        "mamba": (Point(), tuple(range(54)), states((5248, 4), (8, 640, 64)), 73_046_016, 256),
        "full": (Path(), EVERY["zamba2"], kv(32, 160), 184_320, 1),
    }),
    "nemotron_h": (128, {
        "mamba": (Point(), (0,), states((10240, 4), (128, 64, 128)), 4_276_224, 128),
        "full": (Path(), (2,), kv(8, 128), 4_096, 1),
    }),
    "bailing_hybrid": (64, {
        "mamba": (
            Point(), but(42, EVERY["sixth of 42"]), states((12288, 4), (32, 128, 128)), 76_840_960, 64
        ),
        "full": (Path(), EVERY["sixth of 42"], latent(512, 64), 8_064, 1),
    }),
    "mamba2": (256, {"mamba": (Point(), tuple(range(64)), states((10240, 4), (128, 64, 128)), 273_678_336, 256)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry([EntryPoint(kind, f"prefixloom_{kind}.plugin", "prefixloom") for kind in KINDS])


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A config, with ``changes``; None takes a key away."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    inner = config.get("text_config", config)
    inner.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del inner[key]
    return dict(config)


def composed(model: object, registry: Registry) -> Composition:
    return compose(model, capacity=8192, device="meta", registry=registry).composition


def described(part: Part) -> Expected:
    buffers = part.manifest.buffers
    assert len({buffer.layers for buffer in buffers}) == 1
    shapes = {buffer.name: (buffer.shape, buffer.dtype) for buffer in buffers}
    return part.reach, buffers[0].layers, shapes, part.manifest.slot_bytes, part.manifest.grid


@pytest.mark.parametrize("name", TABLE)
def test_a_config_gives_the_components_of_the_models_own_cache(name: str, registry: Registry) -> None:
    page, parts = TABLE[name]
    composition = composed(CONFIGS / f"{name}.json", registry)
    assert {part.name: described(part) for part in composition.parts} == parts
    assert composition.page == page


def test_every_config_is_in_the_table_and_small() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(TABLE)
    assert all(path.stat().st_size < 4096 for path in CONFIGS.glob("*.json"))


# ---------------------------------------------------------------- what is wrong elsewhere


def test_jamba_composes_with_a_warning_that_is_logged(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "prefixloom"):
        (warning,) = composed(config_of("jamba"), registry).warnings
    assert "'jamba': transformers' Mamba-1 scan starts from zero when more than one token continues" in warning
    assert [record.getMessage() for record in caplog.records] == [warning]


@pytest.mark.parametrize("name", CLAMPLESS)
def test_what_is_wrong_with_single_tokens_is_told_and_logged(
    name: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "prefixloom"):
        (warning,) = composed(config_of(name), registry).warnings
    assert f"{name!r}: transformers does not clamp the time step when single tokens continue from a state" in warning
    assert [record.getMessage() for record in caplog.records] == [warning]


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("jamba", *CLAMPLESS)])
def test_no_other_config_warns(name: str, registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    assert composed(config_of(name), registry).warnings == ()
    assert caplog.records == []


# ---------------------------------------------------------------- as they were published


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 4}),
        ("lfm2", {"layer_types": None}),
        ("llama4", {"layer_types": None}),
        ("llama4", {"layer_types": None, "no_rope_layers": []}),
        ("llama4", {"layer_types": None, "no_rope_layers": [1, 1, 1, 0] * 20}),
        ("gemma2", {"layer_types": None}),
        ("gpt_oss", {"layer_types": None}),
        ("olmo3", {"layer_types": None}),
        ("gemma4", {"per_layer_config": None, "global_head_dim": 512}),
        ("deepseek_v32", {"layer_types": None}),
        ("minimax", {"layer_types": None, "attn_type_list": [1, 0] * 16}),
        ("falcon_h1", {"layer_types": ["hybrid"] * 32}),
        (
            "granitemoehybrid",
            {"layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]},
        ),
        ("granitemoehybrid", {"mamba_d_head": "auto"}),
        ("falcon_h1", {"mamba_d_head": "auto"}),
        ("deepseek_v32", {"layer_types": ["deepseek_sparse_attention"] * 61}),
        ("nemotron_h", {"layers_block_type": None, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*-"}),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
        ("zamba2", {"layers_block_type": ["hybrid" if i in EVERY["zamba2"] else "mamba" for i in range(54)]}),
        ("zamba2", {"layers_block_type": None, "layer_types": zamba2_layers()}),
        (
            "kimi_linear",
            {
                "layer_types": None, "linear_head_dim": None, "linear_num_heads": None, "linear_conv_kernel_dim": None,
                "linear_attn_config": {
                    "full_attn_layers": [5, 9, 13, 17, 21, 25], "head_dim": 128, "num_heads": 32,
                    "kda_layers": [n for n in range(1, 28) if n not in (5, 9, 13, 17, 21, 25)],
                    "short_conv_kernel_size": 4,
                },
            },
        ),
    ],
)  # fmt: skip
def test_older_spellings_say_the_same_with_and_without_transformers(
    name: str, changes: dict[str, Any], registry: Registry, request: pytest.FixtureRequest
) -> None:
    page, parts = TABLE[name]
    for hidden in (False, True):
        if hidden:
            request.getfixturevalue("without_transformers")
        composition = composed(config_of(name, **changes), registry)
        assert {part.name: described(part) for part in composition.parts} == parts
        assert composition.page == page


def test_the_windows_of_single_layers_are_components_of_their_own(registry: Registry) -> None:
    windows = {0: {"sliding_window": 64}, 2: {"sliding_window": 64}}
    config = config_of("gemma2", per_layer_config=windows)
    parts = {part.name: described(part) for part in composed(config, registry).parts}
    assert list(parts) == ["swa_64", "swa_4096", "full"]
    assert parts["swa_64"][:3] == (Window(64), (0, 2), kv(4, 256))
    assert parts["swa_4096"][:3] == (Window(4096), tuple(range(4, 26, 2)), kv(4, 256))


def test_layers_that_share_entries_own_none(registry: Registry) -> None:
    parts = composed(config_of("gemma4", num_kv_shared_layers=12), registry).parts
    near, whole = ({part.name: part.manifest.buffers[0] for part in parts}[name] for name in ("swa", "full"))
    assert (near.layers, whole.layers) == (but(18, (5, 11, 17)), (5, 11, 17))
    assert set(near.shared.values()) == {16} and set(whole.shared.values()) == {17}
    assert sorted((*near.layers, *near.shared, *whole.layers, *whole.shared)) == list(range(30))


def test_an_indexer_that_serves_several_layers_has_keys_in_one(registry: Registry) -> None:
    config = config_of("deepseek_v32", indexer_types=["full" if i % 4 == 0 else "shared" for i in range(61)])
    keys = composed(config, registry).parts[1]
    assert keys.manifest.buffers[0].layers == tuple(range(0, 61, 4))


# ---------------------------------------------------------------- what is refused


HALF_NAMED = {"full_attn_layers": [3], "kda_layers": [2]}
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "mistral", {"layer_types": ["compressed_sparse_attention", "full_attention"] * 16},
        r"no installed component serves: 'compressed_sparse_attention' \(layers 0, 2, .*Served: .*sliding_attention",
    ),
    ("lfm3", {"sliding_window": None}, "layer 4 is of kind 'sliding_attention'.*sliding_window=None"),
    ("gemma2", {"sliding_window": 0}, "layer 0 is of kind 'sliding_attention'.*sliding_window=0: it must be"),
    ("llama4", {"attention_chunk_size": None}, "layer 0 is of kind 'chunked_attention'.*attention_chunk_size=None"),
    ("qwen3_next", {"linear_num_key_heads": None}, "does not tell the shape of its recurrent state"),
    ("qwen3_next", {"layer_types": None}, "does not list its layers, and linear_conv_kernel_dim"),
    ("lfm3", {"conv_L_cache": None}, "does not tell the shape of its recurrent state"),
    ("deepseek_v32", {"index_head_dim": None}, "has an indexer, and its config has no index_head_dim"),
    ("gemma3", {"use_bidirectional_attention": True}, "attends to later tokens too"),
    ("mamba2", {"layer_types": ["full_attention"] * 64}, "layer 0 has attention, .* no num_attention_heads"),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": HALF_NAMED}, r"names no kind for layers \[1, 4, 5,"),
    ("jamba", {"mamba_d_conv": None}, "does not tell the shape of its recurrent state"),
    ("jamba", {"attn_layer_offset": None}, "does not list its layers, and attn_layer_period"),
    ("zamba2", {"layers_block_type": None}, "'zamba2' does not list its layers, and mamba_d_state"),
    ("zamba2", {"n_mamba_heads": None}, "'zamba2' does not tell the shape of its recurrent state"),
    (
        "nemotron_h", {"layers_block_type": None, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*?"},
        "'nemotron_h': hybrid_override_pattern has 'ME\\*\\?' for 4 layers: .*M, E, \\*, -",
    ),
    (
        "nemotron_h", {"layers_block_type": None, "num_hidden_layers": 5, "hybrid_override_pattern": "ME*-"},
        "hybrid_override_pattern has 'ME\\*-' for 5 layers",
    ),
    ("bailing_hybrid", {"layer_types": None}, "'bailing_hybrid' does not list its layers, and layer_group_size"),
    (
        "bailing_hybrid", {"layer_types": None, "model_type": "bailing_moe_linear"},
        "'bailing_moe_linear' does not list its layers, and layer_group_size",
    ),
    (
        "bailing_hybrid", {"linear_num_heads": None},
        "'bailing_hybrid' does not tell the shape of its recurrent state",
    ),
)  # fmt: skip


@pytest.mark.usefixtures("without_transformers")  # which would fill in what is left open
@pytest.mark.parametrize(("name", "changes", "told"), REFUSED)
def test_what_a_config_leaves_open_is_refused_by_name(
    name: str, changes: dict[str, Any], told: str, registry: Registry
) -> None:
    with pytest.raises(CompositionError, match=told):
        composed(config_of(name, **changes), registry)
