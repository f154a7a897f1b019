"""Mistakes put into a copy of our own code, each with what must kill it: rows of the kill table of docs/conformance.md.

A mutant is one substitution in one module of the core. Its killer is a law of the kit, held against a sound component
of ``broken.py``; or the state machine, so many operations of it on a composition of ``setups.py``. All of them are run by
``test_kill_table.py``, in forks of one process (``killing.py``), so that the table cannot say what is not so. A mutant
whose text is no longer in the core is stale, and fails, too.
"""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CORE = Path(__file__).resolve().parent.parent / "core" / "prefixloom"
Killer = tuple[str, str, str]
"""("law", its name, the component), ("composition", its name, operations) or ("test", the file, part of its name)."""


class Mutant(NamedTuple):
    """``old`` becomes ``new``, once, in ``file``."""

    name: str
    file: str
    old: str
    new: str
    killer: Killer


MUTANTS: tuple[Mutant, ...] = (
    Mutant("window one short", "lane_span.py", "return self.hole_in(node, self.tail(boundary)",
           "return self.hole_in(node, self.tail(min(boundary + 1, boundary + self.dense))", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("window lock a page short", "lane_span.py", "        low = self.tail(end)\n        above = node\n        while",
           "        low = self.tail(end) + self.page\n        above = node\n        while", ('law', 'law_a_lease_covers_exactly_what_resuming_needs', 'window')),
    Mutant("split forgets the count", "lane_span.py", "new.locks = cell.locks",
           "new.locks = 0", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("path split forgets the count", "lane_path.py", "new.locks = 1 if cell.locks else 0",
           "new.locks = 0", ('law', 'law_it_serves_beside_every_other_kind', 'window')),
    Mutant("path split copies the whole count", "lane_path.py", "new.locks = 1 if cell.locks else 0",
           "new.locks = cell.locks", ("law", "law_every_answer_is_what_the_sets_say", "window")),
    Mutant("split does not divide a window's cell", "lane_span.py", "cell.data = strip(data[-cut:])",
           "cell.data = data", ('law', 'law_a_split_changes_nothing_that_a_reader_sees', 'window')),
    Mutant("split slices a path off by a page", "lane.py", "cut = tokens // self.page * ID_BYTES\n        return data[:cut]",
           "cut = (tokens // self.page - 1) * ID_BYTES or ID_BYTES\n        return data[:cut]", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("release stops a node early", "lane_span.py", "stop = node.end - covered\n        while node.end > stop:",
           "stop = node.end - covered\n        while node.parent.end > stop:", ('law', 'law_a_release_undoes_its_own_acquire', 'window')),
    Mutant("path release undoes only the anchor", "lane_path.py", "            above.locks = locks\n            while not locks:\n                above = above.up\n                locks = above.locks - 1\n                above.locks = locks\n            self.leased -= (rec",
           "            above.locks = locks\n            self.leased -= (rec", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("release of the wrong node", "lease.py", "records[i] = lane.advance(records[i], node)",
           "records[i] = lane.advance(records[i], node) if lane.unit == 'boundary' else lane.acquire(node)", ("law", "law_every_answer_is_what_the_sets_say", "window")),
    Mutant("duplicates are freed twice", "lane_span.py", "self.pool.give(duplicates.tobytes())",
           "self.pool.give(duplicates.tobytes() + duplicates[:1].tobytes())", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("duplicates are never freed", "lane_path.py", "        self.pool.give(holding.table[first:last].tobytes())\n",
           "", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("a duplicate stays in the table", "lane_path.py", "        holding.table[first:last] = array(\"i\", data)\n",
           "", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("a donated state is not renewed", "lane_point.py", "            holding.slot = NO_SLOT\n            holding.ready",
           "            holding.ready", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("a donated state is published as of the wrong boundary", "lane_point.py", "and holding.as_of == node.end and",
           "and holding.as_of >= node.end and", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("a state is published before its op has run", "lane_point.py", "        return holding.ready and not holding.writing",
           "        return not holding.writing", ('composition', 'point, page 1, lfu', '3000')),
    Mutant("a failed step's state is published", "step.py", "                    holding.ready = False\n",
           "", ('composition', 'point, page 1, lfu', '3000')),
    Mutant("a failed step's single states are rewound to", "step.py", "                    holding.steps_from = -1",
           "                    pass", ('composition', 'states to rewind to', '600')),
    Mutant("a rewind takes the state of the token before", "lane_point.py", "length - holding.steps_from - 1]",
           "max(0, length - holding.steps_from - 2)]", ('composition', 'states to rewind to', '1000')),
    Mutant("a track outlives the rewind below it", "lane_point.py", "        self.forget_tracks(holding, -1, length)\n",
           "", ('composition', 'checkpoints and rewinds', '7000')),
    Mutant("a track does not hold its window", "retention.py", "            floor = lane.floor(holding, floor)\n",
           "            pass\n", ('composition', 'checkpoints under a window', '1000')),
    Mutant("a covered state is thinned out", "insert.py", "for number, cell in enumerate(above) if not cell.locks]",
           "for number, cell in enumerate(above)]", ("test", "test_admission.py", "test_a_state_that_somebody_is_copying_is_not_offered_to_go")),
    Mutant("the source of a copy is not covered", "insert.py", "sequence._lease._records[lane.index] = lane.acquire(node)",
           "pass", ('composition', 'one state per path', '1000')),
    Mutant("a copy is dropped", "lane_point.py", "return partial(self.live.copy, src, dst)",
           "return partial(self.live.copy, [], [])", ('law', 'law_every_answer_is_what_the_sets_say', 'state')),
    Mutant("a clear is dropped", "lane_point.py", "return partial(self.live.clear, dst)",
           "return partial(self.live.clear, [])", ('law', 'law_every_answer_is_what_the_sets_say', 'state')),
    Mutant("the window is given back too early", "retention.py", "lane.retain(holding, holding.floor)",
           "lane.retain(holding, holding.floor + cache._page)", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("the rewind depth is not retained", "retention.py", "else floor) - cache._max_rewind",
           "else floor)", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("the window is never given back", "retention.py", "    lane.retain(holding, holding.floor)\n",
           "", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("spare windows are not given back for others", "evict.py", "            reclaim(cache, lane)\n",
           "            pass\n", ('composition', 'path and window', '1000')),
    Mutant("a rewind keeps its pages", "lane.py", "        if dropped:\n            self.pool.give(",
           "        if 0:\n            (", ('composition', 'path and window, rewind', '1000')),
    Mutant("a rewind leaks its pages", "lane.py", "self.pool.give(without_absent(dropped) if ABSENT_BYTES in dropped else dropped)\n",
           "pass\n", ('composition', 'path and window, rewind', '1000')),
    Mutant("rewind twice past what is kept", "sequence.py", "max(self.committed, self._high) - length",
           "self.committed - length", ('composition', 'path and window, rewind', '1000')),
    Mutant("rewind past what a lookahead names", "sequence.py", "if count and self.published and length < min(self.named, self.published + cache._lookahead):",
           "if False:", ('law', 'law_every_answer_is_what_the_sets_say', 'path that looks ahead')),
    Mutant("a locked window is evicted", "lane_span.py", "                if cell.next is not None:\n                    self.queue.remove(cell)\n            above = above.parent\n        covered",
           "            above = above.parent\n        covered", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("a path's inner cell is evicted", "lane_path.py", "            if cell.below:  # an inner anchor returns when its last child has gone\n                continue\n            while",
           "            while", ('composition', 'path, groups of 2', '1000')),
    Mutant("a parent left childless is lost to eviction", "lane_path.py", "                    queue.add_first(cell)\n                    break\n",
           "                    break\n", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("a candidate above the limit", "plan.py", "    if boundary > limit:\n        boundary = limit",
           "    if boundary > limit + page:\n        boundary = limit", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("the lookahead is not left off the limit", "cache.py", "(leave if leave > lookahead else lookahead)",
           "leave", ('composition', 'path and window, lookahead 2', '4000')),
    Mutant("the fixpoint is not reached", "plan.py", "                    plan.branch = paged\n                continue",
           "                    plan.branch = paged", ('composition', 'checkpoints under a window', '1000')),
    Mutant("a hole inside of a cell is overlooked", "lane_span.py", "                if at >= 0:\n                    return",
           "                if at >= 1 << 40:\n                    return", ('composition', 'sinks and window in one', '1000')),
    Mutant("sinks are not looked at", "lane_scatter.py", "for low, high in reversed(self.spans(boundary)):",
           "for low, high in self.spans(boundary)[-1:]:", ('composition', 'window or strided', '1000')),
    Mutant("sinks are let go with the window", "lane_scatter.py", "        return before.count(ABSENT) == len(before)",
           "        return before.count(ABSENT) >= len(before) // 2", ("composition", "sinks and window in one", "3000")),
    Mutant("scattered needs are covered only for now", "lane_scatter.py", "if self.reach.convex:\n            return self.spans(n)",
           "if True:\n            return self.spans(n)", ('composition', 'shifted window, page 1', '1000')),
    Mutant("slack reaches into the window", "lane_slack.py", "return 0, max(0, min(have, (self.first_needed(end) - offset)",
           "return 0, max(0, min(have, (self.first_needed(end) + self.page - offset)", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("a trimmed node is not unlinked", "lane_slack.py", "                emptied.append(slack.cell.node)",
           "                pass", ('composition', 'window of 1', '1000')),
    Mutant("evict counts what it did not free", "lane_slack.py", "            got += self.cut_slack(slack.cell)",
           "            got += self.cut_slack(slack.cell) + 1", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("room is refused that slack could give", "evict.py", " and missing > lane.pool.retiring + lane.evictable",
           "", ('composition', 'window and point', '1000')),
    Mutant("a plan is not stale after eviction", "evict.py", "        cache._epoch += 1\n        if emptied:", "        if emptied:",
           ("law", "law_every_answer_is_what_the_sets_say", "path")),
    Mutant("a plan is not stale after an unlinking", "lease.py", "    if not node.kids and not node.leases and cache._tree.prune(node):\n        cache._epoch += 1\n",
           "    if not node.kids and not node.leases and cache._tree.prune(node):\n        pass\n",
           ("test", "test_regressions.py", "test_a_plan_is_stale_once_its_boundary_was_unlinked")),
    Mutant("a plan outlives a flush", "cache.py", "if plan._epoch < self._flushed_at:",
           "if False:", ('composition', 'path', '1000')),
    Mutant("a dropped namespace keeps its cells", "graves.py", "    for root in list(cache._graves):",
           "    for root in []:", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("namespaces are shared", "plan.py", "    root = tree.roots.get(namespace)",
           "    root = tree.roots.get(\"\")", ("law", "law_every_answer_is_what_the_sets_say", "path")),
    Mutant("extra keys are ignored", "cache.py", "single = self._keys.with_extra(encoded, extra)",
           "single = encoded", ('law', 'law_content_is_that_of_a_namespace_and_its_extra_keys', 'path')),
    Mutant("keys agree a page too far", "tree.py", "        return low * size\n",
           "        return high * size + size * (len(edge) > (high + 1) * size)\n", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("a grown page is handed out twice", "pool.py", "        del free[-count:]\n        return ids",
           "        del free[-count:]\n        free.insert(0, ids[0])\n        return ids", ('law', 'law_every_answer_is_what_the_sets_say', 'path')),
    Mutant("closing gives nothing back", "lane.py", "            self.pool.give(holding.own_pages())\n            holding.owned",
           "            holding.owned", ('law', 'law_no_slot_is_lost_or_owned_twice', 'path')),
    Mutant("what a match reached outlives its names", "sequence.py", "            self._reached = None\n",
           "", ('composition', 'window and states to rewind to', '6000')),
    Mutant("an unlinked node is published into", "insert.py", " and reached.key:",
           ":", ('composition', 'path, page 1, lfu', '6000')),
    Mutant("tombstones are not refilled", "lane_span.py", "            if not mine:\n                continue\n",
           "            if not mine or node is not run[-1]:\n                continue\n", ('law', 'law_every_answer_is_what_the_sets_say', 'window')),
    Mutant("a failed step commits", "step.py", "        if kind is None and self.role ==",
           "        if self.role ==", ("composition", "path and window", "1000")),
    Mutant("a publication asks twice", "insert.py", "        pairs = _ask_keep(cache, sequence, lease._node.end, upto, last)\n",
           "        _ask_keep(cache, sequence, lease._node.end, upto, last)\n        pairs = _ask_keep(cache, sequence, lease._node.end, upto, last)\n",
           ("law", "law_hooks_are_called_when_the_contract_says", "window")),
    Mutant("a validator's higher answer is believed", "plan.py", "        lower = valid(cache, name, validator, view)\n        if lower < boundary:\n            plan.limited_by",
           "        lower = validator(view) // cache._page * cache._page\n        if lower != boundary:\n            plan.limited_by", ("law", "law_validity_only_narrows", "a validator that goes beyond")),
    Mutant("a hook that is only counted fails its operation", "asking.py", "            self._without_answer(error)\n            return None\n\n    def _ask_policy",
           "            raise\n\n    def _ask_policy", ('law', 'law_a_hook_that_raises_has_the_documented_consequence', 'window')),
    Mutant("what is not shareable is published", "lane.py", "self.shared = part.manifest.shareable and not self.replay",
           "self.shared = not self.replay", ('law', 'law_what_is_not_shareable_stays_with_its_sequence', 'nothing shared')),
    Mutant("a path keeps all of its states", "insert.py", "            if len(above) < lane.per_path:\n                continue",
           "            if len(above) < 99 * lane.per_path:\n                continue", ('law', 'law_a_path_has_no_more_states_than_allowed', 'two states on a path')),
    Mutant("a page table keeps what was let go", "tables.py", "            first = min(self.written[row], changed)\n",
           "            first = self.written[row]\n", ('law', 'law_page_tables_say_where_a_sequence_lies', 'window')),
    Mutant("a state comes back too large", "codecs.py", "exact.div_(_steps(exact)).mul_(largest",
           "exact.div_(_steps(exact) - 2).mul_(largest", ('law', 'law_what_is_restored_is_what_was_live', 'states that rest as int8')),
)  # fmt: skip


LESSONS_BY_LAW: tuple[tuple[str, str, str], ...] = (
    ("running_out_of_states_is_an_assertion", "law_a_fault_at_any_step_leaves_the_state_before_or_after", "state"),
    ("a_donation_without_a_slot_to_go_on_with", "law_a_fault_at_any_step_leaves_the_state_before_or_after", "state"),
    (
        "a_checkpoint_without_room_fails_the_request",
        "law_a_fault_at_any_step_leaves_the_state_before_or_after",
        "state",
    ),
    ("a_part_is_released_twice", "law_every_answer_is_what_the_sets_say", "window"),
    ("a_split_forgets_who_holds_the_upper_half", "law_every_answer_is_what_the_sets_say", "window"),
    ("what_arrived_absent_is_freed_too", "law_every_answer_is_what_the_sets_say", "window"),
    ("an_evicted_window_is_freed_again_at_the_end", "law_every_answer_is_what_the_sets_say", "window"),
    ("slots_are_free_while_a_step_still_writes_them", "law_no_schedule_of_steps_goes_wrong", "state"),
    ("slots_are_taken_without_their_fence", "law_no_schedule_of_steps_goes_wrong", "path"),
    ("states_are_copied_by_the_scheduling_thread", "law_no_schedule_of_steps_goes_wrong", "state"),
    ("states_are_copied_by_the_scheduling_thread", "law_a_step_on_another_thread_races_with_nothing", "state"),
    ("a_donation_is_a_copy", "law_no_schedule_of_steps_goes_wrong", "state"),
)
"""Mistakes of the lessons that a law of the kit sees, too: (the mutant, the law, the component)."""
