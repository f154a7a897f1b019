"""The engine: the same tokens as without a cache, whatever is ahead, short or shared; and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import re
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
    cache_for,
    mixed,
    model,
    nothing_left,
    plain,
    prompt,
    served,
    untracked,
)

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
REQUESTS = mixed(16)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_answers_are_those_without_a_cache(policy: str, overlap: bool) -> None:
    cache = cache_for(model(), CAPACITY)
    out, engine = served(model(), REQUESTS, cache, policy=policy, overlap=overlap)
    assert out == plain(model(), REQUESTS)
    assert cache.stats().hit_tokens > 0
    assert engine.counts.admitted >= 16


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_who_is_short_of_a_pool_is_retracted_and_resumes(overlap: bool) -> None:
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


def test_a_request_waits_for_the_checkpoint_of_another_that_shares_its_beginning() -> None:
    """The first is cut where they part, so that even a state is there; nothing is computed twice."""
    requests = [Request([*prompt(5, 200), *prompt(100 + i, 150)], 4) for i in range(5)]
    cache = cache_for(model())
    out, engine = served(model(), requests, cache, chunk=512)
    assert out == plain(model(), requests)
    assert engine.counts.waited == 4
    assert engine.counts.prefilled == 350 + 4 * (350 - 192)


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


def test_the_next_turn_hits_at_its_full_length_rounded_to_the_grid() -> None:
    for overlap in (True, False):
        cache = cache_for(model())
        with Engine(model(), cache, overlap=overlap) as engine:
            history = prompt(9, 100)
            for length in (30, 61, 130):
                (answer,) = engine.generate([Request(history, length)])
                history += answer.tokens
                computed = len(history) - 1  # the last token of an answer is only named
                assert cache.peek([*history, 1], leave=1) == computed // 64 * 64
                history += prompt(length, 20)
        nothing_left(cache)


def test_the_next_turn_hits_as_deep_where_the_cache_keeps_no_checkpoints_of_a_decode() -> None:
    """The engine publishes its own then: a component that does not track is served as well."""
    it = model()
    for overlap, speculate in ((True, 0), (False, 0), (True, 4)):
        cache = untracked(it)
        with Engine(it, cache, overlap=overlap, speculate=speculate) as engine:
            (answer,) = engine.generate([Request(prompt(9, 100), 100)])
        assert cache.peek([*prompt(9, 100), *answer.tokens, 1], leave=1) == 199 // 64 * 64
        assert [answer.tokens] == plain(it, [Request(prompt(9, 100), 100)])
        nothing_left(cache)


def test_a_second_branch_leaves_a_checkpoint_where_prompts_part() -> None:
    """The first prompt leaves no state inside of its chunks; the second is told of the branch, and the third hits."""
    cache = cache_for(model())
    with Engine(model(), cache, chunk=1024) as engine:
        for number, hit in ((1, 0), (2, 0), (3, 128)):
            (answer,) = engine.generate([Request([*SYSTEM, *prompt(number, 200)], 2)])
            assert answer.hit == hit


def test_a_stop_ends_an_answer_inside_of_a_page() -> None:
    (whole,) = plain(model(), [Request(prompt(4, 90), 40)])
    stop = whole[20]
    at = whole.index(stop) + 1
    for overlap in (True, False):
        cache = cache_for(model())
        with Engine(model(), cache, overlap=overlap) as engine:
            (answer,) = engine.generate([Request(prompt(4, 90), 40, stops=[stop])])
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


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_a_model_without_states_or_windows_runs_too(overlap: bool) -> None:
    for layers in (("full_attention",) * 2, ("sliding_attention",) * 2, ("linear_attention",) * 2):
        it = ThreeWay(attrs.evolve(SIZES["tiny"], layers=layers), dtype="float64")
        requests = mixed(4)
        name = {"f": "full", "s": "swa", "l": "mamba"}[layers[0][0]]
        cache = cache_for(it, {name: 28 if name == "mamba" else 900})
        out, _ = served(it, requests, cache, overlap=overlap)
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


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_an_abort_at_any_time_disturbs_nobody(overlap: bool) -> None:
    requests = mixed(4)
    expected = plain(model(), requests)
    for when in range(12):
        cache = cache_for(model(), CAPACITY)
        with Engine(model(), cache, chunk=64, overlap=overlap, speculate=2) as engine:
            answers = [engine.add(each) for each in requests]
            for _ in range(when):
                engine.step()
            engine.abort(answers[when % 4])
            while engine.step():
                pass
        for i, answer in enumerate(answers):
            if answer.reason == "aborted":
                assert i == when % 4
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


def test_an_interrupt_anywhere_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was interrupted starts over; whoever asked it is told, and others go on."""
    requests = mixed(4)
    honest = Scheduler.plan
    for when in (0, 1, 3, 6, 10):
        cache = cache_for(model(), CAPACITY)
        left = [when]

        def interrupted(self: Scheduler, left: list[int] = left) -> Any:
            rows = honest(self)  # reserved, and never launched
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return rows

        monkeypatch.setattr(Scheduler, "plan", interrupted)
        with Engine(model(), cache, chunk=64) as engine:
            answers = [engine.add(each) for each in requests[:2]]
            with pytest.raises(KeyboardInterrupt):
                engine.generate(requests[2:])
            while engine.step():
                pass
        assert [answer.tokens for answer in answers] == plain(model(), requests[:2])
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


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5: it is a whole number from 1 up"),
        ({"max_tokens": True}, "max_tokens=True: it is a whole number from 1 up"),
        ({"temperature": -1}, "temperature=-1: it is a number from 0 up"),
        ({"temperature": float("nan")}, "temperature=nan: it is a number from 0 up"),
        ({"temperature": "hot"}, "temperature='hot': it is a number from 0 up"),
        ({"top_p": 0}, "top_p=0: it is a number above 0, and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan: it is a number above 0"),
        ({"top_logprobs": -1}, "top_logprobs=-1: it is a whole number from 0 up"),
        ({"top_logprobs": 2}, "top_logprobs=2, and no logprobs=True"),
        ({"seed": None}, "seed=None: it is a whole number"),
        ({"priority": "high"}, "priority='high': it is a whole number"),
        ({"speculate": 1.5}, "speculate=1.5: it is a whole number from 0 up"),
        ({"speculate": -1}, "speculate=-1: it is a whole number from 0 up"),
        ({"hand_over": -1, "max_tokens": 1}, "hand_over=-1: it is a whole number from 0 up"),
        ({"hand_over": 0}, "so its answer here has one token: give max_tokens=1"),
        ({"stops": 5}, "stops are token ids, in a list or a set, got 5"),
        ({"stops": "ab"}, "stops are token ids, got"),
        ({"namespace": None}, "namespace=None: it is a string"),
        ({"label": 3}, "a request has label=3: it is a string"),
    ],
)
def test_a_request_that_could_never_be_answered_right_is_not_made(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        Request([1, 2], **wrong)


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


def test_who_cannot_be_admitted_since_others_hold_the_pools_is_told() -> None:
    cache = cache_for(model(), {"full": 256, "swa": 256, "mamba": 28})
    with cache.open(prompt(1, 250)) as other:
        other.grow(250)
        with Engine(model(), cache) as engine:
            (answer,) = engine.generate([prompt(2, 100)])
        assert answer.reason == "error"
        assert "pool" in str(answer.error) or "needs" in str(answer.error)
        other.abort()
    nothing_left(cache)


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
