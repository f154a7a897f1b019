"""The truth about a component's layers, said without the component. It imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from ...compose.registry import default_registry
from ...contract.manifest import Buffer, Manifest
from ...errors import CompositionError


def _buffers(given: Iterable[Buffer] | None) -> tuple[Buffer, ...] | None:
    found = None if given is None else tuple(given)
    if any(not isinstance(buffer, Buffer) for buffer in found or ()):
        raise CompositionError(
            f"Truth(buffers=...) takes what the layers write as prefixloom.Buffer(name, shape, dtype, layers), got "
            f"{found!r}"
        )
    return found


@attrs.frozen
class Truth:
    """What the layers really do, stated independently of the component. Laws compare the component with this.

    ``reads(q)``          the positions before q whose entries are read to compute the token at q
    ``ahead``             how many tokens after p the entry at p depends on
    ``grid``              content is exact only at multiples of this
    ``ends``              whether a hit may end at n, by ``ends(n, extra)``, where ``extra`` are the spans of the prompt
                          that have an extra key. Where nobody says it, a hit may end at every boundary
    ``buffers``           what the layers write: the shape, the dtype and the layers of each buffer, and which layers
                          read another's entries
    ``tokens_per_entry``  how many tokens one entry stands for
    ``at_rest``           the largest error of cached content that the layers bear, if it is stored in another form
    ``layers``            the layers themselves, to be watched: ``layers(tokens, start, end, buffers, pages)`` computes
                          the tokens [start, end) of one sequence, reads and writes ``buffers`` through the page
                          numbers ``pages``, and returns their outputs. Then only ``grid`` is left to be said,
                          and ``buffers`` where layers read each other's entries

    Where a fact is None, the kit believes what the component says and cannot find a mistake in it.
    """

    reads: Callable[[int], Iterable[int]] | None = None
    ahead: int | None = None
    grid: int | None = None
    ends: Callable[[int, tuple[Any, ...]], bool] | None = None
    buffers: tuple[Buffer, ...] | None = attrs.field(default=None, converter=_buffers)
    tokens_per_entry: int | None = None
    at_rest: float | None = None
    layers: Callable[..., Any] | None = None

    def untold(self, manifest: Manifest, has_states: bool) -> tuple[str, ...]:
        """Return the names of the facts that only the component states, of those that matter for it."""
        idle = {"layers", "ends"} | ({"reads", "tokens_per_entry", "ahead"} if has_states else set())
        if self.layers is not None:
            idle |= {"reads", "ahead", "tokens_per_entry"}
            if not any(buffer.shared for buffer in manifest.buffers):
                idle.add("buffers")
        if manifest.stored_as is None:
            idle.add("at_rest")
        return tuple(
            field.name for field in attrs.fields(Truth) if getattr(self, field.name) is None and field.name not in idle
        )


def offered_truth(kind: str, options: Mapping[str, Any]) -> Truth:
    """Return what a component's distribution says of the layers that such options make (``prefixloom_truth``)."""
    registry = default_registry()
    answer = registry.truth(kind, options)
    if answer is None:
        return Truth()
    if not isinstance(answer, Truth):
        raise CompositionError(
            f"component {kind!r} ({registry.source('component', kind)}): prefixloom_truth answered {answer!r}, and "
            f"must return a prefixloom.testing.Truth"
        )
    return answer
