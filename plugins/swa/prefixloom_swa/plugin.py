"""The component of sliding-window and chunked attention: what it stores, and how its options are read from a config.

Its reach is the end of a prefix: the last window, or the unfinished chunk. From the reach the core derives the locks,
the early release by running sequences, and which part of a long edge is evicted first. The component overrides one
hook, and only with ``keep_windows="last"``: it says how much of a publication the tree keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prefixloom import (
    Buffer,
    Chunk,
    Claim,
    Component,
    ComponentType,
    CompositionError,
    LayerFacts,
    Manifest,
    ModelFacts,
    Reach,
    WalkView,
    Window,
    hookimpl,
)

prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


class SwaComponent(Component):
    """Keys and values per token, of which a query sees the last ``window`` tokens, or those of its ``chunk``.

    ``window``  the tokens that a query sees, itself included, as in transformers' ``sliding_window``: a window of w
                needs the w - 1 positions before the first new token
    ``chunk``   chunked attention (Llama 4): a query sees everything since the last multiple of this
    ``layers``  the numbers of the model's layers that own entries, or how many layers there are
    ``shared``  layer -> the layer whose entries it reads
    ``keep_windows``  what the tree keeps of a publication. "all": everything that the sequence holds; what is older
                than a window serves prompts that diverge earlier, and is evicted first. "last": only the last window
    """

    def __init__(
        self,
        name: str = "swa",
        *,
        layers: int | Sequence[int] = 1,
        kv_heads: int,
        k_dim: int,
        v_dim: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        keep_windows: Literal["all", "last"] = "all",
        dtype: object = "bfloat16",
        page_size: int | None = None,
        shared: Mapping[int, int] | None = None,
        lookahead: int = 0,
        max_rewind: int | None = None,
    ) -> None:
        numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        shapes = {"k": (kv_heads, k_dim), "v": (kv_heads, k_dim if v_dim is None else v_dim)}
        buffers = tuple(Buffer(key, shape, str(dtype), numbers, dict(shared or {})) for key, shape in shapes.items())
        manifest = Manifest(buffers, page_size=page_size, lookahead=lookahead, max_rewind=max_rewind)
        super().__init__(name, manifest, _reach(name, window, chunk))
        if keep_windows not in ("all", "last"):
            raise CompositionError(f"{name!r}: keep_windows must be 'all' or 'last', got {keep_windows!r}")
        self.keep_windows = keep_windows
        if keep_windows == "all":
            self.commit_insert = None  # type: ignore[assignment, method-assign]  # a hook that is not overridden costs nothing

    @hookimpl
    def commit_insert(self, walk: WalkView) -> Claim:
        """Keep of each publication only what is needed to resume at its end."""
        return Claim(keep=())


def _reach(name: str, window: int | None, chunk: int | None) -> Reach:
    if (window is None) == (chunk is None):
        raise CompositionError(f"{name!r} needs a window or a chunk, one of the two; got window={window!r}, {chunk=!r}")
    what, size = ("window", window) if chunk is None else ("chunk", chunk)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        counts = ": it counts the query itself, so 1 is the smallest" if what == "window" else ""
        raise CompositionError(f"{name!r}: a {what} must be a whole number of at least 1, got {size!r}{counts}")
    return Window(size) if chunk is None else Chunk(size)


# ---------------------------------------------------------------- model configs


def options_from_layers(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return the options of one component for each window and width: such layers are evicted together."""
    groups: dict[tuple[str, int, tuple[int, int, int]], list[LayerFacts]] = {}
    for layer in layers:
        what, size = _size(layer)
        groups.setdefault((what, size, facts.widths(layer)), []).append(layer)
    sizes = [(what, size) for what, size, _ in groups]
    out = []
    for (what, size, widths), mine in groups.items():
        suffix = "" if len(groups) == 1 else str(size) if what == "window" else f"chunk{size}"
        if sizes.count((what, size)) > 1:
            suffix += "_" + "x".join(map(str, widths))
        out.append((suffix, {what: size, **_options(facts, mine, widths)}))
    return out


def _size(layer: LayerFacts) -> tuple[str, int]:
    what, key = ("window", "sliding_window") if layer.kind == SLIDING else ("chunk", "attention_chunk_size")
    size = layer.options.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CompositionError(
            f"layer {layer.index} is of kind {layer.kind!r}, and the config says {key}={size!r}: it must be a whole "
            f"number of at least 1"
        )
    return what, size


def _options(facts: ModelFacts, layers: Sequence[LayerFacts], widths: tuple[int, int, int]) -> Mapping[str, Any]:
    kv_heads, k_dim, v_dim = widths
    return {**facts.owning(layers), "kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType(
        kind="swa",
        make=SwaComponent,
        summary="sliding-window and chunked attention: keys and values of the last tokens",
        layer_kinds=frozenset({SLIDING, CHUNKED}),
        from_layers=options_from_layers,
    )


@hookimpl
def prefixloom_truth(options: Mapping[str, Any]) -> Any:
    """Say what such layers do: a query sees a window that ends with itself, or its chunk up to itself."""
    from prefixloom.testing import Truth

    window, chunk, heads = options["window"], options["chunk"], options["kv_heads"]

    def reads(q: int) -> range:
        return range(max(0, q + 1 - window), q) if chunk is None else range(q - q % chunk, q)

    layers = range(options["layers"]) if isinstance(options["layers"], int) else options["layers"]
    widths = {"k": options["k_dim"], "v": options["v_dim"] or options["k_dim"]}
    stored = str(options["dtype"]), layers, options["shared"] or {}
    buffers = [Buffer(key, (heads, width), *stored) for key, width in widths.items()]
    return Truth(reads=reads, ahead=options["lookahead"], grid=1, buffers=buffers, tokens_per_entry=1)
