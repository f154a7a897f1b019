"""Race: the race detector of a cache in debug mode.

For every slot the detector keeps the last writer and the readers since. An access that is not ordered after the last
writer, or a write that is not ordered after every reader, is a ``RaceError``. The owner of a slot plays no part: a
recycled slot keeps its history, and so a late write is found.

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
from .streams import Clock, Stream, host_clock

_gone: deque[int] = deque()
"""Numbers of streams that do not exist any more and have no access: the scheduling thread's clock may forget them."""

_ABSENT = -1


class _Access:
    """One piece of work that touched a slot. It keeps its stream alive, whose number must stay known as long."""

    __slots__ = ("stream", "tick", "what", "where")

    def __init__(self, stream: Stream, what: str) -> None:
        self.stream = stream
        self.tick = stream.tick
        self.what = what
        self.where = call_site()

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

    def unordered(self, clock: Clock, writes: bool) -> tuple[_Access, str] | None:
        """Return an access that work at ``clock`` conflicts with and is not ordered after, with what it did."""
        if writes:
            for reader in self.readers:
                if not reader.before(clock):
                    return reader, "read"
        if self.writer is not None and not self.writer.before(clock):
            return self.writer, "wrote"
        return None


_Book = dict[int, _State | None]


class Race:
    """The accesses of one cache to the slots of its pools."""

    __slots__ = ("_books",)

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}  # by pool

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
        self, stream: Stream, what: str, pool: str, *, reads: Iterable[int] = (), writes: Iterable[int] = ()
    ) -> None:
        """Record work that reads and writes these slots and was enqueued on ``stream`` just now; raise ``RaceError`` if
        it races with earlier work.

        It is to be called right *after* ``stream.run``, before anything else is done with the stream: the work's tick
        is the stream's newest. (Work that reaches a stream in another way, as the launches of a model's layers do, gets
        a tick by ``stream.run(lambda: None)`` behind it.) Work on an inline stream is work of the scheduling thread. It
        is over by then, so all later work is ordered after it.

        ``reads`` and ``writes`` may hold a slot several times, may overlap, and may hold -1 for an absent page. An
        access that raises is not recorded.
        """
        while _gone:
            host_clock.pop(_gone.popleft(), None)
        if stream.inline:
            clock = host_clock
        else:
            self.follow(stream)
            clock = stream.entering()
            if not stream.tick:
                raise InvariantError(f"{what!r} is recorded as work of {stream!r}, on which nothing was ever enqueued")
        new = _Access(stream, what)
        reads, writes = list(reads), list(writes)
        book = self._books.setdefault(pool, {})
        states = list(map(book.get, reads))
        for slots, found, is_write in ((reads, states, False), (writes, map(book.get, writes), True)):
            for state in {*found} - {None}:
                assert state is not None
                if (earlier := state.unordered(clock, is_write)) is not None:
                    old, did = earlier
                    racing = [slot for slot in dict.fromkeys(slots) if book.get(slot) is state]
                    raise _error(new, is_write, old, did, clock, pool, racing)
        kept = None if stream.inline else new
        after = _after_read({*states}, clock, kept)
        book.update(zip(reads, map(after.__getitem__, states), strict=True))
        book.update(dict.fromkeys(writes, None if kept is None else _State(kept, ())))
        book.pop(_ABSENT, None)


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


def _error(
    new: _Access, is_write: bool, old: _Access, did: str, clock: Clock, pool: str, slots: list[int]
) -> RaceError:
    inline = new.stream.inline
    does = "writes" if is_write else "reads"
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
        f"{new.what!r} {does} slot {slots[0]}{more} of pool {pool!r} without being ordered after {old.what!r}, "
        f"which {did} it\n"
        f"  before: {old.what!r} {did} on stream {old.stream.name!r}, recorded at {old.where}\n"
        f"  now:    {new.what!r} {does} on {actor}, recorded at {new.where}\n"
        f"  missing edge: {actor} {edge} ({so_far})"
    )
