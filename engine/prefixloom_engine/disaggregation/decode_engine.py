"""The decode process: clients ask it, and it has long prompts computed by a prefill process.

It tells the prefill process how much of a prompt it has, and receives the rest. The prefill process may die at any
time: what it was asked for is computed here then, with a line in the log. Slots are reserved only when content has
arrived, so a lost prefill process leaves none behind.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterable

import attrs

from prefixloom import Identity, InputError

from ..contract.requests import Answer, Request
from ..serving.engine import Engine
from .messages import (
    check_handover,
    decode_handover,
    disagreement,
    encode_question,
    greeting,
    identity_of,
)
from .wire import ASK, DROP, HELLO, REFUSED, Address, Wire, WireClosed

log = logging.getLogger("prefixloom.engine")
RECONNECT_SECONDS = 1.0
"""How long to wait after a prefill process is lost before connecting again."""
HELLO_SECONDS = 10.0
"""How long a prefill process may take to accept a connection, and then to send its greeting."""


@attrs.define(eq=False)
class Pending:
    """A request of a ``DecodeEngine``, and the identity under which it was asked for.

    ``answer``: None while the prefill process computes the prompt.
    """

    request: Request
    identity: Identity
    answer: Answer | None = None
    dropped: bool = False

    @property
    def done(self) -> bool:
        return self.dropped or (self.answer is not None and self.answer.done)


class DecodeEngine:
    """An engine that has prompts computed by a prefill process, and computes them itself where there is none.

    ``least``     a prompt that lacks fewer tokens than this is computed here
    ``patience``  how many seconds a prefill process that owes content may be silent before it counts as gone; one step
                  of it must not take longer

    ``handed_over``, ``lost``, ``received``: prompts that arrived, prompts that a lost prefill process owed, and bytes
    of content.
    """

    def __init__(self, engine: Engine, prefill: Address, *, least: int = 64, patience: float = 30.0) -> None:
        if not patience > 0:
            raise InputError(f"patience is a number of seconds above 0, got {patience!r}")
        self.engine = engine
        identity_of(engine)
        self._address, self._least, self._patience = prefill, least, patience
        self._silent_since = 0.0
        self._wire: Wire | None = None
        self._connect_after = 0.0
        self._asked: dict[int, Pending] = {}
        self._questions = 0
        self.handed_over = self.lost = self.received = 0

    # ------------------------------------------------------------ requests
    def add(self, request: Request) -> Pending:
        """Queue a request. One that carries images is computed here, since only tokens are sent."""
        pending = Pending(request, identity_of(self.engine))
        have = self.engine.cache.peek(request.tokens, namespace=self.engine.namespace(request.namespace), leave=1)
        far = not request.inputs and len(request.tokens) - have >= self._least
        wire = self._connected() if far else None
        self.engine.check(request)
        if wire is None:
            pending.answer = self.engine.add(request)
            return pending
        self._questions += 1
        if not self._asked:
            self._silent_since = time.monotonic()
        self._asked[self._questions] = pending
        try:
            wire.send(ASK, self._questions, encode_question(request, have, pending.identity))
        except WireClosed as error:
            self._compute_here(error)
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
                except WireClosed as error:
                    self._compute_here(error)

    def step(self) -> bool:
        """Read what has arrived, and run a step. False: there was nothing to do and nothing is awaited."""
        self._receive(0.0)
        busy = self.engine.step()
        if not busy and self._asked:
            self._receive(0.02)
        return busy or bool(self._asked)

    def generate(self, requests: Iterable[Request]) -> list[Answer]:
        """Answer all requests and return the answers in their order. An exception aborts what this call has begun."""
        requests = list(requests)
        pending: list[Pending] = []
        try:
            for request in requests:
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
        """Return the connection; connect first if there is none and the last attempt is long enough ago."""
        if self._wire is None and time.monotonic() >= self._connect_after:
            try:
                self._wire = self._say_hello(Wire(socket.create_connection(self._address, timeout=HELLO_SECONDS)))
            except (OSError, WireClosed) as error:
                self._connect_after = time.monotonic() + RECONNECT_SECONDS
                log.warning("no prefill process at %s:%d (%s): prompts are computed here", *self._address, error)
        return self._wire

    def _say_hello(self, wire: Wire) -> Wire:
        """Exchange greetings. Both sides must compute and keep the same, or content means nothing."""
        wire.send(HELLO, 0, json.dumps(greeting(self.engine)).encode())
        until = time.monotonic() + HELLO_SECONDS
        while time.monotonic() < until:
            for kind, _, data in wire.receive(0.1):
                differs = disagreement(self.engine, data) if kind == HELLO else "says no greeting"
                if not differs:
                    return wire
                wire.close()
                host, port = self._address
                raise InputError(f"the prefill process at {host}:{port} {differs}")
        wire.close()
        raise WireClosed(f"it has not greeted within {HELLO_SECONDS:g} s")

    def _receive(self, timeout: float) -> None:
        if self._wire is None:
            return
        try:
            before = self._wire.received
            frames = self._wire.receive(timeout)
            if self._wire.received > before:  # a part of a long answer ends the silence as well
                self._silent_since = time.monotonic()
            for kind, number, data in frames:
                self._handle(kind, number, data)
            if self._asked and time.monotonic() - self._silent_since > self._patience:
                raise WireClosed(f"it has said nothing for {self._patience:g} s")
        except WireClosed as error:
            self._compute_here(error)

    def _handle(self, kind: bytes, number: int, data: bytes) -> None:
        pending = self._asked.pop(number, None)
        if pending is None or pending.dropped:
            return
        if kind == REFUSED:
            log.warning("the prefill process refused a prompt: %s. It is computed here", data.decode(errors="replace"))
            pending.answer = self.engine.add(pending.request)
            return
        self.received += len(data)
        try:
            handover = decode_handover(data)
            if pending.identity != identity_of(self.engine):
                raise InputError("the model's weights or adapters have changed meanwhile")
            check_handover(self.engine.cache, handover, len(pending.request.tokens), self.engine.model.vocabulary)
        except Exception as error:  # malformed bytes may raise anything
            log.warning("what the prefill process handed over cannot be read (%r). It is computed here", error)
            pending.answer = self.engine.add(pending.request)
            return
        self.handed_over += 1
        pending.answer = self.engine.add(pending.request, handover)

    def _compute_here(self, why: WireClosed) -> None:
        """Close the connection, and compute here what the prefill process still owes."""
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._connect_after = time.monotonic() + RECONNECT_SECONDS
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
