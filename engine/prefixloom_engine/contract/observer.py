"""Observers: what an engine tells, while it works, to whoever wants to follow it, such as a trace or a dashboard.

An engine without observers measures nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from prefixloom import Cache

from .requests import Answer


@attrs.frozen
class PrefillChunk:
    """Tokens ``start`` to ``end`` of a request, computed in one step, or ``arrived`` from another engine.

    ``last``: its prefill is over then, and the step samples its next token.
    """

    request: int
    start: int
    end: int
    last: bool
    arrived: bool


@attrs.define(eq=False)
class StepFacts:
    """One step of an engine. Times are seconds of ``time.perf_counter``; 0.0: it did not come to that.

    ``number``             counts the launched steps of the engine from 1
    ``chunks``             what it computed of prompts, or copied
    ``decoded``            how many rows decoded, of which ``drafted`` tokens were guesses
    ``planned``            when the engine began to plan it, and ``launched`` when all of it was enqueued
    ``begun``, ``ended``   when its forward passes ran on the stream
    ``waited``, ``read``   when the engine began to wait for its results, and had them
    ``error``              what the step failed with; None: it went well, or is not over
    """

    number: int
    chunks: tuple[PrefillChunk, ...]
    decoded: int
    drafted: int
    planned: float
    launched: float
    begun: float = 0.0
    ended: float = 0.0
    waited: float = 0.0
    read: float = 0.0
    error: BaseException | None = None

    @property
    def prefilled(self) -> int:
        """How many tokens of prompts it computed."""
        return sum(chunk.end - chunk.start for chunk in self.chunks if not chunk.arrived)


class Observer:
    """Follows one engine. Here every method does nothing: override those that you need.

    They are called in the engine's thread, in the midst of a step. So they return at once, and neither call the engine
    nor change what they are given. An observer that raises is logged, and told nothing more. A request is known by its
    ``number``, which counts the requests of the engine from 0.
    """

    def attached(self, cache: Cache) -> None:
        """Called when the engine was made over this cache."""

    def queued(self, number: int, answer: Answer) -> None:
        """Called when a request was added."""

    def admitted(self, number: int, ready: int) -> None:
        """Called when a request runs, with ``ready`` tokens on the device. ``restored`` comes before it is computed."""

    def restored(self, number: int, ready: int, brought: int) -> None:
        """Called when the tiers below the device have brought all they can: ``ready`` tokens need not be computed."""

    def launched(self, step: StepFacts) -> None:
        """Called when a step was enqueued. Its ``begun`` and the later times are not known yet."""

    def over(self, step: StepFacts) -> None:
        """Called when the engine has the results of a step: once for each launched step, in their order."""

    def first_token(self, number: int) -> None:
        """Called when the prefill of a request is over, and its next token is there; again after ``requeued``."""

    def requeued(self, number: int, retracted: bool) -> None:
        """Called when a running request waits again: it was ``retracted`` for want of room, or has to start over."""

    def ended(self, number: int, answer: Answer) -> None:
        """Called when a request ended; ``answer`` says why."""

    def stepped(self) -> None:
        """Called when the engine returns from ``Engine.step``, whether or not there was something to do."""

    def closed(self) -> None:
        """Called when the engine is closed, as the last call."""


class Polled(Observer):
    """Calls ``poll`` after each step of the engine: for what follows a cache, such as a publisher of events."""

    def __init__(self, poll: Callable[[], object]) -> None:
        self._poll = poll

    def stepped(self) -> None:
        self._poll()
