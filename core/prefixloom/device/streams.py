"""Streams: queues of work that run in order, beside the thread that schedules.

A stream is one interface to a CUDA stream, a worker thread, or the calling thread itself. The scheduler only enqueues:
it asks whether an event is ``done`` and never waits for one. ``prefixloom.testing.schedules.simulated`` has a stream
whose work runs when a test says so.

For the race detector a stream can carry a vector clock: for every other stream, the tick up to which all its work is
ordered before what is enqueued here next. Recording an event, waiting for it and seeing it done pass the clocks on.
Without a detector there are no clocks.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import InputError, PrefixloomError, WorkError

if TYPE_CHECKING:
    import torch

Clock = dict[int, int]
"""The number of each stream, with the tick up to which all its work is known to be over."""

_numbers = itertools.count()

KEPT_FAILURES = 64
"""The most failures that a stream keeps. Work that began before a forgotten failure counts as failed."""

host_clock: Clock = {}
"""The clock of the scheduling thread: the work that it has seen to be over. What it enqueues next comes after that."""


def join(into: Clock, other: Clock) -> None:
    """Raise every tick of ``into`` to at least that of ``other``."""
    for number, tick in other.items():
        if into.get(number, 0) < tick:
            into[number] = tick


class Event:
    """A point in a stream. It is done when everything that was enqueued before it is over."""

    __slots__ = ("clock", "raw", "stream", "tick")

    def __init__(self, stream: Stream, tick: int, raw: Any = None) -> None:
        self.stream = stream
        self.tick = tick
        self.raw = raw
        self.clock: Clock | None = None

    @property
    def done(self) -> bool:
        """Whether everything before it is over. It never waits."""
        if not self.stream.reached(self):
            return False
        if self.clock is not None:
            join(host_clock, self.clock)
        return True

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait until it is done; return False after ``timeout`` seconds. It is for tests and shutdown only."""
        if not self.stream.until(self, timeout):
            return False
        return self.done

    def __repr__(self) -> str:
        return f"<Event {self.tick} of {self.stream!r}>"


class Stamp:
    """A time on a stream: when all that was enqueued before it was over. ``tick`` is its own."""

    __slots__ = ("seconds", "tick")

    def __init__(self) -> None:
        self.seconds: float | None = None
        """By ``time.perf_counter``; None until the stream has come there."""
        self.tick = 0

    def take(self) -> None:
        """Take the time. It is called on the stream when the stream reaches this point."""
        self.seconds = time.perf_counter()


class CudaStamp(Stamp):
    """A time on a CUDA stream, told by a timing event."""

    __slots__ = ("_raw", "_stream", "_told")

    def __init__(self, stream: CudaStream, raw: torch.cuda.Event) -> None:
        self._stream, self._raw = stream, raw
        self._told: float | None = None
        self.tick = stream.tick

    @property
    def seconds(self) -> float | None:  # type: ignore[override]
        if self._told is None and self._raw.query():  # type: ignore[no-untyped-call]
            self._told = self._stream.time_of(self._raw)
        return self._told


class Stream:
    """A queue of work that runs in order.

    ``tick`` counts what was enqueued. ``clock`` is None unless a race detector follows the stream.
    """

    __slots__ = ("__weakref__", "_forgotten", "clock", "failures", "name", "number", "tick")

    inline = False
    """Whether the work has run when ``run`` returns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self.tick = 0
        self.clock: Clock | None = None
        self.failures: deque[tuple[int, BaseException]] = deque()
        self._forgotten: tuple[int, BaseException | None] = (0, None)  # the newest failure that was dropped from them

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue ``work``, which runs after all earlier work. ``failure`` returns what it raises."""
        raise NotImplementedError

    def record(self) -> Event:
        """Return an event after all that was enqueued so far."""
        event = self._record()
        if self.clock is not None:
            join(self.clock, host_clock)
            event.clock = {**self.clock, self.number: self.tick}
        return event

    def wait(self, event: Event) -> None:
        """Make what is enqueued from now on run after ``event``; the caller does not wait."""
        if event.stream is self:
            return
        self._wait(event)
        if self.clock is not None and event.clock is not None:
            join(self.clock, event.clock)

    def current(self) -> AbstractContextManager[object]:
        """Return a block in which the caller allocates tensors for this stream's work.

        In the block, work that used the same memory before is ordered before the stream's work.
        """
        return nullcontext()

    def reads(self, tensor: torch.Tensor) -> None:
        """Note that work just enqueued reads a tensor that the caller made on any stream, and may drop at once."""

    def failure(self, since: int, upto: int) -> BaseException | None:
        """Return the first exception of work with ticks in (since, upto] that is over; None if it raised none.

        If failures after ``since`` were forgotten, one of these is returned.
        """
        for tick, error in tuple(self.failures):  # the worker may add to it
            if since < tick <= upto:
                return error
        tick, forgotten = self._forgotten
        return forgotten if since < tick else None

    def _failed(self, tick: int, error: BaseException) -> None:
        """Keep the exception of the work of this tick, without what the work had at hand, such as a batch's tensors."""
        traceback.clear_frames(error.__traceback__)
        if len(self.failures) == KEPT_FAILURES:
            self._forgotten = self.failures[0]  # set it first: another thread may call ``failure`` now
            self.failures.popleft()
        self.failures.append((tick, error))

    def stamp(self) -> Stamp:
        """Take the time when all that was enqueued so far is over."""
        stamp = Stamp()
        self.run(stamp.take)
        stamp.tick = self.tick
        return stamp

    def follow(self) -> None:
        """Keep a clock from now on."""
        if self.clock is None:
            self.clock = {}

    def entering(self) -> Clock:
        """Return the clock of work that is enqueued now, on a stream that the race detector follows."""
        clock = self.clock
        assert clock is not None
        join(clock, host_clock)
        clock[self.number] = self.tick
        return clock

    # ------------------------------------------------------------ what each kind of stream defines
    def _record(self) -> Event:
        return Event(self, self.tick)

    def _wait(self, event: Event) -> None:
        raise NotImplementedError

    def reached(self, event: Event) -> bool:
        raise NotImplementedError

    def until(self, event: Event, timeout: float | None) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        """Finish what is enqueued and release the stream's resources."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def enqueue(stream: Stream, what: str, work: Callable[[], object]) -> None:
    """Enqueue ``work``, which changes content and no records: what it raises at once is a ``WorkError``."""
    try:
        stream.run(work)
    except PrefixloomError:
        raise
    except Exception as error:
        raise WorkError(f"{what} raised {error!r} on {stream!r}") from error


class InlineStream(Stream):
    """A stream in the calling thread: work runs at once, and raises to the caller."""

    __slots__ = ()
    inline = True

    def run(self, work: Callable[[], object]) -> None:
        self.tick += 1
        work()

    def _wait(self, event: Event) -> None:
        event.synchronize()  # the caller is the stream, so the caller must wait

    def reached(self, event: Event) -> bool:
        return True

    def until(self, event: Event, timeout: float | None) -> bool:
        return True


_RUNNING: weakref.WeakSet[ThreadStream] = weakref.WeakSet()


@atexit.register
def _end_running() -> None:
    """Let no worker be in torch when Python ends: Python would end the thread there, and C++ then ends the process."""
    for stream in [*_RUNNING]:
        stream.close()


class ThreadStream(Stream):
    """A stream in a worker thread, so that work on a CPU overlaps with scheduling."""

    __slots__ = ("_changed", "_idle", "_lock", "_over", "_queue", "_thread")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._queue: deque[tuple[int, Callable[[], object] | None]] = deque()  # each piece of work with its tick
        self._idle = True  # False from before the worker takes work from the queue until the work is over
        self._lock = threading.RLock()  # entered itself and not by the condition, whose exit an interrupt could cut off
        self._changed = threading.Condition(self._lock)
        self._over = 0
        self._thread = threading.Thread(target=self._work, name=f"prefixloom stream {name}", daemon=True)
        self._thread.start()
        _RUNNING.add(self)

    def run(self, work: Callable[[], object]) -> None:
        with self._lock:
            if not self._thread.is_alive():
                raise InputError(f"{self!r} is closed")
            # In this order an interrupt leaves at most a tick without work and a worker that woke for nothing.
            self.tick += 1
            self._changed.notify_all()
            self._queue.append((self.tick, work))

    def _wait(self, event: Event) -> None:
        self.run(lambda: event.stream.until(event, None))

    def reached(self, event: Event) -> bool:
        return self._over >= event.tick or (not self._queue and self._idle)  # in this order: the worker works meanwhile

    def until(self, event: Event, timeout: float | None) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self.reached(event), timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue)
                self._idle = False
                tick, work = self._queue.popleft()
            if work is None:
                with self._lock:
                    self._idle = True
                    self._changed.notify_all()
                return
            try:
                work()
            except BaseException as error:  # ``failure`` returns it, and its step fails
                self._failed(tick, error)
            work = None  # do not keep alive what it holds until more work comes
            with self._lock:
                self._over = tick
                self._idle = True
                self._changed.notify_all()

    def dismiss(self) -> None:
        """Make the worker end after what is enqueued, without waiting. Any thread may call it at any time."""
        with self._lock:
            self._changed.notify_all()
            self._queue.append((self.tick, None))

    def close(self) -> None:
        if self._thread.is_alive():
            self.dismiss()
            self._thread.join()


class CudaStream(Stream):
    """A stream that wraps a CUDA stream of torch. Its work is what is launched while it is current."""

    __slots__ = ("_known_time", "raw")

    def __init__(self, raw: torch.cuda.Stream) -> None:
        super().__init__(f"cuda {raw.device.index}:{raw.cuda_stream:x}")
        self.raw = raw
        self._known_time: tuple[torch.cuda.Event, float] | None = None
        """A timing event that is over, and when it was, by ``time.perf_counter``."""

    def run(self, work: Callable[[], object]) -> None:
        self.tick += 1
        with self.current():
            work()

    def current(self) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.stream(self.raw)

    def reads(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self.raw)

    def stamp(self) -> Stamp:
        """Take the time when all that was launched so far is over. The first call of a stream waits for that."""
        if self._known_time is None:
            known = self._timing_event()
            known.synchronize()
            self._known_time = known, time.perf_counter()
        return CudaStamp(self, self._timing_event())

    def _timing_event(self) -> torch.cuda.Event:
        import torch

        raw = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        raw.record(self.raw)
        return raw

    def time_of(self, raw: torch.cuda.Event) -> float:
        """Return when a timing event was over. It must be over."""
        assert self._known_time is not None
        known, seconds = self._known_time
        passed = known.elapsed_time(raw) / 1000
        if passed > 1:  # CUDA tells it in single precision, so what is long ago is told badly
            self._known_time = raw, seconds + passed
        return float(seconds + passed)

    def _record(self) -> Event:
        import torch

        raw = torch.cuda.Event()  # type: ignore[no-untyped-call]
        raw.record(self.raw)
        return Event(self, self.tick, raw)

    def _wait(self, event: Event) -> None:
        if event.raw is not None:
            self.raw.wait_event(event.raw)
        else:
            event.synchronize()  # CUDA cannot wait for an event of another kind of stream

    def reached(self, event: Event) -> bool:
        return bool(event.raw.query())

    def until(self, event: Event, timeout: float | None) -> bool:
        if timeout is None:
            event.raw.synchronize()
            return True
        end = time.monotonic() + timeout
        while not event.raw.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.0005)
        return True


def stream_for(given: object, device: str, known: dict[object, Stream]) -> Stream:
    """Return the stream that a caller means: a ``Stream``, a CUDA stream of torch, or None for the current one.

    ``known`` remembers the ``Stream`` of each CUDA stream, so that the same one always gives the same ``Stream``.
    """
    on_cuda = device.startswith("cuda")
    if isinstance(given, Stream):
        if on_cuda and not isinstance(given, CudaStream):
            raise InputError(
                f"{given!r} cannot tell when work on {device!r} is over: give a torch.cuda.Stream, or None for the "
                f"current one"
            )
        return given
    if given is None and not on_cuda:
        stream = known.get(None)
        if stream is None:
            stream = known[None] = InlineStream("inline")
        return stream
    import torch

    if given is None:
        given = torch.cuda.current_stream(torch.device(device))
    if not isinstance(given, torch.cuda.Stream):
        raise InputError(f"a stream is a prefixloom Stream, a torch.cuda.Stream or None, got {given!r}")
    if not on_cuda or torch.device(device).index not in (None, given.device.index):
        raise InputError(f"the cache lies on {device!r}, and {given!r} is a stream of {given.device}")
    handle = (given.device, given.cuda_stream)
    stream = known.get(handle)
    if stream is None:
        stream = known[handle] = CudaStream(given)
    return stream
