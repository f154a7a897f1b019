"""How vLLM 0.33.0 divides bytes: one pool of equal blocks, which all groups of layers share.

The rules are those of ``Platform.update_block_size_for_backend`` (a block of attention grows until it has at least the
bytes of one layer's state, and a state is padded to it), ``_get_kv_cache_groups_uniform_page_size`` (groups with the
same number of layers, padded) and ``get_kv_cache_config_from_groups`` (blocks of as many bytes as one group needs).
The driver holds the groups against vLLM's own function.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from prefixloom.lab.beside.peer import MemoryKind, NotSized

BLOCK = 16
"""Tokens of a block by default, and the least that its kernels on CUDA take."""


@attrs.frozen
class VLLMSizes:
    """``groups``: for each group of layers its kind of memory. Block 0 stands for none."""

    page: int
    page_bytes: int
    groups: tuple[MemoryKind, ...]
    group_layers: int
    blocks: int
    sentences: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.group_layers

    def held(self, length: int, chunk: int) -> int:
        """Return the most blocks that a request of ``length`` tokens holds."""
        whole = -(-length // self.page)
        most = 0
        for each in self.groups:
            if each.kind == "path":
                most += whole
            elif each.kind == "window":
                most += min(whole, -(-(each.window - 1 + chunk) // self.page) + 1)
            else:
                most += min(whole, 2) + 1
        return most


def vllm_sizes(kinds: Sequence[MemoryKind], memory: int) -> VLLMSizes:
    """Return the blocks for a model and so many bytes. NotSized: vLLM has no such model, or the bytes are too few."""
    attention = [each for each in kinds if each.kind != "state"]
    states = [each for each in kinds if each.kind == "state"]
    if not attention or len({each.entry_bytes for each in attention}) != 1:
        raise NotSized(
            "vllm: the driver knows models in which each attention layer takes the same bytes of a token, these take "
            + (", ".join(f"{each.entry_bytes} ({each.name})" for each in attention) or "none")
        )
    token, page, sentences = attention[0].entry_bytes, BLOCK, []
    if states:
        largest = max(each.entry_bytes for each in states)
        page = BLOCK * -(-largest // (BLOCK * token))
        for each in states:
            padding = page * token / each.entry_bytes - 1
            sentences.append(
                f"a block has {page} tokens, so that its bytes in a layer ({page * token:,}) are no fewer than those "
                f"of a state ({each.entry_bytes:,}), which is padded by {padding:.1%}"
            )
    counts = [each.layers for each in kinds]
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = tuple(each for each in kinds for _ in range(-(-each.layers // layers)))
    empty = len(groups) * layers - sum(counts)
    if len(groups) > 1:
        of = ", ".join(f"{sum(one is each for one in groups)} of {each.name}" for each in kinds)
        sentences.append(
            f"{len(groups)} groups of {layers} layers share the blocks ({of})"
            + (f"; {empty} places for layers are empty" if empty else "")
        )
    blocks = memory // (page * token * layers)
    if blocks < 2:
        raise NotSized(f"vllm: {memory:,} bytes are less than two blocks of {page * token * layers:,} bytes")
    return VLLMSizes(page, page * token, groups, layers, blocks, tuple(sentences))
