"""The engine: the same tokens as without a cache, whatever is ahead, short or shared; and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import attrs
import pytest
import torch

from prefixloom import CapacityError, InputError, ProtocolError
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.serving.admission import POLICIES, dfs_weight, fcfs, lpm, priority
from prefixloom_engine.serving.scheduler import Scheduler, common_prefix
from prefixloom_engine.threeway import SIZES
from tests.support.engines import (
    CAPACITY,
    SYSTEM,
    Known,
    cache_for,
    mixed,
    model,
    nothing_left,
    plain,
    prompt,
    served,
    untracked,
)
from tests.support.planned_steps import watched

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
REQUESTS = mixed(16)


@pytest.mark.parametrize(("policy", "overlap"), [(policy, at % 2 == 0) for at, policy in enumerate(POLICIES)])
def test_answers_are_those_without_a_cache(policy: str, overlap: bool) -> None:
    cache = cache_for(model(), CAPACITY)
    out, engine = served(model(), REQUESTS, cache, policy=policy, overlap=overlap)
    assert out == plain(model(), REQUESTS)
    assert cache.stats().hit_tokens > 0
    assert engine.counts.admitted >= 16


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_request_that_lacks_pages_is_retracted_and_resumes(overlap: bool) -> None:
    requests = [Request(prompt(i, 60), 70) for i in range(6)]
    cache = cache_for(model(), {"full": 420, "swa": 420, "mamba": 64})
    out, engine = served(model(), requests, cache, overlap=overlap)
    assert engine.counts.retracted > 0
    assert engine.counts.admitted == 6 + engine.counts.retracted
    assert out == plain(model(), requests)


def test_with_priorities_the_lowest_is_retracted_and_the_highest_admitted_first() -> None:
    requests = [Request(prompt(i, 60), 70, priority=i % 3) for i in range(6)]
    cache = cache_for(model(), {"full": 420, "swa": 420, "mamba": 64})
    seen: list[int] = []
    honest = Scheduler.retract

    class Watched(Scheduler):
        def retract(self, job: Any) -> None:
            seen.append(job.request.priority)
            assert job.request.priority == min(other.request.priority for other in self.running)
            honest(self, job)

    with Engine(model(), cache, policy="priority") as engine:
        engine._scheduler.__class__ = Watched
        answers = engine.generate(requests)
    assert seen
    assert [answer.tokens for answer in answers] == plain(model(), requests)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_request_retracted_in_the_plan_of_any_of_its_tokens_is_answered_whole(overlap: bool) -> None:
    """Take the pages that a more urgent prompt needs, so that the step gives up the decode that it has planned."""
    requests = [Request(prompt(1, 100), 7), Request(prompt(2, 330), 4, priority=1)]
    retracted = 0
    for tokens_before in range(1, 5 if overlap else 6):  # with the last, the plan has the last token
        cache = cache_for(model(), {"full": 480, "swa": 480, "mamba": 64})
        with Engine(model(), cache, policy="priority", chunk=128, overlap=overlap) as engine:
            answers = [engine.add(requests[0])]
            while len(answers[0].tokens) < tokens_before:
                engine.step()
            answers.append(engine.add(requests[1]))
            engine.step()
            guest = cache.open([0])
            with contextlib.suppress(CapacityError):
                while True:
                    guest.grow(16)
            engine.step()
            retracted += engine.counts.retracted
            guest.abort()
            for _ in range(100):
                engine.step()
        assert [answer.tokens for answer in answers] == plain(model(), requests)
    assert retracted


def test_a_request_does_not_wait_for_less_than_it_hits_anyway() -> None:
    """There is no state where the second prompt parts from the first, so it computes what the third need not."""
    first = [*prompt(5, 200), *prompt(6, 120)]
    requests = [Request([*prompt(5, 200), *prompt(7, 150)], 4), Request([*first, *prompt(8, 50)], 4)]
    cache = cache_for(model())
    with Engine(model(), cache, chunk=512) as engine:
        engine.generate([first], max_tokens=2)
        answers = engine.generate(requests)
    assert [answer.hit for answer in answers] == [0, 320]
    assert engine.counts.waited == 0
    nothing_left(cache)


@pytest.mark.parametrize("tracked", [True, False], ids=["checkpoints of the cache", "checkpoints of the engine"])
@pytest.mark.parametrize(("overlap", "speculate", "wrong"), [(True, 0, 0.0), (False, 4, 0.0), (True, 4, 0.3)])
def test_next_turn_hits_at_the_full_length_of_a_conversation(
    tracked: bool, overlap: bool, speculate: int, wrong: float
) -> None:
    """Rounded to the grid of the states; a component that tracks none while it decodes is served by the engine."""
    lengths, expected, history = (30, 61, 130), list[Request](), prompt(9, 100)
    for length in lengths:
        expected.append(Request(history, length))
        history = [*history, *plain(model(), expected[-1:])[0], *prompt(length, 20)]
    guesser = Known(expected, plain(model(), expected), wrong)
    cache = cache_for(model()) if tracked else untracked(model())
    with watched(Engine(model(), cache, overlap=overlap, speculate=speculate, guesser=guesser)) as engine:
        for request in expected:
            (answer,) = engine.generate([request])
            assert [answer.tokens] == plain(model(), [request])
            text = [*request.tokens, *answer.tokens]
            assert cache.peek([*text, 1], leave=1) == (len(text) - 1) // 64 * 64, "the last token is only named"
        counts = engine.counts
        assert (counts.accepted > 100) == bool(speculate) and (counts.accepted < counts.drafted) == (wrong > 0)
    nothing_left(cache)


def test_a_second_branch_leaves_a_checkpoint_where_prompts_part() -> None:
    """The first prompt leaves no state inside of its chunks; the second is told of the branch, and the third hits."""
    cache = cache_for(model())
    with Engine(model(), cache, chunk=1024) as engine:
        for number, hit in ((1, 0), (2, 0), (3, 128)):
            (answer,) = engine.generate([Request([*SYSTEM, *prompt(number, 200)], 2)])
            assert answer.hit == hit


@pytest.mark.parametrize(("overlap", "speculate"), [(True, 0), (False, 0), (True, 4)])
def test_stop_ends_an_answer_inside_of_a_page_or_of_a_row_of_guesses(overlap: bool, speculate: int) -> None:
    (whole,) = plain(model(), [Request(prompt(4, 90), 40)])
    stop = whole[20]
    at = whole.index(stop) + 1
    request, cache = Request(prompt(4, 90), 40, stops=[stop]), cache_for(model())
    guesser = Known([request], [whole], 0.0)
    with Engine(model(), cache, overlap=overlap, speculate=speculate, guesser=guesser) as engine:
        (answer,) = engine.generate([request])
    assert (answer.tokens, answer.reason) == (whole[:at], "stop")
    nothing_left(cache)


def test_drawn_tokens_depend_on_seed_and_position_alone() -> None:
    requests = [attrs.evolve(each, temperature=0.8, top_p=1 - i / 6, seed=i) for i, each in enumerate(mixed(5))]
    out, _ = served(model(), requests, cache_for(model(), CAPACITY))
    assert out == plain(model(), requests)
    assert out != plain(model(), mixed(5))
    assert out != plain(model(), [attrs.evolve(each, seed=99) for each in requests])
    guessed, _ = served(model(), requests, cache_for(model(), CAPACITY), speculate=4)
    assert guessed == out


def test_top_p_draws_from_the_likeliest_tokens_which_the_answer_tells() -> None:
    """Each token is one of the fewest that have the probability ``top_p`` together, and not always the first."""
    everything = model().vocabulary
    asked = Request(prompt(3, 60), 60, temperature=1.5, top_p=0.4, seed=5, logprobs=True, top_logprobs=everything)
    fewer = attrs.evolve(asked, top_logprobs=3)
    with Engine(model(), cache_for(model()), speculate=3) as engine:
        answer, short = engine.generate([asked, fewer])
    assert short.tokens == answer.tokens
    ranks = []
    for at, token in enumerate(answer.tokens):
        names, logprobs = map(list, zip(*answer.alternatives[at], strict=True))
        assert sorted(names) == list(range(everything)) and logprobs == sorted(logprobs, reverse=True)
        assert short.alternatives[at] == answer.alternatives[at][:3]
        ranks.append(names.index(token))
        assert answer.logprobs[at] == logprobs[ranks[-1]]
        drawn_from = (torch.tensor(logprobs) / 1.5).softmax(0)
        assert drawn_from[: ranks[-1]].sum() < 0.4
        assert drawn_from.sum() == pytest.approx(1)
    assert max(ranks) > 0


def test_model_without_states_or_windows_is_served() -> None:
    for layers in (("full_attention",) * 2, ("sliding_attention",) * 2, ("linear_attention",) * 2):
        it = ThreeWay(attrs.evolve(SIZES["tiny"], layers=layers), dtype="float64")
        requests = mixed(4)
        name = {"f": "full", "s": "swa", "l": "mamba"}[layers[0][0]]
        cache = cache_for(it, {name: 28 if name == "mamba" else 900})
        out, _ = served(it, requests, cache)
        assert out == [tokens for each in requests for tokens in _alone(it, each, name)]


def _alone(it: ThreeWay, request: Request, name: str) -> list[list[int]]:
    return served(it, [request], cache_for(it, {name: 10 if name == "mamba" else 2048}), overlap=False, chunk=2048)[0]


# ---------------------------------------------------------------- clients


def test_streams_give_tokens_as_they_come_and_run_side_by_side() -> None:
    requests = mixed(3)
    cache = cache_for(model())
    with Engine(model(), cache) as engine:
        streams = [engine.stream(each) for each in requests]
        out: list[list[int]] = [[], [], []]
        left = [0, 1, 2]
        while left:
            for i in list(left):
                token = next(streams[i], None)
                if token is None:
                    left.remove(i)
                else:
                    out[i].append(token)
    assert out == plain(model(), requests)
    nothing_left(cache)


@pytest.mark.parametrize("how", ["closed", "dropped", "not begun"])
def test_a_client_that_goes_away_leaves_nothing_and_disturbs_nobody(how: str) -> None:
    cache = cache_for(model())
    requests = mixed(4)
    with Engine(model(), cache) as engine:
        leaving = engine.stream(Request(prompt(8, 300), 500))
        if how != "not begun":
            for _ in range(5):
                next(leaving)
        answer = leaving.answer
        if how == "closed":
            leaving.close()
            assert answer.reason == "aborted"
        del leaving
        engine.step()
        assert answer.reason == "aborted"
        out = [each.tokens for each in engine.generate(requests)]
    assert out == plain(model(), requests)
    nothing_left(cache)


def test_an_answer_whose_stream_is_over_is_not_kept() -> None:
    with Engine(model(), cache_for(model())) as engine:
        stream = engine.stream(prompt(1, 20), 3)
        assert len(list(stream)) == 3
        answer = weakref.ref(stream.answer)
        del stream
        engine.step()
        gc.collect()
        assert answer() is None


def test_a_request_for_which_somebody_else_leaves_no_room_ends_with_an_error() -> None:
    cache = cache_for(model())
    with Engine(model(), cache) as engine:
        others = []
        with pytest.raises(CapacityError):
            while True:
                others.append(cache.open([1]))
        (refused,) = engine.generate([Request(prompt(2, 100), 5, label="'the last'")])
        assert refused.reason == "error"
        assert "'the last' cannot be admitted: something other than this engine holds the pools" in str(refused.error)
        for other in others:
            other.close()
        (answer,) = engine.generate([Request(prompt(2, 100), 5)])
        assert answer.reason == "length"
    nothing_left(cache)


def test_abort_at_any_time_disturbs_nobody() -> None:
    requests = mixed(4)
    expected = plain(model(), requests)
    for when in range(8):
        cache = cache_for(model(), CAPACITY)
        with Engine(model(), cache, chunk=64, overlap=when % 2 == 0, speculate=2) as engine:
            answers = [engine.add(each) for each in requests]
            for _ in range(when):
                engine.step()
            engine.abort(answers[when // 2 % 4])
            while engine.step():
                pass
        for i, answer in enumerate(answers):
            if answer.reason == "aborted":
                assert i == when // 2 % 4
                assert answer.tokens == expected[i][: len(answer.tokens)]
            else:
                assert answer.tokens == expected[i]
        nothing_left(cache)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_an_answer_that_is_finished_early_stays_cached(overlap: bool) -> None:
    (request,) = mixed(1)
    request = attrs.evolve(request, max_tokens=90)
    (expected,) = plain(model(), [request])
    for when in (0, 1, 80):
        cache = cache_for(model())
        with Engine(model(), cache, overlap=overlap) as engine:
            answer = engine.add(request)
            for _ in range(when):
                engine.step()
            engine.finish(answer)
            assert answer.reason == "stop"
            assert answer.tokens == expected[: len(answer.tokens)]
            while engine.step():
                pass
            known = [*request.tokens, *answer.tokens]
            assert cache.peek(known, namespace=engine.namespace("")) == (len(known) // 64 * 64 if when else 0)
            (turn,) = engine.generate([Request([*known, 3], 5)])
        assert [turn.tokens] == plain(model(), [turn.request])
        nothing_left(cache)


def test_what_is_asked_wrongly_is_refused_and_nothing_is_begun() -> None:
    cache = cache_for(model(), {"full": 256, "swa": 256, "mamba": 28})
    with Engine(model(), cache) as engine:
        with pytest.raises(InputError, match="a request has no tokens"):
            engine.generate([[]])
        with pytest.raises(InputError, match=r"a prompt is a list of tokens, got 7: generate takes a list of prompts"):
            engine.generate([7, 8])  # type: ignore[list-item]
        for given in ({1: 2}, b"ab", {1, 2}):
            with pytest.raises(InputError, match="a prompt is a list of tokens"):
                engine.generate([given])  # type: ignore[list-item]
        with pytest.raises(InputError, match="has the token 512: the model's are whole numbers from 0 to 511"):
            engine.generate([[1, 512]])
        with pytest.raises(InputError, match="max_tokens=0: it is a whole number from 1 up"):
            engine.generate([[1]], max_tokens=0)
        with pytest.raises(InputError, match=r"'the long one' .* 309 tokens.*component 'full', whose pool has 16"):
            engine.generate([prompt(1, 10), Request(prompt(1, 300), 10, label="'the long one'")])
        with pytest.raises(InputError, match="would guess 5 tokens ahead, and the cache takes at most 4 back"):
            engine.generate([Request([1], speculate=5)])
        assert engine.generate([]) == []
        assert not engine.step()
        (answer,) = engine.generate([prompt(1, 10)], max_tokens=3)
        assert len(answer.tokens) == 3
    nothing_left(cache)
    with pytest.raises(ProtocolError, match="closed"):
        engine.add(Request([1]))
    with pytest.raises(InputError, match="a policy is one of fcfs, lpm"):
        Engine(model(), cache, policy="random")
    with pytest.raises(InputError, match="chunk is a whole number from 1 up, got 0"):
        Engine(model(), cache, chunk=0)


NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**5000
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 2.5}, "max_tokens=2.5: it is a whole number from 1 up"),
    ({"max_tokens": True}, "max_tokens=True: it is a whole number from 1 up"),
    *(({"temperature": value}, "temperature=") for value in (-1, NAN, "hot", 10**400, True, 1e300, 1e-300, HUGE)),
    ({"top_p": 0}, "top_p=0: it is a number above 0, and at most 1"),
    ({"top_p": NAN}, "top_p=nan: it is a number above 0"),
    ({"top_logprobs": -1}, "top_logprobs=-1: it is a whole number from 0 up"),
    ({"top_logprobs": 2}, "top_logprobs=2, and no logprobs=True"),
    ({"logprobs": 1}, "logprobs=1"),
    *(({"ttl": value}, "ttl=") for value in (-1, 10**400, True, NAN, INFINITE, "5m")),
    ({"seed": None}, "seed=None: it is a whole number"),
    ({"seed": -(2**63) - 1}, "seed="),
    ({"priority": "high"}, "priority='high': it is a whole number"),
    ({"priority": 2**63}, "priority="),
    ({"speculate": 1.5}, "speculate=1.5: it is a whole number from 0 up"),
    ({"hand_over": -1, "max_tokens": 1}, "hand_over=-1: it is a whole number from 0 up"),
    ({"hand_over": 0}, "so its answer here has one token: give max_tokens=1"),
    *(({field: HUGE}, f"{field}=") for field in ("max_tokens", "seed", "priority", "speculate", "hand_over")),
    ({"stops": 5}, "stops are token ids, in a list or a set, got 5"),
    ({"stops": "ab"}, "stops are token ids, got"),
    ({"stops": [-1]}, "stops are token ids, got -1"),
    ({"stops": [HUGE]}, "stops are token ids, got <int>"),
    ({"namespace": None}, "namespace=None: it is a string"),
    *(({"label": label}, "label=") for label in (3, "two\nlines", "\x1b[31m", "\ud800", "x" * 201)),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_request_that_no_engine_can_serve_is_not_made(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as refused:
        Request([1, 2], **{"label": "mine", **wrong})
    assert told in str(refused.value) and len(str(refused.value)) < 300
    assert {"label", "stops"} & wrong.keys() or str(refused.value).startswith("mine ")


def test_request_of_tokens_that_the_model_has_not_is_refused_when_it_is_added() -> None:
    with Engine(model(), cache_for(model())) as engine:
        for wrong, told in ((Request([1], stops=[512]), "the stop 512"), (Request([HUGE]), "the token <int>")):
            with pytest.raises(InputError, match=told):
                engine.add(wrong)
        assert not engine.step()


@pytest.mark.parametrize("wrong", ["hello", None, 5, Request([1]), [None], ["hello"], [[1.0]], [[True]]])
def test_prompts_that_are_none_are_refused(wrong: Any) -> None:
    with Engine(model(), cache_for(model())) as engine:
        with pytest.raises(InputError):
            engine.generate(wrong)
        assert not engine.step()


def test_an_array_or_a_tensor_is_a_prompt_as_well() -> None:
    with Engine(model(), cache_for(model())) as engine:
        expected = engine.generate([prompt(1, 30)], 3)[0].tokens
        for given in (torch.tensor(prompt(1, 30)), torch.tensor([prompt(1, 30)])):
            made = given if given.ndim == 2 else [given]
            assert engine.generate(made, 3)[0].tokens == expected


@pytest.mark.parametrize(("given", "told"), [((None, None), "takes a model"), ((model(), None), "and its cache")])
def test_an_engine_without_its_parts_is_refused(given: tuple[Any, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Engine(*given)


# ---------------------------------------------------------------- policies


def test_each_policy_has_its_order() -> None:
    cache = cache_for(model())
    with Engine(model(), cache) as engine:
        for each in (1, 2):
            engine.generate([prompt(each, 65 + 64 * each)], max_tokens=1)
        asked = [
            Request(prompt(3, 70), 1),
            Request([*prompt(1, 128), 9], 1),
            Request([*prompt(2, 192), 1], 1, priority=2),
            Request([*prompt(1, 128), 8], 1, priority=5),
            Request([*prompt(2, 192), 2], 1),
            Request([*prompt(1, 128), 7], 1),
        ]
        for request in asked:
            engine.add(request)
        jobs = engine._scheduler.waiting[::-1]

        def numbers(policy: Any) -> list[int]:
            return [job.number - 2 for job in policy(jobs, cache)]

        assert numbers(fcfs) == [0, 1, 2, 3, 4, 5]
        assert numbers(priority) == [3, 2, 0, 1, 4, 5]
        assert numbers(lpm) == [2, 4, 1, 3, 5, 0]
        assert numbers(dfs_weight) == [0, 1, 3, 5, 2, 4]


def test_common_finds_how_far_tokens_agree() -> None:
    a = prompt(1, 50)
    assert common_prefix(a, [*a[:20], 600, *a[21:]], 50) == 20
    assert common_prefix(a, a, 49) == 49
    assert common_prefix(a, [], 50) == 0
