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
from .match import search, walked_boundary
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
    """What an engine hands in of one component: the slot at each page from ``first`` on, and those that are its own."""

    lane: Lane
    first: int
    slots: array[int]
    own: array[int]
    whole: bool
    """Whether none of the slots is absent."""


def insert(
    core: Core, match: Match, slots: Mapping[str, Any], start: int, priority: int, until: float, stream: Stream | None
) -> Inserted:
    """Hand over what an engine computed of ``match``, or what ``stream`` still computes.

    After an InputError or a ProtocolError nothing was taken. After any other error, what was handed in is the cache's.
    """
    search(core, match, match.most)
    boundary = max(0, match.most) // core.shape.page * core.shape.page
    handed = _checked(core, match, slots, start)
    in_tree = {lane.index: _pages_in_tree(core, match, lane) for lane in core.shape.path_lanes}
    at_hand = [each.lane.pool.at_hand for each in handed]
    for each in handed:
        each.lane.pool.receive(each.own)
    work = None if stream is None or stream.inline else _being_written(core, stream, handed)
    followers: tuple[Running, ...] = ()
    try:
        running = open_at(core, match, "", priority, until, arrives=True)
        followers = (running,)
    except PrefixloomError:
        for each in handed:
            each.lane.pool.give(each.own.tobytes())
        if work is not None and stream is not None:
            core.flight.end(work, stream, followers, "the pass before an insert")
        raise
    if work is not None and stream is not None:
        core.flight.end(work, stream, followers, "the pass before an insert")
    try:
        for each in handed:
            _hold(running, each, boundary, in_tree)
        _fill_up(core, running)
        running.reserved = match.count
        running.committed = _whole_length(core, running)
        if running.looks is not None:
            running.looks.computed(running.looks.alone, running.committed, match.count)
        if core.watcher is not None:
            core.watcher.arrived(running, match.ready, running.committed)
    except PrefixloomError:
        give_back(core, running)
        raise
    length = running.publishable
    close(core, running)
    returned = {each.lane.name: _given(each, before) for each, before in zip(handed, at_hand, strict=True)}
    taken = {each.lane.name: len(each.own) - returned[each.lane.name] for each in handed}
    return Inserted(match.ready, length, taken, returned)


def _given(handed: _Handed, at_hand: int) -> int:
    """How many of the slots that were handed in were given back since so many were at hand."""
    given = handed.lane.pool.given_since(at_hand)
    return len(given.intersection(handed.own)) if given else 0


def lend(core: Core, slots: Mapping[str, Any]) -> None:
    """An engine lends slots without content: sequences, loads from below and checkpoints may use them."""
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
    """The lanes of the components that are named."""
    _check_lent(core)
    if not isinstance(slots, Mapping):
        raise InputError(f"slots are given as a mapping by component, got {slots!r}")
    return [core.shape.lane(name) for name in slots]


def _numbers(lane: Lane, given: Any) -> array[int]:
    """The slots that are given, as a list, tensor or array of whole numbers."""
    try:
        view = memoryview(given)
    except TypeError:
        pass
    else:
        if view.format == "i" and view.ndim == 1 and view.contiguous:
            numbers = array("i")
            numbers.frombytes(view.cast("B"))
            return _in_range(lane, numbers)
    try:
        found = list(given.tolist() if hasattr(given, "tolist") else given)
    except TypeError:
        raise InputError(f"the slots of {lane.name!r} are a list of numbers, got {given!r}") from None
    if not {*map(type, found)} <= {int}:
        raise _strange(lane, next(each for each in found if each.__class__ is not int))
    try:
        return _in_range(lane, array("i", found))
    except OverflowError:
        raise _strange(lane, max(found, key=abs)) from None


def _in_range(lane: Lane, numbers: array[int]) -> array[int]:
    if numbers:
        for slot in bounds(numbers):
            if not ABSENT <= slot < lane.pool.capacity:
                raise _strange(lane, slot)
    return numbers


def _strange(lane: Lane, slot: object) -> InputError:
    return InputError(
        f"a slot of {lane.name!r} is a whole number from 0 to {lane.pool.capacity - 1}, or -1 for none; got {slot!r}"
    )


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
    """What is handed in, by component; refused before anything changes."""
    shape = core.shape
    if start.__class__ is not int or start < 0 or start % shape.page:
        raise InputError(f"start is a boundary, a multiple of {shape.page}, got {start!r}")
    found = []
    for lane in _lanes(core, slots):
        numbers = _numbers(lane, slots[lane.name])
        if isinstance(lane, PageLane):
            found.append(_pages(lane, match, numbers, start))
        else:
            found.append(_state(lane, numbers))
    return found


def _pages(lane: PageLane, match: Match, numbers: array[int], start: int) -> _Handed:
    """Pages that the cache lent itself stand below where the insert goes on: the engine only reads them."""
    first, resumed = start // lane.page, match.ready // lane.page
    most = -(-match.count // lane.page) - first
    if len(numbers) > max(0, most):
        raise InputError(
            f"{len(numbers)} pages of {lane.name!r} from {start} on are more than {match.count} tokens have"
        )
    before = max(0, resumed - first)
    present = _present(numbers[before:]) if before else _present(numbers)
    whole = len(present) == len(numbers) - before
    own = present
    if before:
        duplicates = _present(numbers[:before])
        own = array("i", [slot for slot in duplicates if not lane.pool.has(slot)]) + present
    _refuse_what_is_here(lane, own)
    return _Handed(lane, first, numbers, own, whole)


def _present(numbers: array[int]) -> array[int]:
    """Those that are not absent."""
    if not numbers or bounds(numbers)[0] != ABSENT:
        return numbers
    return array("i", [slot for slot in numbers if slot != ABSENT])


def _state(lane: Lane, numbers: array[int]) -> _Handed:
    own = _present(numbers)
    if len(own) > 1:
        raise InputError(f"{lane.name!r} takes one slot, of the state at the deepest boundary; got {numbers.tolist()}")
    _refuse_what_is_here(lane, own)
    return _Handed(lane, 0, numbers, own, whole=True)


# ---------------------------------------------------------------- what is held


def _being_written(core: Core, stream: Stream, handed: Many[_Handed]) -> Work[Any]:
    """Work in flight that stands for all that was enqueued on ``stream``, and writes what is handed in."""
    if core.watcher is not None:
        stream.run(lambda: None)  # the engine's own launches have no tick
        for each in handed:
            pool = each.lane.pool
            core.watcher.accessed(stream, f"the pass before an insert into {each.lane.name}", pool, [], each.own, pool)
    work = core.flight.begin()
    work.stream, work.since = stream, stream.tick
    return work


def _pages_in_tree(core: Core, match: Match, lane: Lane) -> int:
    """The pages at the beginning of the prompt that the tree has of a component that keeps whole paths.

    They may reach beyond where the prompt can resume, since another component may lack something there.
    """
    assert isinstance(lane, PageLane)
    return lane.residency.deepest(match.walked_to, walked_boundary(core, match))[1] // lane.page


def _hold(running: Running, handed: _Handed, boundary: int, in_tree: Mapping[int, int]) -> None:
    """The sequence holds what was handed in from where it resumes; what stands before that is a duplicate.

    Of a component that keeps whole paths, it holds nothing behind the first page that neither it nor the tree has.
    """
    lane, pool = handed.lane, handed.lane.pool
    holding: Any = running.held[lane.index]
    if not isinstance(lane, PageLane):
        for slot in handed.own:
            holding.slot = slot
            holding.reach(boundary)
        return
    resumed = len(holding.table)
    before = max(0, resumed - handed.first)
    lacking = max(0, handed.first - resumed)
    fresh = array("i", [ABSENT]) * lacking + handed.slots[before:]
    useless = handed.slots[:before]
    if lacking or not handed.whole:
        if lane.closed_upward:
            beyond = max(0, in_tree[lane.index] - resumed)
            at = fresh[beyond:].tobytes().find(ABSENT_BYTES)
            if at >= 0:
                whole = beyond + at // ID_BYTES
                useless += fresh[whole:]
                del fresh[whole:]
        else:
            holding.whole = False
    if useless:
        own = {*handed.own}
        pool.give_slots([slot for slot in useless if slot in own])
    holding.table.extend(fresh)


def _fill_up(core: Core, running: Running) -> None:
    """Of pages that were not handed in, components that need not keep whole paths have none."""
    for lane in core.shape.page_lanes:
        holding: Any = running.held[lane.index]
        lacking = -(-running.names.count // lane.page) - len(holding.table)
        if lacking > 0 and not lane.closed_upward:
            holding.table.extend([ABSENT] * lacking)
            holding.whole = False


def _whole_length(core: Core, running: Running) -> int:
    """How far all is there of components that keep whole paths."""
    lengths = [len(running.held[lane.index].table) * lane.page for lane in core.shape.path_lanes]
    return max(running.ready, min([running.names.count, *lengths]))
