"""The decode process: clients ask it, and it has long prompts computed by a prefill process.

It tells the prefill process how much of a prompt it has, and receives the rest. It never waits for the prefill process:
until the two have greeted each other, and whenever the other is gone or silent, prompts are computed here, with a line
in the log. Slots are reserved only when content has arrived, so a lost prefill process leaves none behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Literal

import attrs

from prefixloom import InputError, ProtocolError

from ..contract.requests import Answer, Request
from ..serving.engine import Engine
from ..serving.interrupts import defer_interrupts
from .addresses import KeyFile, open_transport
from .arrival import Arrival
from .messages import (
    Question,
    can_be_asked,
    decode_head,
    disagreement,
    encode_question,
    greeting,
    identity_of,
    question_digest,
)
from .records import ContentKeys, content_size, expect_content
from .transport import (
    ANSWER,
    ASK,
    BUSY,
    CAME,
    DROP,
    FETCHED,
    GONE,
    HELLO,
    OWED,
    PART,
    PREFILL,
    REFUSED,
    MoveFailed,
    Mover,
    PeerGone,
    PeerMessage,
    Transport,
)

log = logging.getLogger("prefixloom.engine")
GREET_SECONDS = 2.0
"""After how long without an answer the prefill process is greeted again."""
IDLE_SECONDS = 0.02
"""How long a step waits for messages when there is nothing to compute, and prompts are awaited."""

REFUSED_HERE = (InputError, MoveFailed, ValueError)
"""What content raises that cannot be used."""

PeerState = Literal["away", "greeted", "agreed", "other", "silent"]
"""What is known of the prefill process: nobody is connected; it was greeted and has not answered; it computes the same;
it computes something else; it owes prompts and says nothing. It is asked only in the state "agreed". In the last
two it is greeted again and again: weights of either process may change, and who hangs may go on."""


@attrs.define(eq=False)
class Pending:
    """A request of a ``DecodeEngine``.

    ``answer``  None while the prefill process computes the prompt
    """

    request: Request
    answer: Answer | None = None
    dropped: bool = False

    @property
    def done(self) -> bool:
        return self.dropped or (self.answer is not None and self.answer.done)


@attrs.define(eq=False)
class AskedPrompt:
    """A prompt that the prefill process was asked for at ``since``, and what has come of it.

    ``digest``: of the question; ``size``: the most bytes of content that it brings
    """

    pending: Pending
    question: Question
    digest: str
    size: int
    since: float
    arrival: Arrival | None = None


class DecodeEngine:
    """An engine that has prompts computed by a prefill process, and computes them itself where there is none.

    ``over``      the address of the prefill process, or a transport
    ``keys``      for an address: the file that ``write_keys`` made
    ``mover``     fetches content past the transport, if the prefill process has a mover of that name as well
    ``least``     a prompt that lacks fewer tokens than this is computed here
    ``patience``  how many seconds a prefill process that owes prompts may be silent before it is asked no more; one
                  step of it must not take longer
    ``longest``   how many seconds a prompt may be awaited, whatever the prefill process says
    ``room``      bytes of content that are awaited, or have come for prompts that are not admitted yet; a prompt that
                  would need more is computed here

    ``handed_over``, ``lost``, ``received``: prompts that arrived, prompts that a prefill process owed and did not send,
    and bytes of content.
    """

    def __init__(
        self,
        engine: Engine,
        over: str | Transport,
        *,
        keys: KeyFile = None,
        mover: Mover | None = None,
        least: int = 64,
        patience: float = 30.0,
        longest: float = 300.0,
        room: int = 4 << 30,
    ) -> None:
        for name, whole in (("least", least), ("room", room)):
            if whole.__class__ is not int or whole < 0:
                raise InputError(f"{name} is a whole number from 0 up, got {whole!r}")
        for name, seconds in (("patience", patience), ("longest", longest)):
            if not seconds > 0:
                raise InputError(f"{name} is a number of seconds above 0, got {seconds!r}")
        self.engine = engine
        identity_of(engine)
        self._transport = open_transport(over, "decode", keys)
        self._mover, self._least, self._room = mover, least, room
        self._patience, self._longest = patience, longest
        self._state: PeerState = "away"
        self._connected = False
        self._alone = False
        self._differs = ""
        self._greet_at = 0.0
        self._heard = time.monotonic()
        self._asked: dict[int, AskedPrompt] = {}
        self._arrived: list[tuple[Answer, int]] = []
        self._questions = 0
        self._closed = False
        self.handed_over = self.lost = self.received = 0

    # ------------------------------------------------------------ requests
    def add(self, request: Request) -> Pending:
        """Queue a request. One is computed here if it carries images, or wants likely tokens or a handover."""
        pending = Pending(request)
        try:
            with defer_interrupts():
                self._add(pending)
        except KeyboardInterrupt:
            self.abort(pending)
            raise
        return pending

    def _add(self, pending: Pending) -> None:
        request = pending.request
        self.engine.check(request)
        self._receive(0.0)
        have = self._cached(request)
        far = can_be_asked(request) and len(request.tokens) - have >= self._least
        if not far or not self._is_asked() or not self._ask(pending, have):
            pending.answer = self.engine.add(request)

    def _cached(self, request: Request) -> int:
        """How many tokens of a prompt are on the device, or can be brought back by a tier below it."""
        cache, namespace = self.engine.cache, self.engine.namespace(request.namespace)
        if cache.composition.tier is None:
            return cache.peek(request.tokens, namespace=namespace, leave=1)
        return cache.match(request.tokens, namespace=namespace, leave=1).restorable

    def _is_asked(self) -> bool:
        """Whether the prefill process is asked now. The log says once that it is not."""
        if self._state == "agreed":
            self._alone = False
        elif not self._alone:
            self._alone = True
            log.warning(
                "no prefill process at %s (%s): prompts are computed here", self._transport.address, self._state
            )
        return self._state == "agreed"

    def _ask(self, pending: Pending, have: int) -> bool:
        size = content_size(self.engine.cache, have, len(pending.request.tokens))
        if size + self._awaited() > self._room:
            return False
        mover = self._mover.name if self._mover is not None else ""
        question = Question(pending.request, have, identity_of(self.engine), mover)
        frames = encode_question(question, self.engine.cache)
        self._questions += 1
        number, now = self._questions, time.monotonic()
        if not self._asked:
            self._heard = now
        self._asked[number] = AskedPrompt(pending, question, question_digest(frames), size, now)
        if not self._send(ASK, number, frames):
            del self._asked[number]
            return False
        return True

    def _awaited(self) -> int:
        """Bytes of content that may come, or that wait here until their prompts are admitted."""
        self._arrived = [each for each in self._arrived if not each[0].admitted_at and not each[0].done]
        return sum(each.size for each in self._asked.values()) + sum(size for _, size in self._arrived)

    def abort(self, pending: Pending) -> None:
        with defer_interrupts():
            self._abort(pending)

    def _abort(self, pending: Pending) -> None:
        pending.dropped = True
        if pending.answer is not None:
            self.engine.abort(pending.answer)
            return
        for number in [number for number, each in self._asked.items() if each.pending is pending]:
            self._forget(number)
            self._send(DROP, number)

    def step(self) -> bool:
        """Read what has arrived, and run a step. False: there was nothing to do and nothing is awaited."""
        with defer_interrupts():
            self._receive(0.0)
            busy = self.engine.step()
            if not busy and self._asked:
                self._receive(IDLE_SECONDS)
            return busy or bool(self._asked)

    def generate(self, prompts: Iterable[Request | Iterable[int]], max_tokens: int = 32) -> list[Answer]:
        """Answer all prompts and return the answers in their order, as ``Engine.generate`` does."""
        requests = [each if isinstance(each, Request) else Request(each, max_tokens) for each in prompts]
        pending: list[Pending] = []
        try:
            with defer_interrupts():
                for request in requests:
                    pending.append(Pending(request))
                    self._add(pending[-1])
            while not all(each.done for each in pending):
                self.step()
        finally:
            with defer_interrupts():
                for each in pending:
                    if not each.done:
                        self._abort(each)
        return [each.answer or Answer(each.request, reason="aborted") for each in pending]

    def connect(self, seconds: float = 10.0) -> bool:
        """Wait until the prefill process has greeted back: for who would rather wait than compute the first prompts.

        False: nobody has, in so many seconds. InputError: it computes something else than this one.
        """
        until = time.monotonic() + seconds
        self._receive(0.0)
        while self._state != "agreed" and time.monotonic() < until:
            self._receive(IDLE_SECONDS)
            if self._state == "other":
                raise InputError(f"the prefill process at {self._transport.address} {self._differs}")
        return self._state == "agreed"

    # ------------------------------------------------------------ the prefill process
    def _send(self, kind: bytes, number: int, frames: Iterable[bytes] = ()) -> bool:
        try:
            return self._transport.send(PREFILL, kind, number, list(frames))
        except PeerGone:
            return False

    def _receive(self, seconds: float) -> None:
        if self._closed:
            raise ProtocolError("this decode engine is closed")
        for message in self._transport.receive(seconds):
            self._handle(message)
        now = time.monotonic()
        if self._connected and self._state in ("greeted", "silent", "other") and now >= self._greet_at:
            self._greet_at = now + GREET_SECONDS
            self._send(HELLO, 0, [greeting(self.engine)])
        for number, asked in list(self._asked.items()):
            if asked.arrival is not None and asked.arrival.moved:
                self._finish(number, asked)
        if self._asked and now - self._heard > self._patience:
            self._state, self._greet_at = "silent", 0.0
            self._compute_all(f"it has said nothing for {self._patience:g} s")
        for number, asked in list(self._asked.items()):
            if now - asked.since <= self._longest:
                break  # the others were asked later
            self.lost += 1
            self._compute_here(number, f"it has not come in {self._longest:g} s")

    def _handle(self, message: PeerMessage) -> None:
        kind, number, frames = message.kind, message.number, message.frames
        self._heard = time.monotonic()
        if kind == CAME:
            self._connected, self._state, self._greet_at = True, "greeted", 0.0
        elif kind == GONE:
            if self._connected:
                self._compute_all("its connection has ended")
            self._connected, self._state = False, "away"
        elif kind == HELLO:
            self._learn(frames)
        elif kind == BUSY:
            self._compute_forgotten(frames)
        elif (asked := self._asked.get(number)) is not None:
            try:
                self._take(kind, number, frames, asked)
            except REFUSED_HERE as error:
                self._compute_here(number, f"what came of it cannot be used ({error})")

    def _learn(self, frames: Iterable[memoryview]) -> None:
        """The prefill process has said what it computes."""
        said = next(iter(frames), memoryview(b""))
        before, self._differs = self._differs, disagreement(self.engine, said)
        if not self._differs:
            self._state = "agreed"
            return
        if self._state == "other" and before == self._differs:
            return
        log.error("the prefill process at %s %s: it is not asked", self._transport.address, self._differs)
        self._compute_all("it computes something else")
        self._state = "other"

    def _compute_forgotten(self, frames: Iterable[memoryview]) -> None:
        """Compute here what the prefill process does not owe any more.

        ``frames`` say which question of this process came last, and which prompts are still owed.
        """
        told = b"".join(frames)
        if not told or len(told) % OWED.size:
            return
        last, *owed = (number for (number,) in OWED.iter_unpack(told))
        for number in self._asked.keys() - owed:
            if number <= last:
                self.lost += 1
                self._compute_here(number, "it does not know of it any more")

    def _take(self, kind: bytes, number: int, frames: Iterable[memoryview], asked: AskedPrompt) -> None:
        """Take what the prefill process says of a prompt."""
        frames = list(frames)
        if kind == REFUSED:
            told = bytes(frames[0][:400]).decode(errors="replace") if frames else ""
            self._compute_here(number, f"it was refused: {told!r}")
        elif kind == ANSWER and asked.arrival is None and len(frames) == 2:
            question, cache = asked.question, self.engine.cache
            head = decode_head(frames[0], question, asked.digest, cache, self.engine.model.vocabulary)
            request = question.request
            keys = ContentKeys(cache, question.identity, request.namespace, request.tokens)
            expected = expect_content(frames[1], head.have, head.boundary, head.end, keys)
            asked.arrival = Arrival(head, expected, self._mover)
            self._finish(number, asked)
        elif kind == PART and asked.arrival is not None:
            asked.arrival.take_part(frames)
            self._finish(number, asked)
        else:
            raise InputError(f"a message of kind {kind!r} with {len(frames)} parts does not belong here")

    def _finish(self, number: int, asked: AskedPrompt) -> None:
        """Go on from what was handed over, once all of it is here."""
        assert asked.arrival is not None
        try:
            handover = asked.arrival.handover()
            if handover is None:
                return
            if asked.question.identity != identity_of(self.engine):
                raise InputError("the model's weights or adapters have changed meanwhile")
        except REFUSED_HERE as error:
            self._compute_here(number, f"what came of it cannot be used ({error})")
            return
        if asked.arrival.moved:
            self._send(FETCHED, number)
        self._forget(number)
        self.handed_over += 1
        self.received += asked.arrival.expected.size
        asked.pending.answer = self.engine.add(asked.pending.request, handover)
        self._arrived.append((asked.pending.answer, asked.arrival.expected.size))

    def _forget(self, number: int) -> AskedPrompt:
        asked = self._asked.pop(number)
        if asked.arrival is not None:
            asked.arrival.close()
        return asked

    def _compute_here(self, number: int, why: str) -> None:
        """Compute a prompt that was asked for, and tell the prefill process that it is not wanted any more."""
        pending = self._forget(number).pending
        log.warning("a prompt is computed here, and not by the prefill process: %s", why)
        self._send(DROP, number)
        pending.answer = self.engine.add(pending.request)

    def _compute_all(self, why: str) -> None:
        """Compute here all that the prefill process owes."""
        numbers = list(self._asked)
        log.warning("the prefill process is gone (%s): %d prompts are computed here", why, len(numbers))
        self.lost += len(numbers)
        for number in numbers:
            self._send(DROP, number)
            pending = self._forget(number).pending
            pending.answer = self.engine.add(pending.request)

    def close(self) -> None:
        """Abort what still runs, and disconnect. A mover is closed afterwards, by whoever made it."""
        self._closed = True
        try:
            for number in list(self._asked):
                self._forget(number).pending.dropped = True
        finally:
            self._transport.close()
            self.engine.close()

    def __enter__(self) -> DecodeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
