"""vLLM's KV cache manager in the lab, as its scheduler calls it for one request at a time.

The blocks' keys are chained hashes as vLLM's are, made by a faster function: a hit does not depend on it. The scheduler
itself is not run: it would decide who runs and who waits, and that is the same for all sides here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from bench.engines.stand_ins import imported
from bench.engines.vllm import KVCacheGroupSpec, Managed, spec_of
from bench.engines.vllm_sizes import vllm_sizes
from prefixloom import PageChain, Tokens
from prefixloom.lab.beside.peer import MemoryKind, NotSized, PeerCache, PeerFull, PeerMatch
from prefixloom.lab.replay import PoolFigures

with imported("vllm", "0.33.0"):
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.core.kv_cache_utils import get_group_id, resolve_kv_cache_block_sizes

POOL = "blocks"


class VLLMOpened:
    """A request, and the part of its prompt that was scheduled when it was admitted."""

    def __init__(self, side: VLLMBeside, request: Any, scheduled: int) -> None:
        self._side, self.request, self.scheduled = side, request, scheduled

    def close(self) -> None:
        self._side.end(self.request)

    abort = close


class VLLMBeside(Managed, PeerCache):
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
        self._chunk, self._longest, drafts = chunk, longest, setting == "drafts"
        stateful = any(each.kind == "state" for each in sizes.groups)
        self._unit = 16 if "fine" in setting and stateful else sizes.page
        self.make(
            self._groups(kinds, drafts), sizes.blocks, sizes.page, unit=self._unit, longest=longest, chunk=chunk,
            drafts=drafts, in_flight=2 * chunk, retention=None if "dense" in setting else 0,
        )  # fmt: skip
        self._check_unit()
        self._page_tokens = sizes.page if all(each.kind == "path" for each in kinds) else 0
        self.sizing = [f"{sizes.blocks - 1:,} blocks of {sizes.page} tokens and {sizes.block_bytes:,} bytes"]
        self.sizing += [*sizes.sentences, f"hits end at multiples of {self.grain} tokens"]
        self._evicted: Counter[int] = Counter()
        self._made: Counter[int] = Counter()
        self._count_blocks()

    @classmethod
    def settings_of(cls, kinds: Sequence[MemoryKind]) -> tuple[str, ...]:
        has = {each.kind for each in kinds}
        chosen = ["default", *(["dense"] if has != {"path"} else [])]
        return (*chosen, *(["fine", "fine and dense"] if "state" in has else []), "drafts")

    @classmethod
    def check_size(cls, kinds: Sequence[MemoryKind], memory: int, setting: str) -> None:
        vllm_sizes(kinds, memory)

    def _groups(self, kinds: Sequence[MemoryKind], drafts: bool) -> list[Any]:
        """Return the groups that vLLM makes of the layers, which must be those of ``vllm_sizes``."""
        sizes = self._sizes
        layers: dict[str, Any] = {}
        kind_of = {}
        for each in kinds:
            spec = spec_of(each.kind, sizes.page, each.entry_bytes, each.window, sizes.page_bytes)
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

    def _check_unit(self) -> None:
        """Hold the tokens of a hash against vLLM's own rule."""
        asked = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=self._sizes.page, enable_prefix_caching=True,
                prefix_match_unit=self._unit if len(self.config.kv_cache_groups) > 1 else None,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1), kv_transfer_config=None,
        )  # fmt: skip
        assert resolve_kv_cache_block_sizes(self.config, asked) == (self._sizes.page, self._unit)

    def _count_blocks(self) -> None:
        """Count what the pool evicts and takes, by group."""
        pool = self.manager.block_pool
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

    def holds(self, length: int) -> bool:
        return length < self._longest and self._sizes.held(length, self._chunk) <= self._sizes.blocks - 1

    def open(self, tokens: Tokens, namespace: str, end: int) -> tuple[VLLMOpened, PeerMatch]:
        request = self.request(tokens.tolist(), namespace, block_hasher(tokens, namespace, self._unit))
        blocks, hit, walked = self.computed(request)
        match = PeerMatch(hit, walked, self._shortest(request) if walked > hit else None)
        self.manager.new_step_starts()
        scheduled = self.admit(request, blocks, hit, self._chunk)
        if not scheduled:
            raise PeerFull(POOL, "no blocks are left for a whole prompt")
        more = self._sizes.held(end, self._chunk) - self._sizes.held(request.num_prompt_tokens, self._chunk)
        if more > self.manager.block_pool.get_num_free_blocks():
            self.end(request)
            raise PeerFull(POOL, "no blocks are left for what was decoded before")
        return VLLMOpened(self, request, scheduled), match

    def _shortest(self, request: Any) -> str:
        """Return the kind whose groups alone hit least."""
        _, hits = self.manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        others = [(hit, each.name) for hit, each in zip(hits, self._sizes.groups, strict=True) if each.kind != "path"]
        return min(others)[1]

    def extend(self, opened: VLLMOpened, count: int) -> int:
        request = opened.request
        if request.num_computed_tokens >= request.num_prompt_tokens:
            self.decode(opened, count)
            return count
        done, opened.scheduled = opened.scheduled, 0
        if not done:
            done = self.aligned(request, min(count, request.num_prompt_tokens - request.num_computed_tokens))
            self._allocate(request, done)
        request.num_computed_tokens += done
        return done

    def decode(self, opened: VLLMOpened, count: int) -> None:
        self._allocate(opened.request, count)
        opened.request.num_computed_tokens += count

    def _allocate(self, request: Any, count: int) -> None:
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, count) is None:
            raise PeerFull(POOL, "no blocks are left")

    def pools(self) -> Mapping[str, PoolFigures]:
        pool, sizes = self.manager.block_pool, self._sizes
        cached = sum(block.ref_cnt == 0 and block.block_hash is not None for block in pool.blocks)
        running = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        taken = cached, running, self._evicted.total()
        return {POOL: PoolFigures(sizes.blocks - 1, self._page_tokens, sizes.block_bytes, *taken)}

    def states(self) -> int:
        groups = [at for at, each in enumerate(self._sizes.groups) if each.kind == "state"]
        return sum(self._made[at] for at in groups) // max(1, len(groups))


def block_hasher(tokens: Tokens, namespace: str, unit: int) -> Callable[[Any], list[bytes]]:
    """Return a maker of the keys of a prompt's whole units: each stands for all text up to its end."""
    chain = PageChain(unit)
    root = chain.root(namespace)

    def hashes(request: Any) -> list[bytes]:
        known = request.block_hashes
        return chain.pages(tokens, known[-1] if known else root, len(known))

    return hashes
