"""Runs an engine's own unit tests, once as they are and once with our cache in place, and compares the outcomes.

vLLM's tests come from its source distribution, or from a folder that has them (``--source``). SGLang's distributions
have no tests, so its come from the folder ``test`` of a checkout. Nothing of them is kept here. What fails as it is
does not count. A test of SGLang that looks into its tree, or needs a flag that we refuse, is not applicable, and one
that makes no cache says nothing of ours (``inside_sglang.py``).
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import attrs

from tests.engines.environment import RELEASES
from tests.engines.running import Bench

VLLM_FILES = (
    "v1/core/test_scheduler.py", "v1/core/test_async_scheduler.py", "v1/core/test_deferred_block_free.py",
    "v1/core/test_mamba_align_chunk_split.py", "v1/core/test_prefix_replay.py",
    "v1/core/test_reset_prefix_cache_e2e.py", "v1/core/prefix_cache",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py", "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_error_propagation.py", "v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "v1/kv_connector/unit/test_kv_connector_lifecycle.py", "v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "v1/kv_connector/unit/test_remote_decode_lifecycle.py", "v1/kv_connector/unit/test_config.py",
    "v1/kv_connector/unit/test_multi_connector.py", "v1/kv_connector/unit/test_output_aggregator.py",
    "v1/core/test_priority_scheduler_random.py", "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_swa_inflight_window_free.py", "v1/kv_offload/cpu/test_manager.py", "v1/kv_offload/cpu/policies",
)  # fmt: skip
SGLANG_FOLDER = "registered/unit/mem_cache/"
SGLANG_FILES = tuple(
    f"{SGLANG_FOLDER}{each}.py"
    for each in (
        "test_unified_radix_cache_unittest", "test_radix_cache_unit", "test_swa_unittest", "test_mamba_unittest",
        "test_radix_cache_slru_accuracy", "test_radix_force_miss", "test_swa_eviction_boundary",
        "test_mamba_path_state_cap", "test_decode_radix_lock_ref", "test_registry",
    )
)  # fmt: skip
FILES = {"vllm": VLLM_FILES, "sglang": SGLANG_FILES}
NOT_APPLICABLE = "not applicable: "
CONFIGS = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768, "torch_dtype": "float16",
    },
}  # fmt: skip
"""Configurations that tests take from a hub, and of which they read the sizes alone."""


@attrs.frozen
class Outcome:
    """What became of one test."""

    kind: str
    """passed, failed, or skipped."""
    says: str = ""
    caches: int | None = None
    """How many caches of ours it has made, where that was counted."""


def outcomes(report: Path) -> dict[str, Outcome]:
    """Read pytest's report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kind, says, caches = "passed", "", None
        for child in case:
            if child.tag in ("failure", "error"):
                kind, says = "failed", (child.get("message") or "").strip()
            elif child.tag == "skipped" and kind == "passed":
                kind, says = "skipped", (child.get("message") or "").strip()
        for each in case.iter("property"):
            if each.get("name") == "caches":
                caches = int(each.get("value") or 0)
        found[f"{case.get('classname')}::{case.get('name')}"] = Outcome(kind, says, caches)
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
    """A hub's cache that has the configurations of CONFIGS, and nothing else."""
    for name, config in CONFIGS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / "0"
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text("0")
    return folder


def run_tests(
    bench: Bench, tests: Path, files: Sequence[str], inside: bool, only: Sequence[str] = ()
) -> dict[str, Outcome]:
    """Run these files, with our cache in place or without. ``only``: the tests that are worth it; none: all."""
    report = bench.folder / "theirs" / f"{bench.engine}-{'inside' if inside else 'plain'}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    existing = [str(tests / each) for each in files if (tests / each).exists()]
    command = [str(bench.python), "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", "-p", f"inside_{bench.engine}",
               f"--junitxml={report}", *existing]  # fmt: skip
    settings = {
        "HF_HOME": str(offline_hub(bench.folder / "theirs" / "hub")), "OURS_INSIDE": str(int(inside)),
        "PYTHONPATH": str(Path(__file__).parent),  # not as tests.engines: the engine has a package 'tests' too
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the tree into which SGLang's tests look
        "SGLANG_TEST_MAX_RETRY": "0",
    }  # fmt: skip
    if only:
        chosen = report.with_suffix(".only")
        chosen.write_text("\n".join(only))
        settings["OURS_ONLY"] = str(chosen)
    log = report.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run(
            command, cwd=tests.parent, env=bench.variables(settings), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, timeout=3000,
        )  # fmt: skip
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report; see {log}")
    return outcomes(report)


COLUMNS = {
    "both": "pass with both", "neither": "fail or skip without ours", "alone": "pass without ours alone",
    "outside": "not applicable", "none": "make no cache",
}  # fmt: skip


def column(before: Outcome, after: Outcome) -> str:
    """What a test says of our cache."""
    if before.kind != "passed":
        return "neither"
    if after.kind == "skipped" and after.says.startswith(NOT_APPLICABLE):
        return "outside"
    if after.kind == "passed":
        return "none" if after.caches == 0 else "both"
    return "alone"


def table(plain: Mapping[str, Outcome], inside: Mapping[str, Outcome]) -> list[str]:
    """One line for each file: how many tests say what of our cache. Below, what ours alone fails, and what is not
    applicable and why: tests of one name, of several classes, together."""
    counts: dict[str, Counter[str]] = {}
    listed: dict[str, Counter[str]] = {"alone": Counter(), "outside": Counter()}
    for name, before in sorted(plain.items()):
        after = inside.get(name, Outcome("failed", "not run"))  # a test that fails without ours may be left out
        what = column(before, after)
        file = ".".join(part for part in name.split("::")[0].split(".") if not part[:1].isupper())
        counts.setdefault(file, Counter())[what] += 1
        says = after.says.splitlines()[0][:200] if after.says else ""
        if what == "alone":
            listed[what][f"`{name.split('::')[1]}`: {after.kind}: {says}"] += 1
        elif what == "outside":
            listed[what][says.removeprefix(NOT_APPLICABLE)] += 1
    used = [each for each in COLUMNS if any(counter[each] for counter in counts.values())]
    lines = [f"| tests of | {' | '.join(COLUMNS[each] for each in used)} |", "|---" * (len(used) + 1) + "|"]
    for file, counter in counts.items():
        lines.append(f"| {file} | {' | '.join(str(counter[each]) for each in used)} |")
    for what, said in listed.items():
        if said:
            lines += ["", f"{COLUMNS[what]}:", *(f"- {count} x {each}" for each, count in said.most_common())]
    return lines


def theirs(bench: Bench, source: Path | None) -> list[str]:
    """The table for one engine."""
    if source is None and bench.engine == "sglang":
        raise SystemExit("SGLang's distributions have no tests: --source is the folder 'test' of its repository")
    tests = source or vllm_tests(bench, RELEASES[bench.engine].versions[0])
    files = FILES[bench.engine]
    plain = run_tests(bench, tests, files, False)
    only = [name for name, outcome in plain.items() if outcome.kind == "passed"]
    return table(plain, run_tests(bench, tests, files, True, only))
