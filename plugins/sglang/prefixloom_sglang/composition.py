"""Composition: from SGLang's model config and pools to the books.

Our profiles read the model's config and say which kinds of memory it has. SGLang has at most three kinds of slots: of
tokens in full attention, of tokens in windows, and of states. All layers of one kind share a slot number, whatever they
store under it. So the books have one component for each kind of slot, with all buffers of that kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs

from prefixloom import Buffer, Cache, Component, CompositionError, Manifest, Path, Point, Window, compose

FULL, SWA, STATE = "full", "swa", "state"


@attrs.frozen
class Pools:
    """The sizes of SGLang's pools. ``pages`` and ``window_pages`` count from page 1 on; page 0 is for padding.

    ``window``: how many tokens behind a boundary the windows' kernels read. None: SGLang has no such pool.
    """

    page_size: int
    pages: int
    window_pages: int | None = None
    window: int | None = None
    states: int | None = None


def pools_of(params: Any, windows: bool, states: bool) -> Pools:
    """Return the pools' sizes in SGLang's ``CacheInitParams``. ``windows``, ``states``: whether it has such pools."""
    allocator, page_size = params.token_to_kv_pool_allocator, params.page_size
    return Pools(
        page_size,
        allocator.size_full // page_size,
        allocator.size_swa // page_size if windows else None,
        kept_back(params) if windows else None,
        params.req_to_token_pool.mamba_allocator.size if states else None,
    )


def kept_back(params: Any) -> int:
    """Return how many tokens behind a boundary SGLang keeps of windows: what its kernels read, or a draft model's."""
    window: int = params.sliding_window_size
    return max(window, getattr(params, "draft_swa_window", 0))  # SGLang 0.5.22 has no window of draft models


def books_for(config: Any, pools: Pools, *, bigrams: bool = False, policy: str = "lru") -> Cache:
    """Make the books of a model for SGLang. CompositionError: no profile knows the model, or its pools do not fit.

    ``bigrams``: a draft model (EAGLE) shares the slots, so a slot's content depends on the next token too.
    """
    _refuse_sizes(pools)
    kinds = _kinds(config)
    manifests = {
        kind: Manifest(buffers, lookahead=1 if bigrams else 0) for kind, (buffers, _) in kinds.items() if buffers
    }
    components = [Component(FULL, _joined(manifests, kinds, pools), Path())]
    capacity = {FULL: (pools.pages + 1) * pools.page_size}
    if pools.window is not None and pools.window_pages is not None:
        _, windows = kinds[SWA]
        if not windows:
            raise CompositionError("SGLang keeps windows for this model, and its config has no windows")
        if max(windows) > pools.window:
            raise CompositionError(
                f"a window of this model reads {max(windows)} tokens back, and SGLang keeps {pools.window}"
            )
        components.append(Component(SWA, manifests[SWA], Window(pools.window + 1)))
        capacity[SWA] = (pools.window_pages + 1) * pools.page_size
    if (pools.states is None) != (STATE not in manifests):
        raise CompositionError(
            "SGLang keeps states for this model, and its config has none"
            if STATE not in manifests
            else "the model's config has states, and SGLang keeps none for it"
        )
    if pools.states is not None:
        components.append(Component(STATE, manifests[STATE], Point()))
        capacity[STATE] = pools.states + 1
    return compose(
        None,
        plugins=components,
        page_size=pools.page_size,
        capacity=capacity,
        slots="lent",
        device="meta",
        policy=policy,
    )


def _refuse_sizes(pools: Pools) -> None:
    """Raise CompositionError if SGLang has a pool of no size."""
    for size, what, flag in (
        (pools.page_size, "tokens for a page", "--page-size"),
        (pools.pages, "pages for tokens", "--mem-fraction-static or --max-total-tokens"),
        (pools.window_pages, "pages for windows", "--swa-full-tokens-ratio or --mem-fraction-static"),
        (pools.states, "slots for states", "--max-mamba-cache-size or --mamba-full-memory-ratio"),
    ):
        if size is not None and size < 1:
            raise SizeError(f"SGLang has {size} {what}, so nothing can be cached: give it more by {flag}")
    if pools.window is not None and pools.window < 1:
        raise SizeError(f"SGLang keeps {pools.window} tokens of a window, so there is nothing to cache")


class SizeError(CompositionError):
    """A pool of SGLang has no size."""


Kinds = dict[str, tuple[list[Buffer], list[int]]]


def _kinds(config: Any) -> Kinds:
    """Return by kind of slot the buffers of the model, and how many tokens back each window reads."""
    parts = compose(config, capacity=1 << 16, device="meta", debug=False).composition.parts
    kinds: Kinds = {kind: ([], []) for kind in (FULL, SWA, STATE)}
    for part in parts:
        if part.unit == "boundary":
            kind = STATE
        else:
            kind = FULL if part.reach.closed_upward else SWA
        buffers, windows = kinds[kind]
        prefix = re.sub(r"\W", "_", part.name)
        buffers += [attrs.evolve(buffer, name=f"{prefix}_{buffer.name}") for buffer in part.manifest.buffers]
        if kind is SWA:
            windows.append(_reads_back(part.reach))
    return kinds


def _reads_back(reach: Any) -> int:
    """Return how many tokens before a boundary a window or chunk reads at most."""
    found = 0
    for boundary in (1 << 20, (1 << 20) - 1):  # a chunk reads most just before it ends
        needed: Sequence[tuple[int, int]] = reach.needs(boundary)
        found = max([found, *(boundary - low for low, _ in needed)])
    return found


def _joined(manifests: dict[str, Manifest], kinds: Kinds, pools: Pools) -> Manifest:
    """Join the buffers under the slots of full attention: without a pool for windows, also those of windows."""
    kept = [manifests[FULL]] if FULL in manifests else []
    if pools.window is None and SWA in manifests:
        kept.append(manifests[SWA])
    if not kept:
        raise CompositionError("the model has no layer that attends to everything, and SGLang has slots for some")
    return Manifest([buffer for manifest in kept for buffer in manifest.buffers], lookahead=kept[0].lookahead)
