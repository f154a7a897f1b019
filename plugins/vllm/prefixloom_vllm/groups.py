"""Groups: what vLLM's cache groups are for prefixloom. Each is a component, with its reach and the bytes of its blocks.

A block is opaque: one entry of so many bytes in each layer, whatever lies in it. What a request needs of a group to
resume follows from the group's reach, and from nothing else. A new kind of group is one line of ``REACHES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from prefixloom import Buffer, Chunk, Component, CompositionError, Manifest, Path, Point, Reach, Window

REACHES: dict[str, tuple[str, Callable[[Any], Reach]]] = {
    "FullAttentionSpec": ("full", lambda spec: Path()),
    "MLAAttentionSpec": ("mla", lambda spec: Path()),
    "SinkFullAttentionSpec": ("sink", lambda spec: Path()),
    "SlidingWindowSpec": ("window", lambda spec: Window(spec.sliding_window + spec.extra_retained_tokens)),
    "SlidingWindowMLASpec": ("window_mla", lambda spec: Window(spec.sliding_window + spec.extra_retained_tokens)),
    "ChunkedLocalAttentionSpec": ("chunk", lambda spec: Chunk(spec.attention_chunk_size)),
    "MambaSpec": ("state", lambda spec: Point()),
}
"""vLLM's kinds of groups by the exact name of their class: our name for it, and what resuming needs of it."""


@attrs.frozen
class Group:
    """One of vLLM's cache groups. ``tokens`` of a block; ``layer_bytes`` of a block in each of its layers.

    ``exact_blocks``: the blocks to store are told one by one (states of vLLM's mode "align"), and not by position.
    """

    index: int
    name: str
    reach: Reach
    tokens: int
    layer_names: tuple[str, ...]
    layer_bytes: tuple[int, ...]
    exact_blocks: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of a block, in all layers of one rank."""
        return sum(self.layer_bytes)

    @property
    def is_state(self) -> bool:
        return self.reach.unit == "boundary"

    def component(self, ranks: int) -> Component:
        """Make the component whose slots hold a block of this group, of all ranks."""
        buffers = []
        for rank in range(ranks):
            for size in sorted({*self.layer_bytes}):
                layers = [layer for layer, each in enumerate(self.layer_bytes) if each == size]
                buffers.append(Buffer(f"rank{rank}_{size}", (size,), "uint8", layers))
        if self.is_state:
            return Component(self.name, Manifest(buffers, grid=self.tokens), self.reach)
        manifest = Manifest(buffers, page_size=self.tokens, tokens_per_slot=self.tokens)
        return Component(self.name, manifest, self.reach)


def groups_of(kv_cache_config: Any) -> list[Group]:
    """Return the groups that a request needs to resume. CompositionError: the kind of a group is not known here."""
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = dict(_layer_specs(group))
        kinds = {type(spec).__name__ for spec in specs.values()}
        unknown = sorted(kinds - REACHES.keys())
        if unknown:
            raise CompositionError(
                f"vLLM's cache group {index} has layers of {', '.join(unknown)}, and this connector knows "
                f"{', '.join(REACHES)}. Its blocks cannot be kept, so no request could resume"
            )
        _check_supported(index, group, specs)
        groups.append(_group(index, group, specs, kinds))
    if not groups:
        raise CompositionError("this model keeps nothing between two tokens, so there is nothing to cache")
    return groups


def _layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and spec of each layer: its own in a group of uniform type, and the group's in all others."""
    spec = group.kv_cache_spec
    for name in group.layer_names:
        yield name, spec.kv_cache_specs[name] if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec


def _check_supported(index: int, group: Any, specs: dict[str, Any]) -> None:
    if group.is_eagle_group:
        raise CompositionError(
            f"vLLM's cache group {index} has layers of a draft model (EAGLE, MTP), whose content depends on the token "
            f"behind it. This connector does not keep such blocks yet: run without the draft model"
        )
    if not group.enable_kv_transfer or group.host_resident or not group.kv_cache_spec.prefix_cacheable:
        raise CompositionError(
            f"vLLM's cache group {index} ({type(group.kv_cache_spec).__name__}) takes no part in prefix caching or in "
            f"transfers, so no request could resume from what this connector keeps"
        )
    if any(getattr(spec, "mamba_cache_mode", "align") == "none" for spec in specs.values()):
        raise CompositionError(
            "vLLM keeps no states at boundaries (mamba_cache_mode 'none'): switch prefix caching on "
            "(enable_prefix_caching=True)"
        )


def _group(index: int, group: Any, specs: dict[str, Any], kinds: set[str]) -> Group:
    names = {REACHES[kind][0] for kind in kinds}
    reaches = {REACHES[type(spec).__name__][1](spec) for spec in specs.values()}
    tokens = {spec.block_size for spec in specs.values()}
    if len(reaches) > 1 or len(tokens) > 1:
        raise CompositionError(
            f"the layers of vLLM's cache group {index} need different things to resume: {sorted(map(repr, reaches))}, "
            f"in blocks of {sorted(tokens)} tokens"
        )
    return Group(
        index,
        f"{'_'.join(sorted(names))}_{index}",
        reaches.pop(),
        tokens.pop(),
        tuple(specs),
        tuple(block_bytes(spec) for spec in specs.values()),
        any(getattr(spec, "mamba_cache_mode", "") == "align" for spec in specs.values()),
    )


def block_bytes(spec: Any) -> int:
    """Return the bytes of a block in one layer, without padding."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(spec.state_content_size_bytes if unpadded is None else unpadded)


def slot_bytes(groups: Sequence[Group]) -> int:
    """Return the bytes of one rank's slot, which holds a block of any group. vLLM gives all blocks about as many."""
    return max(group.bytes for group in groups)


def tree_page(groups: Sequence[Group]) -> int:
    """Return the tokens between two boundaries at which all groups have whole blocks."""
    return math.lcm(*(group.tokens for group in groups))
