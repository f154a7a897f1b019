"""SGLang's prefix cache, with prefixloom's books beneath.

SGLang's scheduler calls ``match_prefix`` for each request, locks what it hit (``inc_lock_ref``), reads the slots of the
prefix (``path_device_indices``), and calls ``checkpoint`` after each chunk of a prompt and at the end of the request.
When its pools are short it calls ``evict``. The names and their meanings are those of SGLang's ``BasePrefixCache``.

The slots of a request stand in its row of SGLang's table (``req_to_token``). Those before ``cache_protected_len`` are
the cache's, and the request reads them under its lock. The rest is its own until a checkpoint hands it over.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.runtime_context import get_serving, get_spec, mamba_checkpoint_grid, mamba_track_grid
from sglang.srt.utils.common import is_pin_memory_available

from prefixloom import Cache, ComponentStats, InvariantError, Tokens, encode

from .composition import FULL, STATE, SWA, kept_back
from .events import Events
from .metrics import Misses
from .prefix import Prefix, depth_first
from .slots import Back, PairedSlots, TokenSlots
from .states import StateSlots

log = logging.getLogger("sglang.prefixloom")


class PrefixloomCache(BasePrefixCache):
    """The prefix cache of one scheduler. ``params`` are SGLang's ``CacheInitParams``."""

    def __init__(self, params: Any, books: Cache) -> None:
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.books = books
        names = [part.name for part in books.composition.parts]
        self._has_windows, self._has_states = SWA in names, STATE in names
        self.sliding_window_size = params.sliding_window_size if self._has_windows else None
        self.draft_swa_window = getattr(params, "draft_swa_window", 0)
        self.slots: TokenSlots
        if self._has_windows:
            window = kept_back(params)
            self.slots = PairedSlots(self.token_to_kv_pool_allocator, self.page_size, to_device, window)
        else:
            self.slots = TokenSlots(self.token_to_kv_pool_allocator, self.page_size, to_device)
        self.states: StateSlots | None = None
        if self._has_states:
            self.states = StateSlots(
                self.req_to_token_pool, to_device, self._make_room_for_states, params.enable_mamba_extra_buffer,
                params.enable_mamba_extra_buffer_lazy, mamba_track_grid(self.page_size),
            )  # fmt: skip
        self.device = self.slots.device
        self._lookahead = books.composition.lookahead
        self._root = Prefix(books)
        self._figures: dict[str, ComponentStats] | None = None
        """The sizes that SGLang asks for again and again; None: something has changed since they were added up."""
        self._may_move_on = (
            self._has_windows
            and not self._has_states
            and bool(envs.SGLANG_OPT_RELEASE_PREFILL_SWA.get())
            and get_spec().speculative_algorithm is None
            and not get_serving().strip_thinking_cache  # it takes back what was decoded
        )
        """Whether a request that decodes may publish on the way (``release_swa_prefix_lock``)."""
        self._misses: Misses | None = None
        if params.enable_metrics:
            self.init_metrics_collector()
            self._misses = Misses(books, self.metrics_collector.labels)
        if params.enable_kv_cache_events:
            self.kv_events = Events(books, params)

    # ------------------------------------------------------------ what it is
    @property
    def root_node(self) -> Prefix:
        return self._root

    def supports_swa(self) -> bool:
        return self._has_windows

    def supports_mamba(self) -> bool:
        return self._has_states

    def reset(self) -> None:
        """Forget everything. SGLang clears its pools right afterwards, so no slot is given back."""
        self.books.flush()
        self.books.take_back()
        self._root = Prefix(self.books)
        self._changed()

    # ------------------------------------------------------------ matching
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        tokens = encode(key.raw_token_ids())
        plan = self.books.match(tokens, namespace=namespace_of(key.extra_key, key.cache_salt))
        prefix = Prefix(self.books, plan, tokens)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %s", getattr(params.req, "rid", "-"), plan.why)
        if params.cow_mamba and prefix.length and self.states is not None and not self.states.begin(params.req, prefix):
            prefix = self._root
        return MatchResult(
            device_prefix_len=prefix.length,
            last_device_node=prefix,
            last_host_node=prefix,
            best_match_node=prefix,
            mamba_branching_seqlen=self._branch(prefix),
            full_kv_hit_length=plan.walked,
        )

    def _branch(self, prefix: Prefix) -> int | None:
        """Return where SGLang is to keep a state of the next chunk; None: at the end of the chunk.

        SGLang keeps one state for each chunk. If cached keys continue behind the tokens that a prompt shares with them,
        prompts branch there, and the next one hits at the branch. If no keys continue, only this prompt does, and its
        next turn hits at its end.
        """
        plan = prefix.plan
        if self.states is None or plan is None or not plan.goes_on:
            return None
        grid = mamba_checkpoint_grid(self.page_size)
        branch: int = plan.walked // grid * grid
        return branch if branch > prefix.length else None

    def touch_prefix(self, key: Any) -> None:
        """Mark as used what a waiting request will hit."""
        tokens = encode(key.raw_token_ids())
        plan = self.books.match(tokens, namespace=namespace_of(key.extra_key, key.cache_salt))
        if plan.ready:
            self.books.lease(plan).release()

    def path_device_indices(self, node: Prefix) -> torch.Tensor:
        return self.slots.locations(node.pages(FULL))

    def dfs_weight_order(self, node_handles: Sequence[Prefix]) -> list[int]:
        return depth_first(node_handles)

    # ------------------------------------------------------------ locks
    def inc_lock_ref(self, node: Prefix) -> IncLockRefResult:
        if self._misses is not None:
            self._misses.count(node)
        node.lock()
        self._changed()
        return IncLockRefResult()

    def dec_lock_ref(self, node: Prefix, params: DecLockRefParams | None = None) -> DecLockRefResult:
        node.unlock()
        self._changed()
        return DecLockRefResult()

    # ------------------------------------------------------------ what requests computed
    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish what the request has computed of its first ``up_to`` tokens, as far as it is whole.

        A request that runs on reads from now on what the cache has, and protects it. A finished one frees the rest
        itself (``release_kv_cache``).

        The state that it came from was copied before anything was computed. So that was used then, as in SGLang's own
        cache, and is not kept until the request ends. Nor is the one that it leaves here, of which it keeps a copy.
        """
        if self.states is not None and req.lock is not None:
            req.lock.node.uncover_state()
        finished = req.finished()
        first = req.kv.cache_protected_len
        end = (up_to - self._lookahead) // self.page_size * self.page_size
        if self.states is not None:
            length = self.states.length(req, up_to, finished)  # and nobody can resume anywhere else
            end = 0 if length > end or length % self.page_size else length
        if end > first:
            self._publish(req, first, end, up_to, finished)
        if self.states is not None:
            if finished:
                self.states.release(req)
            else:
                self.states.forget(req)

    def _publish(self, req: Any, first: int, end: int, up_to: int, finished: bool) -> None:
        """Hand over what the request has of the tokens [first, end)."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        handed = self.slots.hand_in(row[first:end], finished)
        if handed is None:
            return
        if self.states is not None:
            state = self.states.hand_in(req, up_to, finished)
            if state is None:
                return
            handed |= state
        namespace = namespace_of(req.extra_key, req.cache_salt)
        tokens = encode(req.full_untruncated_fill_ids[: end + self._lookahead])
        self.books.insert(tokens, handed, start=first, namespace=namespace, priority=req.priority or 0)
        back = self.books.take_back()
        self._give_back(back)

        def tree() -> Sequence[int]:
            """Return the pages that the cache has where ``handed`` was."""
            return self._found(tokens, namespace, end).pages(FULL)[first // self.page_size :]

        self.slots.rejoin(handed, back, tree)
        req.kv.cache_protected_len = end
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, end)
        self._changed()
        if not finished:
            if len(back.get(FULL, ())):
                row[first:end] = self.slots.locations(tree()).to(row.dtype)
            self._lock_instead(req, self._found(tokens, namespace, end))

    def _found(self, tokens: Tokens, namespace: str, end: int) -> Prefix:
        """Return the prefix that hits now that ``tokens`` were published. InvariantError: it does not end there."""
        plan = self.books.match(tokens, namespace=namespace)
        if plan.ready != end:
            raise InvariantError(f"{end} tokens were published, and then {plan.ready} of them hit: {plan.why}")
        found = Prefix(self.books, plan, tokens)
        found.counted = True  # the request was
        return found

    def _lock_instead(self, req: Any, prefix: Prefix) -> None:
        """Protect ``prefix`` for the request in place of the prefix that it protected."""
        lock = self.lock(prefix)
        prefix.uncover_state()
        self.unlock(req.lock)
        req.lock = lock
        req.last_node = prefix

    def release_swa_prefix_lock(self, req: Any) -> None:
        """Publish what a request has decoded, if it is so far that it reads no more of its prefix's window.

        Then the request protects a window that ends there, and not the one of its prefix. SGLang calls this in each
        decode step, if ``SGLANG_OPT_RELEASE_PREFILL_SWA`` is set.
        """
        if not self._may_move_on or req.skip_radix_cache_insert or req.finished():
            return
        end = self._decoded(req)
        if end - req.kv.cache_protected_len >= max(self.swa_retain_window or 0, self.page_size):
            req.refresh_fill_ids()
            self.checkpoint(req, up_to=end)

    @staticmethod
    def _decoded(req: Any) -> int:
        """Return how many tokens of a request are named and surely computed, even if the last pass still runs."""
        named: int = len(req.origin_input_ids) + len(req.output_ids)
        return named - 1

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        if self.states is not None and not checkpointed:
            self.states.release(req)

    def swa_retain_floor(self, req: Any) -> int | None:
        """Return where the window begins that a waiting state or the next publication needs; None: none is needed."""
        end: int
        if self._may_move_on:
            end = self._decoded(req) // self.page_size * self.page_size
        elif self.states is not None and self._has_windows and req.kv.mamba_last_track_seqlen is not None:
            end = req.kv.mamba_last_track_seqlen
        else:
            return None
        return end - max(self.sliding_window_size or 0, self.draft_swa_window)

    # ------------------------------------------------------------ room
    def evict(self, params: EvictParams) -> EvictResult:
        start = time.perf_counter()
        need = {FULL: -(-params.num_tokens // self.page_size)}
        if self._has_windows:
            need[SWA] = -(-params.swa_num_tokens // self.page_size)
        if self._has_states:
            need[STATE] = params.mamba_num
        self.books.evict({name: count for name, count in need.items() if count > 0})
        back = self.books.take_back()
        self._give_back(back)
        self._changed()
        freed = {name: len(slots) for name, slots in back.items()}
        evicted = EvictResult(
            freed.get(FULL, 0) * self.page_size, freed.get(SWA, 0) * self.page_size, freed.get(STATE, 0)
        )
        self.update_eviction_metrics(evicted.num_tokens_evicted, start)
        return evicted

    def _make_room_for_states(self, count: int) -> None:
        self.evict_for_alloc(EvictParams(mamba_num=count))

    def _give_back(self, back: Back) -> None:
        self.slots.give_back(back)
        if self.states is not None:
            self.states.give_back(back)

    # ------------------------------------------------------------ sizes, in tokens; of states in slots
    def _changed(self) -> None:
        self._figures = None

    def _sizes(self, component: str) -> tuple[int, int]:
        """Return how many tokens (states) of a component may be evicted, and how many are protected."""
        if self._figures is None:
            self._figures = dict(self.books.stats().components)
        figures = self._figures[component]
        unit = figures.page_tokens or 1
        return figures.evictable * unit, (figures.cached - figures.evictable) * unit

    def evictable_size(self) -> int:
        return self._sizes(FULL)[0]

    def protected_size(self) -> int:
        return self._sizes(FULL)[1]

    def full_evictable_size(self) -> int:
        return self._sizes(FULL)[0]

    def full_protected_size(self) -> int:
        return self._sizes(FULL)[1]

    def swa_evictable_size(self) -> int:
        return self._sizes(SWA)[0] if self._has_windows else 0

    def swa_protected_size(self) -> int:
        return self._sizes(SWA)[1] if self._has_windows else 0

    def mamba_evictable_size(self) -> int:
        return self._sizes(STATE)[0] if self._has_states else 0

    def mamba_protected_size(self) -> int:
        return self._sizes(STATE)[1] if self._has_states else 0

    def total_size(self) -> tuple[int, int]:
        return sum(self._sizes(FULL)), sum(self._sizes(STATE)) if self._has_states else 0

    def all_values_flatten(self) -> torch.Tensor:
        return self.slots.locations(self._cached(FULL))

    def all_mamba_values_flatten(self) -> torch.Tensor:
        states = self._cached(STATE) if self._has_states else []
        return torch.tensor(states, dtype=torch.int64, device=self.device)

    def _cached(self, component: str) -> list[int]:
        """Return all page numbers that the books have."""
        pool = self.books.pool(component)
        return [page for page in range(pool.capacity) if pool.has(page)]

    def available_and_evictable_str(self) -> str:
        """Return what SGLang writes to its log when its pools are short, in the words of its own cache."""
        allocator = self.token_to_kv_pool_allocator
        free = allocator.full_available_size() if self._has_windows else allocator.available_size()
        lines = [("full tokens", "full_available_size", free, "full_evictable_size_", self.full_evictable_size())]
        if self._has_windows:
            free = allocator.swa_available_size()
            lines.append(("swa", "available_size", free, "component_evictable_size_", self.swa_evictable_size()))
        if self._has_states:
            free = self.req_to_token_pool.mamba_allocator.available_size()
            lines.append(("mamba", "available_size", free, "component_evictable_size_", self.mamba_evictable_size()))
        return "".join(
            f"Available {name}: {free + rest} ({of_free}={free} + {of_rest}={rest})\n"
            for name, of_free, free, of_rest, rest in lines
        )

    def sanity_check(self) -> None:
        """Raise if the books hold slots that are not cached; all slots that are not cached are SGLang's."""
        for name, figures in self.books.stats().components.items():
            if figures.free or figures.running:
                raise InvariantError(f"between two calls, of {name!r} the cache says: {figures}")

    def pretty_print(self) -> None:
        print(self.books.stats())


def to_device(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy a tensor of the host to ``device``, on the current stream and without waiting, as SGLang does it."""
    if torch.device(device).type == "cpu":
        return tensor
    if not is_pin_memory_available(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def namespace_of(extra_key: str | None, cache_salt: str | None) -> str:
    """Return the name under which requests share prefixes: SGLang's extra key, with the LoRA adapter, and its salt."""
    return "" if extra_key is None and not cache_salt else json.dumps([extra_key, cache_salt or None])
