"""The component of recurrent layers: the states that it stores, and which of them the tree keeps.

Its reach is the boundary itself: a state serves one boundary and no other. The core copies states on a match, gives
them to the tree, tracks them, admits them and keeps the states of single steps. So this component overrides no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prefixloom import (
    AdmissionPolicy,
    Buffer,
    Codec,
    Component,
    ComponentType,
    CompositionError,
    LayerFacts,
    Manifest,
    ModelFacts,
    Point,
    StateView,
    hookimpl,
)

from .states import CONVOLUTION, LINEAR, caveats_of, read_state

Admit = str | AdmissionPolicy | Callable[[StateView], bool]
prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md
LAYER_KINDS = frozenset({LINEAR, CONVOLUTION, "mamba", "mamba2"})


class MambaComponent(Component):
    """One state slot per sequence and checkpoint: in each of ``layers`` a ``conv`` state, a ``recurrent`` one, or both.

    ``conv``         (channels, kernel width), in ``dtype``
    ``recurrent``    the shape of the recurrent state, in ``state_dtype``, which is float32 even in models of 16 bits
    ``grid``         states are exact only at multiples of this, the chunk of the kernel
    ``checkpoint_every``  keep a checkpoint every so many tokens while a sequence runs; 0: only the one at its end
    ``max_rewind``   how many tokens of a speculative step a composition may take back. The slots for them are made only
                     if the composition asks for them
    ``admit``        which checkpoints the tree takes: the name of an admission policy ("all"; "branch-and-last": where
                     prompts diverge and where a sequence ends; or an installed one), a policy, or a function of the
                     state. None: as the composition says
    ``stored_as``    the form of cached states: "int8", "bfloat16", "float16" or "float32", within the error bound of
                     that form, or a ``Codec``. None: unchanged
    """

    def __init__(
        self,
        name: str = "mamba",
        *,
        layers: int | Sequence[int] = 1,
        conv: Sequence[int] | None = None,
        recurrent: Sequence[int] | None = None,
        dtype: object = "bfloat16",
        state_dtype: object = "float32",
        grid: int = 1,
        checkpoint_every: int = 0,
        max_rewind: int = 16,
        admit: Admit | None = None,
        stored_as: str | Codec | None = None,
    ) -> None:
        numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        states = {"conv": (conv, dtype), "recurrent": (recurrent, state_dtype)}
        buffers = [Buffer(key, shape, str(kind), numbers) for key, (shape, kind) in states.items() if shape is not None]
        if not buffers:
            raise CompositionError(f"{name!r} needs a conv state (channels, kernel width), a recurrent one, or both")
        if conv is not None and len(tuple(conv)) != 2:
            raise CompositionError(f"{name!r}: a conv state is (channels, kernel width), got {tuple(conv)}")
        manifest = Manifest(
            buffers,
            grid=grid,
            checkpoint_every=checkpoint_every,
            max_rewind=max_rewind,
            admission=_policy(name, admit),
            stored_as=Codec(stored_as, tolerance=1.0) if isinstance(stored_as, str) else stored_as,
        )
        if checkpoint_every % grid:
            raise CompositionError(
                f"{name!r}: checkpoint_every={checkpoint_every} is off the grid: its states are exact at multiples of "
                f"{grid} only. Say {-(-checkpoint_every // grid) * grid}"
            )
        super().__init__(name, manifest, Point())


def _policy(name: str, admit: Admit | None) -> str | AdmissionPolicy | None:
    """Return the admission policy of the manifest. A bare function becomes a policy named after the component."""
    if admit is None or isinstance(admit, str | AdmissionPolicy):
        return admit
    if not callable(admit):
        raise CompositionError(
            f"{name!r}: admit must be the name of an admission policy, an AdmissionPolicy or a function of a "
            f"StateView, got {admit!r}"
        )
    return AdmissionPolicy(f"{name}.admit", admit=admit)


# ---------------------------------------------------------------- model configs


def options_from_layers(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return the options of one component for the recurrent layers, and of one for the short convolutions."""
    groups: dict[bool, list[int]] = {}
    for layer in layers:
        groups.setdefault(layer.kind == CONVOLUTION, []).append(layer.index)
    out = []
    for is_conv, numbers in groups.items():
        options = read_state(facts, is_conv).options()
        out.append(("conv" if is_conv and len(groups) > 1 else "", {"layers": tuple(numbers)} | options))
    return out


def caveats(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Iterable[str]:
    """Return what transformers is known to compute wrongly in these layers."""
    if all(layer.kind == CONVOLUTION for layer in layers):
        return ()
    return caveats_of(facts)


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType(
        kind="mamba",
        make=MambaComponent,
        summary="recurrent layers: states of linear attention, state spaces and short convolutions",
        layer_kinds=LAYER_KINDS,
        from_layers=options_from_layers,
        caveats=caveats,
    )


@hookimpl
def prefixloom_truth(options: Mapping[str, Any]) -> Any:
    """Say what such layers do: each has states of these shapes, exact at multiples of its kernel's chunk."""
    from prefixloom.testing import Truth

    layers = range(options["layers"]) if isinstance(options["layers"], int) else options["layers"]
    kinds = {"conv": str(options["dtype"]), "recurrent": str(options["state_dtype"])}
    buffers = [Buffer(key, options[key], dtype, layers) for key, dtype in kinds.items() if options[key] is not None]
    asked = options["stored_as"]
    at_rest = asked.tolerance if isinstance(asked, Codec) else 0.0 if asked is None else 1.0
    return Truth(grid=options["grid"], buffers=buffers, at_rest=at_rest)
