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

ATTENTION = "full_attention"
LATENT = "latent_attention"


class FullComponent(Component):
    """Keys and values per token: ``kv_heads`` heads, ``k_dim`` and ``v_dim`` wide (equal unless said).

    With ``latent_dim`` it holds multi-head latents instead (MLA): one compressed latent and one rotary key of
    ``rope_dim`` per token and layer, for all heads together. ``layers`` are the model's layer numbers that own
    entries, or how many there are; ``shared`` maps a layer to the owner whose entries it reads.
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
        dtype: object = "bfloat16",
        page_size: int | None = None,
        shared: Mapping[int, int] | None = None,
    ) -> None:
        numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        heads = {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}
        shapes: dict[str, tuple[int, ...]]
        if latent_dim is not None:
            said = [key for key, value in heads.items() if value is not None]
            if said:
                raise CompositionError(f"{name!r} holds latents, which have no {', '.join(said)}. Leave them out")
            shapes = {"latent": (latent_dim,)}
            if rope_dim:
                shapes["rope"] = (rope_dim,)
        elif kv_heads is None or k_dim is None:
            raise CompositionError(f"{name!r} needs kv_heads and k_dim, or latent_dim where it holds latents")
        elif rope_dim is not None:
            raise CompositionError(f"{name!r}: rope_dim goes with latent_dim; without latents, k_dim includes it")
        else:
            shapes = {"k": (kv_heads, k_dim), "v": (kv_heads, k_dim if v_dim is None else v_dim)}
        buffers = tuple(Buffer(key, shape, str(dtype), numbers, dict(shared or {})) for key, shape in shapes.items())
        # Heads are split over tensor-parallel ranks; a latent serves all heads, so every rank holds it whole.
        placement: Literal["sharded", "replicated"] = "sharded" if latent_dim is None else "replicated"
        super().__init__(name, Manifest(buffers, page_size=page_size, placement=placement), Path())


def options_from_layers(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Mapping[str, Any]:
    """The options of one component for these layers of a model."""
    shared = {layer.index: int(layer.options["kv_owner"]) for layer in layers if "kv_owner" in layer.options}
    owners = tuple(layer.index for layer in layers if layer.index not in shared)
    common: dict[str, Any] = {"layers": owners, "dtype": facts.dtype, "shared": shared}
    if layers[0].kind == LATENT:
        return common | {"latent_dim": facts.raw["kv_lora_rank"], "rope_dim": facts.raw.get("qk_rope_head_dim")}
    widths = {index: _widths(facts, layer) for index, layer in enumerate(layers)}
    if len(set(widths.values())) > 1:
        raise CompositionError(
            f"the {ATTENTION} layers of model type {facts.model_type!r} differ in (heads, K width, V width): "
            f"{sorted(set(widths.values()))}. Write a Profile with one component per width"
        )
    kv_heads, k_dim, v_dim = widths[0]
    return common | {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}


def _widths(facts: ModelFacts, layer: LayerFacts) -> tuple[int, int, int]:
    k_dim = int(layer.options.get("head_dim") or facts.head_dim)
    v_dim = int(layer.options.get("v_head_dim") or facts.raw.get("v_head_dim") or k_dim)
    return int(layer.options.get("num_key_value_heads") or facts.num_key_value_heads), k_dim, v_dim


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType(
        kind="full",
        make=FullComponent,
        summary="full attention: keys and values of the whole path, or multi-head latents",
        layer_kinds=frozenset({ATTENTION, LATENT}),
        from_layers=options_from_layers,
    )
