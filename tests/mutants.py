"""Mistakes put into a copy of the core, to see the property test fail: ``python tests/mutants.py [--no-debug]``.

Each mutant is one substitution in one file. It must be killed by the scripts of ``property.py``; with ``--no-debug``
the cache's own second books are off, so that only the model can see it. A mutant whose text is no longer in the core is
reported as stale. What killed them, by the model alone, with 106,000 operations over all compositions (55 of 58, most
in the first 500 of a composition; * killed with more operations or by a named test, see below):

check                                     mutants that it killed
content equals the key                    split slices off by a page; state of the wrong boundary; state before its op;
                                          a failed step's state; what a match reached outlives its names
content that a sequence reads             source of a copy not covered; a copy, a clear dropped; state of the token before
what it must hold                         window one short; window lock a page short; window given back too early; rewind
                                          depth not retained; a track does not hold its window
borrowed pages are the tree's             a duplicate stays in the table; an inner path cell evicted; sinks let go; scattered
                                          needs covered only for now; slack reaches into the window
one owner for every slot                  split does not divide; duplicates freed twice, never freed; a donated state not
                                          renewed; release of the wrong node; a rewind leaks; a page handed out twice;
                                          closing gives nothing back; tombstones not refilled; a dropped namespace's cells
match and candidates equal the sets       candidate above the limit; lookahead not left off; fixpoint not reached; a hole
                                          overlooked; sinks not looked at; namespaces shared; extra keys ignored; keys agree
                                          too far
refused only without room                 release stops early; path release undoes only the anchor; a locked window evicted
                                          (its pages leave the books); slack is no room; spare windows not given back
evict frees what can go                   path split forgets the count; a parent left childless is lost
all free and unlocked in the end          split forgets the count; path split copies the whole count
lengths and tables                        a rewind keeps its pages; evict counts too much; a failed step commits
nothing is kept too long, nothing bare    the window is never given back; a trimmed node is not unlinked
what must be refused is refused           rewind twice; rewind past a lookahead; a plan outlives a flush; a failed step's
                                          single states
a fresh plan can be resumed               a plan is not stale after eviction
published by nobody                       a track outlives the rewind below it* (6,000 operations of its composition)
the cache's own books (debug)             a covered state is thinned out* (9,000 operations of its composition); an unlinked
                                          node is published into (not tried without them)
tests/test_regressions.py only            a plan is not stale after an unlinking*
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

ROOT = Path(__file__).resolve().parent.parent
Mutant = tuple[str, str, str, str]
MUTANTS: tuple[Mutant, ...] = (
    ("window one short", "lane_span.py", "return self.hole_in(node, self.tail(boundary)",
     "return self.hole_in(node, self.tail(min(boundary + 1, boundary + self.dense))"),
    ("window lock a page short", "lane_span.py", "        low = self.tail(end)\n        above = node",
     "        low = self.tail(end) + self.page\n        above = node"),
    ("split forgets the count", "lane_span.py", "new.locks = cell.locks", "new.locks = 0"),
    ("path split forgets the count", "lane_path.py", "new.locks = 1 if cell.locks else 0", "new.locks = 0"),
    ("path split copies the whole count", "lane_path.py", "new.locks = 1 if cell.locks else 0",
     "new.locks = cell.locks"),
    ("split does not divide a window's cell", "lane_span.py", "cell.data = strip(data[-cut:])", "cell.data = data"),
    ("split slices a path off by a page", "lane.py", "cut = tokens // self.page * ID_BYTES\n        return data[:cut]",
     "cut = (tokens // self.page - 1) * ID_BYTES or ID_BYTES\n        return data[:cut]"),
    ("release stops a node early", "lane_span.py", "stop = node.end - covered\n        while node.end > stop:",
     "stop = node.end - covered\n        while node.parent.end > stop:"),
    ("path release undoes only the anchor", "lane_path.py",
     "            above.locks = locks\n            while not locks:\n                above = above.up\n"
     "                locks = above.locks - 1\n                above.locks = locks\n            self.leased -= (rec",
     "            above.locks = locks\n            self.leased -= (rec"),
    ("release of the wrong node", "lease.py", "records[i] = lane.advance(records[i], node)",
     "records[i] = lane.advance(records[i], node) if lane.unit == 'boundary' else lane.acquire(node)"),
    ("duplicates are freed twice", "lane_span.py", "self.pool.give(duplicates.tobytes())",
     "self.pool.give(duplicates.tobytes() + duplicates[:1].tobytes())"),
    ("duplicates are never freed", "lane_path.py", "        self.pool.give(holding.table[first:last].tobytes())\n", ""),
    ("a duplicate stays in the table", "lane_path.py",
     '        holding.table[first:last] = array("i", data)\n', ""),
    ("a donated state is not renewed", "lane_point.py", "            holding.slot = NO_SLOT\n            holding.ready",
     "            holding.ready"),
    ("a donated state is published as of the wrong boundary", "lane_point.py",
     "and holding.as_of == node.end and", "and holding.as_of >= node.end and"),
    ("a state is published before its op has run", "lane_point.py",
     "        return holding.ready and not holding.writing", "        return not holding.writing"),
    ("a failed step's state is published", "step.py", "                    holding.ready = False\n", ""),
    ("a failed step's single states are rewound to", "step.py", "                    holding.steps_from = -1", "                    pass"),
    ("a rewind takes the state of the token before", "lane_point.py", "length - holding.steps_from - 1]",
     "max(0, length - holding.steps_from - 2)]"),
    ("a track outlives the rewind below it", "lane_point.py", "        self.forget_tracks(holding, -1, length)\n", ""),
    ("a track does not hold its window", "retention.py", "            floor = lane.floor(holding, floor)\n", "            pass\n"),
    ("a covered state is thinned out", "insert.py", "for number, cell in enumerate(above) if not cell.locks]", "for number, cell in enumerate(above)]"),
    ("the source of a copy is not covered", "insert.py",
     "sequence._lease._records[lane.index] = lane.acquire(node)", "pass"),
    ("a copy is dropped", "lane_point.py", "return partial(self.live.copy, src, dst)", "return partial(self.live.copy, [], [])"),
    ("a clear is dropped", "lane_point.py", "return partial(self.live.clear, dst)", "return partial(self.live.clear, [])"),
    ("the window is given back too early", "retention.py", "lane.retain(holding, holding.floor)",
     "lane.retain(holding, holding.floor + cache._page)"),
    ("the rewind depth is not retained", "retention.py", "else floor) - cache._max_rewind", "else floor)"),
    ("the window is never given back", "retention.py", "    lane.retain(holding, holding.floor)\n", ""),
    ("spare windows are not given back for others", "evict.py", "            reclaim(cache, lane)\n", "            pass\n"),
    ("a rewind keeps its pages", "lane.py", "        if dropped:\n            self.pool.give(", "        if 0:\n            ("),
    ("a rewind leaks its pages", "lane.py",
     "self.pool.give(without_absent(dropped) if ABSENT_BYTES in dropped else dropped)\n", "pass\n"),
    ("rewind twice past what is kept", "sequence.py", "max(self.committed, self._high) - length", "self.committed - length"),
    ("rewind past what a lookahead names", "sequence.py",
     "if count and self.published and length < min(self.named, self.published + cache._lookahead):", "if False:"),
    ("a locked window is evicted", "lane_span.py",
     "                if cell.next is not None:\n                    self.queue.remove(cell)\n            above = above.parent",
     "            above = above.parent"),
    ("a path's inner cell is evicted", "lane_path.py", "            if cell.below:  # an inner anchor returns when its last child has gone\n                continue\n            while", "            while"),
    ("a parent left childless is lost to eviction", "lane_path.py",
     "                    queue.add_first(cell)\n                    break\n", "                    break\n"),
    ("a candidate above the limit", "plan.py", "    if boundary > limit:\n        boundary = limit",
     "    if boundary > limit + page:\n        boundary = limit"),
    ("the lookahead is not left off the limit", "cache.py", "(leave if leave > lookahead else lookahead)", "leave"),
    ("the fixpoint is not reached", "plan.py", "                    plan.branch = paged\n                continue",
     "                    plan.branch = paged"),
    ("a hole inside of a cell is overlooked", "lane_span.py", "                if at >= 0:\n                    return",
     "                if at >= 1 << 40:\n                    return"),
    ("sinks are not looked at", "lane_scatter.py", "for low, high in reversed(self.spans(boundary)):",
     "for low, high in self.spans(boundary)[-1:]:"),
    ("sinks are let go with the window", "lane_scatter.py", "        return before.count(ABSENT) == len(before)",
     "        return super().passed(holding, boundary)"),
    ("scattered needs are covered only for now", "lane_scatter.py", "if self.reach.convex:\n            return self.spans(n)",
     "if True:\n            return self.spans(n)"),
    ("slack reaches into the window", "lane_slack.py", "return 0, max(0, min(have, (self.first_needed(end) - offset)",
     "return 0, max(0, min(have, (self.first_needed(end) + self.page - offset)"),
    ("a trimmed node is not unlinked", "lane_slack.py", "                emptied.append(slack.cell.node)", "                pass"),
    ("evict counts what it did not free", "lane_slack.py", "            got += self.cut_slack(slack.cell)",
     "            got += self.cut_slack(slack.cell) + 1"),
    ("room is refused that slack could give", "evict.py", " and missing > lane.pool.retiring + lane.evictable", ""),
    ("a plan is not stale after eviction", "evict.py",
     "        cache._epoch += 1\n        if emptied:", "        if emptied:"),
    ("a plan is not stale after an unlinking", "lease.py",
     "    if not node.kids and not node.leases and cache._tree.prune(node):\n        cache._epoch += 1\n", "    if not node.kids and not node.leases:\n        cache._tree.prune(node)\n"),
    ("a plan outlives a flush", "cache.py", "if plan._epoch < self._flushed_at:", "if False:"),
    ("a dropped namespace keeps its cells", "graves.py", "    for root in list(cache._graves):", "    for root in []:"),
    ("namespaces are shared", "plan.py", "    root = tree.roots.get(namespace)", '    root = tree.roots.get("")'),
    ("extra keys are ignored", "cache.py", "single = self._keys.with_extra(encoded, extra)", "single = encoded"),
    ("keys agree a page too far", "tree.py", "        return low * size\n", "        return high * size + size * (len(edge) > (high + 1) * size)\n"),
    ("a grown page is handed out twice", "pool.py", "        del free[-count:]\n        return ids",
     "        del free[-count:]\n        free.insert(0, ids[0])\n        return ids"),
    ("closing gives nothing back", "lane.py", "            self.pool.give(holding.own_pages())\n            holding.owned",
     "            holding.owned"),
    ("what a match reached outlives its names", "sequence.py", "            self._reached = None\n", ""),
    ("an unlinked node is published into", "insert.py", " and reached.key:", ":"),
    ("tombstones are not refilled", "lane_span.py", "            if not mine:\n                continue\n",
     "            if not mine or node is not run[-1]:\n                continue\n"),
    ("a failed step commits", "step.py", "        if kind is None and self.role ==", "        if self.role =="),
)  # fmt: skip


def outcome(core: Path, no_debug: bool, ops: int) -> str:
    """The first failure of the property test on this core; empty if there is none."""
    command = [sys.executable, str(ROOT / "tests" / "property.py"), "--ops", str(ops), "--first", "--seed", "m"]
    environment = {**os.environ, "PYTHONPATH": str(core), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, "--no-debug"] if no_debug else command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [line.removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return (failed or done.stderr.splitlines()[-1:] or ["?"])[0] if done.returncode else ""


ELSEWHERE = {
    "a covered state is thinned out": "the cache's own books (debug)",
    "a track outlives the rewind below it": "6,000 operations of its composition",
    "a plan is not stale after an unlinking": "tests/test_regressions.py and tests/test_tree.py",
}
"""What so many operations need not find, and what does."""


def survivors(core: Path, no_debug: bool, only: str, ops: int) -> int:
    """How many mutants live; the core is copied once, so that it may be edited meanwhile."""
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        good, bad = Path(folder) / "good", Path(folder) / "bad"
        shutil.copytree(core, good, ignore=shutil.ignore_patterns("__pycache__"))
        honest = outcome(good, no_debug, ops)
        if honest:
            print(f"the core itself fails: {honest}")
            return 1
        for name, file, old, new in MUTANTS:
            if only not in name:
                continue
            text = (good / "prefixloom" / file).read_text()
            if old not in text:
                print(f"STALE     {name}: {file} has changed", flush=True)
                alive += 1
                continue
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            (bad / "prefixloom" / file).write_text(text.replace(old, new, 1))
            killer = outcome(bad, no_debug, ops)
            if not killer and name in ELSEWHERE:
                print(f"not here  {name}: killed by {ELSEWHERE[name]}", flush=True)
                continue
            alive += not killer
            print(f"{'killed   ' if killer else 'SURVIVED '} {name}: {killer[:230]}", flush=True)
    return alive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Mutants of the core against the property test.")
    parser.add_argument("--no-debug", action="store_true")
    parser.add_argument("--only", default="", help="part of a mutant's name")
    parser.add_argument("--core", type=Path, default=ROOT / "core")
    parser.add_argument("--ops", type=int, default=106_000)
    options = parser.parse_args()
    sys.exit(bool(survivors(options.core, options.no_debug, options.only, options.ops)))
