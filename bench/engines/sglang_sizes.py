"""How SGLang 0.5.23 divides bytes: a pool for each kind of memory, whose ratios are options.

The rules are those of ``HybridSWAPoolConfigurator`` (for each slot of full attention ``swa_full_tokens_ratio`` slots of
windows) and ``KVCacheConfigurator._handle_max_mamba_cache`` (``mamba_full_memory_ratio`` bytes of states for each byte
of the rest, and one slot for padding).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from prefixloom.lab.beside.peer import MemoryKind, NotSized

WINDOWS = 0.8
"""``swa_full_tokens_ratio`` by default."""
STATES = 0.9
"""``mamba_full_memory_ratio`` by default."""


@attrs.frozen
class SGLangOptions:
    """What may be chosen at its start. ``extra_buffer``: states are kept on the way, and not only at the end."""

    page: int = 1
    windows: float = WINDOWS
    states: float = STATES
    extra_buffer: bool = True

    @property
    def states_of_one(self) -> int:
        """State slots for which a running request counts: two that are written in turn, and three more."""
        return 5 if self.extra_buffer else 3


@attrs.frozen
class SGLangSizes:
    """Slots of full attention and of windows, and states; 0 where the model has none."""

    tokens: int
    window_tokens: int
    states: int
    sentences: tuple[str, ...]


def sglang_sizes(kinds: Sequence[MemoryKind], memory: int, options: SGLangOptions) -> SGLangSizes:
    """Return the pools for a model and so many bytes. NotSized: SGLang has no such model, or the bytes are too few."""
    found = {each.kind: each for each in kinds}
    if len(found) != len(kinds) or "path" not in found:
        raise NotSized(
            "sglang: the driver knows models with full attention, and at most one window and one kind of state"
        )
    full, window, state = found["path"], found.get("window"), found.get("state")
    left, states, sentences = memory, 0, []
    if state is not None:
        budget = int(memory * options.states / (1 + options.states))
        states = (budget - state.bytes) // state.bytes
        if states < options.states_of_one:
            raise NotSized(
                f"sglang: {max(0, states)} states of {state.bytes:,} bytes fit into its part for states, and one "
                f"request counts for {options.states_of_one}"
            )
        left -= (states + 1) * state.bytes
        sentences.append(
            f"{states:,} states and one for padding, {options.states:g} bytes for each byte of attention; a running "
            f"request counts for {options.states_of_one}, so at most {states // options.states_of_one:,} run"
        )
    ratio = options.windows if window is not None else 0.0
    of_token = full.bytes + (ratio * window.bytes if window is not None else 0)
    tokens = int(left // of_token) // options.page * options.page
    window_tokens = int(tokens * ratio) // options.page * options.page
    if window is not None:
        if window_tokens <= window.window + options.page:
            raise NotSized(
                f"sglang: {window_tokens} slots of windows are fewer than one window of {window.window} needs"
            )
        sentences.append(f"{window_tokens:,} slots of windows, {ratio:g} for each of full attention")
    if tokens <= options.page:
        raise NotSized(f"sglang: {memory:,} bytes have room for {tokens} tokens")
    return SGLangSizes(tokens, window_tokens, states, (f"{tokens:,} slots of full attention", *sentences))
