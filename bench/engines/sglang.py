"""SGLang's unified radix cache, with SGLang's own requests, batches, allocators and pools on a CPU, for the kit.

What the scheduler does around them is that of SGLang's ``Scheduler.get_next_batch_to_run`` (stash the chunk, merge the
last prefill into the running batch, then prefill or decode), ``_get_new_batch_prefill_raw`` (match, ``PrefillAdder``,
``prepare_for_extend``), ``update_running_batch``, ``event_loop_overlap`` (make and launch a batch, and then process
the result of the one before) and ``SchedulerBatchResultProcessor``. Content lies in SGLang's pools, so its own copies
move it. The kernels that write states for the tree are played by the adapter, from the batch's tracking fields.
``sglang_loop`` and ``sglang_lab`` build on it.
"""

from __future__ import annotations

import itertools
import logging
import os
import types
import typing
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from bench.engines.stand_ins import imported, sealed, version_of
from prefixloom import Path, Point, Window
from prefixloom.testing.foreign.contract import (
    ABSENT,
    AdaptedComponent,
    ForeignCache,
    NoRoom,
    PassPart,
    PassResult,
    RequestTables,
    StateAccess,
    UnitOwners,
)

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
with imported(
    "sglang", "0.5.23", "triton", "sgl_kernel", "flashinfer", "tvm_ffi", "torchvision", "compressed_tensors", "gguf",
    "partial_json_parser", "xgrammar", "outlines",
):  # fmt: skip
    import xgrammar

    xgrammar.StructuralTag = typing.Any
    import torch
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
logging.getLogger("sglang").setLevel(logging.ERROR)
if not torch.cuda.is_available():
    torch.Tensor.pin_memory = lambda self, *_: self  # there is no device to copy to

NAMES = {"F": "full attention", "S": "window", "M": "state"}
TYPES = {"F": ComponentType.FULL, "S": ComponentType.SWA, "M": ComponentType.MAMBA}
MOST_NEW = 26
"""The most tokens that a request asks for: one more than the kit ever samples."""
NO_DRAFTS = types.SimpleNamespace(num_correct_drafts_per_req_cpu=None)


def start(page: int, state_chunk: int, **options: Any) -> None:
    """Set SGLang's arguments for this process, as its server does at its start."""
    arguments = ServerArgs(model_path="none", page_size=page, device="cpu", **options)
    arguments._mamba_cache_chunk_size = state_chunk
    set_global_server_args_for_scheduler(arguments)


class Results:
    """What SGLang's result processor does with a request whose token was sampled, without anything but a cache."""

    def __init__(self, cache: Any) -> None:
        self.tree_cache = cache
        self.model_worker = self.draft_worker = None

    _handle_finish_state_updated_req = SchedulerBatchResultProcessor._handle_finish_state_updated_req
    _mamba_prefix_cache_update = SchedulerBatchResultProcessor._mamba_prefix_cache_update
    _mamba_check_track_boundary = SchedulerBatchResultProcessor._mamba_check_track_boundary
    _mamba_can_cache_finished_req = SchedulerBatchResultProcessor._mamba_can_cache_finished_req
    _mamba_assert_committed_len_lookahead = staticmethod(
        SchedulerBatchResultProcessor._mamba_assert_committed_len_lookahead
    )
    _prepare_kv_cache_release = SchedulerBatchResultProcessor._prepare_kv_cache_release

    def decoded(self, request: Any, batch: Any, i: int) -> None:
        """Process the result of a decode for a request that may have finished with it."""
        self._handle_finish_state_updated_req(request, batch, NO_DRAFTS, i, None)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    _maybe_collect_routed_experts = _maybe_collect_indexer_topk = _maybe_collect_customized_info = _nothing


class SGLangCache(ForeignCache):
    """SGLang's cache, one batch ahead. With states and pages of one token, SGLang runs none ahead."""

    sets = ("F", "FS", "FM", "FSM")
    page_sizes = (1, 4)
    ahead = 1
    mixes = False
    one_chunked = True
    decodes_together = True
    aborts_at_result = True
    core: ClassVar[str] = "python"
    parameters: ClassVar[dict[str, Any]] = {}
    """Further parameters of the prefix cache."""
    window_share: ClassVar[float] = 1.0
    """Slots of windows for each slot of full attention."""
    longest: ClassVar[int] = 512
    """Tokens of the longest request."""
    track_interval: ClassVar[int] = 0
    """Of how many tokens each state of a running request is kept. 0: of two pages."""
    requests_at_once: ClassVar[int] = 8
    """Rows of the request table, where no states bound their number."""
    extra_buffer: ClassVar[bool | None] = None
    """Whether states are kept on the way of a request. None: where pages have more than one token."""
    state_chunk: ClassVar[int] = 0
    """Of how many tokens a prompt's states can be kept. 0: of a page."""

    def __init__(self, device: Any, components: str, page: int, tokens: int, states: int, window: int) -> None:
        self.device, self.page, self.letters = device, page, components
        extra = "M" in components and (page > 1 if self.extra_buffer is None else self.extra_buffer)
        self.overlap = extra or "M" not in components
        self.ahead = 1 if self.overlap else 0
        start(
            page, self.state_chunk or page, attention_backend="torch_native", disable_overlap_schedule=not self.overlap,
            mamba_track_interval=self.track_interval or 2 * page,
            mamba_radix_cache_strategy="extra_buffer" if extra else "no_buffer",
        )  # fmt: skip
        tokens = tokens // page * page
        self.window_tokens = int(tokens * self.window_share) // page * page
        self.kv = self._kv_pool(tokens)
        self.allocator = self._allocator(tokens)
        self.rows = self._request_pool(states, extra)
        sealed(False)  # making the cache imports more modules
        self.cache = self._prefix_cache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                sliding_window_size=window - 1 if "S" in components else None,  # SGLang does not count the token itself
                tree_components=tuple(TYPES[letter] for letter in components),
                enable_mamba_extra_buffer=extra,
                tree_core_backend=self.core,
                **self.parameters,
            )
        )
        sealed(True)
        reaches = {"F": Path(), "S": Window(window), "M": Point()}
        self.components = [
            AdaptedComponent(NAMES[each], reaches[each], NAMES[each], 1 if each == "M" else page) for each in components
        ]
        pages, window_pages = tokens // page, self.window_tokens // page
        counts = {"F": pages, "S": window_pages, "M": states}
        self.pools = {NAMES[each]: range(1, counts[each] + 1) for each in components}  # 0 is a slot for padding
        self.model = types.SimpleNamespace(
            vocab_size=1 << 20,
            is_encoder_decoder=False,
            hf_text_config=types.SimpleNamespace(mamba_chunk_size=self.state_chunk or page),
        )
        self.results = Results(self.cache)
        self.running: Any = self.batch([])
        self.last: Any = None
        self.chunked: Any = None
        self._live: list[Any] = []
        self._numbers = itertools.count()
        self._launched: list[Any] = []

    def _prefix_cache(self, params: Any) -> Any:
        return UnifiedRadixCache(params)

    def _kv_pool(self, tokens: int) -> Any:
        sizes = {"page_size": self.page, "dtype": torch.float32, "head_num": 1, "head_dim": 1, "device": "cpu"}
        if "S" in self.letters:
            return SWAKVPool(
                size=tokens,
                size_swa=self.window_tokens,
                swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0],
                **sizes,
            )
        return MHATokenToKVPool(size=tokens, layer_num=1, enable_memory_saver=False, **sizes)

    def _allocator(self, tokens: int) -> Any:
        if "S" in self.letters:
            return SWATokenToKVPoolAllocator(
                tokens, self.window_tokens, self.page, torch.float32, "cpu", self.kv, False
            )
        if self.page == 1:
            return TokenToKVPoolAllocator(tokens, torch.float32, "cpu", self.kv, False)
        return PagedTokenToKVPoolAllocator(tokens, self.page, torch.float32, "cpu", self.kv, False)

    def _request_pool(self, states: int, extra: bool) -> Any:
        # A request has a running slot and two that are written in turn, and SGLang sizes the pool for three or five.
        size = self._rows(states // (5 if extra else 3)) if "M" in self.letters else self.requests_at_once
        common = {"size": size, "max_context_len": self.longest, "device": "cpu", "enable_memory_saver": False}
        if "M" not in self.letters:
            return ReqToTokenPool(**common)
        shape = Mamba2StateShape(
            conv=[(1, 1)], temporal=(1, 1, 1), intermediate_size=1, conv_dim=1, ssm_state_size=1, num_heads=1,
            head_dim=1, state_size=1, conv_kernel=2,
        )  # fmt: skip
        dtypes = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        return HybridReqToTokenPool(
            mamba_size=states,
            mamba_spec_state_size=8,
            cache_params=Mamba2CacheParams(shape=shape, dtype=dtypes, layers=[2]),
            mamba_layer_ids=[2],
            enable_mamba_extra_buffer=extra,
            enable_overlap_schedule=self.overlap,
            **common,
        )

    def _rows(self, most: int) -> int:
        """Return the rows of the request table, where the states allow ``most``."""
        return most

    @classmethod
    def version(cls) -> str:
        return f"{version_of('sglang', 'SGLang')}, {cls.core} core"

    def request(self, tokens: Sequence[int], new: int, ignore_eos: bool = True, **options: Any) -> Any:
        """Return a new request for ``new`` tokens of an answer. SGLang admits it otherwise if it may end before."""
        parameters = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=ignore_eos)
        parameters.normalize(None)
        number = str(next(self._numbers))
        return Req(number, "", array("q", tokens), parameters, vocab_size=self.model.vocab_size, **options)

    def has_row(self, admitted: list[Any]) -> bool:
        """Return whether one more request can be admitted, as get_num_allocatable_reqs says."""
        return len(admitted) < self.rows.available_size() + sum(each.kv.holds_kv for each in admitted)

    def take_states_back(self, request: Any) -> None:
        """Give back the state that a request got when it was matched, since it is not admitted."""
        request.kv.mamba_cow_src_index = None
        request.kv.mamba_needs_clear = False
        if request.kv.holds_mamba:
            self.rows.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))
            request.kv.mamba_pool_idx = None

    def batch(self, requests: list[Any], chunked: Any = None) -> Any:
        return ScheduleBatch.init_new(
            requests, self.rows, self.allocator, self.cache, self.model, self.overlap, SpeculativeAlgorithm.NONE,
            chunked_req=chunked,
        )  # fmt: skip

    def prefill_batch(self, requests: list[Any]) -> Any:
        """Return the batch of these requests' next chunks, ready for its forward pass."""
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        batch = self.batch(requests, self.chunked)
        batch.prepare_for_extend()
        return batch

    def processed(self, batch: Any, sample: Callable[[Any], bool]) -> None:
        """Process the result of a batch. ``sample`` gives a request its token. False: no result comes for it."""
        decodes = batch.forward_mode.is_decode()
        if decodes:
            self.allocator.free_group_begin()
        for i, request in enumerate(batch.reqs):
            if not decodes and request.inflight_middle_chunks > 0:
                request.inflight_middle_chunks -= 1
                continue
            if request.finished() or request.is_retracted or not sample(request):
                continue
            request.update_finish_state()
            if request.finished():
                self._live.remove(request)
            if decodes:
                self.results.decoded(request, batch, i)
            elif request.finished():
                release_kv_cache(request, self.cache, checkpoint=True)
            else:
                checkpoint_kv_cache(request, self.cache)
        if decodes:
            self.allocator.free_group_end()

    # ------------------------------------------------------------ requests
    def take_over(self) -> None:
        """Publish the chunk, and let prefilled requests run on: the first half of get_next_batch_to_run."""
        excluded = set()
        if self.chunked is not None:
            excluded.add(self.chunked)
            if self.chunked.extend_end > self.chunked.prefix_len:
                checkpoint_kv_cache(self.chunked, self.cache)
        if self.last is not None and self.last.forward_mode.is_extend():
            if self.last.chunked_req is not None:
                excluded.add(self.last.chunked_req)
            self.last.filter_batch(reqs_to_exclude=list(excluded))
            if not self.last.is_empty():
                if self.running.is_empty():
                    self.running = self.last
                else:
                    self.running.merge_batch(self.last)
        self.running.filter_batch()

    def begin(self) -> None:
        """Do the first half of get_next_batch_to_run, and make a PrefillAdder for the second."""
        self.take_over()
        self.last = None
        self.adder = PrefillAdder(self.page, self.cache, self.allocator, self.running, 0.5, 1 << 20, 1 << 20)
        self.decoding = False

    def extend(self, request: Any, count: int) -> None:
        if request is self.chunked:
            request.init_next_round_input()
            self.adder.rem_chunk_tokens = max(count // self.page, 1) * self.page
            self.chunked = self.adder.add_chunked_req(request)
            return
        self.decoding = True
        if not self.running.check_decode_mem():
            raise NoRoom

    def open(self, tokens: Sequence[int], namespace: str, count: int) -> tuple[Any, int]:
        if not self.has_row(self.adder.can_run_list):
            raise NoRoom
        request = self.request(tokens, MOST_NEW, False, extra_key=namespace or None)
        request.init_next_round_input(self.cache)
        whole = count >= len(tokens) - request.prefix_len
        self.adder.rem_chunk_tokens = 1 << 20 if whole else max(count // self.page, 1) * self.page
        self.adder.add_one_req(request, has_chunked_req=self.chunked is not None, truncation_align_size=None)
        if not (self.adder.can_run_list and self.adder.can_run_list[-1] is request):
            self.take_states_back(request)
            raise NoRoom
        if self.adder.new_chunked_req is not None:
            assert self.chunked is None or self.chunked is self.adder.new_chunked_req
            self.chunked = self.adder.new_chunked_req
        self._live.append(request)
        return request, request.prefix_len

    def launch(self, forward: Callable[[Sequence[tuple[Any, PassPart]]], None]) -> None:
        requests = list(self.adder.can_run_list)
        if requests:
            batch = self.prefill_batch(requests)
            self._copy_states(batch)
            parts = [self._part(batch, i, each, each.prefix_len, each.extend_end) for i, each in enumerate(requests)]
        elif self.decoding and not self.running.is_empty():
            batch = self.running
            batch.prepare_for_decode()
            ends = batch.seq_lens_cpu.tolist()
            parts = [self._part(batch, i, each, ends[i] - 1, ends[i]) for i, each in enumerate(batch.reqs)]
        else:
            return
        forward(list(zip(batch.reqs, parts, strict=True)))
        self._launched.append(batch.copy())
        self.last = batch

    def _copy_states(self, batch: Any) -> None:
        """Clear and copy states on the device before the layers, as ModelRunner does."""
        if "M" not in self.letters:
            return
        clear, sources, targets = batch.mamba_clear_indices, batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices

        def work() -> None:
            if clear is not None:
                self.rows.mamba_pool.clear_slots(clear)
            if sources is not None:
                self.rows.copy_mamba_state(sources, targets)

        self.device.run(work)

    def _part(self, batch: Any, i: int, request: Any, start: int, end: int) -> PassPart:
        states = {}
        if "M" in self.letters:
            slot = int(request.kv.mamba_pool_idx)
            writes = [(slot, end)]
            if batch.mamba_track_mask is not None and bool(batch.mamba_track_mask[i]):
                target = int(batch.mamba_track_indices[i])
                writes.append((target, request.kv.mamba_last_track_seqlen if batch.forward_mode.is_extend() else end))
            states[NAMES["M"]] = StateAccess(slot, tuple(writes))
        return PassPart(start, end, self._slots(request, end), states)

    def _slots(self, request: Any, end: int) -> dict[str, list[int]]:
        row = self.rows.req_to_token[request.kv.req_pool_idx, :end].to(torch.int64)
        slots = {NAMES["F"]: row.tolist()}
        if "S" in self.letters:
            mapped = self.allocator.full_to_swa_index_mapping[row]
            slots[NAMES["S"]] = [slot if slot > 0 else ABSENT for slot in mapped.tolist()]
        return slots

    def commit(self, results: Sequence[PassResult]) -> None:
        by_request = {id(each.request): each for each in results}

        def sample(request: Any) -> bool:
            result = by_request.get(id(request))
            if result is not None:
                assert result.sampled is not None
                request.output_ids.append(result.sampled)
                if result.last:
                    request.to_finish = FINISH_LENGTH(len(request.output_ids))
            return result is not None

        self.processed(self._launched.pop(0), sample)

    def abort(self, request: Any) -> None:
        """Abort a request midway in its prompt, as process_pending_chunked_abort does."""
        request.finished_reason = FINISH_ABORT("Aborted")
        release_kv_cache(request, self.cache, checkpoint=False)
        if self.chunked is request:
            self.chunked = None
        self._live.remove(request)

    def retract(self, request: Any) -> None:
        """Release the request as release_req in retract_decode does."""
        release_kv_cache(request, self.cache, checkpoint=False)
        request.reset_for_retract()
        for batch in (self.running, self.last):
            if batch is not None and request in batch.reqs:
                batch.filter_batch(reqs_to_exclude=request)
        if self.chunked is request:
            self.chunked = None
        self._live.remove(request)

    # ------------------------------------------------------------ slots
    def evict(self, count: int) -> None:
        self.cache.evict(
            EvictParams(
                num_tokens=count,
                swa_num_tokens=count if "S" in self.letters else 0,
                mamba_num=-(-count // self.page) if "M" in self.letters else 0,
            )
        )

    def tables(self, request: Any) -> RequestTables:
        states = {}
        if "M" in self.letters:
            index = request.kv.mamba_pool_idx
            states[NAMES["M"]] = ABSENT if index is None else int(index)
        return RequestTables(self._slots(request, request.kv.kv_allocated_len), states)

    def _free_units(self, allocator: Any) -> list[int]:
        return allocator.get_all_free_pages().tolist()

    def _nodes(self) -> list[Any]:
        found, stack = [], [self.cache.tree_core.root_node]
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found[1:]

    def _units(self, slots: Any) -> list[int]:
        """Return the pages of token slots that lie in whole pages from a page's start."""
        return [slot // self.page for slot in slots.tolist()[:: self.page]]

    def _cached_units(self) -> dict[str, list[int]]:
        """Return the units that the cache has, by component."""
        cached: dict[str, list[int]] = {NAMES[each]: [] for each in self.letters}
        for node in self._nodes():
            for letter in self.letters:
                value = node.component_data[TYPES[letter]].value
                if value is not None:
                    cached[NAMES[letter]] += value.tolist() if letter == "M" else self._units(value)
        return cached

    def owners(self) -> dict[str, UnitOwners]:
        cached = self._cached_units()
        if "S" in self.letters:
            free = {
                NAMES["F"]: self._free_units(self.allocator.full_attn_allocator),
                NAMES["S"]: self._free_units(self.allocator.swa_attn_allocator),
            }
        else:
            free = {NAMES["F"]: self._free_units(self.allocator)}
        if "M" in self.letters:
            free[NAMES["M"]] = self.rows.mamba_allocator.free_slots.tolist()
        running: dict[str, dict[Any, list[int]]] = {NAMES[each]: {} for each in self.letters}
        for request in self._live:
            kv = request.kv
            if not kv.holds_kv:
                continue
            row = self.rows.req_to_token[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len].to(torch.int64)
            running[NAMES["F"]][request] = self._units(row)
            if "S" in self.letters:
                mapped = self.allocator.full_to_swa_index_mapping[row]
                running[NAMES["S"]][request] = [unit for unit in self._units(mapped) if unit > 0]
            if "M" in self.letters:
                held = [] if kv.mamba_pool_idx is None else [int(kv.mamba_pool_idx)]
                if kv.mamba_ping_pong_track_buffer is not None:
                    held += [slot for slot in kv.mamba_ping_pong_track_buffer.tolist() if slot > 0]
                running[NAMES["M"]][request] = held
        return {name: UnitOwners(free[name], cached[name], running[name]) for name in cached}

    def self_check(self) -> None:
        if not self._live:
            self.cache.sanity_check()

    def _tensors(self, component: str) -> list[Any]:
        if component == NAMES["M"]:
            state = self.rows.mamba_pool.mamba_cache
            return [state.conv[0][0], state.temporal[0]]
        pool = self.kv
        if "S" in self.letters:
            pool = pool.full_kv_pool if component == NAMES["F"] else pool.swa_kv_pool
        return [pool.k_buffer[0], pool.v_buffer[0]]

    def read(self, component: str, slot: int) -> int:
        first, second = (int(tensor[slot].reshape(-1)[0]) for tensor in self._tensors(component))
        return first if first == second else -8

    def write(self, component: str, slot: int, number: int) -> None:
        for tensor in self._tensors(component):
            tensor[slot] = number
