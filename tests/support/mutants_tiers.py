"""Mistakes put into a copy of the host tier's code, each killed by a test: ``python -m tests.support.mutants_tiers``.

As in ``mutants``: one substitution in one file. Here the killers are tests of pytest's, named beside each.
"""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.places import ROOT, test_file

TIER, FOUND, COPIES = "test_tier.py", "test_tier_regressions.py", "test_tier_copies.py"
READS, COMING = "test_store_reads.py", "test_store_coming.py"
LESSON_4 = "test_lesson_4_wrong_anchor.py"
MUTANTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("a hole below is overlooked", "tiers/match_below.py", "if one == other == ABSENT and first <= place < last:", "if False:", LESSON_4),
    ("the device alone is asked of a path", "tiers/match_below.py", "            if closed and theirs is not None:\n                break", "            if closed:\n                break", TIER),
    ("a state is looked for above its boundary only", "tiers/match_below.py", "        if boundary != node.end:\n            node = node.parent", "        node = node.parent", TIER),
    ("positions are loaded that the device has", "tiers/restore.py", "if device[place] == ABSENT and slot", "if slot", COPIES),
    ("the last position of a span is not loaded", "tiers/restore.py", "any(lo < at + page and at < hi for lo, hi in spans)", "any(lo < at + page and at + page < hi for lo, hi in spans)", TIER),
    ("sources are not pinned", "tiers/restore.py", "    if ours is None:\n        return\n    pins.add(host, ours)", "    if ours is None:\n        return", LESSON_4),
    ("what is tried again is not lower", "tiers/restore.py", "if not running.ready < boundary <= limit:", "if not running.ready < boundary:", FOUND),
    ("a state that was filled is loaded into", "tiers/restore.py", " or state.ready)}", ")}", FOUND),
    ("a copy of a state leaves no fence", "tiers/restore.py", "        running.fence = max(running.fence, work.number)\n    copies.follow", "        pass\n    copies.follow", FOUND),
    ("the state's lease is kept after a load", "tiers/restore.py", "        if state.ready:\n            release_part(running, lane)\n", "        if state.ready:\n            pass\n", COPIES),
    ("an anchor is not held while it is loaded", "tiers/restore.py", "    end.leases += 1  # so that", "    end.leases += 0  # so that", TIER),
    ("who reads the device waits for copies down", "operations/unwritten.py", "if publication.below == below and", "if", FOUND),
    ("who closed is not told what failed", "operations/teardown.py", "    hold.failed = hold.failed or error\n    if hold.active:\n", "    if hold.active:\n        hold.failed = hold.failed or error\n", "test_flight_regressions.py"),
    ("what is forgotten went well", "device/streams.py", "return forgotten if since < tick else None", "return None", "test_engine_lost.py"),
    ("a flush forgets who read", "operations/unwritten.py", "        for publication in self.publications:\n            publication.nodes, publication.slots = [], []\n", "        self._by_work = {}\n", "test_engine_lost.py"),
    ("who was told to go on is moved", "tiers/restore.py", "    if restored.over or used or", "    if used or", "test_store_answers.py"),
    ("a victim is lost to an interrupt", "operations/room.py", "            for cell in reversed(victims):\n                lane.put_back(cell)\n            raise", "            raise", FOUND),
    ("a fence is lost with a slot that cannot be had", "tiers/host_copies.py", "            flight.taken_early = before\n            pool", "            flight.taken_early = 0\n            pool", FOUND),
    ("slots below are taken while a step is open", "tiers/host_copies.py", "        if flight.blocked(flight.taken_early):", "        if False:", FOUND),
    ("what a failed copy had is kept below", "tiers/host_copies.py", "                mine.take_back(nodes)\n", "                pass\n", "test_tier_faults.py"),
    ("what was spared before a load is kept", "tiers/restore.py", "    forget_surplus(core, running)\n", "", FOUND),
    ("pins below are kept", "tiers/host_copies.py", "                for host, cell in pinned:\n                    host.unpin(cell)", "                pass", TIER),
    ("demotion is left out", "tiers/host_tier.py", "        if host is not None and self.demotes(lane):", "        if False:", TIER),
    ("hits are not counted upward", "tiers/host_tier.py", "            node = node.parent\n        if due", "            break\n        if due", COPIES),
    ("a path's host leaf does not free its parent", "tiers/host_lane.py", "            if not above.below and not above.locks and above.next is None:\n                self.queue.add_first(above)", "            pass", TIER),
    ("inner host cells go first", "tiers/host_lane.py", "            if cell is None or not cell.below:", "            if True:", TIER),
    ("a split keeps the pages of both halves", "tiers/host_lane.py", "        cell.pages -= new.pages\n        new.locks", "        new.locks", TIER),
    ("a split divides a page off", "tiers/host_lane.py", "        cut = (upper.end - upper.parent.end) // self.page * ID_BYTES", "        cut = ((upper.end - upper.parent.end) // self.page - 1) * ID_BYTES", TIER),
    ("pages of any shape are one piece", "device/host_pool.py", "    return (source.unit, source.entries, source.manifest.buffers) == (\n        target.unit, target.entries, target.manifest.buffers\n    )  # fmt: skip", "    return True", "test_layouts.py"),
    ("buffers of a page lie in one place", "device/layouts.py", "        start += size\n", "        start += 0\n", "test_layouts.py"),
    ("slots of a page-first pool touch", "device/layouts.py", "else -(-size // ALIGNMENT) * ALIGNMENT", "else size", "test_layouts.py"),
    ("narrow buffers of a page come first", "device/layouts.py", "key=lambda b: -DTYPE_BYTES[b.dtype]", "key=lambda b: DTYPE_BYTES[b.dtype]", "test_layouts.py"),
    ("a layout is not that of the pages", "compose/build.py", 'layout = composition.layout if part.unit == "page" else "layer_first"', 'layout = "layer_first"', "test_layouts.py"),
    ("some layers of a page are all of it", "tiers/host_lane.py", "    if whole and in_one_piece(source, target):", "    if in_one_piece(source, target):", "test_layouts.py"),
    ("what is copied down is put a place off", "tiers/host_lane.py", "            data[place] = slot\n", "            data[place - 1] = slot\n", TIER),
    ("the tier's copies are told in lists that change", "tiers/host_copies.py", "tuple(mine.src), target, tuple(mine.dst)", "mine.src, target, mine.dst", "lessons/test_lesson_5_tier.py"),
    ("what a plugin adds is not ordered", "tiers/host_copies.py", "                self.core.unwritten.read_node(hold, node)\n                found", "                found", FOUND),
    ("an interrupted copy stays open", "tiers/host_copies.py", "            if work.number > before and work.event is None and not work.over:", "            if False:", "test_tier_faults.py"),
    ("everybody reads for himself", "tiers/store_reads.py", "            (self.held < shared <= other.boundary or other.boundary == self.boundary)\n            and ", "            False and ", READS),
    ("who waits behind another is not let go", "tiers/store_reads.py", "            self.restored.over = True\n            self._wake_waiting()\n            if", "            self.restored.over = True\n            if", READS),
    ("a forgotten fetch is thought to read", "tiers/store_reads.py", "        if self in self.reads.reading:\n            self.reads.reading.remove(self)\n        for other", "        for other", READS),
    ("runs end as single pages", "device/pool.py", "        if self.orderly:\n", "        if False:\n", "test_pool.py"),
    ("order costs who copies nothing", "device/pool.py", "        self.orderly = False ", "        self.orderly = True ", COPIES),
    ("copied pools see to no order", "tiers/host_copies.py", "        source.orderly = target.orderly = self._orderly\n", "", COPIES),
    ("a dropped namespace comes back", "operations/lease.py", "        core.below.namespace_dropped(namespace)\n", "        pass\n", READS),
    ("another namespace's fetch is forgotten", "tiers/store_reads.py", "            if namespace is None or means(namespace, fetch.match.namespace):", "            if True:", READS),
    ("what came meanwhile is read again", "tiers/store_reads.py", "        self.held = min(self.boundary, _held_path(self.link, match))\n", "", READS),
    ("more is asked for than may wait", "tiers/store_reads.py", "            if waiting > max(SLICE, total(batch)):\n                return\n", "", READS),
    ("a prompt is one slice", "tiers/pieces.py", "        if size > room:", "        if not found:", READS),
    ("another piece's memory is an answer", "tiers/pieces.py", "    if isinstance(memory, Spare) and memory is not into:", "    if False:", "test_spares.py"),
    ("somebody else's memory is used again", "tiers/pieces.py", "        if buffer.__class__ is not Spare:", "        if False:", "test_spares.py"),
    ("all is offered to a new store at once", "tiers/store.py", "        for _ in range(min(PER_POLL, len(self.unseen))):", "        while self.unseen:", COMING),
    ("what is split meanwhile is not offered", "tiers/store.py", "            self.unseen.append((upper, False))", "            pass", COMING),
    ("another store's count is believed", "tiers/store_writes.py", "if cell.store != self.link.attached:", "if False:", COMING),
    ("a plugin's transfers are not united", "tiers/transfer_hooks.py", "            wanted.setdefault(more.component, []).append(", "            wanted.setdefault(more.component, [])[:0] = () and (", "test_tier_hooks.py"),
    ("what a load brought cannot go", "tiers/restore.py", "    lane.line_up(part.run)", "    pass", "test_tier_hooks.py"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a mutant's name")
    given = parser.parse_args()
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        bad = Path(folder) / "bad"
        for name, file, old, new, tests in MUTANTS:
            if given.only not in name:
                continue
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(ROOT / "core", bad, ignore=shutil.ignore_patterns("__pycache__"))
            text = (bad / "prefixloom" / file).read_text()
            if text.count(old) != 1:
                print(f"STALE     {name}: {file} has changed", flush=True)
                alive += 1
                continue
            (bad / "prefixloom" / file).write_text(text.replace(old, new))
            killer = outcome(bad, tests.split())
            alive += not killer
            print(f"{'killed   ' if killer else 'SURVIVED '} {name}: {killer[:160]}", flush=True)
    return alive


def outcome(core: Path, tests: list[str]) -> str:
    """The first failure of these tests on this core; empty if there is none."""
    path = os.pathsep.join([str(core), *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "--tb=no",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, *(str(test_file(test)) for test in tests)], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=600, env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if not done.returncode:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or ["did not run to its end"])[0]


if __name__ == "__main__":
    sys.exit(bool(main()))
