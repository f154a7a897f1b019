"""Growing: room for what the components of a sequence lack of so many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .evict import evict, make_room

if TYPE_CHECKING:
    from .cache import Cache
    from .sequence import Sequence


def find_room(cache: Cache, sequence: Sequence, length: int, count: int) -> None:
    """Room for what the components lack of ``length`` tokens. Those before the first that is short have got theirs by
    now: if there is no room, that is given back.

    Mostly it is certain that eviction gives it: then nothing is asked twice.
    """
    held = sequence._lease.held
    sure = not cache._flight.works
    for lane in cache._page_lanes:
        holding = held[lane.index]
        lacking = -(-length // lane.page) - holding.base - len(holding.table) - lane.pool.at_hand
        if lacking > 0 and (lane.sparing or lacking > lane.in_tree - lane.leased):
            sure = False
    if sure:
        try:
            for lane in cache._page_lanes:
                holding = held[lane.index]
                lacking = -(-length // lane.page) - holding.base - len(holding.table) - lane.pool.at_hand
                if sure and lacking > 0:
                    got = evict(cache, lane, lacking)
                    if got < lacking:
                        sure = False
        except BaseException:  # a reach that is plain Python, or an interrupt
            _give_back(sequence)
            raise
    if not sure:
        _make_room(cache, sequence, length, count)


def _make_room(cache: Cache, sequence: Sequence, length: int, count: int) -> None:
    lacking = []
    for lane, holding in sequence._paged:
        missing = -(-length // lane.page) - holding.base - len(holding.table)
        if missing > 0:
            lacking.append((lane, missing, holding))
    try:
        make_room(cache, lacking, "reserve", count, sequence)
    except BaseException:
        _give_back(sequence)
        raise


def _give_back(sequence: Sequence) -> None:
    """What some components have got by now."""
    for lane, holding in sequence._paged:
        lane.rewind(holding, sequence.reserved)
