"""Arriving: slots for tokens that were computed elsewhere, of which only what resuming needs comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .evict import make_room
from .pool import ABSENT
from .states import SteppedHolding

if TYPE_CHECKING:
    from .cache import Cache
    from .sequence import Sequence


def reserve_arriving(cache: Cache, sequence: Sequence, count: int, length: int) -> None:
    """Slots for what resuming at ``length`` needs of the next ``count`` tokens, and *absent* for the rest."""
    paged = sequence._paged
    needed = [lane.needed_pages(holding.base + len(holding.table), length) for lane, holding in paged]
    wanted = [(lane, sum(pages), holding) for (lane, holding), pages in zip(paged, needed, strict=True)]
    make_room(cache, wanted, "reserve", count, sequence)
    for (lane, slots, holding), pages in zip(wanted, needed, strict=True):
        fresh = iter(lane.pool.take(slots) if slots else ())
        holding.table.extend(next(fresh) if page else ABSENT for page in pages)
        if not all(pages):
            holding.whole = False
    for _, state in sequence._states:
        if isinstance(state, SteppedHolding):
            state.arrived = length
    sequence._lease.claim(cache._flight)
    sequence.reserved = length
    cache._leave("grow")
