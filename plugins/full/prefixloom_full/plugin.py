"""The component of full attention: what it stores, and how a model config says it.

Its reach is the whole path; everything else that the cache does for it (matching, locks, eviction, transfers) the core
derives from that and from the manifest, so that no hook is overridden here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prefixloom import (
    Buffer,
    Component,
    ComponentType,
    CompositionError,
    LayerFacts,
    Manifest,
    ModelFacts,
    Path,
    hookimpl,
)

prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md
ATTENTION = "full_attention"
LATENT = "latent_attention"
INDEXER = "indexer_keys"


class FullComponent(Component):
    """Keys and values per token: ``kv_heads`` heads, ``k_dim`` and ``v_dim`` wide (equal unless said).

    With ``latent_dim`` it holds multi-head latents instead (MLA): one compressed latent and one rotary key of
    ``rope_dim`` per token and layer, for all heads together. With ``index_dim`` it holds the keys by which an indexer
    picks what sparse attention reads: one of that width per token and layer. ``layers`` are the model's layer numbers
    that own entries, or how many there are; ``shared`` maps a layer to the owner whose entries it reads.
    ``lookahead`` is 1 for a draft model (EAGLE, MTP) whose entries depend on the next token too.
    """

    def __init__(
        self,
        name: str = "full",
        *,
        layers: int | Sequence[int] = 1,
        kv_heads: int | None = None,
        k_dim: int | None = None,
        v_dim: int | None = None,
        latent_dim: int | None = None,
        rope_dim: int | None = None,
        index_dim: int | None = None,
        dtype: object = "bfloat16",
        page_size: int | None = None,
        shared: Mapping[int, int] | None = None,
        lookahead: int = 0,
    ) -> None:
        numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        heads = {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}
        latents = {"latent_dim": latent_dim, "rope_dim": rope_dim}
        shapes: dict[str, tuple[int, ...]]
        if index_dim is not None:
            said = [key for key, value in {**heads, **latents}.items() if value is not None]
            if said:
                raise CompositionError(
                    f"{name!r} holds an indexer's keys, which have no {', '.join(said)}: leave them out"
                )
            shapes = {"index": (index_dim,)}
        elif latent_dim is not None:
            said = [key for key, value in heads.items() if value is not None]
            if said:
                raise CompositionError(f"{name!r} holds latents, which have no {', '.join(said)}. Leave them out")
            shapes = {"latent": (latent_dim,)}
            if rope_dim:
                shapes["rope"] = (rope_dim,)
        elif kv_heads is None or k_dim is None:
            raise CompositionError(
                f"{name!r} needs kv_heads and k_dim, or latent_dim where it holds latents, or index_dim for an indexer"
            )
        elif rope_dim is not None:
            raise CompositionError(f"{name!r}: rope_dim goes with latent_dim; without latents, k_dim includes it")
        else:
            shapes = {"k": (kv_heads, k_dim), "v": (kv_heads, k_dim if v_dim is None else v_dim)}
        buffers = tuple(Buffer(key, shape, str(dtype), numbers, dict(shared or {})) for key, shape in shapes.items())
        # Heads are split over tensor-parallel ranks; what serves all heads is held whole by every rank.
        placement: Literal["sharded", "replicated"] = "sharded" if "k" in shapes else "replicated"
        manifest = Manifest(buffers, page_size=page_size, placement=placement, lookahead=lookahead)
        super().__init__(name, manifest, Path())


def options_from_layers(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """One component per shape of what is stored: latents, keys and values of each width, keys of an indexer."""
    groups: dict[str, list[LayerFacts]] = {}
    for layer in layers:
        groups.setdefault(_suffix(facts, layer), []).append(layer)
    first = next((suffix for suffix in groups if suffix != INDEXER), INDEXER)
    return [
        ("" if suffix == first else "indexer" if suffix == INDEXER else suffix, _options(facts, group))
        for suffix, group in groups.items()
    ]


def _suffix(facts: ModelFacts, layer: LayerFacts) -> str:
    """What tells layers apart that cannot share a component, as a part of its name."""
    if layer.kind != ATTENTION:
        return layer.kind
    kv_heads, k_dim, v_dim = facts.widths(layer)
    return f"{kv_heads}x{k_dim}" if v_dim == k_dim else f"{kv_heads}x{k_dim}_{v_dim}"


def _options(facts: ModelFacts, layers: Sequence[LayerFacts]) -> Mapping[str, Any]:
    common = facts.owning(layers)
    if layers[0].kind == LATENT:
        return common | {"latent_dim": facts.raw["kv_lora_rank"], "rope_dim": facts.raw.get("qk_rope_head_dim")}
    if layers[0].kind == INDEXER:
        return common | {"index_dim": facts.raw["index_head_dim"]}
    kv_heads, k_dim, v_dim = facts.widths(layers[0])
    return common | {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType(
        kind="full",
        make=FullComponent,
        summary="full attention: keys and values of the whole path, multi-head latents, or an indexer's keys",
        layer_kinds=frozenset({ATTENTION, LATENT, INDEXER}),
        from_layers=options_from_layers,
    )
