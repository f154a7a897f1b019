"""vLLM's KV cache manager, called as its scheduler calls it: for the rows beside the peers, and for the kit.

``Managed`` makes the manager and has the calls for one request. ``VLLM`` is the driver of the rows. ``VLLMCache`` is
the kit's adapter, in the order of vLLM's ``Scheduler.schedule`` (running requests first, then waiting ones),
``_update_after_schedule``, ``update_from_output`` and ``_preempt_request``. What the device does with states before the
layers is that of ``mamba_utils.preprocess_mamba``. vLLM's block pool is real. Its workers' tensors need a GPU, so the
kit's content lies beside the manager: one memory for each block, which all groups share, as in vLLM.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from bench.engines.driver import Driver
from bench.engines.stand_ins import EngineUnavailable, imported, version_of
from prefixloom import Path, Point, Window
from prefixloom.testing.foreign.contract import (
    ABSENT,
    AdaptedComponent,
    ForeignCache,
    NoRoom,
    PassPart,
    PassResult,
    RequestTables,
    SlotContent,
    StateAccess,
    UnitOwners,
)

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
with imported("vllm", "0.33.0", "triton", "vllm._C", "vllm._moe_C", "flashinfer", "cpuinfo", "xgrammar"):
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request, RequestStatus
init_none_hash(sha256)

KINDS = {"F": "path", "S": "window", "M": "state"}
NAMES = {"F": "full attention", "S": "window", "M": "state"}


def spec_of(kind: str, page: int, entry_bytes: int = 2, window: int = 0, padded: int | None = None) -> Any:
    """Return vLLM's specification of a layer; ``entry_bytes`` are those of a token, or of a state."""
    if kind == "state":
        return MambaSpec(
            block_size=page, shapes=((entry_bytes,),), dtypes=(torch.int8,), mamba_cache_mode="align",
            page_size_padded=padded,
        )  # fmt: skip
    kv = {"block_size": page, "num_kv_heads": 1, "head_size": entry_bytes // 2, "dtype": torch.int8}
    return SlidingWindowSpec(**kv, sliding_window=window) if kind == "window" else FullAttentionSpec(**kv)


class Managed:
    """vLLM's manager for groups of layers, and what its scheduler calls for one request."""

    def make(
        self, groups: list[Any], blocks: int, page: int, *, unit: int = 0, longest: int = 1 << 20, chunk: int = 2048,
        drafts: bool = False, in_flight: int | None = None, retention: int | None = None,
    ) -> None:  # fmt: skip
        """Make the manager. One of the blocks stands for none; ``unit`` is the tokens of a hash, a page by default."""
        unit = unit or page
        self.config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=unit,
            prefix_cache_retention_interval=retention,
        )  # fmt: skip
        self.manager = KVCacheManager(
            self.config, max_model_len=longest, scheduler_block_size=page, hash_block_size=unit, enable_caching=True,
            max_in_flight_tokens=in_flight, use_eagle=drafts,
        )  # fmt: skip
        self.stateful = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        partial = bool(self.manager.coordinator.enable_partial_hash_hits)
        self.grain = unit if partial or len(groups) == 1 else page
        self._alignment = SimpleNamespace(  # what Scheduler._mamba_block_aligned_split reads of its scheduler
            cache_config=SimpleNamespace(block_size=page),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            hash_block_size=unit,
            block_size=page,
            mamba_partial_cache_hit=self.stateful and unit < page and partial,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            use_eagle_block_drop=drafts,
            num_hash_lookahead_tokens=0,
            max_num_scheduled_tokens=chunk,
        )
        self.hasher = get_request_block_hasher(page, sha256)
        self._sampling = SamplingParams(max_tokens=1 << 30)
        self._numbers = itertools.count()

    def make_letters(self, letters: str, page: int, tokens: int, states: int, window: int, longest: int) -> int:
        """Make the manager with a group for each letter. Return its number of blocks."""
        groups = [KVCacheGroupSpec([each], spec_of(KINDS[each], page, window=window)) for each in letters]
        blocks = sum(states if letter == "M" else tokens // page for letter in letters)
        self.make(groups, blocks + 1, page, longest=longest)
        return blocks

    @classmethod
    def version(cls) -> str:
        return version_of("vllm", "vLLM")

    def request(self, tokens: list[int], salt: str = "", hasher: Callable[[Any], list[Any]] | None = None) -> Any:
        """Return a new request. It hashes its blocks at once."""
        return Request(
            request_id=str(next(self._numbers)), prompt_token_ids=tokens, sampling_params=self._sampling,
            pooling_params=None, cache_salt=salt or None, block_hasher=hasher or self.hasher,
        )  # fmt: skip

    def aligned(self, request: Any, count: int, hit: int = 0) -> int:
        """Return how many of ``count`` tokens the scheduler computes next, where a state must end at a block."""
        return (
            int(Scheduler._mamba_block_aligned_split(self._alignment, request, count, hit)) if self.stateful else count
        )

    def computed(self, request: Any) -> tuple[Any, int, int]:
        """Return the blocks that a request hits, how many tokens they are, and how far full attention alone hits."""
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        return blocks, hit, max(hit, boundary)

    def admit(self, request: Any, blocks: Any, hit: int, count: int, **options: Any) -> int:
        """Take blocks for ``count`` tokens behind the hit. Return how many tokens got blocks; 0 if there is no room."""
        count = self.aligned(request, min(count, request.num_tokens - hit), hit)
        found = count and self.manager.allocate_slots(
            request, count, num_new_computed_tokens=hit, new_computed_blocks=blocks, full_sequence_must_fit=True,
            **options,
        )  # fmt: skip
        if not count or found is None:
            return 0
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        return count

    def end(self, request: Any, status: Any = RequestStatus.FINISHED_STOPPED) -> None:
        request.status = status
        self.manager.free(request)


# ---------------------------------------------------------------- the rows


class VLLMRequest:
    __slots__ = ("blocks", "hit", "request")


class VLLM(Managed, Driver):
    """The driver of the rows.

    A request hashes its blocks when it is made, asks for computed blocks, takes slots for its prompt, appends its
    answer, takes slots for the answer, and is freed. With states, slots are taken in two steps: the first one ends at a
    whole block, where a state is kept.
    """

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int) -> None:
        if page == 1:
            raise EngineUnavailable("vLLM hashes whole blocks, and is not made for blocks of one token")
        Driver.__init__(self, comps, page, tokens, states, window)
        self.make_letters(comps, page, tokens, states, window, 1 << 20)

    def key(self, tokens: list[int]) -> list[int]:
        return tokens

    def joined(self, key: list[int], tail: list[int]) -> None:
        return None  # a request extends its own key

    def open(self, key: list[int]) -> VLLMRequest:
        found = self.match(key)
        self.pages(found)
        return found

    def hit(self, request: VLLMRequest) -> int:
        return request.hit

    def grow(self, request: VLLMRequest, tokens: int) -> None:
        """Take slots for the prompt. vLLM cannot take slots for tokens that are not known yet."""
        self._compute(request.request, request.hit, request.blocks)

    def _compute(self, request: Any, hit: int = 0, blocks: Any = None) -> None:
        """Take slots for all known tokens as one step does, or two with states: the first ends at a whole block."""
        begin, end = max(hit, request.num_computed_tokens), request.num_tokens
        whole = end // self.page * self.page
        for upto in (whole, end) if self.stateful and begin < whole < end else (end,):
            self._take(request, upto - begin, hit, blocks)
            begin = request.num_computed_tokens = upto
            hit, blocks = 0, None

    def _take(self, request: Any, count: int, hit: int = 0, blocks: Any = None) -> None:
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, count, hit, blocks) is None:
            raise MemoryError("no blocks are left")

    def finish(self, request: VLLMRequest, tail: list[int] | None, whole: Any) -> None:
        if tail is not None:
            request.request.append_output_token_ids(tail)
            self._compute(request.request)

    def close(self, request: VLLMRequest) -> None:
        self.manager.free(request.request)

    def chunk(self, request: VLLMRequest, tokens: int, key: Any) -> None:
        theirs = request.request
        self._take(theirs, tokens - theirs.num_computed_tokens)
        theirs.num_computed_tokens = tokens

    def match(self, key: list[int]) -> VLLMRequest:
        found = VLLMRequest()
        found.request = self.request(key)
        found.blocks, found.hit, _ = self.manager.get_computed_blocks(found.request)
        return found

    matched = hit

    def pages(self, found: VLLMRequest) -> Any:
        return found.blocks.get_block_ids()

    def lock(self, found: VLLMRequest) -> Any:
        return found

    def unlock(self, lock: Any) -> None:
        pass

    def evict(self, tokens: int) -> int:
        pool = self.manager.block_pool
        count = tokens // self.page
        pool.free_blocks(pool.get_new_blocks(count))
        return count * self.page

    def filled(self) -> None:
        """Use up the blocks that were never used: vLLM takes these first, and they have no hashes to forget."""
        pool = self.manager.block_pool
        head = pool.free_block_queue.fake_free_list_head
        while head.next_free_block.block_hash is None:
            pool.get_new_blocks(1)


# ---------------------------------------------------------------- the kit


class VLLMRunning:
    """A request, and what the scheduler and the worker know of it."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.start = self.count = 0
        """Where the pass that is being made begins, and how many tokens it computes."""
        self.state_index: int | None = None
        """The worker's ``mamba_state_idx``."""


class VLLMCache(Managed, ForeignCache):
    """vLLM's manager under its asynchronous scheduler: a pass is scheduled before the last one's result is known."""

    sets = ("F", "S", "FS", "FM", "FSM")
    page_sizes = (4,)
    ahead = 1

    def __init__(self, device: Any, components: str, page: int, tokens: int, states: int, window: int) -> None:
        self.device, self.page = device, page
        blocks = self.make_letters(components, page, tokens, states, window, 4096)
        reaches = {"F": Path(), "S": Window(window), "M": Point()}
        self.components = [
            AdaptedComponent(NAMES[each], reaches[each], "blocks", 1 if each == "M" else page) for each in components
        ]
        self.pools = {"blocks": range(1, blocks + 1)}  # block 0 stands for none
        self.content = SlotContent(self.components)
        self._running: list[VLLMRunning] = []
        self._making: list[VLLMRunning] = []

    def begin(self) -> None:
        self.manager.new_step_starts()
        self._making = []

    def extend(self, running: VLLMRunning, count: int) -> None:
        request = running.request
        known = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        count = self.aligned(request, min(count, known))
        if count and self.manager.allocate_slots(request, count) is None:
            raise NoRoom
        if count:
            self._scheduled(running, request.num_computed_tokens, count)

    def open(self, tokens: Sequence[int], namespace: str, count: int) -> tuple[Any, int]:
        request = self.request(list(tokens), namespace)
        blocks, hit, _ = self.computed(request)
        count = self.admit(request, blocks, hit, count, has_scheduled_reqs=bool(self._running))
        if not count:
            raise NoRoom
        running = VLLMRunning(request)
        self._running.append(running)
        self._scheduled(running, hit, count)
        return running, hit

    def _scheduled(self, running: VLLMRunning, start: int, count: int) -> None:
        running.start, running.count = start, count
        self._making.append(running)

    def launch(self, forward: Callable[[Sequence[tuple[Any, PassPart]]], None]) -> None:
        parts = []
        for running in self._making:
            start, end = running.start, running.start + running.count
            blocks = self.manager.get_block_ids(running.request.request_id)
            slots, states = {}, {}
            for component, ids in zip(self.components, blocks, strict=True):
                if component.is_state:
                    states[component.name] = self._access(running, component.name, ids, start, end)
                else:
                    slots[component.name] = self._slots(ids, end)
            parts.append((running, PassPart(start, end, slots, states)))
        forward(parts)
        for running in self._making:
            request = running.request
            request.num_computed_tokens += running.count
            request.num_in_flight_tokens += running.count
            known = request.num_tokens + request.num_output_placeholders
            request.is_prefill_chunk = request.num_computed_tokens < known
            request.num_output_placeholders += not request.is_prefill_chunk

    def _access(self, running: VLLMRunning, name: str, ids: list[int], start: int, end: int) -> StateAccess:
        """Copy the state to the block of the pass's last token, where it lives from then on."""
        before = running.state_index
        if before is None:
            before = (start - 1) // self.page
        now = running.state_index = -(-end // self.page) - 1
        if before not in (-1, now):
            source, target = ids[before], ids[now]
            self.device.run(lambda: self.write(name, target, self.read(name, source)))
        return StateAccess(ids[now] if start else None, ((ids[now], end),))

    def _slots(self, ids: Sequence[int], count: int) -> list[int]:
        size = self.page
        return [
            ids[i // size] * size + i % size if i // size < len(ids) and ids[i // size] else ABSENT
            for i in range(count)
        ]

    def commit(self, results: Sequence[PassResult]) -> None:
        for result in results:
            request = result.request.request
            request.num_in_flight_tokens -= result.part.end - result.part.start
            if result.sampled is None:
                continue
            placeholders = request.num_output_placeholders > 0
            request.append_output_token_ids(result.sampled)
            request.num_output_placeholders -= 1
            if placeholders:
                self.manager.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
            if result.last:
                self._over(result.request, RequestStatus.FINISHED_STOPPED)

    def abort(self, running: VLLMRunning) -> None:
        self._over(running, RequestStatus.FINISHED_ABORTED)

    def retract(self, running: VLLMRunning) -> None:
        self._over(running, RequestStatus.PREEMPTED)

    def _over(self, running: VLLMRunning, status: Any) -> None:
        self.end(running.request, status)
        self._running.remove(running)
        if running in self._making:
            self._making.remove(running)

    def evict(self, count: int) -> None:
        """Take blocks as a new request would, until enough cached ones were taken, and give them back."""
        pool = self.manager.block_pool
        taken: list[Any] = []
        left = -(-count // self.page)
        while left > 0 and pool.get_num_free_blocks():
            head = pool.free_block_queue.fake_free_list_head.next_free_block
            left -= head.block_hash is not None
            taken += pool.get_new_blocks(1)
        pool.free_blocks(taken)

    def tables(self, running: VLLMRunning) -> RequestTables:
        request = running.request
        blocks = self.manager.get_block_ids(request.request_id)
        slots, states = {}, {}
        for component, ids in zip(self.components, blocks, strict=True):
            if component.is_state:
                index = running.state_index
                states[component.name] = ids[index] if index is not None and ids[index] else ABSENT
            else:
                slots[component.name] = self._slots(ids, request.num_computed_tokens)
        return RequestTables(slots, states)

    def _held(self, running: VLLMRunning) -> list[Any]:
        groups = self.manager.get_blocks(running.request.request_id).blocks
        return [block for group in groups for block in group if not block.is_null]

    def owners(self) -> dict[str, UnitOwners]:
        pool = self.manager.block_pool
        cached = [block.block_id for block in pool.blocks if not block.is_null and block.block_hash is not None]
        queued = pool.free_block_queue.get_all_free_blocks()
        free = [block.block_id for block in queued if block.block_hash is None]
        running = {
            each: [block.block_id for block in self._held(each) if block.block_hash is None] for each in self._running
        }
        return {"blocks": UnitOwners(free, cached, running)}

    def self_check(self) -> None:
        """Hold vLLM's counts against its rule: a block counts each request that holds it, or is queued."""
        counts = Counter(block.block_id for running in self._running for block in self._held(running))
        queued = {block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()}
        for block in self.manager.block_pool.blocks:
            held = counts[block.block_id]
            if not block.is_null and (block.ref_cnt != held or (held == 0) != (block.block_id in queued)):
                raise AssertionError(
                    f"block {block.block_id} is counted {block.ref_cnt} times, {held} requests hold it, and it is "
                    f"{'' if block.block_id in queued else 'not '}in the free queue"
                )

    def read(self, component: str, slot: int) -> int:
        return self.content.read(component, slot)

    def write(self, component: str, slot: int, number: int) -> None:
        self.content.write(component, slot, number)


class VLLMByPriority(VLLMCache):
    """vLLM with scheduling by priority: who is preempted for room may stand in the pass that is being made."""

    gives_up_scheduled = True
