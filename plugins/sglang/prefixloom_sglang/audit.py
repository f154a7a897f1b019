"""Debug mode inside SGLang: after every call, each slot has exactly one owner, on both sides.

A slot of SGLang's pools is free in SGLang's allocator, or cached in the books, or it belongs to one running request.
The books' own debug mode checks everything inside of the books. This checks what lies between. ``PREFIXLOOM_DEBUG=1``
turns both on. They cost much more time than the calls themselves.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prefixloom import InvariantError

from .cache import PrefixloomCache
from .composition import FULL, STATE, SWA


class AuditedCache(PrefixloomCache):
    """The cache, which compares the books with SGLang's after each call in which both are at rest.

    They are not while SGLang releases a request: it frees the slots first, and forgets that the request had them last.
    So ``dec_lock_ref`` and ``on_release`` are looked at with the next call.
    """

    def __init__(self, params: Any, books: Any) -> None:
        super().__init__(params, books)
        self._requests: weakref.WeakSet[Any] = weakref.WeakSet()

    def match_prefix(self, params: Any) -> Any:
        if params.req is not None:
            self._requests.add(params.req)
        result = super().match_prefix(params)
        self.audit("match_prefix")
        return result

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._requests.add(req)
        super().checkpoint(req, up_to=up_to, **kwargs)
        self.audit("checkpoint")

    def evict(self, params: Any) -> Any:
        result = super().evict(params)
        self.audit("evict")
        return result

    def inc_lock_ref(self, node: Any) -> Any:
        result = super().inc_lock_ref(node)
        self.audit("inc_lock_ref")
        return result

    def sanity_check(self) -> None:
        """Raise if anything is protected: SGLang calls this when no request runs."""
        super().sanity_check()
        for name, figures in self.books.stats().components.items():
            if figures.leased:
                raise InvariantError(f"no request runs, and of {name!r} the cache says: {figures}")
        self.audit("sanity_check")

    # ------------------------------------------------------------ the check
    def audit(self, call: str) -> None:
        """Raise InvariantError if a slot has no owner, or more than one."""
        owners = self._owners()
        if owners is None:
            return
        for component, (all_slots, who) in owners.items():
            count = Counter(slot for slots in who.values() for slot in slots)
            wrong = [slot for slot in all_slots if count[slot] != 1] + [slot for slot in count if slot not in all_slots]
            if wrong:
                slot = wrong[0]
                has = [name for name, slots in who.items() if slot in set(slots)]
                raise InvariantError(
                    f"after {call}, {len(wrong)} slots of {component!r} do not have one owner each. Page {slot}, for "
                    f"example, belongs to {' and '.join(has) or 'nobody'}"
                )
        if self._has_windows:
            self._audit_pairs(call)

    def _owners(self) -> dict[str, tuple[range, dict[str, list[int]]]] | None:
        """Return by component all pages (state slots) and who owns which. None: SGLang is about to free some."""
        allocator = self.token_to_kv_pool_allocator
        full = allocator.full_attn_allocator if self._has_windows else allocator
        if allocator.free_group is not None or full.free_group is not None:
            return None  # what was freed waits for the end of a group
        requests = [req for req in self._requests if req.kv.holds_kv]
        rows = {f"request {req.rid}": self._row(req) for req in requests}
        size = self.page_size
        owners: dict[str, tuple[range, dict[str, list[int]]]] = {
            FULL: (
                range(1, full.size // size + 1),
                {"SGLang's free list": full.get_all_free_pages().tolist(), "the cache": self._cached(FULL)}
                | {name: self._pages(row) for name, row in rows.items()},
            )
        }
        if self._has_windows:
            windows = allocator.swa_attn_allocator
            mapping = allocator.full_to_swa_index_mapping
            owners[SWA] = (
                range(1, windows.size // size + 1),
                {"SGLang's free list": windows.get_all_free_pages().tolist(), "the cache": self._cached(SWA)}
                | {name: [page for page in self._pages(mapping[row]) if page] for name, row in rows.items()},
            )
        if self._has_states:
            states = self.req_to_token_pool.mamba_allocator
            if getattr(states, "_alloc_iter", None) is None:  # else some are set aside for the requests to come
                owners[STATE] = (
                    range(1, states.size + 1),
                    {"SGLang's free list": states.free_slots.tolist(), "the cache": self._cached(STATE)}
                    | {f"request {req.rid}": self._states_of(req) for req in self._requests},
                )
        return owners

    def _row(self, req: Any) -> Any:
        """Return the slots that a request alone has, from the first that the cache does not have."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return row[req.kv.cache_protected_len : req.kv.kv_allocated_len].long()

    def _pages(self, row: Any) -> list[int]:
        """Return the pages of slots that begin at a page's start. SGLang may hand out the last page in part."""
        return [slot // self.page_size for slot in row[:: self.page_size].tolist()]

    @staticmethod
    def _states_of(req: Any) -> list[int]:
        running = [] if req.kv.mamba_pool_idx is None else [int(req.kv.mamba_pool_idx)]
        buffer = req.kv.mamba_ping_pong_track_buffer
        return running + ([] if buffer is None else [slot for slot in buffer.tolist() if slot > 0])

    def _audit_pairs(self, call: str) -> None:
        """Raise if SGLang's table does not pair exactly the cached window pages with cached pages of full attention."""
        mapping = self.token_to_kv_pool_allocator.full_to_swa_index_mapping
        cached = {*self._cached(SWA)}
        paired: Iterable[int] = mapping[self.slots.locations(self._cached(FULL))][:: self.page_size].tolist()
        windows = [slot // self.page_size for slot in paired if slot > 0]
        if len(windows) != len(cached) or {*windows} != cached:
            lonely = sorted(cached.symmetric_difference(windows))
            raise InvariantError(f"after {call}, window pages {lonely} are cached without a page of full attention")
