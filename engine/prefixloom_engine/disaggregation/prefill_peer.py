"""One prefill process, as a decode engine knows it: whether it may be asked, and what it owes.

It is never waited for. ``receive`` reads what has come, and returns the prompts that are settled: their content is
here, or this process will not bring it. What becomes of those, the decode engine decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Literal

import attrs

from prefixloom import InputError

from ..contract.handover import Handover
from ..contract.requests import Answer, Request
from ..serving.engine import Engine
from .arrival import Arrival
from .messages import (
    Question,
    decode_head,
    disagreement,
    encode_question,
    greeting,
    identity_of,
    question_digest,
)
from .records import ContentKeys, expect_content
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
REFUSED_HERE = (InputError, MoveFailed, ValueError)
"""What content raises that cannot be used."""

PeerState = Literal["away", "greeted", "agreed", "other", "silent"]
"""What is known of the prefill process: nobody is connected; it was greeted and has not answered; it computes the same;
it computes something else; it owes prompts and says nothing. It is asked only in the state "agreed". In the last
two it is greeted again and again: weights of either process may change, and who hangs may go on."""


@attrs.define(eq=False)
class AwaitedPrompt:
    """A prompt that prefill processes are asked for.

    ``answer``  what the client has of it
    ``since``   when it was asked for at first
    ``have``    how many of its tokens were here when it was asked for
    ``size``    the most bytes of content that it brings
    ``asked``   the names of the processes that were asked
    """

    answer: Answer
    since: float
    have: int = 0
    size: int = 0
    asked: set[str] = attrs.field(factory=set)

    @property
    def request(self) -> Request:
        return self.answer.request

    @property
    def ahead(self) -> int:
        """How many of its tokens are to be computed."""
        return len(self.request.tokens) - self.have


@attrs.define(eq=False)
class AskedQuestion:
    """A question that the process has not answered to its end. ``digest``: of the question."""

    prompt: AwaitedPrompt
    question: Question
    digest: str
    arrival: Arrival | None = None


@attrs.frozen(eq=False)
class SettledPrompt:
    """A prompt that this process owes no more.

    ``handover``  what it has computed, of so many bytes (``size``); None: it brings nothing
    ``lost``      whether it owed the prompt, and did not send it
    """

    prompt: AwaitedPrompt
    handover: Handover | None = None
    size: int = 0
    lost: bool = False


class PrefillPeer:
    """A prefill process at the other end of ``transport``. ``name`` is its address."""

    def __init__(
        self, engine: Engine, transport: Transport, mover: Mover | None, patience: float, longest: float
    ) -> None:
        self.name = transport.address
        self.state: PeerState = "away"
        self.differs = ""
        """What it computes otherwise, in a sentence."""
        self._engine, self._transport, self._mover = engine, transport, mover
        self._patience, self._longest = patience, longest
        self._connected = False
        self._greet_at = 0.0
        self._heard = time.monotonic()
        self._owed: dict[int, AskedQuestion] = {}
        self._questions = 0

    # ------------------------------------------------------------ what it owes
    @property
    def owed(self) -> list[AwaitedPrompt]:
        """The prompts that are awaited from it."""
        return [each.prompt for each in self._owed.values()]

    @property
    def tokens_ahead(self) -> int:
        """How many tokens of these it still has to compute, as far as this side knows."""
        return sum(each.prompt.ahead for each in self._owed.values() if each.arrival is None)

    def ask(self, prompt: AwaitedPrompt) -> bool:
        """Ask for a prompt. False: the process takes nothing now."""
        mover = self._mover.name if self._mover is not None else ""
        question = Question(prompt.request, prompt.have, identity_of(self._engine), mover)
        frames = encode_question(question, self._engine.cache)
        self._questions += 1
        number = self._questions
        if not self._owed:
            self._heard = time.monotonic()
        self._owed[number] = AskedQuestion(prompt, question, question_digest(frames))
        if not self._send(ASK, number, frames):
            del self._owed[number]
            return False
        prompt.asked.add(self.name)
        return True

    def drop(self, answer: Answer) -> bool:
        """Drop a prompt that is not wanted any more. False: it is not awaited from this process."""
        found = [number for number, each in self._owed.items() if each.prompt.answer is answer]
        for number in found:
            self._forget(number)
            self._send(DROP, number)
        return bool(found)

    def close(self) -> list[AwaitedPrompt]:
        """Disconnect, and return the prompts that are still awaited."""
        left = self.owed
        try:
            for number in list(self._owed):
                self._forget(number)
        finally:
            self._transport.close()
        return left

    def _forget(self, number: int) -> AwaitedPrompt:
        asked = self._owed.pop(number)
        if asked.arrival is not None:
            asked.arrival.close()
        return asked.prompt

    def _send(self, kind: bytes, number: int, frames: Iterable[bytes] = ()) -> bool:
        try:
            return self._transport.send(PREFILL, kind, number, list(frames))
        except PeerGone:
            return False

    # ------------------------------------------------------------ what it says
    def receive(self, seconds: float = 0.0) -> list[SettledPrompt]:
        """Read messages, and return the prompts that they settle. If there is none, wait so many seconds."""
        settled: list[SettledPrompt] = []
        for message in self._transport.receive(seconds):
            settled += self._handle(message)
        now = time.monotonic()
        if self._connected and self.state in ("greeted", "silent", "other") and now >= self._greet_at:
            self._greet_at = now + GREET_SECONDS
            self._send(HELLO, 0, [greeting(self._engine)])
        if self._owed:
            settled += self._look_at_clock(now)
        return settled

    def _look_at_clock(self, now: float) -> list[SettledPrompt]:
        """Settle prompts whose content a mover has brought meanwhile, and prompts that are awaited for too long."""
        settled: list[SettledPrompt] = []
        for number, asked in list(self._owed.items()):
            if asked.arrival is not None and asked.arrival.moved:
                settled += self._finish(number, asked)
        if self._owed and now - self._heard > self._patience:
            self.state, self._greet_at = "silent", 0.0
            settled += self._give_up_all(f"it has said nothing for {self._patience:g} s")
        for number, asked in list(self._owed.items()):
            if now - asked.prompt.since > self._longest:
                settled.append(self._give_up(number, f"it has not come in {self._longest:g} s", lost=True))
        return settled

    def _handle(self, message: PeerMessage) -> list[SettledPrompt]:
        kind, number, frames = message.kind, message.number, message.frames
        self._heard = time.monotonic()
        if kind == CAME:
            self._connected, self.state, self._greet_at = True, "greeted", 0.0
        elif kind == GONE:
            connected, self._connected, self.state = self._connected, False, "away"
            return self._give_up_all("its connection has ended") if connected else []
        elif kind == HELLO:
            return self._learn(frames)
        elif kind == BUSY:
            return self._give_up_forgotten(frames)
        elif (asked := self._owed.get(number)) is not None:
            try:
                return self._take(kind, number, frames, asked)
            except REFUSED_HERE as error:
                return [self._give_up(number, f"what came of it cannot be used ({error})")]
        return []

    def _learn(self, frames: Iterable[memoryview]) -> list[SettledPrompt]:
        """Learn from the greeting whether the prefill process computes the same. If not, give up its prompts."""
        said = next(iter(frames), memoryview(b""))
        before, self.differs = self.differs, disagreement(self._engine, said)
        if not self.differs:
            self.state = "agreed"
            return []
        if self.state == "other" and before == self.differs:
            return []
        self.state = "other"
        log.error("the prefill process at %s %s: it is not asked", self.name, self.differs)
        return self._give_up_all("it computes something else")

    def _give_up_forgotten(self, frames: Iterable[memoryview]) -> list[SettledPrompt]:
        """Give up what the prefill process does not owe any more.

        ``frames`` say which question of this process came last, and which prompts are still owed.
        """
        told = b"".join(frames)
        if not told or len(told) % OWED.size:
            return []
        last, *owed = (number for (number,) in OWED.iter_unpack(told))
        forgotten = [number for number in self._owed.keys() - owed if number <= last]
        return [self._give_up(number, "it does not know of it any more", lost=True) for number in forgotten]

    def _take(
        self, kind: bytes, number: int, frames: Iterable[memoryview], asked: AskedQuestion
    ) -> list[SettledPrompt]:
        """Take what the prefill process says of a prompt."""
        frames = list(frames)
        if kind == REFUSED:
            told = bytes(frames[0][:400]).decode(errors="replace") if frames else ""
            return [self._give_up(number, f"it was refused: {told!r}")]
        if kind == ANSWER and asked.arrival is None and len(frames) == 2:
            question, cache = asked.question, self._engine.cache
            head = decode_head(frames[0], question, asked.digest, cache, self._engine.model.vocabulary)
            request = question.request
            keys = ContentKeys(cache, question.identity, request.namespace, request.tokens)
            expected = expect_content(frames[1], head.have, head.boundary, head.end, keys)
            asked.arrival = Arrival(head, expected, self._mover)
        elif kind == PART and asked.arrival is not None:
            asked.arrival.take_part(frames)
        else:
            raise InputError(f"a message of kind {kind!r} with {len(frames)} parts does not belong here")
        return self._finish(number, asked)

    def _finish(self, number: int, asked: AskedQuestion) -> list[SettledPrompt]:
        """Hand on the handover of a prompt, once all of its content is here."""
        assert asked.arrival is not None
        try:
            handover = asked.arrival.handover()
            if handover is None:
                return []
            if asked.question.identity != identity_of(self._engine):
                raise InputError("the model's weights or adapters have changed meanwhile")
        except REFUSED_HERE as error:
            return [self._give_up(number, f"what came of it cannot be used ({error})")]
        self._send(FETCHED, number)
        return [SettledPrompt(self._forget(number), handover, asked.arrival.expected.size)]

    # ------------------------------------------------------------ what it does not bring
    def _give_up(self, number: int, why: str, *, lost: bool = False) -> SettledPrompt:
        """Await a prompt no more, and tell the prefill process so."""
        log.warning("a prompt does not come from the prefill process at %s: %s", self.name, why)
        self._send(DROP, number)
        return SettledPrompt(self._forget(number), lost=lost)

    def _give_up_all(self, why: str) -> list[SettledPrompt]:
        numbers = list(self._owed)
        log.warning("the prefill process at %s is gone (%s): it owed %d prompts", self.name, why, len(numbers))
        for number in numbers:
            self._send(DROP, number)
        return [SettledPrompt(self._forget(number), lost=True) for number in numbers]
