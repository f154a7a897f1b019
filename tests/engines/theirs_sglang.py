"""Runs SGLang's own unit tests, once as they are and once with our cache in place, and compares the outcomes.

SGLang's distributions have no tests, so they come from the folder ``test`` of a checkout. Nothing of them is kept here.
What fails as it is does not count. A test that looks into SGLang's tree, or needs a flag that we refuse, is not
applicable, and one that makes no cache says nothing of ours (``inside_sglang.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import attrs

from tests.engines.running import Bench

SGLANG_FOLDER = "registered/unit/mem_cache/"
SGLANG_FILES = tuple(
    f"{SGLANG_FOLDER}{each}.py"
    for each in (
        "test_unified_radix_cache_unittest", "test_radix_cache_unit", "test_swa_unittest", "test_mamba_unittest",
        "test_radix_cache_slru_accuracy", "test_radix_force_miss", "test_swa_eviction_boundary",
        "test_mamba_path_state_cap", "test_decode_radix_lock_ref", "test_registry",
    )
)  # fmt: skip
NOT_APPLICABLE = "not applicable: "


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


def run_tests(
    bench: Bench, tests: Path, files: Sequence[str], inside: bool, only: Sequence[str] = ()
) -> dict[str, Outcome]:
    """Run these files, with our cache in place or without. ``only``: the tests that are worth it; none: all."""
    settings = {
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the tree into which SGLang's tests look
        "SGLANG_TEST_MAX_RETRY": "0",
    }
    if only:
        chosen = bench.folder / "theirs" / "only"
        chosen.write_text("\n".join(only))
        settings["OURS_ONLY"] = str(chosen)
    return outcomes(bench.test(tests, files, inside, settings))


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


def theirs_of_sglang(bench: Bench, source: Path | None) -> list[str]:
    """The table."""
    if source is None:
        raise SystemExit("SGLang's distributions have no tests: --source is the folder 'test' of its repository")
    plain = run_tests(bench, source, SGLANG_FILES, False)
    only = [name for name, outcome in plain.items() if outcome.kind == "passed"]
    return table(plain, run_tests(bench, source, SGLANG_FILES, True, only))
