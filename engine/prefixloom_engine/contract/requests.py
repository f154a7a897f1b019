"""Requests: what a client asks (``Request``) and what it gets (``Answer``). Neither knows a cache or a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Literal

import attrs

from prefixloom import InputError

if TYPE_CHECKING:
    from .handover import Handover

Reason = Literal["", "length", "stop", "aborted", "error"]
"""Why an answer ended; "" while it has not."""
WORD = 2**63
POSITIONS = 2**31
WHOLE_NUMBERS = {
    "max_tokens": (1, POSITIONS), "seed": (-WORD, WORD), "speculate": (0, POSITIONS), "priority": (-WORD, WORD),
    "hand_over": (0, POSITIONS), "top_logprobs": (0, 2**10 + 1),
}  # fmt: skip
"""The fields of a ``Request`` that are whole numbers, each with the least value that is allowed and the first one above
that is not."""
COLDEST, HOTTEST = 1e-6, 1e6
"""The least and the greatest temperature besides 0. Beyond these, draws are no different from the likeliest token, or
from any token."""
LONGEST_LABEL = 200


def shown(value: object) -> str:
    """Return a value as errors show it: never too long, whatever its ``repr`` does."""
    try:
        text = repr(value)
    except Exception:  # such as of a whole number with more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _tokens(values: Iterable[int]) -> tuple[int, ...]:
    """Convert a list, or anything with ``tolist`` such as an array or a tensor."""
    try:
        if isinstance(values, (str, bytes, Mapping, Set)):
            raise TypeError("it has no tokens in an order")
        return tuple(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError as error:
        raise InputError(
            f"a prompt is a list of tokens, got {shown(values)}: generate takes a list of prompts, stream takes one"
        ) from error


def _stops(values: Iterable[int] | None) -> frozenset[int] | None:
    try:
        stops = None if values is None else frozenset(values)
    except TypeError as error:
        raise InputError(f"stops are token ids, in a list or a set, got {shown(values)}") from error
    wrong = [each for each in stops or () if each.__class__ is not int or not 0 <= each < POSITIONS]
    if wrong:
        raise InputError(f"stops are token ids, got {', '.join(sorted(map(shown, wrong[:9])))}")
    return stops


@attrs.frozen
class Request:
    """What a client asks.

    ``tokens``      the prompt, at least one token
    ``max_tokens``  the greatest length of the answer, at least 1
    ``stops``       token ids that end the answer; the one that ends it is its last token. None: the model's own
    ``temperature`` 0: the engine takes the likeliest token. Otherwise it draws each token from ``seed`` and the token's
                    position alone, so that batching, overlap and caching do not change what is drawn
    ``top_p``       each token is drawn from the likeliest ones alone, which together have this probability; 1: from all
    ``speculate``   how many tokens are guessed ahead and checked in one pass; None: as the engine is set
    ``namespace``   requests of different namespaces share nothing in the cache
    ``tenant``      whose request it is. Tenants have shares of what runs; priorities are compared within one
    ``priority``    with the engine's policy "priority", the request with the highest priority is admitted first
    ``ttl``         seconds, from the request's end, after which nobody needs what it used and left in the cache: then
                    that is evicted before all else, unless others use it. None: for ever
    ``logprobs``    whether ``Answer.logprobs`` is filled
    ``top_logprobs``  with ``logprobs``: how many of the likeliest tokens ``Answer.alternatives`` tells for each token
    ``hand_over``   None, or how many tokens of this prompt another engine has: ``Answer.handed`` then carries what that
                    engine lacks to go on after the first token
    ``prefill``     of an engine that has prompts computed elsewhere: the address of the process that is to compute this
                    one. "", or where it cannot: the engine chooses
    ``label``       the name of the request in errors: printable, with at most 200 characters
    ``inputs``      what the prompt carries beside its tokens, such as images: what the model's processor returned
                    beside ``input_ids``, on the CPU

    A request with a value that no engine can serve is not made: ``InputError`` names the value.
    """

    tokens: tuple[int, ...] = attrs.field(converter=_tokens)
    max_tokens: int = 32
    stops: frozenset[int] | None = attrs.field(default=None, converter=_stops, kw_only=True)
    temperature: float = attrs.field(default=0.0, kw_only=True)
    top_p: float = attrs.field(default=1.0, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    speculate: int | None = attrs.field(default=None, kw_only=True)
    namespace: str = attrs.field(default="", kw_only=True)
    tenant: str = attrs.field(default="", kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    ttl: float | None = attrs.field(default=None, kw_only=True)
    logprobs: bool = attrs.field(default=False, kw_only=True)
    top_logprobs: int = attrs.field(default=0, kw_only=True)
    hand_over: int | None = attrs.field(default=None, kw_only=True)
    prefill: str = attrs.field(default="", kw_only=True)
    label: str = attrs.field(default="", kw_only=True)
    inputs: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.label.__class__ is not str:
            raise InputError(f"a request has label={shown(self.label)}: it is a string")
        if not self.label.isprintable() or len(self.label) > LONGEST_LABEL:
            raise InputError(
                f"a request has label={shown(self.label)}: it is printable, with at most {LONGEST_LABEL} characters"
            )
        name = self.label or "a request"
        if not self.tokens:
            raise InputError(f"{name} has no tokens: a prompt has at least one")
        for field, (least, end) in WHOLE_NUMBERS.items():
            value = getattr(self, field)
            if value is None and field in ("speculate", "hand_over"):
                continue
            if value.__class__ is not int or not least <= value < end:
                low = f" from {least} up" if least in (0, 1) else ""
                bits = end.bit_length() - 1
                raise InputError(
                    f"{name} has {field}={shown(value)}: it is a whole number{low}, of at most {bits} bits"
                )
        if self.ttl is not None and (not _is_number(self.ttl) or not 0 <= self.ttl < WORD):
            raise InputError(f"{name} has ttl={shown(self.ttl)}: it is a number of seconds from 0 up, or None")
        self._check_drawing(name)
        if self.logprobs.__class__ is not bool:
            raise InputError(f"{name} has logprobs={shown(self.logprobs)}: it is True or False")
        if self.top_logprobs and not self.logprobs:
            raise InputError(f"{name} has top_logprobs={self.top_logprobs}, and no logprobs=True")
        for field in ("namespace", "tenant", "prefill"):
            if getattr(self, field).__class__ is not str:
                raise InputError(f"{name} has {field}={shown(getattr(self, field))}: it is a string")
        if self.hand_over is not None and self.max_tokens != 1:
            raise InputError(f"{name} asks for a handover, so its answer here has one token: give max_tokens=1")
        if not isinstance(self.inputs, Mapping) or any(each.__class__ is not str for each in self.inputs):
            raise InputError(f"{name} has inputs={shown(self.inputs)}: they are what a processor returns, by name")
        if self.inputs and self.hand_over is not None:
            raise InputError(f"{name} carries {', '.join(self.inputs)} beside its tokens, and asks for a handover")

    def _check_drawing(self, name: str) -> None:
        given = self.temperature
        if not _is_number(given) or not (given == 0 or COLDEST <= given <= HOTTEST):
            raise InputError(
                f"{name} has temperature={shown(given)}: it is a number from 0 up, and besides 0 from {COLDEST:g} to "
                f"{HOTTEST:g}"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"{name} has top_p={shown(self.top_p)}: it is a number above 0, and at most 1")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@attrs.define(eq=False)
class Answer:
    """What a client gets. The engine extends it while it runs.

    ``tokens``, ``logprobs``    the answer so far; log-probabilities only if the request asks for them
    ``alternatives``            if the request asks for them: for each token of the answer, the likeliest tokens in its
                                place with their log-probabilities, the likeliest first
    ``reason``                  why the answer ended; "" while it has not
    ``error``                   with the reason "error": what went wrong
    ``hit``                     how many tokens of the prompt the cache had when the request was first admitted
    ``restored``                how many of these a tier below the device brought back
    ``prefill_hit``             how many tokens of the prompt were cached in the process that computed it for this one
    ``drafted``, ``accepted``   how many tokens were guessed ahead, and how many of these guesses were right
    ``handed``                  what another engine needs to go on, if the request asks for it
    ``admitted_at``             when it was first admitted, on the clock ``time.monotonic``; 0: not yet
    """

    request: Request
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    alternatives: list[list[tuple[int, float]]] = attrs.field(factory=list)
    reason: Reason = ""
    error: BaseException | None = None
    hit: int = 0
    restored: int = 0
    prefill_hit: int = 0
    drafted: int = 0
    accepted: int = 0
    handed: Handover | None = None
    admitted_at: float = 0.0

    @property
    def cached(self) -> int:
        """How many tokens of the prompt nobody had to compute."""
        return max(self.hit, self.prefill_hit)

    @property
    def done(self) -> bool:
        """Whether the answer has ended, for whatever reason."""
        return self.reason != ""
