"""SGLang's unified radix cache in the lab, with SGLang's own requests, batches, allocators and pools on a CPU.

The calls are those of SGLang's scheduler for one request: match, lock, ``prepare_for_extend`` for each chunk, which
evicts and takes slots, ``checkpoint_kv_cache`` behind it, and ``release_kv_cache``. The scheduler and its
``PrefillAdder`` are not run: they decide who runs and who waits, and that is the same for all sides here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from bench.engines.sglang import SGLangCache, checkpoint_kv_cache, release_kv_cache, torch
from bench.engines.sglang_sizes import SGLangOptions, sglang_sizes
from bench.engines.stand_ins import imported
from prefixloom import Tokens
from prefixloom.lab.beside.peer import MemoryKind, NotSized, PeerCache, PeerFull, PeerMatch
from prefixloom.lab.replay import PoolFigures

with imported("sglang", "0.5.23"):
    from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots

LETTERS = {"path": "F", "window": "S", "state": "M"}
STATE_CHUNK = 64
"""Tokens at whose multiples SGLang's kernels can give a state of a prompt."""
SETTINGS = {
    "default": ("as it starts", SGLangOptions()),
    "pages of 64": ("--page-size 64", SGLangOptions(page=64)),
    "windows 0.5": ("--swa-full-tokens-ratio 0.5", SGLangOptions(windows=0.5)),
    "windows 0.2": ("--swa-full-tokens-ratio 0.2", SGLangOptions(windows=0.2)),
    "windows 0.05": ("--swa-full-tokens-ratio 0.05", SGLangOptions(windows=0.05)),
    "states 0.45": ("--mamba-full-memory-ratio 0.45", SGLangOptions(states=0.45)),
    "states 1.8": ("--mamba-full-memory-ratio 1.8", SGLangOptions(states=1.8)),
    "states 3.6": ("--mamba-full-memory-ratio 3.6", SGLangOptions(states=3.6)),
    "no buffer": ("--mamba-radix-cache-strategy no_buffer", SGLangOptions(extra_buffer=False)),
}
"""By name: what is said to SGLang at its start, and what that means here."""


class SGLangOpened:
    def __init__(self, side: SGLangBeside, request: Any) -> None:
        self._side, self.request = side, request
        self.length = 0
        """Tokens that have slots of their own or of the tree."""

    def close(self) -> None:
        self._side.release(self.request)

    abort = close


class SGLangBeside(PeerCache):
    settings: ClassVar[Mapping[str, str]] = {name: told for name, (told, _) in SETTINGS.items()}

    def __init__(
        self, kinds: Sequence[MemoryKind], memory: int, setting: str, *, running: int, chunk: int, longest: int
    ) -> None:
        if setting not in SETTINGS:
            raise NotSized(f"sglang: no setting {setting!r} is known, there are {', '.join(SETTINGS)}")
        _, options = SETTINGS[setting]
        sizes = sglang_sizes(kinds, memory, options)
        self._chunk, self._page, self._options = chunk, options.page, options
        self._names = {each.kind: each.name for each in kinds}
        self._window = max(1, *(each.window for each in kinds))
        letters = "".join(LETTERS[kind] for kind in LETTERS if kind in self._names)
        self._longest = longest = min(longest, sizes.tokens + 1)
        made = type(
            "Sized", (SGLangCache,),
            {
                "longest": longest + 64, "requests_at_once": running, "track_interval": 256,
                "window_share": sizes.window_tokens / sizes.tokens, "extra_buffer": options.extra_buffer,
                "state_chunk": max(STATE_CHUNK, options.page), "_rows": lambda self, most: min(running, most),
            },
        )  # fmt: skip
        self._made = made(
            SimpleNamespace(run=lambda work: work()), letters, options.page, sizes.tokens, sizes.states, self._window
        )
        self._cache, self._rows, self._allocator = self._made.cache, self._made.rows, self._made.allocator
        self.grain = max(STATE_CHUNK, options.page) if sizes.states and options.extra_buffer else options.page
        self._bytes = {each.kind: each.bytes for each in kinds}
        counts = {"path": sizes.tokens, "window": sizes.window_tokens, "state": sizes.states}
        self._counts = {kind: count for kind, count in counts.items() if count}
        self.sizing = [*sizes.sentences, f"hits end at multiples of {self.grain} tokens"]
        self._evicted: Counter[str] = Counter()
        self._found: Any = None
        self._watch()

    @classmethod
    def version(cls) -> str:
        return SGLangCache.version()

    @classmethod
    def settings_of(cls, kinds: Sequence[MemoryKind]) -> tuple[str, ...]:
        has = {each.kind for each in kinds}
        chosen = [each for each in cls.settings if each.startswith("windows") and "window" in has]
        chosen += [each for each in cls.settings if each.startswith(("states", "no ")) and "state" in has]
        return "default", *chosen, "pages of 64"

    @classmethod
    def check_size(cls, kinds: Sequence[MemoryKind], memory: int, setting: str) -> None:
        sglang_sizes(kinds, memory, SETTINGS[setting][1])

    def _watch(self) -> None:
        """See what a match says of full attention alone, and count what is evicted."""
        cache = self._cache
        match, evict = cache.match_prefix, cache._evict

        def matching(*args: Any, **kwargs: Any) -> Any:
            self._found = match(*args, **kwargs)
            return self._found

        def evicting(*args: Any, **kwargs: Any) -> Any:
            result = evict(*args, **kwargs)
            self._evicted["path"] += result.num_tokens_evicted
            self._evicted["window"] += result.swa_num_tokens_evicted
            self._evicted["state"] += result.mamba_num_evicted
            return result

        cache.match_prefix, cache._evict = matching, evicting

    # ------------------------------------------------------------ room
    def _evictable(self, kind: str) -> int:
        """Return how many cached tokens or states of a kind nobody holds."""
        cache = self._cache
        sizes = {
            "path": cache.full_evictable_size, "window": cache.swa_evictable_size, "state": cache.mamba_evictable_size,
        }  # fmt: skip
        return int(sizes[kind]())

    def _room(self, kind: str) -> int:
        """Return how many tokens or states of a kind a request can get."""
        allocator = self._allocator
        if kind == "state":
            free = self._rows.mamba_allocator.schedulable_available_size()
        elif kind == "window":
            free = allocator.swa_available_size()
        else:
            free = allocator.full_available_size() if "window" in self._names else allocator.available_size()
        return int(free + self._evictable(kind))

    def _check(self, tokens: int, window_tokens: int, states: int) -> None:
        wanted = {"path": tokens + self._page, "window": window_tokens + self._page, "state": states}
        for kind in LETTERS:
            if kind in self._names and wanted[kind] and wanted[kind] > self._room(kind):
                raise PeerFull(self._names[kind], f"no {'states' if kind == 'state' else 'slots'} are left")

    def _of_window(self, tokens: int) -> int:
        """Return the most window slots that the rest of a prompt takes at once."""
        return min(tokens, self._window + 2 * self._chunk)

    def holds(self, length: int) -> bool:
        if length >= self._longest or length + 2 * self._page > self._counts["path"]:
            return False
        window = self._counts.get("window")
        return window is None or self._of_window(length) + 2 * self._page <= window

    # ------------------------------------------------------------ requests
    def open(self, tokens: Tokens, namespace: str, end: int) -> tuple[SGLangOpened, PeerMatch]:
        if self._rows.available_size() < 1:
            raise PeerFull("requests", "no row is left")
        needed = (2 + (2 if self._options.extra_buffer else 0)) if "state" in self._names else 0
        self._check(0, 0, needed and needed + 1)
        request = self._made.request(tokens.tolist(), 1, extra_key=namespace or None)
        request.init_next_round_input(self._cache)
        hit, walked = int(request.prefix_len), min(int(self._found.full_kv_hit_length), tokens.count - 1)
        request.lock = self._cache.lock(request.last_node)
        try:
            rest = end - hit
            self._check(rest, self._of_window(rest), needed)
        except PeerFull:
            self.release(request)
            raise
        opened = SGLangOpened(self, request)
        opened.length = hit
        limited = self._names.get("state", self._names.get("window")) if walked > hit else None
        return opened, PeerMatch(hit, max(walked, hit), limited)

    def extend(self, opened: SGLangOpened, count: int) -> int:
        request, start = opened.request, opened.length
        prompt = len(request.origin_input_ids)
        if start >= prompt:
            self.decode(opened, count)
            return count
        end = min(start + count, prompt)
        if end < prompt:
            end = max(end // self._page * self._page, start + self._page)
        first = not request.kv.holds_kv
        states = 0
        if "state" in self._names:
            states = 1 + (2 if first and self._options.extra_buffer else 0) + (not request.kv.holds_mamba)
        self._check(end - start, end - start, states)
        if not first:
            request.init_next_round_input()
        request.extend_end = end
        self._made.batch([request]).prepare_for_extend()
        checkpoint_kv_cache(request, self._cache)
        opened.length = end
        return end - start

    def decode(self, opened: SGLangOpened, count: int) -> None:
        request, length = opened.request, opened.length
        self._check(count, count, 0)
        kv = request.kv
        if self._page == 1:
            slots = alloc_token_slots(self._cache, count)
        else:
            ends = torch.tensor([length + count])
            row = self._rows.req_to_token[kv.req_pool_idx]
            starts = torch.tensor([length])
            slots = alloc_paged_token_slots_extend(
                tree_cache=self._cache, prefix_lens=starts, prefix_lens_cpu=starts, seq_lens=ends, seq_lens_cpu=ends,
                last_loc=row[length - 1 : length].to(torch.int64), extend_num_tokens=count,
            )  # fmt: skip
        self._rows.write((kv.req_pool_idx, slice(length, length + count)), slots.to(torch.int32))
        kv.kv_allocated_len += count
        kv.kv_committed_len += count
        opened.length = length + count
        if "window" in self._names:
            self._cache.evict_sliding_windows(request, length + count - 1)

    def release(self, request: Any) -> None:
        """Give back the room of a request. What it published stays."""
        if request.kv.holds_kv:
            release_kv_cache(request, self._cache, checkpoint=False)
            return
        self._cache.unlock(request.lock)
        request.lock = None
        self._made.take_states_back(request)

    # ------------------------------------------------------------ figures
    def pools(self) -> Mapping[str, PoolFigures]:
        found = {}
        for kind, count in self._counts.items():
            unit, tokens = (1, 0) if kind == "state" else (self._page, self._page)
            capacity, cached, evicted = count // unit, self._evictable(kind) // unit, self._evicted[kind] // unit
            running = capacity - self._room(kind) // unit
            size = self._bytes[kind] * unit
            found[self._names[kind]] = PoolFigures(capacity, tokens, size, cached, running, evicted)
        return found

    def states(self) -> int:
        if "state" not in self._names:
            return 0
        return int(self._evicted["state"] + self._cache.mamba_evictable_size() + self._cache.mamba_protected_size())
