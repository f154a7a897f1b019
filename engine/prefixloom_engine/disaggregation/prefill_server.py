"""The prefill process: it computes prompts for decode processes, and sends them the content that they lack.

It never waits for a decode process. What one does not take now is sent later; one that takes nothing for long, or is
gone, loses its prompts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from prefixloom import Figure, InputError, PrefixloomError

from ..contract.requests import Answer
from ..serving.engine import Engine
from .addresses import KeyFile, open_transport
from .around import AroundEngine, figure_of
from .arrival import parts_of
from .messages import Question, decode_question, encode_head, greeting, identity_of, question_digest
from .records import ContentKeys, content_size, pack_content
from .transport import (
    ANSWER,
    ASK,
    BUSY,
    DROP,
    FETCHED,
    HELLO,
    MOST_AT_ONCE,
    OWED,
    PART,
    REFUSED,
    Mover,
    PeerGone,
    PeerMessage,
    Transport,
)

log = logging.getLogger("prefixloom.engine")
BUSY_SECONDS = 1.0
"""How often the process tells the decode processes that it is still computing."""
IDLE_SECONDS = 0.02
"""How long it waits for messages when there is nothing to compute and nothing to send."""
REFUSABLE = (PrefixloomError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a malformed or impossible question can raise; the question is refused then."""
MOST_PROMPTS = 1024
"""Prompts of all decode processes that are computed or wait."""
LONGEST_REFUSAL = 400


@attrs.frozen(eq=False)
class OwedPrompt:
    """A prompt that is computed for a decode process.

    ``digest``: of the question; ``size``: the most bytes of the content
    """

    answer: Answer
    question: Question
    digest: str
    size: int


@attrs.define(eq=False)
class DecodePeer:
    """A decode process that has asked for something.

    ``asked``     by number: the prompts that are computed for it
    ``last``      the number of the question that came last
    ``outgoing``  messages with content that it has not taken: kind, number, frames
    ``refused``   by number: why its prompts are refused, until it has taken that
    ``uninformed``  whether it is to be told which prompts it is owed; so at first, since some may have been forgotten
    ``stuck``     since when it takes nothing; None: it does
    ``offered``   by number: tickets of what it is fetching, and when they end
    ``unread``    by number: answers that were sent and of which it has not said that they are there, and how long that
                  is waited for
    """

    name: bytes
    asked: dict[int, OwedPrompt] = attrs.field(factory=dict)
    last: int = 0
    outgoing: deque[tuple[bytes, int, Sequence[Any]]] = attrs.field(factory=deque)
    refused: dict[int, str] = attrs.field(factory=dict)
    uninformed: bool = True
    stuck: float | None = None
    offered: dict[int, tuple[bytes, float]] = attrs.field(factory=dict)
    unread: dict[int, float] = attrs.field(factory=dict)

    @property
    def owed(self) -> set[int]:
        """The numbers of the prompts that it still waits for."""
        return {*self.asked, *self.offered, *(number for _, number, _ in self.outgoing)}

    @property
    def content_bytes(self) -> int:
        """Bytes of the content that it has not taken, with the most that its other prompts may come to."""
        there = sum(len(each) for _, _, frames in self.outgoing for each in frames)
        return there + sum(each.size for each in self.asked.values())


class PrefillServer(AroundEngine):
    """Serves all decode processes that connect. ``run`` returns after ``stop``, and closes all also after an interrupt.

    Whoever has requests of its own drives it by ``step``, as any engine.

    ``over``      the address to listen at, or a transport
    ``keys``      for an address: the file that ``write_keys`` made
    ``mover``     brings content to decode processes that have a mover of the same name
    ``patience``  how many seconds a decode process may take nothing, or leave content at the mover
    ``most``      prompts of one decode process that are computed or wait; more are refused
    ``room``      bytes of content that are computed or wait for one decode process; a prompt that would need more is
                  refused, unless there is no other
    """

    def __init__(
        self,
        engine: Engine,
        over: str | Transport = "tcp://127.0.0.1:0",
        *,
        keys: KeyFile = None,
        mover: Mover | None = None,
        patience: float = 30.0,
        most: int = 256,
        room: int = 4 << 30,
    ) -> None:
        if not patience > 0:
            raise InputError(f"patience is a number of seconds above 0, got {patience!r}")
        super().__init__(engine)
        identity_of(engine)
        self._transport = open_transport(over, "server", keys)
        self._mover, self._patience, self._most, self._room = mover, patience, most, room
        self._peers: dict[bytes, DecodePeer] = {}
        self._running = True
        self._retired = False
        self._idle = False
        self._busy_sent_at = 0.0
        self.served = self.refused = self.content = 0
        """Prompts whose content was made, questions that were refused, and bytes of that content."""

    @property
    def address(self) -> str:
        """Where decode processes find this one."""
        return self._transport.address

    @property
    def prompts(self) -> int:
        """How many prompts are computed now, or wait."""
        return sum(len(peer.asked) for peer in self._peers.values())

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait, those included whose content is not there yet."""
        running, waiting = self.engine.load
        unread = sum(len({*peer.owed, *peer.unread} - peer.asked.keys()) for peer in self._peers.values())
        return running, waiting + unread

    def figures(self) -> list[Figure]:
        """Return the engine's figures, and those of the questions of decode processes."""
        return [
            *self.engine.figures(),
            figure_of("served", "prompts that were computed for decode processes", self.served),
            figure_of("refused", "questions of decode processes that were refused", self.refused),
            figure_of("content_bytes", "bytes of what was computed for decode processes", self.content),
            figure_of("asking", "decode processes that want something now", len(self._peers), gauge=True),
        ]

    def retire(self) -> None:
        """Refuse further questions. Compute and send what was asked before."""
        self._retired = True

    def run(self) -> None:
        try:
            while self._running:
                self.step()
        finally:
            self.close()

    def step(self) -> bool:
        """Serve once. If there is nothing to do, wait for messages for a moment. True: who listens has never done."""
        self._idle = not self.serve_once(IDLE_SECONDS if self._idle else 0.0)
        if self._idle:
            self.engine.step()  # which tells its observers that nothing has happened
            self.engine.cache.poll()
        return True

    def serve_once(self, seconds: float = 0.0) -> bool:
        """Take messages, run a step, send complete answers. False: there was nothing to do.

        ``seconds``: how long to wait for messages if there is none.
        """
        messages = self._transport.receive(seconds)
        for message in messages:
            try:
                self._handle(message)
            except PeerGone as error:
                self._drop_peer(message.peer, str(error))
        busy = self.engine.step() if any(self.engine.load) else False
        for peer in list(self._peers.values()):
            try:
                self._serve_peer(peer)
            except PeerGone as error:
                self._drop_peer(peer.name, str(error))
        self._inform_peers()
        return busy or bool(messages)

    # ------------------------------------------------------------ messages
    def _handle(self, message: PeerMessage) -> None:
        name, kind, number = message.peer, message.kind, message.number
        if kind == HELLO:
            self._transport.send(name, HELLO, 0, [greeting(self.engine)])
        elif kind == ASK:
            peer = self._peers.setdefault(name, DecodePeer(name))
            try:
                self._ask(peer, number, message.frames)
            except REFUSABLE as error:
                self._refuse(peer, number, str(error))
        elif kind in (DROP, FETCHED) and (known := self._peers.get(name)) is not None:
            self._drop(known, number)

    def _ask(self, peer: DecodePeer, number: int, frames: Sequence[memoryview]) -> None:
        owed = peer.owed
        if number in owed:
            raise InputError("this number is in use")
        peer.last = max(peer.last, number)
        if self._retired:
            raise InputError("this prefill process ends")
        if len(owed) >= self._most or self.prompts >= MOST_PROMPTS:
            raise InputError("too many prompts are asked for")
        question = decode_question(self.engine, frames)
        size = content_size(self.engine.cache, question.have, len(question.request.tokens))
        if owed and peer.content_bytes + size > self._room:
            raise InputError("too much content waits for this decode process already")
        answer = self.engine.add(question.request)
        peer.asked[number] = OwedPrompt(answer, question, question_digest(frames), size)

    def _refuse(self, peer: DecodePeer, number: int, why: str) -> None:
        """Refuse a prompt. Of a flood of refusals some are left out; the list of owed prompts replaces them then."""
        self.refused += 1
        if len(peer.refused) < self._most:
            peer.refused[number] = why
        else:
            peer.uninformed = True

    def _drop(self, peer: DecodePeer, number: int) -> None:
        """Forget a prompt that is not wanted any more, or whose content has been fetched."""
        peer.refused.pop(number, None)
        peer.unread.pop(number, None)
        if number in peer.asked:
            self.engine.abort(peer.asked.pop(number).answer)
        if number in peer.offered:
            self._release(peer, number)
        elif any(each[1] == number for each in peer.outgoing):
            peer.outgoing = deque(each for each in peer.outgoing if each[1] != number)

    # ------------------------------------------------------------ answers
    def _serve_peer(self, peer: DecodePeer) -> None:
        """Send complete content, and forget a decode process that wants nothing more."""
        for number in [number for number, asked in peer.asked.items() if asked.answer.done]:
            asked = peer.asked.pop(number)
            if asked.answer.handed is None:
                self._refuse(peer, number, f"{asked.answer.reason}: {asked.answer.error}")
            elif asked.question.identity != identity_of(self.engine):  # what waits is computed under the new identity
                self._refuse(peer, number, "the model's weights or adapters have changed meanwhile")
            else:
                self._answer(peer, number, asked)
        self._push(peer)
        now = time.monotonic()
        if peer.stuck is not None and now - peer.stuck > self._patience:
            raise PeerGone(f"it has taken nothing for {self._patience:g} s")
        for number in [number for number, (_, ends) in peer.offered.items() if now > ends]:
            self._release(peer, number)
        for number in [number for number, ends in peer.unread.items() if now > ends]:
            del peer.unread[number]
        if not (peer.owed or peer.refused or peer.uninformed or peer.unread):
            self._peers.pop(peer.name, None)

    def _answer(self, peer: DecodePeer, number: int, asked: OwedPrompt) -> None:
        answer, question = asked.answer, asked.question
        assert answer.handed is not None
        logprob = answer.logprobs[0] if answer.logprobs else 0.0
        handed = attrs.evolve(answer.handed, logprob=logprob, hit=answer.hit)
        request = question.request
        keys = ContentKeys(self.engine.cache, question.identity, request.namespace, request.tokens)
        offer = None
        if self._mover is not None and question.mover == self._mover.name and handed.size:
            offer = self._mover.offer(handed.size)
        content = memoryview(bytearray(handed.size)) if offer is None else offer.memory
        headers = pack_content(handed, keys, content, question.checksum)
        ticket = b"" if offer is None else offer.ticket
        self.served += 1
        self.content += handed.size
        peer.outgoing.append((ANSWER, number, [encode_head(handed, asked.digest, ticket), headers]))
        if offer is not None:
            peer.offered[number] = ticket, time.monotonic() + self._patience
            return
        for frames in parts_of(content):
            peer.outgoing.append((PART, number, frames))

    def _push(self, peer: DecodePeer) -> None:
        """Send what the decode process takes now, and not so much that the engine's next step waits for it."""
        for _ in range(MOST_AT_ONCE):
            if not (peer.refused or peer.uninformed or peer.outgoing):
                break
            if not self._send_next(peer):
                peer.stuck = time.monotonic() if peer.stuck is None else peer.stuck
                break
            peer.stuck = None

    def _send_next(self, peer: DecodePeer) -> bool:
        """Send one message, content last. False: the decode process takes nothing now."""
        if peer.refused:
            number, why = next(iter(peer.refused.items()))
            taken = self._transport.send(peer.name, REFUSED, number, [why.encode(errors="replace")[:LONGEST_REFUSAL]])
            if taken:
                del peer.refused[number]
        elif peer.uninformed:
            taken = self._transport.send(peer.name, BUSY, 0, [b"".join(map(OWED.pack, (peer.last, *peer.owed)))])
            peer.uninformed = not taken
        else:
            taken = self._transport.send(peer.name, *peer.outgoing[0])
            if taken:
                _, number, _ = peer.outgoing.popleft()
                peer.unread[number] = time.monotonic() + self._patience
        return taken

    def _inform_peers(self) -> None:
        now = time.monotonic()
        if now - self._busy_sent_at < BUSY_SECONDS:
            return
        self._busy_sent_at = now
        for peer in self._peers.values():
            peer.uninformed = True

    def _release(self, peer: DecodePeer, number: int) -> None:
        ticket, _ = peer.offered.pop(number)
        if self._mover is not None:
            self._mover.release(ticket)

    def _drop_peer(self, name: bytes, why: str) -> None:
        """Abort the prompts of a decode process, and forget it."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        log.info("a decode process is gone (%s): %d prompts of it are dropped", why, len(peer.asked))
        for asked in peer.asked.values():
            self.engine.abort(asked.answer)
        for number in list(peer.offered):
            self._release(peer, number)

    def stop(self) -> None:
        """Make ``run`` return; may be called from another thread."""
        self._running = False

    def drop_peers(self) -> None:
        """Abort the prompts of all decode processes, which compute them themselves."""
        for name in list(self._peers):
            self._drop_peer(name, "it was told to go")

    def close(self) -> None:
        self.drop_peers()
        self._transport.close()
        self.engine.close()
