"""Disaggregation: one process computes prompts, another decodes, and hands over go between them.

The decode process is the one that clients ask. It tells the prefill process what it has of a prompt and gets the rest.
Either may die at any time: what was asked of a prefill process that is gone is computed here, with a line in the log;
what was asked by a decode process that is gone is aborted there. A slot is taken only when content is at hand, so that
neither leaves one behind.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from collections.abc import Iterable

import attrs

from prefixloom import InputError, PrefixloomError

from .engine import Engine
from .handover import check, packed, shapes, unpacked
from .requests import Answer, Request
from .wire import ANSWER, ASK, BUSY, DROP, MEET, REFUSED, Closed, Wire

log = logging.getLogger("prefixloom.engine")
AGAIN = 1.0
"""Seconds until a lost prefill process is looked for again."""
PATIENCE = 10.0
"""Seconds for the other side to say who it is."""
BEAT = 1.0
"""Seconds between two words of a prefill process that it is still computing."""
UNREADABLE = (PrefixloomError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a question can be refused with."""
Address = tuple[str, int]


def ask_of(request: Request, have: int) -> bytes:
    told = {
        "tokens": request.tokens, "temperature": request.temperature, "seed": request.seed,
        "namespace": request.namespace, "priority": request.priority, "logprobs": request.logprobs, "have": have,
    }  # fmt: skip
    return json.dumps(told).encode()


class PrefillServer:
    """Computes prompts for whoever connects, and hands over what they lack. ``run`` until ``stop`` or an interrupt."""

    def __init__(self, engine: Engine, address: Address = ("127.0.0.1", 0)) -> None:
        self.engine = engine
        self._listening = socket.create_server(address)
        self._listening.setblocking(False)
        self._wires: list[Wire] = []
        self._asked: dict[Answer, tuple[Wire, int]] = {}
        self._running = True
        self._said = 0.0

    @property
    def address(self) -> Address:
        host, port = self._listening.getsockname()[:2]
        return str(host), int(port)

    def run(self) -> None:
        try:
            while self._running:
                if not self.turn():
                    sockets = [self._listening, *(wire.socket for wire in self._wires)]
                    select.select(sockets, [], [], 0.02)
        finally:
            self.close()

    def turn(self) -> bool:
        """Look at all connections, run a step, answer what is complete. False: there was nothing to do."""
        self._accept()
        for wire in list(self._wires):
            try:
                for kind, number, data in wire.look():
                    self._heard(wire, kind, number, data)
            except Closed as gone:
                self._gone(wire, gone)
        busy = self.engine.step() if self._asked else False
        for answer in [answer for answer in self._asked if answer.done]:
            if answer in self._asked:  # the answer before may have found its decode process gone
                self._answer(answer, *self._asked.pop(answer))
        if self._asked and time.monotonic() - self._said >= BEAT:
            self._said = time.monotonic()
            for wire in {wire for wire, _ in self._asked.values()}:
                self._send(wire, BUSY, 0, b"")
        return busy

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            self._wires.append(Wire(connection))

    def _heard(self, wire: Wire, kind: bytes, number: int, data: bytes) -> None:
        if kind == MEET:
            mine = json.dumps(shapes(self.engine.cache)).encode()
            wire.send(MEET, 0, mine)
            return
        if kind == DROP:
            for answer in [answer for answer, asked in self._asked.items() if asked == (wire, number)]:
                del self._asked[answer]
                self.engine.abort(answer)
            return
        if kind != ASK:
            raise Closed(f"a frame of kind {kind!r} was not expected")
        try:
            told = json.loads(data)
            have = int(told.pop("have"))
            answer = self.engine.add(Request(**told, max_tokens=1, stops=(), speculate=0, hand_over=have))
        except UNREADABLE as error:
            wire.send(REFUSED, number, str(error).encode())
            return
        self._asked[answer] = (wire, number)

    def _answer(self, answer: Answer, wire: Wire, number: int) -> None:
        if answer.handed is None:
            self._send(wire, REFUSED, number, f"{answer.reason}: {answer.error}".encode())
        else:
            logprob = answer.logprobs[0] if answer.logprobs else 0.0
            self._send(wire, ANSWER, number, packed(attrs.evolve(answer.handed, logprob=logprob)))

    def _send(self, wire: Wire, kind: bytes, number: int, data: bytes) -> None:
        try:
            wire.send(kind, number, data)
        except Closed as gone:
            self._gone(wire, gone)

    def _gone(self, wire: Wire, why: Closed) -> None:
        mine = [answer for answer, (whose, _) in self._asked.items() if whose is wire]
        log.info("a decode process is gone (%s): %d prompts of it are dropped", why, len(mine))
        for answer in mine:
            del self._asked[answer]
            self.engine.abort(answer)
        if wire in self._wires:
            self._wires.remove(wire)
        wire.close()

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        for wire in list(self._wires):
            self._gone(wire, Closed("this prefill process ends"))
        self._listening.close()
        self.engine.close()


@attrs.define(eq=False)
class Pending:
    """A request whose prompt is being computed elsewhere, or the answer that runs here by now."""

    request: Request
    answer: Answer | None = None
    dropped: bool = False

    @property
    def done(self) -> bool:
        return self.dropped or (self.answer is not None and self.answer.done)


class DecodeEngine:
    """An engine that has prompts computed by a prefill process, and computes them itself where there is none.

    ``least``: a prompt that lacks fewer tokens than this is not worth the way. ``patience``: seconds after which a
    prefill process that has been asked and says nothing counts as gone; one step there should not take so long.
    """

    def __init__(self, engine: Engine, prefill: Address, *, least: int = 64, patience: float = 30.0) -> None:
        if not patience > 0:
            raise InputError(f"patience is a number of seconds above 0, got {patience!r}")
        self.engine = engine
        self._address, self._least, self._patience = prefill, least, patience
        self._heard = 0.0  # when the prefill process said something, or was asked after it owed nothing
        self._wire: Wire | None = None
        self._next_try = 0.0
        self._asked: dict[int, Pending] = {}
        self._numbers = 0
        self.handed_over = self.lost = self.received = 0

    # ------------------------------------------------------------ asking
    def add(self, request: Request) -> Pending:
        pending = Pending(request)
        have = self.engine.cache.peek(request.tokens, namespace=request.namespace, leave=1)
        wire = self._connected() if len(request.tokens) - have >= self._least else None
        self.engine.check(request)
        if wire is None:
            pending.answer = self.engine.add(request)
            return pending
        self._numbers += 1
        if not self._asked:
            self._heard = time.monotonic()
        self._asked[self._numbers] = pending
        try:
            wire.send(ASK, self._numbers, ask_of(request, have))
        except Closed as gone:
            self._gone(gone)
        return pending

    def abort(self, pending: Pending) -> None:
        pending.dropped = True
        if pending.answer is not None:
            self.engine.abort(pending.answer)
            return
        for number in [number for number, each in self._asked.items() if each is pending]:
            del self._asked[number]
            if self._wire is not None:
                try:
                    self._wire.send(DROP, number, b"")
                except Closed as gone:
                    self._gone(gone)

    def step(self) -> bool:
        """Take what has come, and run a step. False: there was nothing to do but wait."""
        self._look(0.0)
        busy = self.engine.step()
        if not busy and self._asked:
            self._look(0.02)
        return busy or bool(self._asked)

    def generate(self, requests: Iterable[Request]) -> list[Answer]:
        asked = list(requests)
        pending: list[Pending] = []
        try:
            for request in asked:
                pending.append(self.add(request))
            while not all(each.done for each in pending):
                self.step()
        finally:
            for each in pending:
                if not each.done:
                    self.abort(each)
        return [each.answer or Answer(each.request, reason="aborted") for each in pending]

    # ------------------------------------------------------------ the prefill process
    def _connected(self) -> Wire | None:
        if self._wire is None and time.monotonic() >= self._next_try:
            try:
                self._wire = self._meet(Wire(socket.create_connection(self._address, timeout=PATIENCE)))
            except (OSError, Closed) as error:
                self._next_try = time.monotonic() + AGAIN
                log.warning("no prefill process at %s:%d (%s): prompts are computed here", *self._address, error)
        return self._wire

    def _meet(self, wire: Wire) -> Wire:
        """Both sides must keep the same things in the same way; else what is handed over means nothing."""
        mine = shapes(self.engine.cache)
        wire.send(MEET, 0, json.dumps(mine).encode())
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for kind, _, data in wire.look(0.1):
                if kind == MEET and json.loads(data) == mine:
                    return wire
                wire.close()
                host, port = self._address
                raise InputError(
                    f"the prefill process at {host}:{port} keeps other things in its cache than this one: compose "
                    f"both from the same config"
                )
        wire.close()
        raise Closed("it does not say who it is")

    def _look(self, timeout: float) -> None:
        if self._wire is None:
            return
        try:
            before = self._wire.received
            frames = self._wire.look(timeout)
            if self._wire.received > before:  # a long answer is no silence
                self._heard = time.monotonic()
            for kind, number, data in frames:
                self._came(kind, number, data)
            if self._asked and time.monotonic() - self._heard > self._patience:
                raise Closed(f"it has said nothing for {self._patience:g} s")
        except Closed as gone:
            self._gone(gone)

    def _came(self, kind: bytes, number: int, data: bytes) -> None:
        pending = self._asked.pop(number, None)
        if pending is None or pending.dropped:
            return
        if kind == REFUSED:
            log.warning("the prefill process refused a prompt: %s. It is computed here", data.decode(errors="replace"))
            pending.answer = self.engine.add(pending.request)
            return
        self.received += len(data)
        try:
            handed = unpacked(data)
            check(self.engine.cache, handed, len(pending.request.tokens), self.engine.model.vocabulary)
        except Exception as error:  # whatever the bytes made of it
            log.warning("what the prefill process handed over cannot be read (%r). It is computed here", error)
            pending.answer = self.engine.add(pending.request)
            return
        self.handed_over += 1
        pending.answer = self.engine.add(pending.request, handed)

    def _gone(self, why: Closed) -> None:
        """What was asked there is computed here."""
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._next_try = time.monotonic() + AGAIN
        waiting, self._asked = [each for each in self._asked.values() if not each.dropped], {}
        log.warning("the prefill process is gone (%s): %d prompts are computed here", why, len(waiting))
        self.lost += len(waiting)
        for pending in waiting:
            pending.answer = self.engine.add(pending.request)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._asked.clear()
        self.engine.close()

    def __enter__(self) -> DecodeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
