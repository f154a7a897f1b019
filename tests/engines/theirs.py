"""Runs an engine's own unit tests, once as they are and once with our cache in place, and compares the outcomes.

vLLM's tests come from its source distribution, or from a folder that has them (``--source``). SGLang's distributions
have no tests, so they come from the folder ``test`` of a checkout. Nothing of them is kept here.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import attrs

from tests.engines.environment import RELEASES
from tests.engines.running import Bench

VLLM_FILES = (
    "v1/core/test_scheduler.py", "v1/core/test_async_scheduler.py", "v1/core/test_deferred_block_free.py",
    "v1/core/test_prefix_replay.py", "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_swa_inflight_window_free.py", "v1/core/test_worker_slot_overflow.py",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py", "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_error_propagation.py", "v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py", "v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "v1/kv_offload/cpu/test_manager.py", "v1/kv_offload/cpu/policies",
    "v1/kv_offload/tiering/test_tiering_offloading.py",
)  # fmt: skip
"""The files whose tests make a scheduler, or vLLM's own host tier. In others nothing of ours has a place."""
SGLANG_FILES = tuple(
    f"registered/unit/mem_cache/{each}.py"
    for each in (
        "test_unified_radix_cache_unittest", "test_radix_cache_unit", "test_swa_unittest", "test_mamba_unittest",
        "test_radix_cache_slru_accuracy", "test_radix_force_miss", "test_swa_eviction_boundary",
        "test_mamba_path_state_cap", "test_decode_radix_lock_ref", "test_registry",
    )
)  # fmt: skip
ENOUGH = 0.95
"""The share of applicable tests that must pass."""

OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "torch_dtype": "float16"}
CONFIGS = {
    "facebook/opt-125m": {
        **OPT, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
    },
    "facebook/opt-350m": {
        **OPT, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
    },
    "llava-hf/llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
        "torch_dtype": "float16", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        },
    },
}  # fmt: skip
"""Configurations that tests take from a hub, and of which they read the sizes alone."""

REASONS = {
    "Invalid repository ID": "needs a model of a hub",
    "outgoing traffic has been disabled": "needs a model of a hub",
    "LocalEntryNotFoundError": "needs a model of a hub",
    "couldn't connect to 'https://huggingface.co'": "needs a model of a hub",
    "failed to be inspected": "of images, and torch's library for them is not installed",
    "CUDA": "needs a GPU",
}
"""Why a test does not pass without ours here, by a part of what it says."""
NOT_APPLICABLE = "not applicable: "
"""What ``inside_sglang`` says of a test that looks into SGLang's tree, or needs a flag that we refuse."""
REFUSED = ("has layers of CrossAttentionSpec", "takes no part in prefix caching", "pipeline_parallel_size is")
"""What the connector says of models and ways to run that it refuses."""
OTHER_PURPOSE = {
    "test_remote_prefill_lifecycle": "about handing blocks to another engine",
    "test_remote_decode_lifecycle": "about handing blocks to another engine",
    "kv_producer": "about handing blocks to another engine",
    "test_requires_kv_delivery_defaults_to_producer_role": "about handing blocks to another engine",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request": "reads another connector's metadata",
    "test_reset_connector_cache_no_connector_is_no_op_success": "asks that there is no connector",
    "test_lru_and_arc_registered": "asks for vLLM's class of LRU",
    "test_lru_batch_eviction_failure_is_atomic": "looks inside of vLLM's class of LRU",
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": "looks inside of vLLM's class of LRU",
    "test_touch_propagates_to_all_tiers": "looks inside of vLLM's class of LRU",
}
"""Why a test cannot hold with our cache in place, by its file or its name."""


@attrs.frozen
class Outcome:
    """What became of one test."""

    kind: str
    """passed, failed, or skipped."""
    says: str = ""
    ours: bool = False
    """Whether the test made a scheduler, a tier or a cache in which ours was."""


def outcomes(report: Path) -> dict[str, Outcome]:
    """Read pytest's report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kind, says = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                kind, says = "failed", (child.get("message") or "").strip()
            elif child.tag == "skipped" and kind == "passed":
                kind, says = "skipped", (child.get("message") or "").strip()
        ours = any(each.get("name") == "ours" and each.get("value") != "0" for each in case.iter("property"))
        found[f"{case.get('classname')}::{case.get('name')}"] = Outcome(kind, says, ours)
    return found


def vllm_tests(bench: Bench, version: str) -> Path:
    """Download vLLM's source distribution, and unpack its tests."""
    folder = bench.folder / "theirs" / f"vllm-{version}"
    if not (folder / "tests").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(bench.python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm",
                   "--no-build-isolation", "--dest", str(folder), f"vllm=={version}"]  # fmt: skip
        more = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=bench.variables(more))
        with tarfile.open(folder / f"vllm-{version}.tar.gz") as packed:
            members = [each for each in packed.getmembers() if "/tests/" in each.name and each.isfile()]
            for each in members:
                each.name = each.name.split("/", 1)[1]
            packed.extractall(folder, members=members, filter="data")
    return folder / "tests"


def offline_hub(folder: Path) -> Path:
    """Return a hub's cache that has the configurations of CONFIGS, and nothing else."""
    for name, config in CONFIGS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / "0"
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text("0")
    return folder


def file_of(name: str) -> str:
    """Return the file of a test, as a path below the engine's tests."""
    parts = [part for part in name.split("::")[0].split(".") if not part[:1].isupper()]
    return "/".join(parts).removeprefix("tests/") + ".py"


def reason_of(says: str) -> str:
    """Return why a test does not pass without ours, in a few words."""
    first = (says.splitlines() or ["no reason given"])[0]
    return next((why for part, why in REASONS.items() if part in says), first[:100].replace("|", "/"))


def purpose_of(name: str, says: str) -> str | None:
    """Return why a test that fails with ours in place is none that it could pass."""
    if says.startswith(NOT_APPLICABLE):
        return says.splitlines()[0].removeprefix(NOT_APPLICABLE)
    if any(part in says for part in REFUSED):
        return "of what this connector refuses"
    return next((why for part, why in OTHER_PURPOSE.items() if part in name), None)


def table(plain: Mapping[str, Outcome], inside: Mapping[str, Outcome]) -> tuple[list[str], bool]:
    """Return one line for each file, the sum below, and whether at least 95% of what is applicable passes.

    A test is applicable if it passes without ours, ours is in place in it, and its purpose is one that ours has.
    """
    lines = ["| file | tests | pass without ours | have ours in place | of these pass | why not |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    whole: Counter[str] = Counter()
    for name, before in sorted(plain.items()):
        after = inside.get(name, Outcome("failed", "it was not run", True))
        counter = counts.setdefault(file_of(name), Counter())
        why = reasons.setdefault(file_of(name), Counter())
        counter["tests"] += 1
        if before.kind != "passed":
            why[f"{before.kind} without ours: {reason_of(before.says)}"] += 1
            continue
        counter["alone"] += 1
        if not after.ours and after.kind == "passed":
            continue
        counter["ours"] += 1
        counter["pass"] += after.kind == "passed"
        whole["applicable"] += 1
        if after.kind != "passed":
            purpose = purpose_of(name, after.says)
            whole["applicable"] -= purpose is not None
            why[f"not applicable: {purpose}" if purpose else f"`{name.split('::')[-1]}`: {reason_of(after.says)}"] += 1
    for file, counter in sorted(counts.items()):
        whole.update(counter)
        said = "; ".join(f"{count} {each}" for each, count in sorted(reasons[file].items()))
        lines.append(row(file, counter, said))
    lines.append(row("all", whole, ""))
    applicable, passed = whole["applicable"], whole["pass"]
    lines += ["", f"Of {applicable} applicable tests, {passed} pass."]
    return lines, applicable > 0 and passed >= ENOUGH * applicable


def row(name: str, counter: Counter[str], said: str) -> str:
    return f"| {name} | {' | '.join(str(counter[each]) for each in ('tests', 'alone', 'ours', 'pass'))} | {said} |"


def theirs(bench: Bench, source: Path | None, version: str | None = None) -> tuple[list[str], bool]:
    """Return the table for one engine, and whether enough passes."""
    if bench.engine == "vllm":
        tests = source or vllm_tests(bench, version or RELEASES[bench.engine].versions[0])
        settings = {"HF_HOME": str(offline_hub(bench.folder / "theirs" / "hub"))}
        plain, inside = (outcomes(bench.test(tests, VLLM_FILES, ours, settings)) for ours in (False, True))
        return table(plain, inside)
    if source is None:
        raise SystemExit("SGLang's distributions have no tests: --source is the folder 'test' of its repository")
    settings = {
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the tree into which SGLang's tests look
        "SGLANG_TEST_MAX_RETRY": "0",
    }
    plain = outcomes(bench.test(source, SGLANG_FILES, False, settings))
    chosen = bench.folder / "theirs" / "only"
    chosen.write_text("\n".join(name for name, outcome in plain.items() if outcome.kind == "passed"))
    return table(plain, outcomes(bench.test(source, SGLANG_FILES, True, {**settings, "OURS_ONLY": str(chosen)})))
