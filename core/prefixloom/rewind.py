"""Rewinding: a sequence takes its last tokens back, in every component. It must not know what a component keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import InputError, ProtocolError
from .pool import NO_SLOT
from .retention import retain_again

if TYPE_CHECKING:
    from .cache import Cache
    from .sequence import Sequence


def rewind(cache: Cache, sequence: Sequence, count: int) -> None:
    """Take the last ``count`` reserved tokens back, names included, or refuse to with nothing changed."""
    if count.__class__ is not int or count < 0:
        raise InputError(f"rewind takes a number of tokens from 0 up, got {count!r}")
    length = sequence.reserved - count
    if length < sequence.published:
        raise ProtocolError(f"{sequence!r} cannot rewind to {length}: {sequence.published} are published")
    if count and sequence.published and length < min(sequence.named, sequence.published + cache._lookahead):
        raise ProtocolError(
            f"{sequence!r} cannot rewind to {length}: {sequence.published} are published, and their keys and content "
            f"depend on {cache._lookahead} tokens more"
        )
    high = max(sequence.committed, sequence._high)  # what is too far below the highest commit was given back
    back = high - length
    limit = cache._rewind_limit
    if limit is not None and back > limit[1]:
        raise ProtocolError(
            f"{sequence!r} cannot rewind {back} committed tokens: component {limit[0]!r} allows {limit[1]}"
        )
    for lane, holding in sequence._states:
        if sequence._steps and length < sequence._planned:
            raise ProtocolError(
                f"{sequence!r} cannot rewind to {length}: an open step computes up to {sequence._planned}, and so "
                f"does the state of component {lane.name!r}. End the step first"
            )
        if count and not (holding.ready or sequence._steps or sequence._lost) and not _due(sequence, holding):
            raise ProtocolError(
                f"{sequence!r} cannot rewind to {length}: since fill, layers may have written the state of component "
                f"{lane.name!r}. Commit first"
            )
        if not lane.can_rewind(holding, length):
            raise ProtocolError(
                f"{sequence!r} cannot rewind to {length}: component {lane.name!r} has the states of single tokens "
                f"only for the last step, and only if that had at most {len(holding.steps)} tokens"
            )
    cache._flight.end_alone(sequence._lease)
    if cache._retaining:
        sequence._high = high
    sequence.reserved = length
    sequence.committed = min(sequence.committed, length)
    sequence._planned = min(sequence._planned, length)
    for lane, holding in sequence._paged:
        lane.rewind(holding, length)
    for lane, holding in sequence._states:
        source = lane.rewind_state(holding, length)
        if source != NO_SLOT:  # instead of what an earlier rewind wanted copied
            sequence._fills = [fill for fill in sequence._fills if fill[1] is not holding]
            sequence._fills.append((lane, holding, "copy", source))
    if count and sequence.named > length:
        sequence._cut(length)
        sequence._reached = None
    if cache._sparing:
        retain_again(cache, sequence)


def _due(sequence: Sequence, holding: Any) -> bool:
    """Whether a running state has yet to be filled, so that no layer has written it."""
    return any(of is holding for _, of, _, _ in sequence._fills)
