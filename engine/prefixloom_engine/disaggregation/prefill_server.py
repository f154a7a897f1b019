"""The prefill process: it computes prompts for decode processes, and sends them the content that they lack.

A decode process may die at any time; the prompts that it asked for are aborted then.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import time

import attrs

from prefixloom import InputError, PrefixloomError

from ..contract.requests import Answer, Request
from ..serving.engine import Engine
from .messages import encode_handover, greeting, identity_of
from .wire import ANSWER, ASK, BUSY, DROP, HELLO, REFUSED, Address, Wire, WireClosed

log = logging.getLogger("prefixloom.engine")
BUSY_SECONDS = 1.0
"""How often the process tells the decode processes that it is still computing."""
REFUSABLE = (PrefixloomError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a malformed or impossible question can raise; the question is refused then."""


class PrefillServer:
    """Serves all decode processes that connect. ``run`` returns after ``stop`` or an interrupt."""

    def __init__(self, engine: Engine, address: Address = ("127.0.0.1", 0)) -> None:
        self.engine = engine
        identity_of(engine)
        self._listening = socket.create_server(address)
        self._listening.setblocking(False)
        self._wires: list[Wire] = []
        self._asked: dict[Answer, tuple[Wire, int]] = {}
        self._running = True
        self._busy_sent_at = 0.0

    @property
    def address(self) -> Address:
        host, port = self._listening.getsockname()[:2]
        return str(host), int(port)

    def run(self) -> None:
        try:
            while self._running:
                if not self.serve_once():
                    sockets = [self._listening, *(wire.socket for wire in self._wires)]
                    select.select(sockets, [], [], 0.02)
        finally:
            self.close()

    def serve_once(self) -> bool:
        """Read all connections, run a step, send what is complete. False: there was nothing to do."""
        self._accept()
        for wire in list(self._wires):
            try:
                for kind, number, data in wire.receive():
                    self._handle(wire, kind, number, data)
            except WireClosed as error:
                self._drop_wire(wire, error)
        busy = self.engine.step() if self._asked else False
        for answer in [answer for answer in self._asked if answer.done]:
            if answer in self._asked:  # sending the answer before may have dropped this one's wire
                self._send_answer(answer, *self._asked.pop(answer))
        if self._asked and time.monotonic() - self._busy_sent_at >= BUSY_SECONDS:
            self._busy_sent_at = time.monotonic()
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

    def _handle(self, wire: Wire, kind: bytes, number: int, data: bytes) -> None:
        if kind == HELLO:
            wire.send(HELLO, 0, json.dumps(greeting(self.engine)).encode())
            return
        if kind == DROP:
            for answer in [answer for answer, asked in self._asked.items() if asked == (wire, number)]:
                del self._asked[answer]
                self.engine.abort(answer)
            return
        if kind != ASK:
            raise WireClosed(f"a frame of kind {kind!r} was not expected")
        try:
            fields = json.loads(data)
            have = int(fields.pop("have"))
            if fields.pop("identity", None) != identity_of(self.engine).digest:
                raise InputError("the model's weights or adapters here are others than those that are asked for")
            answer = self.engine.add(Request(**fields, max_tokens=1, stops=(), speculate=0, hand_over=have))
        except REFUSABLE as error:
            wire.send(REFUSED, number, str(error).encode())
            return
        self._asked[answer] = (wire, number)

    def _send_answer(self, answer: Answer, wire: Wire, number: int) -> None:
        if answer.handed is None:
            self._send(wire, REFUSED, number, f"{answer.reason}: {answer.error}".encode())
        else:
            logprob = answer.logprobs[0] if answer.logprobs else 0.0
            self._send(wire, ANSWER, number, encode_handover(attrs.evolve(answer.handed, logprob=logprob)))

    def _send(self, wire: Wire, kind: bytes, number: int, data: bytes) -> None:
        try:
            wire.send(kind, number, data)
        except WireClosed as error:
            self._drop_wire(wire, error)

    def _drop_wire(self, wire: Wire, why: WireClosed) -> None:
        """Abort the prompts that were asked for over this connection, and close it."""
        mine = [answer for answer, (whose, _) in self._asked.items() if whose is wire]
        log.info("a decode process is gone (%s): %d prompts of it are dropped", why, len(mine))
        for answer in mine:
            del self._asked[answer]
            self.engine.abort(answer)
        if wire in self._wires:
            self._wires.remove(wire)
        wire.close()

    def stop(self) -> None:
        """Make ``run`` return; may be called from another thread."""
        self._running = False

    def close(self) -> None:
        for wire in list(self._wires):
            self._drop_wire(wire, WireClosed("this prefill process ends"))
        self._listening.close()
        self.engine.close()
