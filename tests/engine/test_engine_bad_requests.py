"""Nobody pays for another's bad request: what one request breaks ends that request, and the others go on as before."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

from prefixloom import Cache, InputError
from prefixloom_engine import Answer, Batch, Engine, Request, Span, ThreeWay
from prefixloom_engine.forward.passes import usable
from tests.support.engines import AMPLE, CAPACITY, SYSTEM, cache_for, mixed, model, nothing_left, plain, prompt
from tests.support.sampling import slow

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
AHEAD = pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
NAN, INFINITE = float("nan"), float("inf")
BAD = 511
"""A token that is only in prompts of bad requests. The stub knows their rows by it, whatever the batch."""


class Fault(RuntimeError):
    """What a model raises for a request that it cannot take."""


@attrs.define
class Faults:
    """What goes wrong with which requests: a bad prompt begins with ``BAD`` and the number of its fault.

    ``raising``  by number: the position from which on a pass of the request raises
    ``spoiled``  by number: the position from which on the logits of the request are spoiled, and with what value: one
                 logit with NaN or infinity, all of them with minus infinity
    ``masked``   the numbers of requests of which one logit is minus infinity, which is legal
    """

    raising: dict[int, int] = attrs.field(factory=dict)
    spoiled: dict[int, tuple[int, float]] = attrs.field(factory=dict)
    masked: set[int] = attrs.field(factory=set)


class Faulty:
    """A ``ThreeWay`` whose passes go wrong for chosen requests, half-way: what they write is written."""

    def __init__(self, it: ThreeWay, faults: Faults | None = None, kind: type[FaultyRunner] | None = None) -> None:
        self.it, self.faults, self.kind = it, faults or Faults(), kind or FaultyRunner
        self.vocabulary, self.stops, self.config = it.vocabulary, it.stops, it.config

    def bind(self, cache: Cache) -> FaultyRunner:
        return self.kind(self.it.bind(cache), self.faults, cache)


class FaultyRunner:
    def __init__(self, bound: Any, faults: Faults, cache: Cache) -> None:
        self.bound, self.faults, self.cache = bound, faults, cache
        self.drafter = None if bound.drafter is None else FaultyDrafter(self)
        self.numbers: dict[int, int] = {}
        """By the first page of a sequence: the number of its fault."""

    def groups(self, spans: Sequence[Span]) -> list[list[int]]:
        return self.bound.groups(spans)  # type: ignore[no-any-return]

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.spoil(self.bound.forward(batch), batch)

    def spoil(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        for row, span in enumerate(batch.spans):
            number = self.number(batch, row)
            if number is None:
                continue
            if span.end > self.faults.raising.get(number, 1 << 30):
                raise Fault(str(number))
            start, value = self.faults.spoiled.get(number, (1 << 30, 0.0))
            for at in range(batch.wanted):
                if span.end - batch.wanted + at >= start:
                    logits[row, at, slice(None) if value == -INFINITE else 7 * number] = value
            if number in self.faults.masked:
                logits[row, :, 7 * number] = -INFINITE
        return logits

    def number(self, batch: Batch, row: int) -> int | None:
        """Which bad request this row is of: its first pass shows its first tokens, and the first page stays its own."""
        first = int(batch.tables["full"][row, 0])
        if batch.spans[row].start == 0:
            head = batch.tokens[row, :2].tolist()
            self.numbers.pop(first, None)
            if head[0] == BAD:
                self.numbers[first] = head[1]
        return self.numbers.get(first)


class FaultyDrafter:
    def __init__(self, runner: FaultyRunner) -> None:
        self.runner, self.bound = runner, runner.bound.drafter
        self.width, self.draft = self.bound.width, self.bound.draft

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = self.bound.forward(batch)
        return self.runner.spoil(logits, batch), hidden


def bad(number: int, length: int, max_tokens: int = 30, **more: Any) -> Request:
    return Request([BAD, number, *prompt(number, length)], max_tokens, label=f"bad {number}", **more)


def run(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    answers = [engine.add(request) for request in requests]
    for _ in range(3000):
        if all(answer.done for answer in answers):
            return answers
        engine.step()
    raise AssertionError("it goes on for ever")


def good(count: int, seed: int = 1, **more: Any) -> list[Request]:
    """``mixed`` without the token that belongs to bad requests."""
    return [attrs.evolve(r, tokens=[t % BAD for t in r.tokens]) for r in mixed(count, seed, **more)]


# ---------------------------------------------------------------- one request raises


@pytest.mark.parametrize(
    ("at", "speculate", "overlap"), [(60, 0, True), (60, 3, False), (130, 3, True), (155, 0, False), (155, 3, True)]
)
def test_only_the_request_that_makes_the_model_raise_ends_with_an_error(at: int, speculate: int, overlap: bool) -> None:
    requests = [Request(prompt(seed, 60 + seed), 40, speculate=speculate) for seed in range(5)]
    expected = plain(model(), requests)
    cache = cache_for(model(), CAPACITY)
    faulty = Faulty(model(), Faults(raising={3: at}))
    with Engine(faulty, cache, chunk=1024, overlap=overlap) as engine:
        answers = run(engine, [*requests[:3], bad(3, 127), *requests[3:]])
        culprit = answers.pop(3)
        assert (culprit.reason, repr(culprit.error)) == ("error", "Fault('3')")
        assert [answer.reason for answer in answers] == ["length"] * 5
        assert [answer.tokens for answer in answers] == expected
        engine.drain()
        nothing_left(cache)
        assert [answer.tokens for answer in run(engine, requests)] == expected


def test_a_request_that_no_pass_can_be_planned_for_is_the_only_one_that_ends() -> None:
    """A runner refuses it when rows are grouped, and not in the pass: here beyond 150 tokens."""

    class Grouping(FaultyRunner):
        def groups(self, spans: Sequence[Span]) -> list[list[int]]:
            if self.armed and any(span.end > 150 for span in spans):
                raise InputError("too long")
            return super().groups(spans)

        armed = False

    requests = [Request(prompt(seed, 40), 20) for seed in range(3)]
    cache, faulty = cache_for(model(), CAPACITY), Faulty(model(), kind=Grouping)
    with Engine(faulty, cache) as engine:
        answers = [engine.add(request) for request in [*requests, Request(prompt(9, 145), 20)]]
        Grouping.armed = True
        while not all(answer.done for answer in answers):
            engine.step()
    assert [answer.reason for answer in answers] == ["length"] * 3 + ["error"]
    assert isinstance(answers[3].error, InputError)
    assert [answer.tokens for answer in answers[:3]] == plain(model(), requests)
    nothing_left(cache)


@AHEAD
def test_a_failure_that_is_nobodys_ends_all_of_them_in_the_end_and_one_of_a_crowd_ends_nobody(overlap: bool) -> None:
    class Crowded(FaultyRunner):
        def forward(self, batch: Batch) -> torch.Tensor:
            if len(batch.spans) > self.most:
                raise Fault("out of memory")
            return self.bound.forward(batch)  # type: ignore[no-any-return]

        most = 1

    requests = [Request(prompt(seed, 40), 12) for seed in range(4)]
    cache, faulty = cache_for(model(), CAPACITY), Faulty(model(), kind=Crowded)
    with Engine(faulty, cache, overlap=overlap) as engine:
        answers = run(engine, requests)
        assert [answer.tokens for answer in answers] == plain(model(), requests)
        Crowded.most = 0
        assert [answer.reason for answer in run(engine, requests)] == ["error"] * 4
    nothing_left(cache)


# ---------------------------------------------------------------- logits that are not finite


def test_logits_made_of_what_a_failed_step_left_unwritten_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind a failed one was launched already, and it reads memory in which anything may lie, also NaN."""

    behind = threading.Event()

    class FirstFails(FaultyRunner):
        passes = 0

        def forward(self, batch: Batch) -> torch.Tensor:
            self.passes += 1
            logits: torch.Tensor = self.bound.forward(batch)
            if self.passes == 1:
                assert behind.wait(60), "no step was launched behind this one"
                raise Fault("out of memory")
            return logits * (NAN if self.passes == 2 else 1)

    request = Request(prompt(1, 40), 12)
    cache = cache_for(model(), CAPACITY)
    with Engine(Faulty(model(), kind=FirstFails), cache) as engine:
        collect = engine._collect

        def when_the_next_is_over(launched: Any) -> None:
            if engine._in_flight:
                behind.set()
            for step in engine._in_flight:
                step.wait()
            collect(launched)

        monkeypatch.setattr(engine, "_collect", when_the_next_is_over)
        (answer,) = run(engine, [request])
        assert [answer.tokens] == plain(model(), [request]), answer.error
    nothing_left(cache)


@pytest.mark.parametrize(
    ("at", "speculate", "value", "overlap"),
    [(70, 0, NAN, True), (70, 3, -INFINITE, False), (128, 3, INFINITE, True), (128, 0, NAN, False),
     (140, 3, NAN, True), (140, 0, -INFINITE, True), (140, 3, INFINITE, False)],
)  # fmt: skip
def test_only_the_request_whose_logits_are_not_finite_ends_and_nothing_of_that_pass_is_hit(
    at: int, speculate: int, value: float, overlap: bool
) -> None:
    requests = [*good(3, speculate=speculate), bad(4, 90, speculate=speculate)]
    expected = plain(model(), requests)
    culprit = bad(3, 127)
    (right,) = plain(model(), [culprit])
    faults = Faults(spoiled={3: (at, value)}, masked={4})
    cache, faulty = cache_for(model(), CAPACITY), Faulty(model(), faults)
    with Engine(faulty, cache, chunk=96, overlap=overlap) as engine:
        answers = run(engine, [*requests[:3], culprit, *requests[3:]])
        ended = answers.pop(3)
        assert [answer.tokens for answer in answers] == expected
        assert ended.reason == "error"
        seen = int(re.findall(r"bad 3: the model's logits .* not finite at position (\d+)", str(ended.error))[0])
        assert seen >= at
        assert ended.tokens == right[: max(0, seen - 128)], "what was sampled before stays"
        assert engine.counts.failed == 1, "the others were not computed anew"
        engine.drain()
        nothing_left(cache)
        assert cache.peek([*culprit.tokens, *right]) <= seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_logit_of_the_likeliest_token_tells_whether_all_can_be_used(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    for vocabulary in (1, 2, 7, 64, 513, 4096, 151_936):
        logits = torch.randn(40, 2, vocabulary, dtype=torch.float32).to(dtype)
        for row in logits.flatten(0, 1):
            for _ in range(rng.choice([0, 0, 1, 3])):
                row[rng.randrange(vocabulary)] = rng.choice([NAN, INFINITE, -INFINITE, -INFINITE])
            if rng.random() < 0.1:
                row[:] = -INFINITE
        legal = logits.isfinite().any(-1) & ~logits.isnan().any(-1) & ~(logits == INFINITE).any(-1)
        highest, likeliest = logits.max(-1)
        assert torch.equal(usable(highest), legal)
        assert torch.equal(likeliest, logits.argmax(-1))  # the first of equal ones


def test_whatever_a_bad_request_leaves_in_freed_pages_their_next_owners_answer_the_same() -> None:
    requests = [*good(6, speculate=3), bad(4, 300)]
    expected = plain(model(), requests[:6])
    cache = cache_for(model(), CAPACITY)
    with Engine(Faulty(model(), Faults(spoiled={4: (5, NAN)})), cache, chunk=256) as engine:
        for part in cache.composition.parts:
            for buffer in cache.pool(part.name).buffers.values():
                buffer.fill_(NAN)
        answers = run(engine, requests)
    assert answers[6].reason == "error"
    assert [answer.tokens for answer in answers[:6]] == expected
    nothing_left(cache)


def test_rows_beside_one_that_is_not_finite_are_computed_once_and_bitwise_as_without_it() -> None:
    """The other rows' log-probabilities, whose batch has a row of the same length that is spoiled in the middle."""
    others = [Request(prompt(seed, 129), 24, logprobs=True) for seed in (1, 2)]
    found = []
    for faults in (Faults(), Faults(spoiled={3: (135, NAN)})):
        cache = cache_for(model(), AMPLE)
        with Engine(Faulty(model(), faults), cache) as engine:
            answers = run(engine, [bad(3, 127), *others])
            steps = engine.counts.steps
        nothing_left(cache)
        assert answers[0].reason == ("error" if faults.spoiled else "length")
        found.append(([(answer.tokens, answer.logprobs) for answer in answers[1:]], steps))
    (plainly, steps), (beside, steps_beside) = found
    assert [tokens for tokens, _ in beside] == [tokens for tokens, _ in plainly]
    assert steps_beside <= steps
    for (_, one), (_, other) in zip(plainly, beside, strict=True):
        assert one[:7] == other[:7], "while the batch is the same, every bit is"
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-12)


@AHEAD
def test_a_reader_of_content_that_is_not_finite_computes_it_itself(overlap: bool) -> None:
    """Requests with the prompt of the bad one wait for its checkpoint, and read what it publishes."""
    shared = [BAD, 3, *prompt(3, 190)]
    requests = [Request([*shared, *prompt(seed, 20)], 6) for seed in (1, 2)]
    cache = cache_for(model(), CAPACITY)

    class Once(FaultyRunner):
        """The first pass of the first request is spoiled, and no other."""

        def forward(self, batch: Batch) -> torch.Tensor:
            logits = self.bound.forward(batch)
            if batch.spans[0].start == 0 and self.left:
                self.left -= 1
                logits[0] = NAN
                for part in ("full", "swa"):
                    for buffer in self.cache.pool(part).buffers.values():
                        pages = batch.tables[part][0]
                        buffer[:, pages[pages >= 0].long()] = NAN
            return logits  # type: ignore[no-any-return]

        left = 1

    with Engine(Faulty(model(), kind=Once), cache, chunk=128, overlap=overlap) as engine:
        answers = run(engine, [Request(shared, 5), *requests])
        assert answers[0].reason == "error"
        assert [answer.tokens for answer in answers[1:]] == plain(model(), requests)
        (again,) = run(engine, [Request(shared, 5)])
        assert [again.tokens] == plain(model(), [Request(shared, 5)])
    nothing_left(cache)


# ---------------------------------------------------------------- guessers


def raising(tokens: Any, most: int) -> Any:
    raise Fault("no guess")


def forgetful(tokens: Any, most: int) -> Any:
    tokens.clear()
    return []


ANSWERS: dict[str, Callable[[Any, int], Any]] = {
    "raises": raising,
    "no list": lambda tokens, most: None,
    "too many": lambda tokens, most: [1] * (most + 1),
    "not a token": lambda tokens, most: [512],
    "negative": lambda tokens, most: [-1],
    "no numbers": lambda tokens, most: ["a"] * most,
    "clears what it was given": forgetful,
}


@pytest.mark.parametrize(("kind", "overlap"), [(kind, at % 2 == 0) for at, kind in enumerate(ANSWERS)])
def test_a_guesser_that_answers_wrongly_costs_its_guesses_and_nothing_else(kind: str, overlap: bool) -> None:
    asked: list[int] = []

    class Wrong:
        def guess(self, tokens: Sequence[int], most: int) -> list[int]:
            asked.append(most)
            return ANSWERS[kind](tokens, most)  # type: ignore[no-any-return]

    requests = [Request(prompt(seed, 50 + seed), 24) for seed in range(2)]
    cache = cache_for(model())
    with Engine(model(), cache, guesser=Wrong(), speculate=3, overlap=overlap) as engine:
        answers = run(engine, requests)
        assert (engine.counts.failed, engine.counts.drafted) == (0, 0)
    assert len(asked) == 2 or kind == "clears what it was given", "it is not asked again for that request"
    assert [answer.tokens for answer in answers] == plain(model(), requests)
    assert [cache.peek([*answer.request.tokens, *answer.tokens], leave=1) for answer in answers] == [64] * 2
    nothing_left(cache)


# ---------------------------------------------------------------- all of it at once


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 16))])
def test_good_requests_are_answered_as_without_bad_ones(seed: int) -> None:
    rng, overlap, drafting = random.Random(seed), seed % 2 == 0, seed % 4 > 1
    it = ThreeWay("tiny", dtype="float64", draft=True) if drafting else model()
    capacity = {**CAPACITY, "mamba": 60, **({"draft": 1200} if drafting else {})}
    speculate = rng.choice([0, 2, 4])
    wanted = good(8, seed + 50, speculate=speculate)
    wanted = [attrs.evolve(r, temperature=rng.choice([0.0, 0.8]), seed=i) for i, r in enumerate(wanted)]
    faults, wrong = Faults(), []
    for number in range(5):
        length, tokens = rng.randrange(1, 150), rng.randrange(1, 30)
        at = rng.randrange(length + 2 + tokens)
        if rng.random() < 0.5:
            faults.raising[number] = at
        else:
            faults.spoiled[number] = at, rng.choice([NAN, INFINITE, -INFINITE])
        wrong.append(bad(number, length, tokens, speculate=speculate, temperature=rng.choice([0.0, 1.3])))
        wrong[-1] = attrs.evolve(wrong[-1], tokens=[*wrong[-1].tokens, *(SYSTEM if rng.random() < 0.3 else [])])
    cache = cache_for(it, capacity)
    everything = [*wanted, *wrong]
    rng.shuffle(everything)
    with Engine(Faulty(it, faults), cache, chunk=rng.choice([48, 128, 512]), overlap=overlap) as engine:
        answers: dict[Request, Answer] = {}
        for _ in range(4000):
            if everything and (rng.random() < 0.4 or all(answer.done for answer in answers.values())):
                request = everything.pop()
                answers[request] = engine.add(request)
                with pytest.raises(InputError):
                    engine.add(Request([BAD], temperature=rng.choice([NAN, 10**400, -1, 1e-200])))
            engine.step()
            if not everything and all(answer.done for answer in answers.values()):
                break
        engine.drain()
        nothing_left(cache)
    assert [answers[request].tokens for request in wanted] == plain(model(), wanted)
    assert {answers[request].reason for request in wanted} == {"length"}
    for number, request in enumerate(wrong):
        fault = faults.raising.get(number, faults.spoiled.get(number, (0, 0.0))[0])
        if fault < len(request.tokens):
            assert answers[request].reason == "error"
    nothing_left(cache)
