"""Refusals: what a sequence may not be asked for as it stands, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ProtocolError

if TYPE_CHECKING:
    from .sequence import Sequence


def why_ended(sequence: Sequence) -> ProtocolError:
    """The error of one that may not be used any more."""
    if sequence._lease.failed is not None:
        return ProtocolError(
            f"{sequence!r} ended when a step or copy failed that it was in or had read from, or its publication did: "
            f"open it again"
        )
    if sequence._lease._flushes != sequence._cache._flushes:
        return ProtocolError(f"{sequence!r} was made before the cache was flushed: open it again")
    return ProtocolError(f"{sequence!r} is closed")


def check_states(sequence: Sequence) -> None:
    """Refuse to build on a running state that is not there."""
    if sequence._lost:
        raise ProtocolError(
            f"{sequence!r}: a step that failed may have written half a state of component "
            f"{sequence._states[0][0].name!r}. Abort the sequence and open it again; what it published is still there"
        )
    if sequence._fills:
        raise ProtocolError(
            f"{sequence!r} has ops that have not run: commit through cache.step(...), or call sequence.fill() first"
        )
