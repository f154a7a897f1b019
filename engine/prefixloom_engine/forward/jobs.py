"""Jobs and planned rows: plain data that the scheduler writes and the forward stream reads."""

from __future__ import annotations

import attrs

from prefixloom import PrefixloomError, Restored, Sequence, Tokens

from ..contract.handover import Handover
from ..contract.model import Media, Span
from ..contract.requests import Answer, Request


class LogitsError(PrefixloomError):
    """The model returned logits of one request from which no token can be taken."""


@attrs.define(eq=False)
class Job:
    """A request while the engine works on it. Lengths count the tokens of prompt and answer together.

    ``number``            counts jobs in the order of their arrival
    ``tokens``            all tokens known to the planning thread; with overlap, the device knows one more
    ``key``               the tokens with which the cache is asked for a match
    ``namespace``         where the cache is asked for it: the request's namespace of the model's identity
    ``stops``             the token ids that end the answer
    ``speculate``         how many tokens to guess ahead
    ``media``             what the prompt carries beside its tokens; None: nothing
    ``sequence``          the running sequence in the cache; None while the job waits
    ``launched``          the length for which forward passes are launched
    ``prefill_end``       the length at which prefill ends; after a retraction this includes the answer so far
    ``answer_launched``   how many tokens of the answer are sampled or will be by launched passes
    ``unread_passes``     how many launched passes have sampled tokens that the planning thread has not read yet
    ``prefill_stops``     boundaries at which a prefill step should end besides, since other jobs begin like this one
    ``attempt``           grows when everything in flight for the job becomes void
    ``device_row``        the index at which tensors on the device keep this job's newest token and guesses
    ``guesses_kept``      how many guesses of the last pass were right; -1: the draft model has not seen this job yet
    ``handover``          what another engine computed of the prompt, until it is copied into the pools
    ``restoring``         what tiers below the device may still bring back; the job is not computed meanwhile
    ``failures``          how many steps in a row failed while they computed this job alone, or read a copy that failed
    ``apart_until``       up to this length the job is computed alone, since a step failed that computed it with others;
                          0: it may be computed with others
    ``admitted``          whether the job was ever admitted
    ``awaited_prefix``    whether the job ever waited for a prefix that another one was computing
    """

    answer: Answer
    number: int
    tokens: list[int]
    key: Tokens
    namespace: str
    stops: frozenset[int]
    speculate: int
    media: Media | None = None
    sequence: Sequence | None = None
    launched: int = 0
    prefill_end: int = 0
    answer_launched: int = 0
    unread_passes: int = 0
    prefill_stops: set[int] = attrs.field(factory=set)
    attempt: int = 0
    device_row: int = -1
    guesses_kept: int = 0
    handover: Handover | None = None
    restoring: Restored | None = None
    failures: int = 0
    apart_until: int = 0
    admitted: bool = False
    awaited_prefix: bool = False

    @property
    def request(self) -> Request:
        return self.answer.request

    @property
    def extra(self) -> list[tuple[int, int, str]]:
        """The spans of the prompt whose content depends on more than tokens."""
        return [] if self.media is None else list(self.media.extra)

    @property
    def prefilling(self) -> bool:
        return self.launched < self.prefill_end

    @property
    def answer_left(self) -> int:
        """How many more tokens of the answer may be launched."""
        return self.request.max_tokens - self.answer_launched


@attrs.define(eq=False)
class PlannedRow:
    """What one step computes of one job.

    ``sequence``, ``attempt``  those of the job when the row was planned
    ``span``                   the positions that are computed
    ``tokens``                 the tokens at these positions; empty: the one token is the newest, which only the device
                               knows
    ``samples``                whether the pass samples the token after the span
    ``prefill``                whether the row belongs to prefill
    ``guesses``                the guesses at the end of ``tokens``, and ``guess_count`` their number
    ``guesses_kept``           how many guesses of the job's last pass were right, from where the draft model goes on;
                               -1: the draft model has no part in this row
    ``next_token``             the token after the span where it is known already, that is where ``samples`` is False
    ``sampled``, ``logprobs``, ``alternatives``  results: the sampled tokens, the last ``guess_count`` + 1 positions of
                               the span each give one, and if the request asks for them their log-probabilities and the
                               likeliest tokens in their places
    ``error``                  result: why this row alone cannot go on; None: it can
    ``incoming``               content from another engine that takes the place of a forward pass
    ``outgoing``               result: content for another engine
    """

    job: Job
    sequence: Sequence
    span: Span
    tokens: list[int]
    attempt: int
    samples: bool
    prefill: bool = False
    guesses: list[int] = attrs.field(factory=list)
    guess_count: int = 0
    guesses_kept: int = -1
    next_token: int = 0
    sampled: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    alternatives: list[list[tuple[int, float]]] = attrs.field(factory=list)
    error: LogitsError | None = None
    incoming: Handover | None = None
    outgoing: Handover | None = None

    @property
    def hands_over(self) -> bool:
        """Whether another engine gets the content of this row's sequence when the pass is over."""
        return self.samples and self.job.request.hand_over is not None
