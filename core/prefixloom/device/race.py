"""Race: the race detector of a cache in debug mode.

For every slot, and for every buffer of it that an access names, the detector keeps the last writer and the readers
since. An access that is not ordered after the last writer, or a write that is not ordered after every reader, is a
``RaceError``. The owner of a slot plays no part: a recycled slot keeps its history, and so a late write is found.

The streams' vector clocks define the order (``streams``): order within a stream, an event that is waited for, an event
that the scheduling thread saw done, and chains of these. Edges that are made outside of these streams do not count; a
stream that passes on an edge has to be known (``follow``) before it does.

The detector knows clocks, names of pools and numbers of slots. It knows no tensor, no tree, and not what an op does. A
pool of another tier is just another name. All calls come from the scheduling thread.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

from ..errors import InvariantError, RaceError
from .handles import call_site
from .streams import Clock, InlineStream, Stream, host_clock

_HOST = InlineStream("the scheduling thread")

_gone: deque[int] = deque()
"""Numbers of streams that do not exist any more and have no access: the scheduling thread's clock may forget them."""


class _Access:
    """One piece of work that touched a slot. It keeps its stream alive, whose number must stay known as long."""

    __slots__ = ("stream", "tick", "what", "where")

    def __init__(self, stream: Stream, what: str, where: str) -> None:
        self.stream = stream
        self.tick = stream.tick
        self.what = what
        self.where = where

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream.number, 0) >= self.tick


class _State:
    """The last writer and the readers since, without those that all later work is ordered after. It never changes.

    Slots with the same history share one state, so an access is checked once for each state, not for each slot. A slot
    without any access to remember has None.
    """

    __slots__ = ("readers", "writer")

    def __init__(self, writer: _Access | None, readers: tuple[_Access, ...]) -> None:
        self.writer = writer
        self.readers = readers


_Column = dict[int, _State | None]

_ABSENT = -1


class Race:
    """The accesses of one cache to the slots of its pools."""

    __slots__ = ("_books",)

    def __init__(self) -> None:
        # By pool, then by buffer; None stands for all buffers that no access has named so far.
        self._books: dict[str, dict[str | None, _Column]] = {}

    def follow(self, *streams: Stream) -> None:
        """Make these streams keep a clock from now on, so that edges through them count.

        An access follows its stream by itself. A stream that only passes edges on between others must be followed
        before the first of these edges is made.
        """
        for stream in streams:
            if stream.clock is None and not stream.inline:
                stream.follow()
                weakref.finalize(stream, _gone.append, stream.number).atexit = False

    def access(
        self,
        stream: Stream | None,
        what: str,
        pool: str,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        buffers: tuple[str, ...] | None = None,
        where: str | None = None,
    ) -> None:
        """Record work that reads and writes these slots and was enqueued on ``stream`` just now; raise ``RaceError`` if
        it races with earlier work.

        It is to be called right *after* ``stream.run``, before anything else is done with the stream: the work's tick
        is the stream's newest. (Work that reaches a stream in another way, as the launches of a model's layers do, gets
        a tick by ``stream.run(lambda: None)`` behind it.) Work on an inline stream, and that of the scheduling thread
        itself (None), is over by then, so all later work is ordered after it.

        ``reads`` and ``writes`` may hold a slot several times, may overlap, and may hold -1 for an absent page.
        ``buffers`` None means all. ``where`` is where the work was recorded, by default the caller's line. An access
        that raises is not recorded.
        """
        while _gone:
            host_clock.pop(_gone.popleft(), None)
        if stream is None or stream.inline:
            clock = host_clock
        else:
            self.follow(stream)
            clock = stream.entering()
            if not stream.tick:
                raise InvariantError(f"{what!r} is recorded as work of {stream!r}, on which nothing was ever enqueued")
        new = _Access(_HOST if stream is None else stream, what, call_site() if where is None else where)
        reads, writes = _many(reads), _many(writes)
        columns = self._columns(pool, buffers)
        found = [list(map(column.get, reads)) for _, column in columns]
        for (buffer, column), states in zip(columns, found, strict=True):
            for state in set(states):
                if state is not None and state.writer is not None and not state.writer.before(clock):
                    raise _error(
                        new, "reads", state.writer, "wrote", clock, pool, buffer, _having(column, reads, state)
                    )
            for state in set(map(column.get, writes)):
                if state is not None:
                    self._check_write(new, state, clock, pool, buffer, column, writes)
        over = clock is host_clock
        written = None if over else _State(new, ())
        for (_, column), states in zip(columns, found, strict=True):
            if reads:
                after = _after_read(set(states), clock, None if over else new)
                column.update(zip(reads, map(after.__getitem__, states), strict=True))
            column.update(dict.fromkeys(writes, written))
            column.pop(_ABSENT, None)

    def _check_write(
        self,
        new: _Access,
        state: _State,
        clock: Clock,
        pool: str,
        buffer: str | None,
        column: _Column,
        writes: Iterable[int],
    ) -> None:
        for reader in state.readers:
            if not reader.before(clock):
                raise _error(new, "writes", reader, "read", clock, pool, buffer, _having(column, writes, state))
        if state.writer is not None and not state.writer.before(clock):
            raise _error(new, "writes", state.writer, "wrote", clock, pool, buffer, _having(column, writes, state))

    def _columns(self, pool: str, buffers: tuple[str, ...] | None) -> list[tuple[str | None, _Column]]:
        book = self._books.get(pool)
        if book is None:
            book = self._books[pool] = {None: {}}
        if buffers is None:
            return list(book.items())
        for buffer in buffers:
            if buffer not in book:
                book[buffer] = dict(book[None])
        return [(buffer, book[buffer]) for buffer in buffers]


def _many(slots: Iterable[int]) -> tuple[int, ...] | list[int]:
    """The slots as a sequence that can be iterated more than once."""
    return slots if isinstance(slots, (tuple, list)) else list(slots)


def _after_read(states: set[_State | None], clock: Clock, new: _Access | None) -> dict[_State | None, _State | None]:
    """Map each state to the one after a read. Accesses that all later work is ordered after anyway are dropped."""
    made: dict[object, _State | None] = {}
    after: dict[_State | None, _State | None] = {}
    for state in states:
        writer: _Access | None = None
        readers: tuple[_Access, ...] = ()
        if state is not None:
            writer = state.writer
            if writer is not None and writer.before(host_clock):
                writer = None
            readers = tuple([reader for reader in state.readers if not reader.before(clock)])
        if new is not None:
            readers = (*readers, new)
        key = (writer, readers)
        if key not in made:
            made[key] = _State(writer, readers) if readers else None
        after[state] = made[key]
    return after


def _having(column: _Column, slots: Iterable[int], state: _State) -> list[int]:
    """The slots that have this state."""
    return [slot for slot in dict.fromkeys(slots) if column.get(slot) is state]


def _error(
    new: _Access,
    does: str,
    old: _Access,
    did: str,
    clock: Clock,
    pool: str,
    buffer: str | None,
    slots: list[int],
) -> RaceError:
    inline = clock is host_clock
    actor = "the scheduling thread" if inline else f"stream {new.stream.name!r}"
    known = clock.get(old.stream.number, 0)
    event = f"an event recorded on stream {old.stream.name!r} after {old.what!r}"
    edge = f"must see {event} done before it goes on" if inline else f"must wait for {event}"
    if known:
        so_far = f"{actor} is ordered after that stream's work {known}; {old.what!r} is its work {old.tick}"
    else:
        so_far = f"nothing so far orders {actor} after stream {old.stream.name!r}"
    more = f" (and of {len(slots) - 1} more)" if len(slots) > 1 else ""
    return RaceError(
        f"{new.what!r} {does} slot {slots[0]}{more} of pool {pool!r}{'' if buffer is None else f', buffer {buffer!r}'} "
        f"without being ordered after {old.what!r}, which {did} it\n"
        f"  before: {old.what!r} {did} on stream {old.stream.name!r}, recorded at {old.where}\n"
        f"  now:    {new.what!r} {does} on {actor}, recorded at {new.where}\n"
        f"  missing edge: {actor} {edge} ({so_far})"
    )
