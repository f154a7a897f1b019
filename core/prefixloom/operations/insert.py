"""Inserting: an engine that has slots and content of its own hands both over, and the tree takes what it lacks.

The slots of such a composition are *lent*. An insert is a sequence that opens, holds what was handed in, publishes it
and ends, in one operation. What the tree has already, or cannot use, waits in the pools until the engine takes it back.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import attrs

from ..device.flight import Work
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, bounds
from ..device.streams import Stream
from ..errors import InputError, PrefixloomError, ProtocolError
from ..tree.lane import Lane, PageLane
from .match import limit_of, search, walked_boundary
from .open import open_at
from .publish import close
from .state import Core, Match, Running
from .teardown import give_back


@attrs.frozen
class Inserted:
    """What came of an insert.

    ``ready``: the boundary up to which the tree had every component before. ``length``: the boundary up to which the
    prompt is in the tree now. ``taken`` and ``returned``: by component, how many of the slots that were handed in the
    tree took, and how many wait for ``take_back``.
    """

    ready: int
    length: int
    taken: Mapping[str, int]
    returned: Mapping[str, int]


@attrs.frozen
class _Handed:
    """What an engine hands in of one component.

    ``own`` are its own slots. ``pages`` are those that follow where the prompt resumes, or the one slot of a state.
    ``useless`` are own slots that cannot be used: the tree has their content, or they lie behind a hole.
    """

    lane: Lane
    own: array[int]
    pages: array[int]
    useless: array[int]


def insert(
    core: Core, match: Match, slots: Mapping[str, Any], start: int, priority: int, until: float, stream: Stream | None
) -> Inserted:
    """Hand over what an engine computed of ``match``, or what ``stream`` still computes.

    After an InputError or a ProtocolError nothing was taken. After any other error, what was handed in is the cache's.
    """
    search(core, match, match.most)
    handed = _checked(core, match, slots, start)
    at_hand = {each.lane: each.lane.pool.at_hand for each in handed if each.lane.name in slots}
    for each in handed:
        each.lane.pool.receive(each.own)
    work = None if stream is None or stream.inline else _being_written(core, stream, handed)
    followers: tuple[Running, ...] = ()
    try:
        running = open_at(core, match, "", priority, until, arrives=True)
        followers = (running,)
    except PrefixloomError:
        for each in handed:
            each.lane.pool.give_slots([*each.own])
        raise
    finally:
        if work is not None and stream is not None:
            core.flight.end(work, stream, followers, "the pass before an insert")
    try:
        for each in handed:
            _hold(running, each, limit_of(core, match))
        running.reserved = match.count
        lengths = [len(running.held[lane.index].table) * lane.page for lane in core.shape.path_lanes]
        running.committed = max(match.ready, min([match.count, *lengths]))
        if running.looks is not None:
            running.looks.computed(running.looks.alone, running.committed, match.count)
        if core.watcher is not None:
            core.watcher.arrived(running, match.ready, running.committed)
    except PrefixloomError:
        give_back(core, running)
        raise
    length = running.publishable
    close(core, running)
    taken, returned = {}, {}
    for each in handed:
        lane = each.lane
        if lane in at_hand:
            returned[lane.name] = len(lane.pool.given_since(at_hand[lane]).intersection(each.own))
            taken[lane.name] = len(each.own) - returned[lane.name]
    return Inserted(match.ready, length, taken, returned)


def lend(core: Core, slots: Mapping[str, Any]) -> None:
    """Take slots without content that an engine lends: sequences, loads from below and checkpoints may use them."""
    lent = [(lane, _numbers(lane, slots[lane.name])) for lane in _lanes(core, slots)]
    for lane, numbers in lent:
        if ABSENT in numbers:
            raise InputError(f"-1 stands for no slot of {lane.name!r}, and cannot be lent")
        _refuse_what_is_here(lane, numbers)
    for lane, numbers in lent:
        lane.pool.lend(numbers)


def take_back(core: Core) -> dict[str, array[int]]:
    """Give the engine all slots that nobody uses, by component, and that no step or copy in flight may touch."""
    _check_lent(core)
    if core.flight.works:
        core.flight.poll()
    return {lane.name: lane.pool.hand_back() for lane in core.shape.lanes if lane.pool.at_hand}


# ---------------------------------------------------------------- what is refused


def _check_lent(core: Core) -> None:
    if not core.shape.composition.lent:
        raise ProtocolError("this cache hands out its slots itself: compose it with slots='lent'")


def _lanes(core: Core, slots: object) -> list[Lane]:
    """Return the lanes of the components that are named."""
    _check_lent(core)
    if not isinstance(slots, Mapping):
        raise InputError(f"slots are given as a mapping by component, got {slots!r}")
    return [core.shape.lane(name) for name in slots]


def _numbers(lane: Lane, given: Any) -> array[int]:
    """Return the slots that are given as a list, tensor or array of whole numbers."""
    found: array[int] | list[int]
    try:
        view = memoryview(given)
        plain = view.format == "i" and view.ndim == 1 and view.contiguous
    except TypeError:
        plain = False
    try:
        found = array("i", view.tobytes()) if plain else list(given.tolist() if hasattr(given, "tolist") else given)
    except TypeError:
        raise InputError(f"the slots of {lane.name!r} are a list of numbers, got {given!r}") from None
    most = lane.pool.capacity - 1
    strange = [] if plain or {*map(type, found)} <= {int} else [each for each in found if each.__class__ is not int]
    if not strange and found:
        strange = [each for each in (min(found), max(found)) if not ABSENT <= each <= most]
    if strange:
        raise InputError(
            f"a slot of {lane.name!r} is a whole number from 0 to {most}, or -1 for none; got {strange[0]!r}"
        )
    return array("i", found)


def _refuse_what_is_here(lane: Lane, own: array[int]) -> None:
    if lane.pool.may_come(own):
        return
    seen: set[int] = set()
    for slot in own:
        if slot in seen:
            raise ProtocolError(f"slot {slot} of {lane.name!r} is given twice")
        if lane.pool.has(slot):
            raise ProtocolError(
                f"slot {slot} of {lane.name!r} is the cache's already: it was handed in, and not taken back. If the "
                f"request reads it under a lease, the cache does not find this prompt there any more: give -1"
            )
        seen.add(slot)


def _checked(core: Core, match: Match, slots: Mapping[str, Any], start: int) -> list[_Handed]:
    """Return what is handed in of each component, or refuse it before anything changes."""
    shape = core.shape
    if start.__class__ is not int or start < 0 or start % shape.page:
        raise InputError(f"start is a boundary, a multiple of {shape.page}, got {start!r}")
    given = {lane: _numbers(lane, slots[lane.name]) for lane in _lanes(core, slots)}
    nothing = array("i")
    handed = [
        _pages(core, lane, match, given.get(lane, nothing), start if lane in given else match.ready)
        for lane in shape.page_lanes
    ]
    handed += [_state(lane, given.get(lane, nothing)) for lane in shape.state_lanes]
    for each in handed:
        _refuse_what_is_here(each.lane, each.own)
    return handed


def _pages(core: Core, lane: PageLane, match: Match, numbers: array[int], start: int) -> _Handed:
    """Return the pages of a component. The engine may only read some of those before where the prompt resumes."""
    first, resumed, count = start // lane.page, match.ready // lane.page, -(-match.count // lane.page)
    if len(numbers) > max(0, count - first):
        raise InputError(
            f"{len(numbers)} pages of {lane.name!r} from {start} on are more than {match.count} tokens have"
        )
    before = max(0, resumed - first)
    useless = array("i", [slot for slot in _present(numbers[:before]) if not lane.pool.has(slot)])
    pages = array("i", [ABSENT]) * max(0, first - resumed) + numbers[before:]
    own = useless + _present(pages)
    if lane.closed_upward:  # what lies behind a page that neither it nor the tree has is of no use
        end = lane.residency.deepest(match.walked_to, walked_boundary(core, match))[1] // lane.page
        at = pages.tobytes().find(ABSENT_BYTES, max(0, end - resumed) * ID_BYTES)
        if at >= 0:
            useless += _present(pages[at // ID_BYTES :])
            del pages[at // ID_BYTES :]
    else:
        pages += array("i", [ABSENT]) * (count - resumed - len(pages))
    return _Handed(lane, own, pages, useless)


def _present(numbers: array[int]) -> array[int]:
    """Return those that are not absent."""
    if not numbers or bounds(numbers)[0] != ABSENT:
        return numbers
    return array("i", [slot for slot in numbers if slot != ABSENT])


def _state(lane: Lane, numbers: array[int]) -> _Handed:
    own = _present(numbers)
    if len(own) > 1:
        raise InputError(f"{lane.name!r} takes one slot, of the state at the deepest boundary; got {numbers.tolist()}")
    return _Handed(lane, own, own, array("i"))


# ---------------------------------------------------------------- what is held


def _being_written(core: Core, stream: Stream, handed: Many[_Handed]) -> Work[Any]:
    """Return work in flight for all that was enqueued on ``stream``, which writes what is handed in."""
    if core.watcher is not None:
        stream.run(lambda: None)  # the engine's own launches have no tick
        for each in handed:
            pool = each.lane.pool
            core.watcher.accessed(stream, f"the pass before an insert into {each.lane.name}", pool, [], each.own, pool)
    work = core.flight.begin()
    work.stream, work.since = stream, stream.tick
    return work


def _hold(running: Running, handed: _Handed, boundary: int) -> None:
    """Let the sequence hold what was handed in, as if it had computed that, and give back what is useless."""
    holding: Any = running.held[handed.lane.index]
    if handed.useless:
        handed.lane.pool.give_slots([*handed.useless])
    if isinstance(handed.lane, PageLane):
        holding.table.extend(handed.pages)
    elif handed.own:
        holding.slot = handed.own[0]
        holding.reach(boundary)
