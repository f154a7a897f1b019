"""Runs vLLM's own unit tests, once as they are and once with our cache in place, and compares the outcomes.

The tests come from its source distribution, or from a folder that has them (``--source``). Nothing of them is kept
here. SGLang's distributions have no tests.
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


def outcomes(report: Path) -> dict[str, Outcome]:
    """Read pytest's report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kind, says = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                kind, says = "failed", (child.get("message") or "").strip()
            elif child.tag == "skipped":
                kind, says = "skipped", (child.get("message") or "").strip()
        found[f"{case.get('classname')}::{case.get('name')}"] = Outcome(kind, says)
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


def run_tests(bench: Bench, tests: Path, files: Sequence[str], inside: bool) -> dict[str, Outcome]:
    """Run these files, with our cache in place or without."""
    report = bench.folder / "theirs" / f"{bench.engine}-{'inside' if inside else 'plain'}.xml"
    report.unlink(missing_ok=True)
    existing = [str(tests / each) for each in files if (tests / each).exists()]
    command = [str(bench.python), "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", "-p", f"inside_{bench.engine}",
               f"--junitxml={report}", *existing]  # fmt: skip
    settings = {
        "HF_HOME": str(offline_hub(bench.folder / "theirs" / "hub")), "OURS_INSIDE": str(int(inside)),
        "PYTHONPATH": str(Path(__file__).parent),  # not as tests.engines: the engine has a package 'tests' too
    }  # fmt: skip
    log = report.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run(
            command, cwd=tests.parent, env=bench.variables(settings), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, timeout=3000,
        )  # fmt: skip
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report; see {log}")
    return outcomes(report)


def table(plain: Mapping[str, Outcome], inside: Mapping[str, Outcome]) -> list[str]:
    """One line for each file: how many pass either way, and how many do not; below, what ours alone fails."""
    lines = ["| tests of | pass with both | fail or skip without ours | pass without ours alone |", "|---|---|---|---|"]
    counts: dict[str, Counter[str]] = {}
    alone = []
    for name, before in sorted(plain.items()):
        after = inside.get(name, Outcome("failed", "not run"))
        file = name.split("::")[0]
        file = ".".join(part for part in file.split(".") if not part[:1].isupper())
        counter = counts.setdefault(file, Counter())
        if before.kind != "passed":
            counter["neither"] += 1
        elif after.kind == "passed":
            counter["both"] += 1
        else:
            counter["alone"] += 1
            alone.append(
                f"- `{name.split('.')[-1]}`: {after.kind}: {after.says.splitlines()[0][:200] if after.says else ''}"
            )
    for file, counter in counts.items():
        lines.append(f"| {file} | {counter['both']} | {counter['neither']} | {counter['alone']} |")
    return [*lines, "", *alone]


def theirs(bench: Bench, source: Path | None) -> list[str]:
    """The table for one engine."""
    tests = source or vllm_tests(bench, RELEASES[bench.engine].versions[0])
    return table(run_tests(bench, tests, VLLM_FILES, False), run_tests(bench, tests, VLLM_FILES, True))
