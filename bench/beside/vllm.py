"""vLLM's KV cache manager in the lab, as its scheduler calls it for one request at a time.

The calls are those of ``Scheduler.schedule`` for a waiting and for a running request, with the scheduler's own rule for
where a chunk ends in models with states. The blocks' keys are chained hashes as vLLM's are, made by a faster function:
a hit does not depend on it. The scheduler itself is not run: it would decide who runs and who waits, and that is the
same for all sides here.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from bench.beside.vllm_sizes import vllm_sizes
from bench.drivers.stand_ins import sealed, stand_in
from prefixloom import PageChain, Tokens
from prefixloom.lab.beside.peer import (
    MemoryKind,
    NotSized,
    PeerCache,
    PeerFull,
    PeerMatch,
    PeerPool,
    PeerUnavailable,
    PeerUse,
)

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sealed(False)
stand_in("triton", "vllm._C", "vllm._moe_C", "flashinfer", "cpuinfo", "xgrammar")
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_page_size
        from vllm.v1.core.kv_cache_utils import get_group_id, resolve_kv_cache_block_sizes
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
    raise PeerUnavailable(
        f"--beside vllm: vLLM cannot be imported here ({error}), get it by `pip install --no-deps vllm==0.33.0` beside "
        f"what its cache manager imports, as docs/peers.md says"
    ) from error
sealed(True)

POOL = "blocks"


class VLLMOpened:
    """A request, and the part of its prompt that was scheduled when it was admitted."""

    def __init__(self, manager: Any, request: Any) -> None:
        self._manager, self.request = manager, request
        self.scheduled = 0

    def close(self) -> None:
        self.request.status = RequestStatus.FINISHED_STOPPED
        self._manager.free(self.request)

    abort = close


class VLLMBeside(PeerCache):
    settings: ClassVar[Mapping[str, str]] = {
        "default": "as it starts",
        "dense": "--prefix-cache-retention-interval none: windows and states are kept at all boundaries",
        "fine": "--prefix-match-unit 16: a hit may end within a block",
        "fine and dense": "both",
        "drafts": "with a draft model: the last block that hits is dropped",
    }

    def __init__(
        self, kinds: Sequence[MemoryKind], memory: int, setting: str, *, running: int, chunk: int, longest: int
    ) -> None:
        if setting not in self.settings:
            raise NotSized(f"vllm: no setting {setting!r} is known, there are {', '.join(self.settings)}")
        self._sizes = sizes = vllm_sizes(kinds, memory)
        self._chunk, self._longest = chunk, longest
        fine, dense, drafts = "fine" in setting, "dense" in setting, setting == "drafts"
        groups = self._groups(kinds, drafts)
        self._states = any(each.kind == "state" for each in sizes.groups)
        unit = 16 if fine and self._states else sizes.page
        config = KVCacheConfig(
            num_blocks=sizes.blocks, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=unit,
            prefix_cache_retention_interval=None if dense else 0,
        )  # fmt: skip
        self._unit = self._checked_unit(config, unit)
        self._manager = KVCacheManager(
            config, max_model_len=longest, scheduler_block_size=sizes.page, hash_block_size=unit, enable_caching=True,
            max_in_flight_tokens=2 * chunk, use_eagle=drafts,
        )  # fmt: skip
        coordinator = self._manager.coordinator
        partial = bool(coordinator.enable_partial_hash_hits)
        self.grain = unit if partial or len(groups) == 1 else sizes.page
        self._alignment = SimpleNamespace(  # what Scheduler._mamba_block_aligned_split reads of its scheduler
            cache_config=SimpleNamespace(block_size=sizes.page),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            hash_block_size=unit,
            block_size=sizes.page,
            mamba_partial_cache_hit=self._states and unit < sizes.page and partial,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            use_eagle_block_drop=drafts,
            num_hash_lookahead_tokens=0,
            max_num_scheduled_tokens=chunk,
        )
        self.pools = [PeerPool(POOL, sizes.blocks - 1, 0, sizes.block_bytes)]
        if all(each.kind == "path" for each in kinds):
            self.pools = [PeerPool(POOL, sizes.blocks - 1, sizes.page, sizes.block_bytes)]
        self.sizing = [f"{sizes.blocks - 1:,} blocks of {sizes.page} tokens and {sizes.block_bytes:,} bytes"]
        self.sizing += [*sizes.sentences, f"hits end at multiples of {self.grain} tokens"]
        self._sampling = SamplingParams(max_tokens=1 << 30)
        self._numbers = itertools.count()
        self._evicted: Counter[int] = Counter()
        self._made: Counter[int] = Counter()
        self._count_blocks()

    @classmethod
    def version(cls) -> str:
        import vllm

        return f"vLLM {vllm.__version__}"

    @classmethod
    def settings_of(cls, kinds: Sequence[MemoryKind]) -> tuple[str, ...]:
        has = {each.kind for each in kinds}
        chosen = ["default", *(["dense"] if has != {"path"} else [])]
        return (*chosen, *(["fine", "fine and dense"] if "state" in has else []), "drafts")

    @classmethod
    def check_size(cls, kinds: Sequence[MemoryKind], memory: int, setting: str) -> None:
        vllm_sizes(kinds, memory)

    # ------------------------------------------------------------ making
    def _groups(self, kinds: Sequence[MemoryKind], drafts: bool) -> list[Any]:
        """The groups that vLLM makes of the layers, which must be those of ``vllm_sizes``."""
        sizes = self._sizes
        kv = {"block_size": sizes.page, "num_kv_heads": 1, "dtype": torch.int8}
        layers: dict[str, Any] = {}
        kind_of = {}
        for each in kinds:
            if each.kind == "path":
                spec = FullAttentionSpec(**kv, head_size=each.entry_bytes // 2)
            elif each.kind == "window":
                spec = SlidingWindowSpec(**kv, head_size=each.entry_bytes // 2, sliding_window=each.window)
            else:
                spec = MambaSpec(
                    block_size=sizes.page, shapes=((each.entry_bytes,),), dtypes=(torch.int8,),
                    mamba_cache_mode="align", page_size_padded=sizes.page_bytes,
                )  # fmt: skip
            assert spec.page_size_bytes == sizes.page_bytes, (each, spec.page_size_bytes, sizes.page_bytes)
            for layer in range(each.layers):
                layers[f"{each.name}.{layer}"] = spec
                kind_of[f"{each.name}.{layer}"] = each
        if len(kinds) == 1:
            groups = [KVCacheGroupSpec(list(layers), next(iter(layers.values())))]
        else:
            groups = _get_kv_cache_groups_uniform_page_size(layers)
        made = [kind_of[group.layer_names[0]] for group in groups]
        if tuple(made) != sizes.groups or max(len(group.layer_names) for group in groups) > sizes.group_layers:
            raise NotSized(
                "vllm: its own groups of layers are others than the driver expects, so this is another release"
            )
        for group, kind in zip(groups, made, strict=True):
            group.is_eagle_group = drafts and kind.kind == "path"
        return groups

    def _checked_unit(self, config: Any, unit: int) -> int:
        """The tokens of a hash, held against vLLM's own rule."""
        asked = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=self._sizes.page, enable_prefix_caching=True,
                prefix_match_unit=unit if len(config.kv_cache_groups) > 1 else None,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1), kv_transfer_config=None,
        )  # fmt: skip
        assert resolve_kv_cache_block_sizes(config, asked) == (self._sizes.page, unit)
        return unit

    def _count_blocks(self) -> None:
        """Count what the pool evicts and takes, by group."""
        pool = self._manager.block_pool
        evict, insert = pool._maybe_evict_cached_block, pool._insert_block_hash

        def evicting(block: Any) -> bool:
            key = block.block_hash
            gone: bool = evict(block)
            if gone and key is not None:
                self._evicted[get_group_id(key)] += 1
            return gone

        def inserting(key: Any, *args: Any, **kwargs: Any) -> None:
            self._made[get_group_id(key)] += 1
            insert(key, *args, **kwargs)

        pool._maybe_evict_cached_block, pool._insert_block_hash = evicting, inserting

    # ------------------------------------------------------------ requests
    def holds(self, length: int) -> bool:
        return length < self._longest and self._sizes.held(length, self._chunk) <= self._sizes.blocks - 1

    def open(self, tokens: Tokens, namespace: str, end: int) -> tuple[VLLMOpened, PeerMatch]:
        manager = self._manager
        request = Request(
            request_id=str(next(self._numbers)), prompt_token_ids=tokens.tolist(), sampling_params=self._sampling,
            pooling_params=None, cache_salt=namespace or None, block_hasher=block_hasher(tokens, namespace, self._unit),
        )  # fmt: skip
        blocks, hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        count = self._aligned(request, min(self._chunk, request.num_tokens - hit), hit)
        match = PeerMatch(hit, max(hit, boundary), self._shortest(request) if boundary > hit else None)
        manager.new_step_starts()
        found = manager.allocate_slots(
            request, count, num_new_computed_tokens=hit, new_computed_blocks=blocks, full_sequence_must_fit=True
        )
        if found is None:
            raise PeerFull(POOL, "no blocks are left for a whole prompt")
        more = self._sizes.held(end, self._chunk) - self._sizes.held(request.num_prompt_tokens, self._chunk)
        if more > manager.block_pool.get_num_free_blocks():
            manager.free(request)
            raise PeerFull(POOL, "no blocks are left for what was decoded before")
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        opened = VLLMOpened(manager, request)
        opened.scheduled = count
        return opened, match

    def _shortest(self, request: Any) -> str:
        """The kind whose groups alone hit least."""
        _, hits = self._manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        others = [(hit, each.name) for hit, each in zip(hits, self._sizes.groups, strict=True) if each.kind != "path"]
        return min(others)[1]

    def _aligned(self, request: Any, count: int, hit: int = 0) -> int:
        if not self._states:
            return count
        return int(Scheduler._mamba_block_aligned_split(self._alignment, request, count, hit))

    def extend(self, opened: VLLMOpened, count: int) -> int:
        request = opened.request
        if request.num_computed_tokens >= request.num_prompt_tokens:
            self.decode(opened, count)
            return count
        done, opened.scheduled = opened.scheduled, 0
        if not done:
            done = self._aligned(request, min(count, request.num_prompt_tokens - request.num_computed_tokens))
            self._allocate(request, done)
        request.num_computed_tokens += done
        return done

    def decode(self, opened: VLLMOpened, count: int) -> None:
        self._allocate(opened.request, count)
        opened.request.num_computed_tokens += count

    def _allocate(self, request: Any, count: int) -> None:
        self._manager.new_step_starts()
        if self._manager.allocate_slots(request, count) is None:
            raise PeerFull(POOL, "no blocks are left")

    # ------------------------------------------------------------ figures
    def uses(self) -> Mapping[str, PeerUse]:
        pool = self._manager.block_pool
        cached = sum(block.ref_cnt == 0 and block.block_hash is not None for block in pool.blocks)
        return {POOL: PeerUse(cached, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), self._evicted.total())}

    def states(self) -> int:
        kinds = enumerate(self._sizes.groups)
        groups = [at for at, each in kinds if each.kind == "state"]
        return sum(self._made[at] for at in groups) // max(1, len(groups))


def block_hasher(tokens: Tokens, namespace: str, unit: int) -> Callable[[Any], list[bytes]]:
    """Makes the keys of a prompt's whole units: each stands for all text up to its end."""

    chain = PageChain(unit)
    root = chain.root(namespace)

    def hashes(request: Any) -> list[bytes]:
        known = request.block_hashes
        return chain.pages(tokens, known[-1] if known else root, len(known))

    return hashes
