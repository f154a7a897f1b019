"""The component of full attention: what it stores, and how its options are read from a model config.

Its reach is the whole path. From the reach and the manifest the core derives everything that the cache does for it:
matching, locks, eviction, transfers. So this component overrides no hook.
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
    """Keys and values per token, for ``kv_heads`` heads that are ``k_dim`` and ``v_dim`` wide (equal by default).

    ``latent_dim``  hold multi-head latents (MLA) in their place: per token and layer one compressed latent, and one
                    rotary key of ``rope_dim``, for all heads together
    ``index_dim``   hold an indexer's keys in their place, by which sparse attention selects what it reads: one key of
                    this width per token and layer
    ``layers``      the numbers of the model's layers that own entries, or how many layers there are
    ``shared``      layer -> the layer whose entries it reads
    ``lookahead``   1 for a draft model (EAGLE, MTP), whose entries depend on the next token too
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
            extra = [key for key, value in {**heads, **latents}.items() if value is not None]
            if extra:
                raise CompositionError(
                    f"{name!r} holds an indexer's keys, which have no {', '.join(extra)}: leave them out"
                )
            shapes = {"index": (index_dim,)}
        elif latent_dim is not None:
            extra = [key for key, value in heads.items() if value is not None]
            if extra:
                raise CompositionError(f"{name!r} holds latents, which have no {', '.join(extra)}. Leave them out")
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
        # Heads are split over tensor-parallel ranks. What serves all heads is replicated on every rank.
        placement: Literal["sharded", "replicated"] = "sharded" if "k" in shapes else "replicated"
        manifest = Manifest(buffers, page_size=page_size, placement=placement, lookahead=lookahead)
        super().__init__(name, manifest, Path())


def options_from_layers(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return the options of one component per stored shape: latents, indexer keys, each width of keys and values."""
    groups: dict[str, list[LayerFacts]] = {}
    for layer in layers:
        groups.setdefault(_suffix(facts, layer), []).append(layer)
    first = next((suffix for suffix in groups if suffix != INDEXER), INDEXER)
    return [
        ("" if suffix == first else "indexer" if suffix == INDEXER else suffix, _options(facts, group))
        for suffix, group in groups.items()
    ]


def _suffix(facts: ModelFacts, layer: LayerFacts) -> str:
    """Return a name for what a layer stores. Layers with different names cannot share a component."""
    if layer.kind != ATTENTION:
        return layer.kind
    kv_heads, k_dim, v_dim = facts.widths(layer)
    return f"{kv_heads}x{k_dim}" if v_dim == k_dim else f"{kv_heads}x{k_dim}_{v_dim}"


def _options(facts: ModelFacts, layers: Sequence[LayerFacts]) -> Mapping[str, Any]:
    common = facts.owning(layers)
    if layers[0].kind == LATENT:
        return common | {"latent_dim": facts.raw["kv_lora_rank"], "rope_dim": facts.raw.get("qk_rope_head_dim")}
    if layers[0].kind == INDEXER:
        return common | {"index_dim": _index_width(facts)}
    kv_heads, k_dim, v_dim = facts.widths(layers[0])
    return common | {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}


def _index_width(facts: ModelFacts) -> int:
    for name in ("index_head_dim", "indexer_head_dim"):
        if facts.raw.get(name) is not None:
            return int(facts.raw[name])
    raise CompositionError(f"model type {facts.model_type!r} has an indexer, and its config has no index_head_dim")


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


@hookimpl
def prefixloom_truth(options: Mapping[str, Any]) -> Any:
    """Say what such layers do: a query sees all tokens before it, whatever is kept of each."""
    from prefixloom.testing import Truth

    if options["index_dim"] is not None:
        shapes: dict[str, tuple[int, ...]] = {"index": (options["index_dim"],)}
    elif options["latent_dim"] is not None:
        shapes = {"latent": (options["latent_dim"],), "rope": (options["rope_dim"] or 0,)}
    else:
        shapes = {name: (options["kv_heads"], options[f"{name}_dim"] or options["k_dim"]) for name in "kv"}
    layers = range(options["layers"]) if isinstance(options["layers"], int) else options["layers"]
    stored = str(options["dtype"]), layers, options["shared"] or {}
    buffers = [Buffer(name, shape, *stored) for name, shape in shapes.items() if all(shape)]
    return Truth(reads=range, ahead=options["lookahead"], grid=1, buffers=buffers, tokens_per_entry=1)
