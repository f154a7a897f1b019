"""Driving: what whoever drives an engine may ask of it, whether or not other processes compute for it.

``DrivenEngine`` is the contract. A server, a loop of one's own, ``generate`` and ``AnswerStream`` drive all engines by
it in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prefixloom import Cache, Figure, InputError

from ..contract.model import Model
from ..contract.requests import Answer, Request
from .interrupts import defer_interrupts
from .scheduler import Counts


class StepsAnswers(Protocol):
    """What answers need: requests are added, steps are run, and a request can be ended."""

    def add(self, request: Request) -> Answer:
        """Queue a request. InputError: it can never be answered."""

    def abort(self, answer: Answer) -> None:
        """End a request. ``answer.tokens`` keeps what it has so far."""

    def step(self) -> bool:
        """Do what is to be done next. False: there was nothing to do, and nothing is awaited."""


class DrivenEngine(StepsAnswers, Protocol):
    """An engine as a server drives it. One thread makes it and calls it."""

    @property
    def model(self) -> Model: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def counts(self) -> Counts:
        """What was done so far."""

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its answer may come to."""

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait, here or for another process."""

    @property
    def tokens_ahead(self) -> int:
        """How many tokens of prompts are still to be computed here."""

    @property
    def peers(self) -> Mapping[str, str]:
        """By name, the processes that compute for this one, and what is known of each, in a word."""

    def finish(self, answer: Answer) -> None:
        """End a request as if it had met a stop."""

    def namespace(self, name: str) -> str:
        """Return where the cache keeps what requests of the namespace ``name`` compute."""

    def extra_keys(self, tokens: list[int], inputs: Mapping[str, Any]) -> list[tuple[int, int, str]]:
        """Return the extra keys of a prompt that carries ``inputs``."""

    def account(self) -> None:
        """Count from now on in the cache's history why the tokens of each request miss."""

    def figures(self) -> list[Figure]:
        """Return the figures of the cache, and of what other processes compute for this one or ask of it."""

    def retire(self) -> None:
        """Take nothing new from other processes, but complete what they have asked for."""

    def close(self) -> None:
        """Abort what still runs, and end. A second call does nothing."""


# ---------------------------------------------------------------- whole answers


def generate(engine: StepsAnswers, prompts: Iterable[Request | Iterable[int]], max_tokens: int) -> list[Answer]:
    """Answer all prompts and return the answers in their order; a prompt is a ``Request`` or a list of tokens.

    If one prompt is refused, none is begun. An exception or an interrupt aborts what this call has begun.
    """
    if isinstance(prompts, (str, bytes, Request)) or not isinstance(prompts, Iterable):
        raise InputError(f"generate takes a list of prompts, each a Request or a list of tokens, got {prompts!r}")
    requests = [p if isinstance(p, Request) else Request(p, max_tokens) for p in prompts]
    answers: list[Answer] = []
    try:
        with defer_interrupts():
            for request in requests:
                answers.append(engine.add(request))
        while not all(answer.done for answer in answers):
            engine.step()
    finally:
        with defer_interrupts():
            for answer in answers:
                engine.abort(answer)
    return answers


# ---------------------------------------------------------------- streams


class AnswerStream:
    """Iterates over the tokens of an answer. Closing it early aborts the request; the engine sees if it is dropped."""

    def __init__(self, engine: StepsAnswers, answer: Answer) -> None:
        self.engine, self.answer = engine, answer
        self._returned = 0

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> int:
        answer = self.answer
        while self._returned == len(answer.tokens):
            if answer.error is not None:
                raise answer.error
            if answer.done:
                raise StopIteration
            self.engine.step()
        self._returned += 1
        return answer.tokens[self._returned - 1]

    def close(self) -> None:
        self.engine.abort(self.answer)


class OpenStreams:
    """The streams of one engine whose answers may not be done yet. A finalizer could come in the middle of a change, so
    the engine asks at each step which streams were dropped."""

    def __init__(self) -> None:
        self._open: dict[Answer, weakref.ref[AnswerStream]] = {}

    def begin(self, engine: StepsAnswers, request: Request) -> AnswerStream:
        """Add a request, whose stream is dropped, and so the request aborted, if an interrupt is raised here."""
        with defer_interrupts():
            stream = AnswerStream(engine, engine.add(request))
            self._open[stream.answer] = weakref.ref(stream)
            return stream

    def dropped(self) -> list[Answer]:
        """Return the answers whose streams were dropped since the last call."""
        found = []
        for answer, stream in list(self._open.items()):
            if answer.done or stream() is None:
                del self._open[answer]
                if not answer.done:
                    found.append(answer)
        return found

    def clear(self) -> None:
        self._open.clear()
