"""Mistakes that a person would make, in the places where earlier ones were not noticed: ``--by-hand`` runs them.

They were written with the product at hand and without a look at the tests.
"""

# ruff: noqa: E501

from __future__ import annotations

from tests.mutation.fragments import Fragment

CORE, HICACHE = "core/prefixloom", "plugins/hicache/prefixloom_hicache"
MATCH, PUBLISH, ROOM = (f"{CORE}/operations/{name}.py" for name in ("match", "publish", "room"))
PATH, PARTIAL, CELLS, HOLDINGS = (
    f"{CORE}/tree/{name}.py" for name in ("path_lane", "partial_lane", "cells", "holdings")
)
POOL, FLIGHT = f"{CORE}/device/pool.py", f"{CORE}/device/flight.py"
COPIES, RESTORE, PIECES = (f"{CORE}/tiers/{name}.py" for name in ("host_copies", "restore", "pieces"))
FRAME, FILES = f"{CORE}/storage/frame.py", f"{HICACHE}/file_store/backend.py"
SCHEDULER = "engine/prefixloom_engine/serving/scheduler.py"
ARRIVAL, RECORDS, PEER, PREFILL = (
    f"engine/prefixloom_engine/disaggregation/{name}.py"
    for name in ("arrival", "records", "prefill_peer", "prefill_server")
)

BY_HAND = (
    # what a plan says of the branch
    Fragment("the branch is the last boundary where a state was missing", MATCH, "search", "lowered and branch is None", "lowered"),
    Fragment("the branch is where the state was", MATCH, "search", "branch = paged", "branch = boundary"),
    Fragment("the last claim of a branch wins", MATCH, "claims_at", "max(match.branch or 0, claim.branch // page * page)", "claim.branch // page * page"),
    # recency when a leaf is computed again
    Fragment("a leaf that is computed again is not recent", PATH, "PathLane.finish", "self.release(last)", "self._uncover(last)"),
    Fragment("a tail that is computed again is not recent", PARTIAL, "PartialLane._merge", "if cell.next is not None:\n    self.queue.touch(cell)", ""),
    Fragment("a lease that was not used makes its leaf recent", PATH, "PathLane.release", "self.enter(cover, recent)", "self.enter(cover)"),
    # parents of victims that a plugin keeps
    Fragment("what a kept victim hangs from goes", ROOM, "_held_back", "cell = lane.hangs_from(cell)", "break"),
    Fragment("a victim that is put back is no child", CELLS, "Cells.put_back", "cell.node.parent.cells[self.index].below += 1", "pass"),
    Fragment("kept victims change places", ROOM, "_evict_asking", "reversed(victims)", "victims", why="in which order kept victims become recent is not promised"),
    Fragment("a kept victim is asked for again and again", ROOM, "_evict_asking", "held |= staying", ""),
    # checkpoints inside of what arrived
    Fragment("steps that begin inside of what arrived have single states", HOLDINGS, "StateHolding.reach", "self.arrived <= before < upto <= before + len(self.steps)", "before < upto <= before + len(self.steps)"),
    Fragment("a checkpoint inside of what arrived is due", HOLDINGS, "StateHolding.due", "end - start <= len(self.steps) and start >= self.arrived", "end - start <= len(self.steps)"),
    Fragment("what arrived and was taken back is remembered", HOLDINGS, "StateHolding.rewind", "self.arrived = min(self.arrived, length)", ""),
    # the newest fence of several pools
    Fragment("the fence of the last pool counts", POOL, "Pool._free_early", "max(self.fence.taken_early, fence)", "fence"),
    Fragment("the fence of slots below hides the one before", COPIES, "HostCopies.take", "flight.taken_early = max(before, flight.taken_early)", ""),
    Fragment("only the last pool waits for steps", FLIGHT, "Flight._free_retired", "waiting += pool.retiring", "waiting = pool.retiring"),
    Fragment("an older step lowers a fence", FLIGHT, "Flight.follow", "max(follower.fence, work.number)", "work.number"),
    # selective copies
    Fragment("of several slots the first is copied", f"{CORE}/device/kernels.py", "select_slots", "selector.reshape(-1, 1).long()", "selector.reshape(-1, 1).long() * 0"),
    # the fingerprint of coded content
    Fragment("coded states have the fingerprint of running ones", PIECES, "fingerprint", "part, manifest = lane.part, lane.pool.manifest", "part, manifest = lane.part, lane.part.manifest"),
    Fragment("a fingerprint does not know how many entries a page has", f"{CORE}/contract/composition.py", "Part.fingerprint", "(*buffer.shape, entries)", "buffer.shape"),
    # checksums of headers
    Fragment("the checksum of a header is not asked", FRAME, "decode_header", "check != zlib.crc32(data[_FIRST_PART.size :], zlib.crc32(data[8:12]))", "False"),
    Fragment("the record of another fingerprint is an answer", FRAME, "RecordHeader.is_of", "self.fingerprint + self.content == key.address", "self.content == key.content"),
    # the file store
    Fragment("what went while it was read is damage", FILES, "FileBackend._get", "found = self._read(key, buffer)", "pass", at=1),
    Fragment("all records of others explain a miss", FILES, "FileBackend._absent", "own not in folders", "True"),
    Fragment("a shorter record keeps the end of the one before it", FILES, "FileBackend._write", "self._disk.cut(file.number, end)", ""),
    Fragment("a full disk empties the store", FILES, "FileBackend._write_record", "room > self._used", "False"),
    # the budget of a step, and of the pools
    Fragment("what may be taken back needs no pages", f"{CORE}/compose/sizing.py", "SequenceNeeds.of", "max(chunk, 1 + rewind) + rewind", "max(chunk, 1 + rewind)"),
    Fragment("rows that decode cost a step nothing", SCHEDULER, "Scheduler._plan_together", "self.chunk - len(planned)", "self.chunk"),
    Fragment("admission costs a step nothing", SCHEDULER, "Scheduler._admit", "budget -= taken", ""),
    # guesses over a boundary
    Fragment("guesses pass a boundary", SCHEDULER, "Scheduler._most_guesses", "(job.launched // self.page + 1) * self.page - job.launched - 1", "(job.launched // self.page + 1) * self.page - job.launched"),
    Fragment("guesses pass the end of the answer", SCHEDULER, "Scheduler._plan_decode", "min(self._most_guesses(job), job.answer_left - 1)", "self._most_guesses(job)"),
    # content from another process
    Fragment("a part of an answer is taken anywhere", ARRIVAL, "Arrival.take_part", "at != self._came or not 0 < len(part) <= len(self._content) - at", "not 0 < len(part) <= len(self._content) - at"),
    Fragment("the key of what came is not asked", RECORDS, "expect_content", "header.fingerprint + header.content != wanted.address", "False"),
    Fragment("a prompt is awaited for ever", PEER, "PrefillPeer._look_at_clock", "now - asked.prompt.since > self._longest", "False"),
    Fragment("a decode process asks for any number of prompts", PREFILL, "PrefillServer._ask", "len(owed) >= self._most", "False"),
    Fragment("who takes nothing is waited for", PREFILL, "PrefillServer._serve_peer", "peer.stuck is not None and now - peer.stuck > self._patience", "False"),
)  # fmt: skip
