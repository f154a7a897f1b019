"""Room: slots for what a sequence needs, and which cells go for them.

The amounts are known before anything is touched: a shortage that eviction cannot cover is refused with nothing lost.
Victims are of one component. What of others can serve no boundary without them goes with them (``lane.feeds``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..contract.shares import SharedQueue, owner_of
from ..contract.values import Claim, NodeView
from ..device.pool import ABSENT
from ..errors import CapacityError, InputError, PrefixloomError, Shortage
from ..tree.lane import Lane
from ..tree.partial_lane import PartialLane
from ..tree.radix import Node
from .retain import reclaim
from .state import Core, Running

Wanted = list[tuple[Any, int]]
"""(who has the pool, how many slots of it)"""


# ---------------------------------------------------------------- growing


def grow(core: Core, running: Running, count: int) -> None:
    """Reserve slots for ``count`` more tokens in every component, or CapacityError with none taken."""
    length = running.reserved + count
    held = running.held
    for lane in core.shape.page_lanes:
        holding = held[lane.index]
        table = holding.table
        missing = -(-length // lane.page) - len(table)
        if missing > 0:
            pool = lane.pool
            if missing > pool.at_hand:
                _make_room_to_grow(core, running, length, count)
            table += pool.take(missing)
    if core.flight.taken_early:
        running.take_fence(core.flight)
    running.reserved = length


def _make_room_to_grow(core: Core, running: Running, length: int, count: int) -> None:
    """Make room for what the components lack of ``length`` tokens; if there is none, those that have grown shrink."""
    lacking = [(lane, -(-length // lane.page) - len(holding.table)) for lane, holding in running.paged]
    try:
        make_room(core, [(lane, missing) for lane, missing in lacking if missing > 0], "reserve", count, running)
    except PrefixloomError:
        for lane in core.shape.page_lanes:
            lane.rewind(running.held[lane.index], running.reserved)
        raise


def grow_arriving(core: Core, running: Running, count: int) -> None:
    """Reserve slots for what resuming at the end of ``count`` more tokens needs of them, and *absent* for the rest.

    The tokens were computed elsewhere, and only that much of them comes.
    """
    length = running.reserved + count
    needed = [(lane, holding, lane.needed_pages(len(holding.table), length)) for lane, holding in running.paged]
    make_room(core, [(lane, sum(pages)) for lane, _, pages in needed], "reserve", count, running)
    for lane, holding, pages in needed:
        fresh = iter(lane.pool.take(sum(pages)) if any(pages) else ())
        holding.table.extend(next(fresh) if page else ABSENT for page in pages)
    for _, state in running.states:
        state.arrive(length)
    running.take_fence(core.flight)
    running.reserved = length


# ---------------------------------------------------------------- making room


def make_room(
    core: Core, wanted: Wanted, verb: str, count: int = 0, who: Running | None = None, *, by: str = ""
) -> None:
    """Evict until each of ``wanted`` can have its slots; CapacityError, nothing evicted, if one cannot.

    ``who`` needs the slots. ``by``: the label that journals get, instead of that of ``who``.
    """
    by = by or (who.label if who is not None else "")
    if core.flight.works:
        core.flight.poll(between_operations=False)
    short = []
    for lane, pages in wanted:
        missing = pages - lane.pool.at_hand
        if missing > 0:
            if lane.surplus:
                reclaim(core, lane, pages)
                missing = pages - lane.pool.at_hand
            short.append((lane, pages))
            if missing > lane.in_tree - lane.leased and missing > lane.pool.retiring + lane.evictable:
                raise _refusal(core, wanted, verb, count, who)
    for lane, pages in short:
        missing = pages - lane.pool.free  # some may have gone with another's
        if missing > 0 and evict(core, lane, missing, "room", by) < missing:  # a hook raised half-way
            raise _refusal(core, wanted, verb, count, who)


def _refusal(core: Core, wanted: Wanted, verb: str, count: int, who: object) -> CapacityError:
    short = [(lane, pages) for lane, pages in wanted if pages > lane.pool.free + lane.evictable]
    short = short or [(lane, pages) for lane, pages in wanted if pages > lane.pool.free]
    what = verb + (f" {count} tokens" if count else "") + (f" for {who!r}" if who else "")
    return CapacityError(tuple(_shortage(core, lane, pages) for lane, pages in short), what)


def _shortage(core: Core, lane: Lane, count: int) -> Shortage:
    """Return what is lacking and who holds it: the running sequences that own most."""
    held = [
        (running.label or "a sequence opened without a label", lane.owned(holding))
        for running in core.live
        for other, holding in running.pairs
        if other is lane
    ]
    holders = sorted([each for each in held if each[1]], key=lambda each: -each[1])
    pool = lane.pool
    return Shortage(
        lane.name, count, pool.free, lane.evictable, lane.leased, lane.running, pool.capacity, tuple(holders[:3])
    )


# ---------------------------------------------------------------- evicting


def evict_asked(core: Core, need: object, unneeded: bool) -> dict[str, int]:
    """Free so many tokens of each page component, or pages (slots) by component. Return how many pages were freed.

    ``unneeded``: free only what no boundary needs.
    """
    if need.__class__ is int and need >= 0 and not unneeded:
        need = {lane.name: -(-need // lane.page) for lane in core.shape.page_lanes}
    if not isinstance(need, Mapping):
        raise InputError(f"evict takes a number of tokens from 0 up, or a mapping by component; got {need!r}")
    for name, count in need.items():
        core.shape.lane(name)
        if count.__class__ is not int or count < 0:
            raise InputError(f"evict takes numbers from 0 up, got {count!r} for {name!r}")
    wanted = [(lane, need[lane.name]) for lane in core.shape.lanes if need.get(lane.name)]
    freed = {lane.name: -lane.evicted for lane, _ in wanted}
    for lane, count in wanted:
        missing = count - lane.evicted - freed[lane.name]  # some went with another's
        if missing > 0:
            evict(core, lane, missing, "asked", unneeded=unneeded)
    for lane, _ in wanted:
        freed[lane.name] += lane.evicted
    return freed


def evict(core: Core, lane: Lane, count: int, cause: str, by: str = "", *, unneeded: bool = False) -> int:
    """Free at least ``count`` pages of one component, if so many may go. Return the number that was freed.

    ``cause`` and ``by`` are for journals. ``unneeded``: only pages that no boundary at a node's end needs.
    """
    with core.because(cause, by):
        return _evict(core, lane, count, unneeded)


def _evict(core: Core, lane: Lane, count: int, unneeded: bool) -> int:
    freed: list[Node] = []
    emptied: list[Node] = []
    below = core.below
    if isinstance(lane.queue, SharedQueue):
        lane.queue.running = Counter()
        for running in core.live:
            if running.held:
                lane.queue.running[owner_of(running.namespace)] += lane.owned(running.held[lane.index])
    asks = lane.hooks.evict_component is not None or (below is not None and below.demotes(lane))
    before = lane.in_tree
    got, last = 0, -1
    while last < got < count:  # again: slack of others is left while the owner that keeps most has cells
        last = got
        if isinstance(lane, PartialLane):
            trimmed = lane.trimmed_first(count - got, unneeded)
            if below is not None:
                below.losing(lane, trimmed)
            got += lane.trim(trimmed, emptied)
        if not unneeded:
            got += _evict_asking(core, lane, count - got, freed) if asks else lane.evict(count - got, freed)
    lane.evicted += before - lane.in_tree
    try:
        if lane.feeds:
            gone = freed if below is None else below.gone(lane, freed)
            with core.because("unneeded", lane.name):
                for other in lane.feeds:
                    other.fall(gone, lane)
    finally:  # a reach that is plain Python may raise
        core.index.prune_all((*emptied, *freed))
    return got


def _evict_asking(core: Core, lane: Lane, count: int, freed: list[Node]) -> int:
    """Evict with ``evict_component``, which sees all victims at once, and then only those that replace kept ones.

    A kept cell becomes recent, and so does each cell that it hangs from. The plugin is not asked of a kept cell again:
    if no other can be evicted, a kept one is.
    """
    got = 0
    held: set[Any] = set()
    while got < count:
        victims = lane.take_victims(count - got)
        if not victims:
            break
        asked = [cell for cell in victims if cell not in held]
        staying = _held_back(core, lane, asked)
        going = [cell for cell in victims if cell not in staying]
        if core.below is not None:
            core.below.losing(lane, going)
        held |= staying
        for cell in reversed(victims):
            if cell in staying:
                lane.put_back(cell)
        for cell in going:
            freed.append(cell.node)
            got += lane.free_victim(cell)
    return got


def _held_back(core: Core, lane: Lane, asked: list[Any]) -> set[Any]:
    """Return the cells of ``asked`` that the plugin keeps, with those of ``asked`` that these depend on."""
    if not asked or lane.hooks.evict_component is None:
        return set()
    extra_in = core.keys.extra_in
    views = tuple(
        NodeView(
            cell.node.start, cell.node.end, cell.pages, cell.locks,
            extra=extra_in(cell.node.key, cell.node.start),
        )
        for cell in asked
    )  # fmt: skip
    claim = core.plugins.ask_softly(lane, "evict_component", Claim, views, "device")
    staying: set[Any] = set()
    for index in (claim.keep or ()) if claim is not None else ():
        if not isinstance(index, int) or not 0 <= index < len(asked):
            core.plugins.go_on_without(
                core.plugins.bad_answer(lane.name, "evict_component", "indices of victims", claim)
            )
            continue
        cell = asked[index]
        while cell in asked and cell not in staying:
            staying.add(cell)
            cell = lane.hangs_from(cell)
    return staying
