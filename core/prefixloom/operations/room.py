"""Making room: which cells go, all or nothing.

The amounts are known before anything is touched: a shortage that eviction cannot cover is refused with nothing lost.
Victims are of one component. What of others can serve no boundary without them goes with them (``lane.feeds``).

Growing: room for what the components of a sequence lack of so many tokens.

Arriving: slots for tokens that were computed elsewhere, of which only what resuming needs comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from ..contract.values import Claim, NodeView
from ..device.pool import ABSENT
from ..errors import CapacityError, InputError, Shortage
from ..tree.holdings import SteppedHolding
from .retain import reclaim

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..tree.lane import Lane
    from ..tree.radix import Node

    Wanted = Many[tuple[Lane, int, Any]]


def make_room(cache: Cache, wanted: Wanted, verb: str, count: int = 0, who: object = None) -> None:
    """Evict until each (lane, pages, holding) can have its pages; CapacityError, nothing evicted, if one cannot."""
    if cache._flight.works:
        cache._flight.poll(between_operations=False)
    short = []
    for lane, pages, _ in wanted:
        missing = pages - lane.pool.at_hand
        if missing > 0:
            if lane.sparing:
                reclaim(cache, lane, pages)
                missing = pages - lane.pool.at_hand
            short.append((lane, pages))
            if missing > lane.in_tree - lane.leased and missing > lane.pool.retiring + lane.evictable:
                raise _refusal(cache, wanted, verb, count, who)
    for lane, pages in short:
        missing = pages - lane.pool.free  # some may have gone with another's
        if missing > 0 and evict(cache, lane, missing) < missing:  # the books were wrong, or a hook raised half-way
            raise _refusal(cache, wanted, verb, count, who)


def _refusal(cache: Cache, wanted: Wanted, verb: str, count: int, who: object) -> CapacityError:
    short = [(lane, pages) for lane, pages, _ in wanted if pages > lane.pool.free + lane.evictable]
    short = short or [(lane, pages) for lane, pages, _ in wanted if pages > lane.pool.free]
    what = verb + (f" {count} tokens" if count else "") + (f" for {who!r}" if who else "")
    return CapacityError(tuple(shortage(cache, lane, pages) for lane, pages in short), what)


def shortage(cache: Cache, lane: Lane, count: int) -> Shortage:
    """What is lacking and who holds it: the running sequences that own most."""
    held: list[tuple[str, int]] = []
    for hold in cache._live:
        for other, holding in hold.pairs(cache):
            if other is lane:
                held.append((hold.label or "a sequence opened without a label", lane.owned(holding)))
    holders = sorted(((name, pages) for name, pages in held if pages), key=lambda held: -held[1])
    return Shortage(
        lane.name,
        count,
        lane.pool.free,
        lane.evictable,
        lane.leased,
        lane.running,
        lane.pool.capacity,
        tuple(holders[:3]),
    )


def evict(cache: Cache, lane: Lane, count: int) -> int:
    """Free at least ``count`` pages of one component, if so much may go; the number that was freed."""
    freed: list[Node] = []
    emptied: list[Node] = []
    tier = cache._tier
    demoted = tier is not None and tier.demotes(lane)
    if demoted:
        tier.losing(lane, lane.loses_first(count))  # type: ignore[union-attr]
    got = 0
    before = lane.in_tree
    try:
        if lane.retains:
            got = lane.trim(count, emptied)
        if not lane.retains or got < count:
            if demoted or lane.hooks.evict_component is not None:
                got += _evict_asking(cache, lane, count - got, freed)
            else:
                got += lane.evict(count - got, freed)
    finally:  # an interrupt in a hook or in a copy: what has gone by then has gone
        cache._epoch += 1
        if emptied:
            cache._tree.prune_all(emptied)
        lane.evicted += before - lane.in_tree
        try:
            gone = freed if tier is None else tier.gone(lane, freed)
            for other in lane.feeds:
                other.fall(gone, lane)
        finally:  # a reach that is plain Python may raise
            cache._tree.prune_all(freed)
    return got


def evict_told(cache: Cache, need: object) -> dict[str, int]:
    """Free so many pages (slots) by component; those that were freed."""
    if not isinstance(need, Mapping):
        raise InputError(f"evict takes a number of tokens from 0 up, or a mapping by component; got {need!r}")
    for name, count in need.items():
        cache._lane(name)
        if count.__class__ is not int or count < 0:
            raise InputError(f"evict takes numbers from 0 up, got {count!r} for {name!r}")
    lanes = [lane for lane in cache._lanes if need.get(lane.name)]
    before = {lane: lane.evicted for lane in lanes}
    for lane in lanes:
        missing = need[lane.name] - lane.evicted + before[lane]  # some went with another's
        if missing > 0:
            evict(cache, lane, missing)
    return {lane.name: lane.evicted - before[lane] for lane in lanes}


def _evict_asking(cache: Cache, lane: Lane, count: int, freed: list[Node]) -> int:
    """Eviction with ``evict_component``: it sees all victims at once, and again only those sought for what it kept.

    What it keeps becomes recent, and so does what that hangs from; asked once, it goes after all if nothing else can.
    """
    got = 0
    held: set[Any] = set()
    while got < count:
        victims = _candidates(lane, count - got)
        if not victims:
            break
        asked = [cell for cell in victims if cell not in held]
        try:
            staying = _held_back(cache, lane, asked)
            if cache._tier is not None:
                cache._tier.losing(lane, [cell for cell in victims if cell not in staying])
        except BaseException:  # an interrupt in the hook or in a copy: nobody goes
            for cell in reversed(victims):
                lane.come_back(cell)
            raise
        held |= staying
        for cell in reversed(victims):
            if cell in staying:
                lane.come_back(cell)
        going = [cell for cell in reversed(victims) if cell not in staying]
        try:
            while going:
                cell = going.pop()
                freed.append(cell.node)
                got += lane.free_left(cell)
        finally:  # an interrupt: the others stay
            for cell in going:
                lane.come_back(cell)
    return got


def _candidates(lane: Lane, count: int) -> list[Any]:
    """The next cells to go, ``count`` pages or all there are, taken as gone so that what they uncover follows."""
    victims: list[Any] = []
    pages = 0
    try:
        while pages < count:
            cell = lane.pop_victim()
            if cell is None:
                break
            lane.leave(cell)
            victims.append(cell)
            pages += lane.size(cell)
    except BaseException:  # an interrupt: nobody goes
        for cell in reversed(victims):
            lane.come_back(cell)
        raise
    return victims


def _held_back(cache: Cache, lane: Lane, asked: list[Any]) -> set[Any]:
    """What the plugin keeps of ``asked``, and what those hang from."""
    if not asked or lane.hooks.evict_component is None:
        return set()
    views = tuple(NodeView(cell.node.start, cell.node.end, lane.size(cell), cell.locks) for cell in asked)
    claim = cache._ask_softly(lane, "evict_component", Claim, lane.hooks.evict_component, views, "device")
    staying: set[Any] = set()
    for index in (claim.keep or ()) if claim is not None else ():
        if not isinstance(index, int) or not 0 <= index < len(asked):
            cache._without_answer(cache._bad_answer(lane.name, "evict_component", "indices of victims", claim))
            continue
        cell = asked[index]
        while cell in asked and cell not in staying:
            staying.add(cell)
            cell = lane.hangs_from(cell)
    return staying


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
