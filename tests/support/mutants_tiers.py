"""Mistakes in the host tier's code, each with the files of tests that must kill it, as in ``mutants``.

python -m tests.support.killing --tiers
"""

# ruff: noqa: E501

from __future__ import annotations

from tests.support.mutants import Mutant

TIER, COPIES = "test_tier.py", "test_tier_copies.py"
READS, COMING = "test_store_reads.py", "test_store_coming.py"
LESSON_4 = "test_lesson_4_wrong_anchor.py"
ROWS = (
    ("a hole below is overlooked", "tree/cells.py", "Cells.gap", "absent >= 0", "absent >= 0 and self.tier == 'device'", LESSON_4),
    ("the device alone is asked of a path", "tiers/host_copies.py", "HostCopies.__init__", "lane.residency if host is None else lane.residency.with_place(host)", "lane.residency", TIER),
    ("a state serves each boundary of its edge", "tree/cells.py", "Cells.gap", "at < first", "at < first and self.unit == 'page'", TIER),
    ("positions are loaded that the device has", "tiers/restore.py", "lacking", "lane.residency.absent(node, wanted)", "wanted", COPIES),
    ("the last page of a span is not loaded", "tiers/restore.py", "lacking", "range(max(low, first), min(high, end))", "range(max(low, first), min(high, end) - 1)", TIER),
    ("sources are not pinned", "tiers/restore.py", "lacking", "pins.add(host, there)", "pass", LESSON_4),
    ("what no boundary needs is never restored", "tiers/restore.py", "_has_more", "lacks and lacks != copies.residencies[lane.index].absent(end, wanted)", "False", "test_tier_faults.py"),
    ("without room for what is not needed nothing is loaded", "tiers/restore.py", "_load_with_more", "end.end > running.ready", "not left_out", "test_optional.py"),
    ("what is tried again is not lower", "tiers/restore.py", "restore", "running.ready < boundary <= limit", "running.ready < boundary", COPIES),
    ("a state that was filled is loaded into", "tiers/restore.py", "_copy_up", "isinstance(lane, CodedLane) or state.ready", "isinstance(lane, CodedLane)", COPIES),
    ("a copy of a state leaves no fence", "tiers/restore.py", "_copy_up", "running.fence = max(running.fence, work.number)", "", COPIES),
    ("the state's lease is kept after a load", "tiers/restore.py", "_resume_at", "release_part(running, point)", "", COPIES),
    ("an anchor is not held while it is loaded", "tiers/restore.py", "_load", "end.protect()", "pass", TIER),
    ("who reads the device waits for copies down", "operations/unwritten.py", "Unwritten.read_node", "publication.below == below and publication.hold is not hold and (hold not in publication.readers)", "publication.hold is not hold and hold not in publication.readers", COPIES),
    ("who closed is not told what failed", "operations/teardown.py", "abandon", "hold.failed = hold.failed or error\nif hold.active:\n    if isinstance(hold, Running):\n        give_back(core, hold)\n    else:\n        release(core, hold)", "if hold.active:\n    hold.failed = hold.failed or error\n    if isinstance(hold, Running):\n        give_back(core, hold)\n    else:\n        release(core, hold)", "test_flight.py"),
    ("what is forgotten went well", "device/streams.py", "Stream.failure", "forgotten if since < tick else None", "None", "test_engine_lost.py"),
    ("a flush forgets who read", "operations/unwritten.py", "Unwritten.flushed", "for publication in self.publications:\n    publication.nodes, publication.slots = ([], [])", "self._by_work = {}", "test_engine_lost.py"),
    ("who was told to go on is moved", "tiers/restore.py", "restore_more", "restored.over or used or running.core is None", "used or running.core is None", "test_store_answers.py"),
    ("a fence is lost with a slot that cannot be had", "tiers/host_copies.py", "HostCopies.take", "flight.taken_early = before", "flight.taken_early = 0", COPIES),
    ("slots below are taken while a step is open", "tiers/host_copies.py", "HostCopies.take", "flight.blocked(flight.taken_early)", "False", COPIES),
    ("what a failed copy had is kept below", "tiers/host_copies.py", "Filling.__exit__", "isinstance(error, PrefixloomError)", "False", "test_tier_faults.py"),
    ("what was spared before a load is kept", "tiers/restore.py", "_resume_at", "forget_surplus(core, running)\ncore.unwritten.read(running, end)", "core.unwritten.read(running, end)", COPIES),
    ("pins below are kept", "tiers/host_lane.py", "Pins.__exit__", "lane.unpin(cell)", "pass", TIER),
    ("demotion is left out", "tiers/host_tier.py", "LowerTier.losing", "host is not None", "False", TIER),
    ("hits are not counted upward", "tiers/host_tier.py", "LowerTier.used", "path_up(node)", "path_up(node, node.start)", COPIES),
    ("a path's host leaf does not free its parent", "tree/cells.py", "Cells._leave", "if not above.below and (not above.locks) and (above.next is None):\n    self.queue.add_first(above)", "", TIER),
    ("inner host cells go first", "tree/cells.py", "Cells._pop_victim", "cell is None or not cell.below", "True", TIER),
    ("a split keeps the pages of both halves", "tree/cells.py", "Cells.divide", "cell.pages -= new.pages", "pass", TIER),
    ("a split divides a page off", "tree/cells.py", "Cells.divide", "(lower.end - upper.end) // self.page * ID_BYTES", "((lower.end - upper.end) // self.page - (self.tier == 'host')) * ID_BYTES", TIER),
    ("pages of any shape are one piece", "device/host_pool.py", "in_one_piece", "(source.unit, source.entries, source.manifest.buffers) == (target.unit, target.entries, target.manifest.buffers)", "True", "test_layouts.py"),
    ("buffers of a page lie in one place", "device/layouts.py", "parts", "for buffer in sorted(manifest.buffers, key=lambda b: -DTYPE_BYTES[b.dtype]):\n    size = buffer.entry_bytes * entries\n    yield (buffer, start, size)\n    start += size", "for buffer in sorted(manifest.buffers, key=lambda b: -DTYPE_BYTES[b.dtype]):\n    size = buffer.entry_bytes * entries\n    yield (buffer, start, size)\n    start += 0", "test_layouts.py"),
    ("slots of a page-first pool touch", "device/layouts.py", "slot_bytes", "-(-size // ALIGNMENT) * ALIGNMENT", "size", "test_layouts.py"),
    ("narrow buffers of a page come first", "device/layouts.py", "parts", "-DTYPE_BYTES[b.dtype]", "DTYPE_BYTES[b.dtype]", "test_layouts.py"),
    ("a layout is not that of the pages", "compose/build.py", "make_lane", "composition.layout if part.unit == 'page' else 'layer_first'", "'layer_first'", "test_layouts.py"),
    ("some layers of a page are all of it", "tiers/host_copies.py", "copy_between", "whole and in_one_piece(source, target)", "in_one_piece(source, target)", "test_layouts.py"),
    ("what is copied down is put a place off", "tree/cells.py", "Cells.add", "data[place] = slot", "data[place - 1] = slot", TIER),
    ("the tier's copies are told in lists that change", "tiers/host_copies.py", "HostCopies._run_one", "partial(copy_between, source, tuple(mine.src), target, tuple(mine.dst), *group)", "partial(copy_between, source, mine.src, target, mine.dst, *group)", "test_lesson_5_polluted_descriptor.py"),
    ("what a plugin adds is not ordered", "tiers/host_copies.py", "HostCopies._ordered", "self.core.unwritten.read_node(hold, node)\nfound.append((host, node))", "found.append((host, node))", COPIES),
    ("an interrupted copy stays open", "tiers/host_copies.py", "HostCopies.end", "work.number > before and work.event is None and (not work.over)", "False", "test_tier_faults.py"),
    ("everybody reads for himself", "tiers/store_reads.py", "Fetch._comes_after", "self.held < shared <= other.boundary or other.boundary == self.boundary", "False", READS),
    ("who waits behind another is not let go", "tiers/store_reads.py", "Fetch.go_on", "self._close()", "self.reads.fetches.remove(self)", READS),
    ("runs end as single pages", "device/pool.py", "Pool.take", "if self.orderly:\n    self._order(count)", "if False:\n    self._order(count)", "test_pool.py"),
    ("order costs who copies nothing", "device/pool.py", "Pool.__init__", "self.orderly = False", "self.orderly = True", COPIES),
    ("copied pools see to no order", "tiers/host_copies.py", "HostCopies._run_one", "source.orderly = target.orderly = self._orderly\ntarget.enter(mine.dst, Stage.WRITING)", "target.enter(mine.dst, Stage.WRITING)", COPIES),
    ("a dropped namespace comes back", "operations/lease.py", "drop_namespace", "core.below.namespace_dropped(namespace)", "", READS),
    ("another namespace's fetch is forgotten", "tiers/store_reads.py", "StoreReads.forget", "namespace is None or means(namespace, fetch.match.namespace)", "True", READS),
    ("what came meanwhile is read again", "tiers/store_reads.py", "Fetch._steps", "self.held = min(boundary, _held_path(behind, match))", "pass", READS),
    ("more is asked for than may wait", "tiers/store_reads.py", "Fetch._ask_more", "waiting > max(SLICE, total(batch))", "False", READS),
    ("a prompt is one slice", "tiers/pieces.py", "slices", "if size > room:\n    found.append([])\n    room = SLICE", "if not found:\n    found.append([])\n    room = SLICE", READS),
    ("another piece's memory is an answer", "tiers/pieces.py", "checked", "isinstance(memory, Spare) and memory is not into", "False", "test_spares.py"),
    ("somebody else's memory is used again", "tiers/pieces.py", "Spares.give", "buffer.__class__ is not Spare", "False", "test_spares.py"),
    ("all is offered to a new store at once", "tiers/store_writes.py", "StoreWrites._offer_unseen", "range(min(PER_POLL, len(self.unseen)))", "iter(lambda: not self.unseen, True)", COMING),
    ("what is split meanwhile is not offered", "tiers/store_writes.py", "StoreWrites.divided", "self.unseen.append((upper, False))", "", COMING),
    ("another store's count is believed", "tiers/store_writes.py", "StoreWrites.left", "cell.store != self.behind.attached", "False", COMING),
    ("a plugin's transfers are not united", "tiers/transfer_hooks.py", "proposed", "wanted.setdefault(more.component, []).append((more.start, min(more.end, plan.boundary)))", "wanted.setdefault(more.component, [])[:0] = () and (more.start, min(more.end, plan.boundary))", "test_tier_hooks.py"),
    ("a loaded state leaves the one above for recent", "tiers/restore.py", "_copy_up", "lane.pass_above(restored, restored[-1].end, lane.resumable)", "pass", COPIES),
)  # fmt: skip

MUTANTS_OF_TIERS = tuple(Mutant(*row, ("test", tests, "")) for *row, tests in ROWS)
