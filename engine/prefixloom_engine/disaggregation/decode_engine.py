"""The decode process: clients ask it, and it has long prompts computed by prefill processes.

It tells a prefill process how much of a prompt it has, and receives the rest. It never waits for a prefill process:
whoever is gone or silent is not asked, and what one does not bring is asked of another, or computed here, with a line
in the log. Slots are reserved only when content has arrived, so a lost prefill process leaves none behind.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from prefixloom import Figure, InputError, ProtocolError

from ..contract.requests import Answer, Reason, Request
from ..serving.driving import AnswerStream, OpenStreams, generate
from ..serving.engine import Engine
from ..serving.interrupts import defer_interrupts
from .addresses import KeyFile, open_transport
from .around import AroundEngine, figure_of
from .messages import can_be_asked, identity_of
from .prefill_peer import AwaitedPrompt, PeerState, PrefillPeer, SettledPrompt
from .records import content_size
from .transport import Mover, Transport

log = logging.getLogger("prefixloom.engine")
IDLE_SECONDS = 0.02
"""How long a step waits for messages when there is nothing to compute, and prompts are awaited."""


class DecodeEngine(AroundEngine):
    """An engine that has prompts computed by prefill processes, and computes them itself where there are none.

    ``over``      the address of a prefill process, or a transport; or a list of these
    ``keys``      for addresses: the file that ``write_keys`` made
    ``mover``     fetches content past the transport, if the prefill process has a mover of that name as well
    ``least``     a prompt that lacks fewer tokens than this is computed here
    ``patience``  how many seconds a prefill process that owes prompts may be silent before it is asked no more; one
                  step of it must not take longer
    ``longest``   how many seconds a prompt may be awaited, whatever prefill processes say
    ``room``      bytes of content that are awaited, or have come for prompts that are not admitted yet; a prompt that
                  would need more is computed here

    A request may name the process that is to compute its prompt (``Request.prefill``). Else it is the one that owes the
    fewest tokens.

    ``handed_over``, ``lost``, ``received``: prompts that arrived, prompts that a prefill process owed and did not send,
    and bytes of content. ``computed_here``: prompts that should have been computed elsewhere, and were not.
    """

    def __init__(
        self,
        engine: Engine,
        over: str | Transport | Sequence[str | Transport],
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
        super().__init__(engine)
        identity_of(engine)
        self._keys, self._mover, self._least, self._room = keys, mover, least, room
        self._patience, self._longest = patience, longest
        self._turn = 0
        self._alone = False
        self._arrived: list[tuple[Answer, int]] = []
        self._streams = OpenStreams()
        self._closed = False
        self.handed_over = self.lost = self.received = self.computed_here = 0
        self._peers = self._opened([over] if isinstance(over, str) or not isinstance(over, Sequence) else over)

    # ------------------------------------------------------------ prefill processes
    def _opened(self, over: Iterable[str | Transport]) -> list[PrefillPeer]:
        """Connect to all, or to none if one cannot be."""
        made: list[PrefillPeer] = []
        try:
            for each in dict.fromkeys(over):
                transport = open_transport(each, "client", self._keys)
                made.append(PrefillPeer(self.engine, transport, self._mover, self._patience, self._longest))
        except BaseException:
            for peer in made:
                peer.close()
            raise
        return made

    def set_peers(self, addresses: Iterable[str]) -> None:
        """Ask only the prefill processes at these addresses from now on. Prompts that others owe are placed anew."""
        wanted = dict.fromkeys(addresses)
        with defer_interrupts():
            known = {peer.name for peer in self._peers}
            fresh = self._opened(name for name in wanted if name not in known)
            gone = [peer for peer in self._peers if peer.name not in wanted]
            self._peers = [peer for peer in self._peers if peer.name in wanted] + fresh
            for peer in gone:
                for prompt in peer.close():
                    self._place(prompt)

    @property
    def peers(self) -> Mapping[str, PeerState]:
        """By address, what is known of each prefill process."""
        return {peer.name: peer.state for peer in self._peers}

    @property
    def awaited(self) -> int:
        """How many prompts are awaited from prefill processes."""
        return sum(len(peer.owed) for peer in self._peers)

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait, for the engine or for a prefill process."""
        running, waiting = self.engine.load
        return running, waiting + self.awaited

    def figures(self) -> list[Figure]:
        """Return the engine's figures, and those of prompts that were to be computed elsewhere."""
        states = Counter(peer.state for peer in self._peers)
        return [
            *self.engine.figures(),
            figure_of("handed_over", "prompts that prefill processes have computed", self.handed_over),
            figure_of("lost", "prompts that a prefill process owed and did not send", self.lost),
            figure_of("computed_here", "prompts that no prefill process has computed", self.computed_here),
            figure_of("received_bytes", "bytes of content that prefill processes have sent", self.received),
            figure_of("awaited", "prompts that are awaited from prefill processes", self.awaited, gauge=True),
            Figure(
                "prefixloom:prefill_peers", "gauge", "prefill processes by what is known of them",
                tuple(((("state", state),), float(states[state])) for state in get_args(PeerState)),
            ),
        ]  # fmt: skip

    # ------------------------------------------------------------ requests
    def add(self, request: Request) -> Answer:
        """Queue a request. One is computed here if it carries images, or wants likely tokens or a handover."""
        answer = Answer(request)
        try:
            with defer_interrupts():
                self.engine.check(request)
                self._receive(0.0)
                self._place(AwaitedPrompt(answer, time.monotonic()))
        except KeyboardInterrupt:  # the caller never gets the answer, and so could not abort it
            self.abort(answer)
            raise
        return answer

    def _place(self, prompt: AwaitedPrompt) -> None:
        """Ask a prefill process that was not asked for this prompt yet. If there is none, compute it here."""
        request = prompt.request
        prompt.have = self._cached(request)
        if not can_be_asked(request) or prompt.ahead < self._least:
            self.engine.add(request, answer=prompt.answer)
        elif not self._asked(prompt):
            self.computed_here += 1
            self.engine.add(request, answer=prompt.answer)

    def _cached(self, request: Request) -> int:
        """Return how many tokens of a prompt are on the device, or can be restored by a tier below it."""
        cache, namespace = self.engine.cache, self.engine.namespace(request.namespace)
        if cache.composition.tier is None:
            return cache.peek(request.tokens, namespace=namespace, leave=1)
        return cache.match(request.tokens, namespace=namespace, leave=1).restorable

    def _asked(self, prompt: AwaitedPrompt) -> bool:
        """Ask a prefill process for a prompt if one can be asked and there is room. Return whether one was asked."""
        agreed = [peer for peer in self._peers if peer.state == "agreed"]
        self._tell_alone(not agreed)
        if not agreed:
            return False
        prompt.size = content_size(self.engine.cache, prompt.have, len(prompt.request.tokens))
        if prompt.size + self._awaited_bytes() > self._room:
            return False
        wanted, count = prompt.request.prefill, len(agreed)
        self._turn += 1
        turns = {peer.name: (at - self._turn) % count for at, peer in enumerate(agreed)}
        ordered = sorted(agreed, key=lambda peer: (peer.name != wanted, peer.tokens_ahead, turns[peer.name]))
        return any(peer.ask(prompt) for peer in ordered if peer.name not in prompt.asked)

    def _tell_alone(self, alone: bool) -> None:
        """Log once that no prefill process is asked."""
        if alone and not self._alone:
            known = ", ".join(f"{name} ({state})" for name, state in self.peers.items()) or "none is known"
            log.warning("no prefill process can be asked: %s: prompts are computed here", known)
        self._alone = alone

    def _awaited_bytes(self) -> int:
        """Return the bytes of content that may come, or that wait here until their prompts are admitted."""
        self._arrived = [each for each in self._arrived if not each[0].admitted_at and not each[0].done]
        awaited = sum(prompt.size for peer in self._peers for prompt in peer.owed)
        return awaited + sum(size for _, size in self._arrived)

    def abort(self, answer: Answer) -> None:
        """End a request at any time, also while its prompt is awaited."""
        with defer_interrupts():
            if not self._end_awaited(answer, "aborted"):
                self.engine.abort(answer)

    def finish(self, answer: Answer) -> None:
        """End a request at any time as if it had met a stop."""
        with defer_interrupts():
            if not self._end_awaited(answer, "stop"):
                self.engine.finish(answer)

    def _end_awaited(self, answer: Answer, reason: Reason) -> bool:
        """End a request whose prompt is awaited. False: it is not."""
        if not any(peer.drop(answer) for peer in self._peers):
            return False
        answer.reason = reason
        return True

    # ------------------------------------------------------------ steps
    def step(self) -> bool:
        """Read messages, and run a step. False: there was nothing to do and nothing is awaited."""
        with defer_interrupts():
            self._receive(0.0)
            for answer in self._streams.dropped():
                self.abort(answer)
            busy = self.engine.step()
            if not busy and self.awaited:
                self.engine.cache.poll()
                self._receive(IDLE_SECONDS)
            return busy or bool(self.awaited)

    def _receive(self, seconds: float) -> None:
        """Read the messages of all prefill processes. If there is none, wait for processes that owe something."""
        if self._closed:
            raise ProtocolError("this decode engine is closed")
        waited_for = [peer for peer in self._peers if peer.owed or not seconds]
        for peer in waited_for:
            for settled in peer.receive(seconds / len(waited_for)):
                self._settle(settled)

    def _settle(self, settled: SettledPrompt) -> None:
        """Continue a prompt from its handover, or have the prompt computed elsewhere or here."""
        prompt, handover = settled.prompt, settled.handover
        self.lost += settled.lost
        if handover is None:
            self._place(prompt)
            return
        self.handed_over += 1
        self.received += settled.size
        self.engine.add(prompt.request, handover, answer=prompt.answer)
        self._arrived.append((prompt.answer, settled.size))

    def generate(self, prompts: Iterable[Request | Iterable[int]], max_tokens: int = 32) -> list[Answer]:
        """Answer all prompts and return the answers in their order, as ``Engine.generate`` does."""
        return generate(self, prompts, max_tokens)

    def stream(self, prompt: Request | Iterable[int], max_tokens: int = 32) -> AnswerStream:
        """Return the tokens of one answer as they come, as ``Engine.stream`` does."""
        request = prompt if isinstance(prompt, Request) else Request(prompt, max_tokens)
        return self._streams.begin(self, request)

    def connect(self, seconds: float = 10.0) -> bool:
        """Wait until all prefill processes have greeted back: for who would rather wait than compute the first prompts.

        False: one has not, in so many seconds. InputError: one computes something else than this one.
        """
        until = time.monotonic() + seconds
        self._receive(0.0)
        while (late := self._not_agreed()) and time.monotonic() < until:
            for settled in late[0].receive(IDLE_SECONDS):
                self._settle(settled)
        return not self._not_agreed()

    def _not_agreed(self) -> list[PrefillPeer]:
        for peer in self._peers:
            if peer.state == "other":
                raise InputError(f"the prefill process at {peer.name} {peer.differs}")
        return [peer for peer in self._peers if peer.state != "agreed"]

    def close(self) -> None:
        """Abort all prompts, and disconnect. Whoever made a mover closes the mover afterwards."""
        self._closed = True
        try:
            for peer in self._peers:
                for prompt in peer.close():
                    prompt.answer.reason = "aborted"
        finally:
            self._streams.clear()
            self.engine.close()

    def __enter__(self) -> DecodeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
