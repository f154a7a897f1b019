"""Text processes: bodies are parsed and turned into tokens apart from the server, within a time and a memory.

A body, a chat template, a tokenizer and an image take as long as a client makes them take, and hold Python's lock
meanwhile. So ``read`` runs in processes of their own. One process makes the tokenizer, and is copied for each reader. A
reader that takes too long, needs too much memory or dies is replaced by another copy. Bodies that are small and have no
images have a reader of their own. The others have two, of which nobody holds both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefixloom import CompositionError, InputError

from ...contract.texts import Tokenizer
from ..protocol import ApiError, Body
from .bodies import Bounds, ReadBody, read, unwritten, written

log = logging.getLogger("prefixloom.server")
SMALL = 64 << 10
"""The bytes of a body that does not wait for larger ones."""
SECONDS = 20.0
MEMORY = 2 << 30
START_SECONDS = 120.0
HELD_SECONDS = 5.0
"""After so long with one body, a reader is told to be busy."""
NICENESS = 10
"""Of the readers of large bodies and images: the engine's threads come first."""


class TextProcesses:
    """Reads bodies in processes of its own, which end with this one.

    ``make``     makes the tokenizer there, and here, where answers are decoded. A function or a class of a module, or a
                 ``functools.partial`` of one, since only its name goes there
    ``seconds``  how long a body may take
    ``memory``   how many bytes a reader may need beyond what it begins with, where the system counts them (Linux)
    """

    def __init__(self, make: Callable[[], Tokenizer], *, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        try:
            given = pickle.dumps((make, seconds, memory))
        except Exception as error:
            raise InputError(
                f"a tokenizer is made in a process of its own: give a function of a module that makes it, not {make!r}"
            ) from error
        if not hasattr(os, "fork"):
            raise CompositionError("text is read in copies of a process, and this system cannot copy one")
        self._origin = Origin(given)
        self._lanes = [
            ReaderLane([BodyReader(self._origin, seconds, images) for _ in range(count)])
            for images, count in ((False, 1), (True, 2))
        ]
        try:
            self.tokenizer = make()
        except BaseException:
            self.close()
            raise

    async def begin(self) -> None:
        """Start the readers. What keeps one from starting, the first body and ``trouble`` say."""
        loop = asyncio.get_running_loop()
        begun = ((lane.threads, reader.begin) for lane in self._lanes for reader in lane.readers)
        await asyncio.gather(*(loop.run_in_executor(*each) for each in begun))

    async def read(self, kind: type[Body], data: bytes, bounds: Bounds, who: str = "") -> ReadBody:
        """Read a body. Of each ``who`` one body at a time is read or in line, so that nobody's many delay others."""
        turn = asyncio.get_running_loop(), who
        for lane in self._lanes[len(data) > SMALL :]:
            async with lane.turns[turn]:
                self._origin.check()
                begun = lane.threads.submit(lane.read, kind, data, bounds)
                reading = asyncio.wrap_future(begun)
                try:
                    found = await asyncio.shield(reading)
                except asyncio.CancelledError:
                    if not begun.cancel():  # whoever leaves has no other body read until this one is
                        await asyncio.wait([reading])
                    raise
            if found is not None:
                return found
        raise AssertionError("the last lane reads everything")

    @property
    def trouble(self) -> str:
        """What keeps bodies from being read, in words; "": nothing."""
        return next(filter(None, (reader.trouble for lane in self._lanes for reader in lane.readers)), "")

    def close(self) -> None:
        """End the processes. Bodies that are being read, or come later, are refused."""
        self._origin.close()
        for lane in self._lanes:
            lane.threads.shutdown(wait=False)


class Origin:
    """The process of which readers are copies. It makes the tokenizer once, and is started anew if it has died."""

    def __init__(self, given: bytes) -> None:
        self._given = given
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def check(self) -> None:
        """Raise an ``ApiError`` if there are no readers any more."""
        if self._closed:
            raise ApiError(503, "the server ends before this body is read", code="server_ends")

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import copy_readers as go; go({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True
            )
        stdin: Any = self._process.stdin
        with suppress(BrokenPipeError), stdin:  # it has died: the first reader says so
            stdin.write(self._given)

    def reader(self, images: bool) -> Connection[Any, Any]:
        """Return the pipe to a new reader. It has nothing else open of this process. ``OSError``: there is none."""
        ours, theirs = socket.socketpair()
        pipe = Connection(ours.detach())
        try:
            with theirs, self._lock:
                self.check()
                if self._process.poll() is not None:
                    self._control.close()
                    self._start()
                socket.send_fds(self._control, [b"i" if images else b"t"], [theirs.fileno()])
            if not pipe.poll(START_SECONDS):
                raise OSError(f"none has begun in {START_SECONDS:g} seconds")
            pipe.recv_bytes()
        except (EOFError, OSError) as error:
            pipe.close()
            raise OSError(str(error) or "the first one has died") from error
        return pipe

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # its session: the readers too
                self._process.wait()
                self._control.close()
            self._closed = True


class ReaderLane:
    """Readers, and a thread for each, which waits for it."""

    def __init__(self, readers: Sequence[BodyReader]) -> None:
        self.readers, self._free = readers, deque(readers)
        self.threads = ThreadPoolExecutor(len(readers), thread_name_prefix="prefixloom texts")
        self.turns: defaultdict[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        """By event loop, since a lock is for one, and by whose bodies they are."""

    def read(self, kind: type[Body], data: bytes, bounds: Bounds) -> ReadBody | None:
        """Have a body read by the reader that is free, in a thread of the lane."""
        reader = self._free.popleft()
        try:
            return reader.read(kind, data, bounds)
        finally:
            self._free.append(reader)


class BodyReader:
    """One process at a time. ``images``: whether it reads bodies with images."""

    def __init__(self, origin: Origin, seconds: float, images: bool) -> None:
        self._origin, self._seconds, self._images = origin, seconds, images
        self._pipe: Connection[Any, Any] | None = None
        self._since = 0.0
        """When the body that is read came; 0: there is none."""
        self._failed = ""

    @property
    def trouble(self) -> str:
        held = time.monotonic() - self._since if self._since else 0.0
        return self._failed or (f"a body has been read for {held:.0f} seconds" if held > HELD_SECONDS else "")

    def read(self, kind: type[Body], data: bytes, bounds: Bounds) -> ReadBody | None:
        """Have a body read. ``ApiError``: it is refused, takes too much, or the reader died."""
        self.begin()
        if self._pipe is None:
            raise ApiError(503, self._failed, code="text_failed", retry_after=1)
        self._since = time.monotonic()
        try:
            self._pipe.send((kind, data, bounds))
            told = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            late = time.monotonic() - self._since >= self._seconds
            self._end()
            self._origin.check()
            if late:
                text = f"the body took more than {self._seconds:g} seconds to read"
                raise ApiError(400, text, code="text_timeout") from error
            text = "the process that read the body has died"
            raise ApiError(503, text, code="text_failed", retry_after=1) from error
        finally:
            self._since = 0.0
        if not told:
            self._end()
            raise ApiError(400, "the body took too much memory to read", code="text_memory")
        return unwritten(told)

    def begin(self) -> None:
        """Start a reader, if there is none."""
        try:
            self._pipe = self._pipe or self._origin.reader(self._images)
            self._failed = ""
        except OSError as error:
            self._failed = f"no process reads bodies: {error}"

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None


# ---------------------------------------------------------------- in the processes


def copy_readers(descriptor: int) -> None:
    """Make the tokenizer that standard input says, and a copy of this process for each pipe that comes."""
    control = socket.socket(fileno=descriptor)
    make, seconds, memory = pickle.load(sys.stdin.buffer)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = make()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for readers
    while True:
        kind, pipes, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            return
        if os.fork() == 0:
            control.close()
            limit_memory(memory)
            serve(tokenizer, Connection(pipes[0]), seconds, images=kind == b"i")
            return
        os.close(pipes[0])


def serve(tokenizer: Tokenizer, pipe: Connection[Any, Any], seconds: float, *, images: bool) -> None:
    """Read bodies until the server ends, or until one was too large: an empty answer says so."""
    if images:
        os.nice(NICENESS)
    pipe.send_bytes(b"ready")
    told = b"ready"
    while told:
        try:
            kind, data, bounds = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends this process, whatever it does
        told = answered(tokenizer, kind, data, bounds, images)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(told)


def answered(tokenizer: Tokenizer, kind: type[Body], data: bytes, bounds: Bounds, images: bool) -> bytes:
    try:
        try:
            return written(read(tokenizer, kind, data, bounds, images=images))
        except ApiError as error:
            return written(error)
        except InputError as error:
            return written(ApiError(400, str(error)))
    except MemoryError:
        return b""
    except Exception:
        log.exception("a body could not be read")
        return written(ApiError(500, "something went wrong in the server"))


def limit_memory(more: int) -> None:
    """Let this process have so many bytes more than it has."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        import resource

        has = int(sizes.read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (has + more, has + more))
