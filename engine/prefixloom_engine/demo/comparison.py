"""The comparison: every turn of every conversation, answered by an engine with a cache and by one without hits."""

from __future__ import annotations

import time

import attrs

from prefixloom import Cache, CompositionError, InputError, PrefixloomError, TierManifest, compose

from ..contract.model import Model
from ..contract.requests import Answer, Request
from ..serving.engine import Engine
from ..tracing.trace import Trace
from .conversations import Conversations
from .exactness import TOLERANCE, TOLERANCE_OF_OTHER_MODELS, ContentLedger, Exactness, lose_each_component
from .progress import Progress
from .settings import Settings

REPLY = 16
"""How many tokens each answer has."""
STATES = 6
"""How many states the pool has beside those for the tree."""


@attrs.define
class Turn:
    """One prompt and its answers with the cache and without.

    ``hit_tokens``       how many tokens of the prompt the cache had, and ``restored_tokens`` how many of these came
                         back from the host
    ``seconds_with``, ``seconds_without``  how long the first token took
    ``ended_by``         what kept the hit from being longer
    """

    conversation: int
    prompt_tokens: int
    hit_tokens: int
    restored_tokens: int
    seconds_with: float
    seconds_without: float
    ended_by: str


@attrs.define
class Round:
    """One turn of every conversation. ``evicted``: by component, how many pages or states were evicted."""

    number: int
    turns: list[Turn] = attrs.field(factory=list)
    evicted: dict[str, int] = attrs.field(factory=dict)

    def total(self, field: str) -> float:
        return float(sum(getattr(turn, field) for turn in self.turns))

    @property
    def hit_rate(self) -> float:
        return self.total("hit_tokens") / self.total("prompt_tokens")

    @property
    def speedup(self) -> float:
        return self.total("seconds_without") / self.total("seconds_with")


def device_capacity(settings: Settings, conversations: Conversations) -> int:
    """Return how many tokens each pool holds: less than all conversations have, but enough for the longest prompt."""
    least = -(-(conversations.longest + REPLY) // 64) * 64
    if settings.capacity is None:
        return max(least, conversations.total * 4 // 10)
    if settings.capacity < least:
        turns = f"{settings.turns} turn{'s' if settings.turns > 1 else ''}"
        raise InputError(
            f"--capacity {settings.capacity} is too small: one conversation of {turns} may need {least} tokens. Give "
            f"at least so many, or fewer --turns"
        )
    return settings.capacity


def pool_capacities(model: Model, tokens: int, max_rewind: int) -> dict[str, int]:
    """Return by component: ``tokens`` if it has pages, or as many states as usually go with so many tokens."""
    composed: Cache = compose(model.config, capacity=tokens, device="meta", max_rewind=max_rewind)
    states = STATES + max_rewind + tokens // 128
    return {part.name: tokens if part.page_tokens else states for part in composed.composition.parts}


@attrs.frozen(eq=False)
class HostTierPart:
    """The component of a tier in the host's memory: one with a ``TierManifest``.

    ``HostTier`` of prefixloom_hicache is the usual one, with a store behind it; but an engine imports no plugin.
    """

    manifest: TierManifest
    name: str = "host"


class Comparison:
    """Two engines over one model: ``engine``, whose cache may hit, and ``cold``, which computes every prompt."""

    def __init__(
        self, settings: Settings, model: Model, about: str, conversations: Conversations, progress: Progress
    ) -> None:
        self.about, self.conversations, self.progress, self.folder = about, conversations, progress, settings.model
        self.rounds: list[Round] = []
        rewind = settings.speculate
        shared, one = device_capacity(settings, conversations), conversations.longest + 4 * 64
        host = conversations.total if settings.host is None else settings.host
        tier = []
        if host:
            tier.append(HostTierPart(TierManifest(capacity=pool_capacities(model, host, rewind), write="back")))
        self.cache: Cache = compose(
            model.config, plugins=tier, capacity=pool_capacities(model, shared, rewind), max_rewind=rewind
        )
        cold_cache: Cache = compose(model.config, capacity=pool_capacities(model, one, 0))
        self.trace = None if settings.trace is None else Trace(settings.trace)
        self.engine = Engine(model, self.cache, speculate=rewind, observers=() if self.trace is None else (self.trace,))
        self.cold = Engine(model, cold_cache)
        built_in = settings.model is None
        self.exactness = Exactness(TOLERANCE[settings.dtype] if built_in else TOLERANCE_OF_OTHER_MODELS)
        self._ledger = ContentLedger(self.cache, self.exactness)
        self._prompts = 0
        self._answer(self.cold, [1] * 64, "warm-up")  # so that the first turn's time does not include torch's start

    def run_round(self, turn: int) -> Round:
        """Run one turn of every conversation."""
        round_ = Round(turn + 1)
        before = self._evicted()
        order = self.conversations.order()
        for done, number in enumerate(order):
            turns = self.conversations.turns
            self.progress.show(f"turn {turn + 1} of {turns}, conversation {done + 1} of {len(order)}")
            prompt = self.conversations.next_prompt(number, turn)
            answer, one = self._turn(number, prompt)
            self.conversations.add_reply(number, answer.tokens)
            round_.turns.append(one)
        self.progress.clear()
        round_.evicted = {name: count - before[name] for name, count in self._evicted().items()}
        self.rounds.append(round_)
        return round_

    def _turn(self, number: int, prompt: list[int]) -> tuple[Answer, Turn]:
        plan = self.cache.match(prompt, leave=1)
        limited, on_device = plan.limited_by, plan.restorable == plan.ready
        if on_device:
            self._ledger.compare(prompt)
        answer, seconds = self._answer(self.engine, prompt, "")
        if not on_device:  # what came back from the host can be read only now
            self._ledger.compare([*prompt[: answer.hit], 0])
        self._ledger.remember([*prompt, *answer.tokens])
        self._prompts += 1
        without, cold_seconds = self._answer(self.cold, prompt, f"cold {self._prompts}")
        self.exactness.compare_answers(answer, without)
        return answer, Turn(
            number, len(prompt), answer.hit, answer.restored, seconds, cold_seconds, limited or "the text"
        )

    def _answer(self, engine: Engine, prompt: list[int], namespace: str) -> tuple[Answer, float]:
        """Answer a prompt; also return how many seconds its first token took.

        With a ``namespace`` the prompt hits nothing, and what it leaves in the cache is dropped.
        """
        started = time.perf_counter()
        stream = engine.stream(Request(prompt, REPLY, stops=(), namespace=namespace, logprobs=True))
        try:
            next(stream)
            seconds = time.perf_counter() - started
            for _ in stream:
                pass
        except Exception as error:
            if self.folder is None or isinstance(error, PrefixloomError):
                raise
            raise CompositionError(self._failure(error, len(prompt))) from error
        if namespace:
            engine.drain()
            engine.cache.drop_namespace(namespace)
        return stream.answer, seconds

    def _failure(self, error: Exception, length: int) -> str:
        """Return the message for a model that raises. Mostly it has no embedding for so late a position."""
        most = getattr(self.engine.model.config, "max_position_embeddings", None)
        message = f"the model in {str(self.folder)!r} fails with {type(error).__name__} ({error})"
        if isinstance(most, int) and length + REPLY > most:
            return (
                f"{message}: a prompt of {length} tokens and its answer, and its config says at most {most} positions"
            )
        return f"{message} at a prompt of {length} tokens"

    def judge(self) -> Exactness:
        """Complete the check at the end, where no request runs and so none may hold a page."""
        self.progress.show("the control: the same again with memory lost")
        prompt = self.conversations.next_prompt(0, self.conversations.turns)[: self.conversations.longest]
        self.exactness.moved = lose_each_component(self.engine, prompt)
        self.progress.clear()
        self.engine.close()
        components = self.cache.stats().components.values()
        self.exactness.held = sum(component.running + component.leased for component in components)
        return self.exactness

    @property
    def total(self) -> Round:
        """All rounds in one, with the number 0."""
        total = Round(0, [turn for round_ in self.rounds for turn in round_.turns])
        for round_ in self.rounds:
            for name, count in round_.evicted.items():
                total.evicted[name] = total.evicted.get(name, 0) + count
        return total

    def _evicted(self) -> dict[str, int]:
        return {name: part.evicted for name, part in self.cache.stats().components.items()}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.clear()
        self.engine.close()
        self.cold.close()
        if self.trace is not None:
            self.trace.close()
