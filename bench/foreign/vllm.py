"""The adapter of vLLM's KV cache manager, as its scheduler drives it.

The order of calls is that of vLLM's ``Scheduler.schedule`` (running requests first, then waiting ones),
``_update_after_schedule``, ``update_from_output`` and ``_preempt_request``, and what the device does with states before
the layers is that of ``mamba_utils.preprocess_mamba``. vLLM's block pool is real. Its workers' tensors need a GPU, so
content lies beside the manager: one memory for each block, which all groups share, as in vLLM.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from bench.drivers.stand_ins import sealed, stand_in
from prefixloom import Path, Point, Window
from prefixloom.testing.foreign.contract import (
    ABSENT,
    AdaptedComponent,
    AdapterUnavailable,
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
sealed(False)
stand_in("triton", "vllm._C", "vllm._moe_C", "flashinfer", "cpuinfo", "xgrammar")
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
except ImportError as error:
    raise AdapterUnavailable(f"{error}. docs/peers.md says how vLLM is installed without what needs a GPU") from error
sealed(True)
init_none_hash(sha256)

NAMES = {"F": "full attention", "S": "window", "M": "state"}


class VLLMRunning:
    """A request, and what the scheduler and the worker know of it."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.count = 0
        """The tokens that it gets in the pass that is being made."""
        self.start = 0
        self.state_index: int | None = None
        """The worker's ``mamba_state_idx``."""


class VLLMCache(ForeignCache):
    """vLLM's manager under its asynchronous scheduler: a pass is scheduled before the last one's result is known."""

    sets = ("F", "S", "FS", "FM", "FSM")
    page_sizes = (4,)
    ahead = 1

    def __init__(self, device: Any, components: str, page: int, tokens: int, states: int, window: int) -> None:
        self.device, self.page = device, page
        kv = {"block_size": page, "num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
        specs = {
            "F": lambda: FullAttentionSpec(**kv),
            "S": lambda: SlidingWindowSpec(**kv, sliding_window=window),
            "M": lambda: MambaSpec(
                block_size=page, shapes=((1,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
            ),
        }  # fmt: skip
        blocks = sum(states if letter == "M" else tokens // page for letter in components)
        groups = [KVCacheGroupSpec([letter], specs[letter]()) for letter in components]
        config = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=page)
        self.manager = KVCacheManager(
            config, max_model_len=4096, scheduler_block_size=page, hash_block_size=page, enable_caching=True
        )
        reaches = {"F": Path(), "S": Window(window), "M": Point()}
        self.components = [
            AdaptedComponent(NAMES[each], reaches[each], "blocks", 1 if each == "M" else page) for each in components
        ]
        self.pools = {"blocks": range(1, blocks + 1)}  # block 0 stands for none
        self.content = SlotContent(self.components)
        self.states = "M" in components
        self._alignment = SimpleNamespace(  # what Scheduler._mamba_block_aligned_split reads of its scheduler
            cache_config=SimpleNamespace(block_size=page),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            hash_block_size=page,
            block_size=page,
            mamba_partial_cache_hit=False,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
            max_num_scheduled_tokens=2048,
        )
        self._hasher = get_request_block_hasher(page, sha256)
        self._sampling = SamplingParams(max_tokens=1000)
        self._numbers = itertools.count()
        self._running: list[VLLMRunning] = []
        self._making: list[VLLMRunning] = []

    @classmethod
    def version(cls) -> str:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return f"vllm {version('vllm')}"
        except PackageNotFoundError:  # unpacked, and not installed
            import vllm

            return f"vllm {vllm.__version__}"

    # ------------------------------------------------------------ requests
    def begin(self) -> None:
        self.manager.new_step_starts()
        self._making = []

    def _aligned(self, request: Any, count: int, hit: int = 0) -> int:
        return Scheduler._mamba_block_aligned_split(self._alignment, request, count, hit) if self.states else count

    def extend(self, running: VLLMRunning, count: int) -> None:
        request = running.request
        known = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        count = self._aligned(request, min(count, known))
        if count == 0:
            return
        if self.manager.allocate_slots(request, count) is None:
            raise NoRoom
        self._scheduled(running, count, request.num_computed_tokens)

    def open(self, tokens: Sequence[int], namespace: str, count: int) -> tuple[Any, int]:
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=list(tokens),
            sampling_params=self._sampling,
            pooling_params=None,
            cache_salt=namespace or None,
            block_hasher=self._hasher,
        )
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        count = self._aligned(request, min(count, request.num_tokens - hit), hit)
        if count == 0:
            raise NoRoom
        found = self.manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
            has_scheduled_reqs=bool(self._running),
        )
        if found is None:
            raise NoRoom
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        running = VLLMRunning(request)
        self._running.append(running)
        self._scheduled(running, count, hit)
        return running, hit

    def _scheduled(self, running: VLLMRunning, count: int, start: int) -> None:
        running.count, running.start = count, start
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
            request.is_prefill_chunk = request.num_computed_tokens < (
                request.num_tokens + request.num_output_placeholders
            )
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1

    def _access(self, running: VLLMRunning, name: str, ids: list[int], start: int, end: int) -> StateAccess:
        """The state is copied to the block of the pass's last token, and then lives there."""
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
                self._end(result.request, RequestStatus.FINISHED_STOPPED)

    def abort(self, running: VLLMRunning) -> None:
        self._end(running, RequestStatus.FINISHED_ABORTED)

    def retract(self, running: VLLMRunning) -> None:
        self._end(running, RequestStatus.PREEMPTED)

    def _end(self, running: VLLMRunning, status: Any) -> None:
        running.request.status = status
        self.manager.free(running.request)
        self._running.remove(running)
        if running in self._making:
            self._making.remove(running)

    # ------------------------------------------------------------ blocks
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
        blocks = [block for block in self.manager.block_pool.blocks if not block.is_null]
        cached = [block.block_id for block in blocks if block.block_hash is not None]
        free = [
            block.block_id
            for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()
            if block.block_hash is None
        ]
        running = {
            each: [block.block_id for block in self._held(each) if block.block_hash is None] for each in self._running
        }
        return {"blocks": UnitOwners(free, cached, running)}

    def self_check(self) -> None:
        """vLLM's rule for its own counts: a block is counted once for each request that holds it, or is queued."""
        counts: dict[int, int] = {}
        for running in self._running:
            for block in self._held(running):
                counts[block.block_id] = counts.get(block.block_id, 0) + 1
        queued = {block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()}
        for block in self.manager.block_pool.blocks:
            if not block.is_null:
                held = counts.get(block.block_id, 0)
                if block.ref_cnt != held or (held == 0) != (block.block_id in queued):
                    raise AssertionError(
                        f"block {block.block_id} is counted {block.ref_cnt} times, {held} requests hold it, and it is "
                        f"{'' if block.block_id in queued else 'not '}in the free queue"
                    )

    def read(self, component: str, slot: int) -> int:
        return self.content.read(component, slot)

    def write(self, component: str, slot: int, number: int) -> None:
        self.content.write(component, slot, number)


class VLLMInOrder(VLLMCache):
    """vLLM without asynchronous scheduling: each result is known before the next pass is scheduled."""

    ahead = 0


class VLLMByPriority(VLLMCache):
    """vLLM with scheduling by priority: who is preempted for room may stand in the pass that is being made."""

    gives_up_scheduled = True
