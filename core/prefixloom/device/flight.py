"""Flight: the work that was enqueued on streams and is not over yet, by number.

A *fence* is the number of a piece of work. Work with a fence must run after all work up to that number: on the same
stream this holds by itself, another stream waits for events. Slots that are given back while work runs carry a fence
(``pool``), and so does a reader of what running work has yet to write.

Nothing here waits for a device: ``poll`` asks events whether they are done, and so does an operation that is short of
slots. Nothing here knows a tree, a component or a sequence: ``on_failure`` decides what a failure means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any, Generic, Protocol

import attrs
from typing_extensions import TypeVar

from ..errors import ProtocolError
from .pool import Fence, Pool, ignore
from .streams import Event, Stream
from .timeline import Timekeeper, wait_for


class Follower(Protocol):
    """A sequence or lease that uses what work in flight writes: its ``fence``, and the last ``work`` that it was part
    of itself.
    """

    fence: int
    label: str
    work: Any


F = TypeVar("F", bound=Follower, default=Any)


Verdict = Callable[[], Many["BaseException | None"]]
"""Says of work that is over, for each of its followers, whether its part failed. It changes nothing."""


@attrs.define(eq=False)
class Work(Generic[F]):
    """One piece of work in flight: a step or a copy that runs, or that is still being enqueued.

    ``enclosed``   whether a block is open that will end it
    ``over``       whether it is over; ``failed``: it is, and did not go well, as a whole or in part
    ``event``      the event behind it; None while it is still being enqueued
    ``verdict``    judges the parts of the followers where the work as a whole went well
    ``followers``  the sequences or leases whose work it is
    ``gates``      of a load by groups of layers: (the last layer of a group, the event after its copies), in order
    ``since``      the tick of the stream when the work began
    ``after``      what is enqueued comes after all work up to this number
    """

    number: int
    enclosed: bool = False
    over: bool = False
    failed: bool = False
    event: Event | None = None
    stream: Stream | None = None
    verdict: Verdict | None = None
    followers: Many[F] = ()
    gates: Many[tuple[int, Event]] = ()
    name: str = ""
    since: int = 0
    after: int = 0

    def failures(self) -> list[tuple[Many[F], BaseException]]:
        """Return the followers whose parts failed, with the error, of work whose event is done. Any thread may ask."""
        assert self.stream is not None
        assert self.event is not None
        followers, verdict = self.followers, self.verdict  # in this order: see ``_retire_works``
        error = self.stream.failure(self.since, self.event.tick)
        if error is not None or verdict is None:
            return [] if error is None else [(followers, error)]
        try:
            parts = zip(followers, verdict(), strict=True)
            return [((follower,), error) for follower, error in parts if error is not None]
        except Exception as broken:  # nobody knows which parts went well
            return [(followers, broken)]


class Flight(Fence, Generic[F]):
    """The work in flight of one cache, oldest first.

    ``on_failure(work, followers, error)`` is called when the part of these followers in the work failed (of all of
    them, if the work itself failed on its stream), and ``on_over(work)`` when work and all before it are over.
    """

    __slots__ = ("_pools", "alone", "launched", "on_failure", "on_over", "over", "times", "works")

    def __init__(self, pools: Iterable[Pool]) -> None:
        super().__init__()
        self._pools = tuple(pools)
        self.launched = 0
        """The number of the newest work that ever began."""
        self.over = 0
        """The number up to which all work is over."""
        self.works: list[Work[F]] = []
        self.alone: dict[F, tuple[Stream, int]] = {}
        """The followers whose layers are being enqueued outside of steps, with the stream and its tick at the start."""
        self.on_failure: Callable[[Work[F], Many[F], BaseException], None] = ignore
        self.on_over: Callable[[Work[F]], None] = ignore
        self.times: Timekeeper | None = None
        """Times copies and waits; None while no timeline follows."""
        for pool in self._pools:
            pool.fence = self

    # ------------------------------------------------------------ beginning and ending
    def begin(self) -> Work[F]:
        """Make a new piece of work, which is about to be enqueued."""
        self.launched += 1
        work: Work[F] = Work(self.launched)
        self.stamp = self.launched
        self.works.append(work)
        return work

    def order(self, own: Work[F], stream: Stream, fence: int, who: object, gates: Gates | None = None) -> None:
        """Make ``own``, which is enqueued on ``stream`` from now on, run after the work up to ``fence``.

        With ``gates``, it waits for a load by groups of layers gate by gate.
        """
        if fence <= own.after:
            return
        for work in self.unfinished(fence, own):
            if work.event is None:
                raise ProtocolError(f"{who!r} comes after step {work.number}, whose block is open: end that first")
            if gates is not None and work.gates:
                gates.add(work)
            elif work.stream is not stream:
                wait_for(stream, work.event, self.times)
        own.after = fence

    def end(self, work: Work[F], stream: Stream, followers: Many[F], who: object) -> None:
        """Note that all of ``work`` has been enqueued, by ``who`` for ``followers``."""
        if stream.inline and work.verdict is None:
            works = self.works
            if len(works) == 1:  # nothing else is in flight
                work.over = True
                works.pop()
                self.over = work.number
                self.stamp = 0
                if self.retiring:
                    self._free_retired()
                return
            if not any(self.unfinished(follower.fence, work) for follower in followers):
                work.over = True
                self._retire_works()
                return
        self.follow(work, stream, followers, who)

    def follow(self, work: Work[F], stream: Stream, followers: Many[F], who: object) -> None:
        """Record the end of ``work``, all of which has been enqueued on ``stream``, and attach it to ``followers``."""
        work.event = stream.record()
        work.stream = stream
        work.name = repr(who)
        work.followers = followers
        for follower in followers:
            follower.work = work
            follower.fence = max(follower.fence, work.number)  # its fence may be that of later work by now
        if stream.inline:  # the work has run, but work that it came after may still turn out to have failed
            self.poll(between_operations=False)

    def end_alone(self, who: F) -> None:
        """Note that all layers of ``who`` outside of steps have been enqueued; if there are any, they become work."""
        found = self.alone.pop(who, None)
        if found is not None:
            stream, since = found
            work = self.begin()
            work.since = since
            self.follow(work, stream, [who], f"the layers of {who.label or 'a sequence'}")

    def give_up(self) -> None:
        """End the work that nobody will end any more: an interrupt came while it began or ended, or a step was dropped.

        What it has enqueued on a stream may still run, and nobody asks whether it went well.
        """
        self.alone.clear()
        for work in self.works:
            if work.event is None and not work.enclosed:
                work.verdict, work.followers = None, ()
                work.name = "work that was given up"
                if work.stream is None or work.stream.inline:
                    work.over = True
                else:
                    work.event = work.stream.record()
        self._retire_works()

    # ------------------------------------------------------------ what is over
    def unfinished(self, fence: int, own: Work[F] | None = None) -> list[Work[F]]:
        """Return the work up to ``fence`` that is not known to be over, without ``own``."""
        return [work for work in self.works if work.number <= fence and not work.over and work is not own]

    @property
    def running(self) -> bool:
        """Whether any work was enqueued completely and is not known to be over."""
        return any(work.event is not None and not work.over for work in self.works)

    def blocked(self, fence: int) -> bool:
        """Return whether a step up to ``fence`` is still open, so that nothing can be enqueued behind it yet."""
        return any(work.event is None for work in self.unfinished(fence))

    def poll(self, between_operations: bool = True) -> None:
        """Find out which work is over. It never waits.

        A failure ends sequences. So it is handled between operations only, and not when an operation is short of slots.
        """
        # Ask the newest event first: if it is done, the events before it are done as well when they are asked.
        done = [w for w in reversed(self.works) if not w.over and w.event is not None and w.event.done]
        for work in reversed(done):
            failures = work.failures()
            if failures and not between_operations:
                break  # later work may have read what this one wrote, so it does not count as over either
            if failures:
                self._retire_works()  # what work before this one wrote stays
            work.failed = bool(failures)
            work.over = True
            for followers, error in failures:
                self.on_failure(work, followers, error)
        self._retire_works()

    def _retire_works(self) -> None:
        """Drop the oldest works as far as they are over, and free the slots that waited for them."""
        works = self.works
        while works and works[0].over:
            work = works.pop(0)
            self.over = work.number
            self.on_over(work)
            work.verdict = None  # before the followers, which another thread reads first
            work.followers = ()  # cut the cycle: a follower knows its work
        if not works:
            self.stamp = 0
        if self.retiring:
            self._free_retired()

    def _free_retired(self) -> None:
        waiting = 0
        for pool in self._pools:
            pool.settle(self.over)
            waiting += pool.retiring
        self.retiring = waiting > 0


class Gates:
    """The gates of one step: its layers wait for loads group by group, so that the first layers run while the last are
    still copied.

    ``passed`` is the layer up to which the step's stream has waited for all loads. ``missed`` says, after the end of
    the step, that a layer may have read too early.
    """

    __slots__ = ("_stream", "_times", "_works", "missed", "passed")

    def __init__(self, stream: Stream, times: Timekeeper | None) -> None:
        self._stream = stream
        self._times = times
        self._works: list[Work] = []
        self.passed = -1
        self.missed = ""

    def add(self, work: Work) -> None:
        """Make the step's layers wait for this load, each for its own group."""
        if work not in self._works:
            self._works.append(work)

    def open(self, layer: int) -> None:
        """Make what is enqueued from now on run after the loads of all layers up to ``layer``."""
        for work in self._works:
            for last, event in work.gates:
                if last > self.passed:
                    wait_for(self._stream, event, self._times)
                if last >= layer:
                    break
        self.passed = max(self.passed, layer)

    def check(self) -> None:
        """Raise ``ProtocolError`` if a layer may have read too early. Called after the end of the step."""
        if self.missed:
            raise ProtocolError(self.missed)

    def finish(self) -> None:
        """Make what comes after the step run after all loads, and note whether a gate was missed."""
        last = max((work.gates[-1][0] for work in self._works), default=-1)
        if self.passed < last:
            self.missed = (
                f"this step was to pass a gate before each layer, and got to layer {self.passed} of {last}: call "
                f"step.gate(layer) before every layer, or run_ops() without gated"
            )
        self.open(last)
