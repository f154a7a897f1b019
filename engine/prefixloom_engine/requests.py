"""Requests: what a client asks, what it gets, and what the engine knows of one that is on its way.

An ``Answer`` is the client's; a ``Job`` is the engine's. Nothing here knows a cache's inside or a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import attrs

from prefixloom import InputError

if TYPE_CHECKING:
    from prefixloom import Restored, Sequence, Tokens

    from .handover import Handed

Reason = Literal["", "length", "stop", "aborted", "error"]
RETRIES = 2
"""How often in a row a request starts over because a step or copy failed; the last time with what the device has."""


WHOLE = {"max_tokens": 1, "seed": None, "speculate": 0, "priority": None, "hand_over": 0}
"""Fields that are whole numbers, and the least that each may be."""


def _tokens(values: Iterable[int]) -> tuple[int, ...]:
    """From a list, or whatever has one (an array, a tensor)."""
    try:
        return tuple(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError as error:
        raise InputError(
            f"a prompt is a list of tokens, got {values!r}: generate takes a list of prompts, stream takes one"
        ) from error


def _stops(values: Iterable[int] | None) -> frozenset[int] | None:
    try:
        stops = None if values is None else frozenset(values)
    except TypeError as error:
        raise InputError(f"stops are token ids, in a list or a set, got {values!r}") from error
    if stops is not None and any(each.__class__ is not int for each in stops):
        raise InputError(f"stops are token ids, got {sorted(map(repr, stops))}")
    return stops


@attrs.frozen
class Request:
    """What a client asks.

    ``tokens``      the prompt, at least one token
    ``max_tokens``  the answer has at most so many, at least one
    ``stops``       token ids that end the answer, and are its last token; None: the model's own
    ``temperature`` 0: the likeliest token. Else tokens are drawn, each from ``seed`` and its position alone, so that
                    batching, overlap and caching draw the same
    ``speculate``   tokens that are guessed ahead and checked in one pass; None: as the engine is set
    ``namespace``   nothing is shared between two
    ``priority``    with the engine's policy "priority" the highest goes first
    ``logprobs``    whether the answer tells how likely each of its tokens was
    ``hand_over``   None, or tokens that another engine has of this prompt: what it lacks to go on after the first
                    token is in ``Answer.handed``
    ``label``       its name in errors
    """

    tokens: tuple[int, ...] = attrs.field(converter=_tokens)
    max_tokens: int = 32
    stops: frozenset[int] | None = attrs.field(default=None, converter=_stops, kw_only=True)
    temperature: float = attrs.field(default=0.0, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    speculate: int | None = attrs.field(default=None, kw_only=True)
    namespace: str = attrs.field(default="", kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    logprobs: bool = attrs.field(default=False, kw_only=True)
    hand_over: int | None = attrs.field(default=None, kw_only=True)
    label: str = attrs.field(default="", kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.label.__class__ is not str:
            raise InputError(f"a request has label={self.label!r}: it is a text")
        name = self.label or "a request"
        if not self.tokens:
            raise InputError(f"{name} has no tokens: a prompt has at least one")
        for field, least in WHOLE.items():
            value = getattr(self, field)
            if value is None and field in ("speculate", "hand_over"):
                continue
            if value.__class__ is not int or (least is not None and value < least):
                low = "" if least is None else f" from {least} up"
                raise InputError(f"{name} has {field}={value!r}: it is a whole number{low}")
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature < math.inf:
            raise InputError(f"{name} has temperature={self.temperature!r}: it is a number from 0 up")
        if self.namespace.__class__ is not str:
            raise InputError(f"{name} has namespace={self.namespace!r}: it is a text")
        if self.hand_over is not None and self.max_tokens != 1:
            raise InputError(f"{name} is to be handed over: its answer has one token here, max_tokens=1")


@attrs.define(eq=False)
class Answer:
    """What a client gets; it grows while the engine runs.

    ``reason``: why it ended, "" while it has not. ``error``: with the reason "error", what went wrong. ``hit``: tokens
    of the prompt that the cache had when the request was first admitted; ``restored``: of these how many a tier below
    the device brought back. ``drafted``, ``accepted``: tokens that were
    guessed ahead for it, and of these how many were right. ``logprobs``: of each token, if the request asks for them.
    ``handed``: what another engine needs to go on, if the request says so.
    """

    request: Request
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    reason: Reason = ""
    error: BaseException | None = None
    hit: int = 0
    restored: int = 0
    drafted: int = 0
    accepted: int = 0
    handed: Handed | None = None

    @property
    def done(self) -> bool:
        return self.reason != ""


@attrs.define(eq=False)
class Job:
    """A request on its way. Lengths count tokens of prompt and answer together.

    ``tokens`` are those that are known here; with overlap the device has one more. ``key``: those that it is opened
    with. ``end``: how far forward passes were launched. ``total``: where prefill ends, which after a retraction
    includes what was answered before. ``due``: tokens of the answer that were sampled or are being sampled.
    ``pending``: launched passes whose tokens are not known here yet. ``cuts``: boundaries where prefill should stop, to
    leave a checkpoint. ``life`` grows when all that is in flight for it is void. ``row``: where the device keeps its
    newest token. ``kept``: how many guesses of its last pass were right; -1: the device's draft knows nothing of it.
    ``arrived``: what another engine handed over of it. ``restoring``: what tiers below the device may still bring of
    it; it is not computed meanwhile. ``failures``: steps that failed under it in a row. ``waited``:
    it has waited for another one's checkpoint.
    """

    answer: Answer
    number: int
    tokens: list[int]
    key: Tokens
    stops: frozenset[int]
    speculate: int
    sequence: Sequence | None = None
    end: int = 0
    total: int = 0
    due: int = 0
    pending: int = 0
    cuts: set[int] = attrs.field(factory=set)
    life: int = 0
    row: int = -1
    kept: int = 0
    arrived: Handed | None = None
    restoring: Restored | None = None
    failures: int = 0
    admitted: bool = False
    waited: bool = False

    @property
    def request(self) -> Request:
        return self.answer.request

    @property
    def prefilling(self) -> bool:
        return self.end < self.total

    @property
    def left(self) -> int:
        """Tokens of the answer that may still be launched."""
        return self.request.max_tokens - self.due
