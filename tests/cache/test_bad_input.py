"""Bad input: each item of the list gets a clear error of the family, changes nothing, and the cache goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixloom import (
    CapacityError,
    Claim,
    Component,
    CompositionError,
    InputError,
    Path,
    PluginError,
    Point,
    PrefixloomError,
    ProtocolError,
    Receipt,
    Touch,
    Window,
    hookimpl,
)
from prefixloom.keys.tokens import TOKEN_LIMIT
from tests.support.helpers import cache_of, held, part, path_cache, run, serve, settle

TOKENS = list(range(40))


def mixed(**options: Any) -> Any:
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("tokens", [None, "text", 5, [1.5], [-1], [TOKEN_LIMIT], [None], {1: 2}, np.zeros(3), object()])
def test_wrong_tokens_are_refused_everywhere_and_change_nothing(tokens: Any) -> None:
    cache = mixed()
    serve(cache, TOKENS)
    before = cache.stats()
    for call in (cache.open, cache.match, cache.peek):
        with pytest.raises(InputError, match=r"token"):
            call(tokens)
    assert cache.stats() == before
    with cache.open(TOKENS) as sequence:
        with pytest.raises(InputError, match=r"token"):
            sequence.append(tokens)
        assert sequence.named == 40
    settle(cache)


@pytest.mark.parametrize("namespace", [None, 5, b"a", ("a",)])
def test_a_namespace_that_is_not_a_string_is_refused(namespace: Any) -> None:
    cache = path_cache()
    for call in (cache.open, cache.match, cache.peek):
        with pytest.raises(InputError, match="a namespace must be a string, got"):
            call(TOKENS, namespace=namespace)
    with pytest.raises(InputError, match="a namespace must be a string, got"):
        cache.drop_namespace(namespace)
    assert cache.stats().namespaces == 0
    settle(cache)


@pytest.mark.parametrize("leave", [-1, 1.5, "1", None, True])
def test_leave_must_be_a_number_of_tokens(leave: Any) -> None:
    cache = path_cache()
    with pytest.raises(InputError, match="leave takes a number of tokens from 0 up"):
        cache.open(TOKENS, leave=leave)
    settle(cache)


def test_a_sequence_longer_than_the_pool_is_refused_at_once_and_names_the_smallest_pool() -> None:
    cache = cache_of(
        part("wide", Path(), page_size=16), part("narrow", Path(), page_size=4), capacity={"wide": 160, "narrow": 80}
    )
    with cache.open(range(200)) as sequence:
        with pytest.raises(InputError, match=r"84 tokens is longer than the pool of component 'narrow'.*80"):
            sequence.grow(84)
        assert sequence.reserved == 0
        run(sequence, 80)
        with pytest.raises(InputError, match="81 tokens"):
            sequence.grow(1)
    assert held(cache, range(80)) == 80
    settle(cache)


def test_a_window_that_its_pool_cannot_hold_is_a_capacity_error() -> None:
    cache = cache_of(part("window", Window(10)), tokens=16)
    with cache.open(TOKENS) as sequence:
        with pytest.raises(CapacityError, match="window: needs 5 pages"):
            sequence.grow(20)
        for _ in range(10):
            run(sequence, 4)
    settle(cache)


@pytest.mark.parametrize("need", [-1, 1.5, "all", None, {"path": -1}, {"path": "x"}, {"ghost": 1}, True])
def test_evict_takes_numbers_of_components_that_exist(need: Any) -> None:
    cache = path_cache()
    with pytest.raises(InputError, match=r"evict takes|no component 'ghost' here"):
        cache.evict(need)


def test_a_plan_is_opened_as_it_is_and_tells_neither_candidates_nor_pages_once_stale() -> None:
    cache = mixed()
    serve(cache, TOKENS, chunk=20)
    plan = cache.match(TOKENS)
    assert plan.candidates() == ((0, 0), (20, 20), (40, 40))
    for more in ({"namespace": "a"}, {"leave": 1}, {"extra": [(0, 1, "cat")]}):
        with pytest.raises(InputError, match="a plan has its namespace, leave and extra already"):
            cache.open(plan, **more)  # type: ignore[arg-type]
    cache.evict({"state": 1})
    for tell in (plan.candidates, lambda: plan.pages("path")):
        with pytest.raises(ProtocolError, match="this plan is stale"):
            tell()


def test_names_of_components_are_checked() -> None:
    cache = path_cache()
    serve(cache, TOKENS)
    plan = cache.match(TOKENS)
    with cache.open(TOKENS) as sequence:
        for call in (cache.pool, sequence.pages, sequence.owned, plan.pages):
            with pytest.raises(InputError, match="no component 'ghost' here; there are path"):
                call("ghost")


# ---------------------------------------------------------------- another thread


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises in another thread."""
    raised: list[BaseException | None] = [None]

    def body() -> None:
        try:
            call()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return raised[0]


def test_every_call_from_another_thread_is_refused_and_changes_nothing() -> None:
    cache = mixed()
    serve(cache, TOKENS)
    plan = cache.match(TOKENS)
    lease = cache.lease(plan)
    sequence = cache.open(TOKENS)
    sequence.grow(4)
    step = cache.step([sequence])
    before = cache.stats()
    calls: list[Callable[[], object]] = [
        lambda: cache.open(TOKENS), lambda: cache.open(plan), lambda: cache.match(TOKENS), lambda: cache.peek(TOKENS),
        lambda: cache.lease(plan), lambda: cache.evict(4), cache.flush, cache.poll, lambda: cache.drop_namespace(""),
        lambda: cache.step([sequence]), lambda: sequence.grow(1), lambda: sequence.append([1]), sequence.commit,
        sequence.publish, lambda: sequence.rewind(1), sequence.close, sequence.abort, lease.release,
    ]  # fmt: skip
    for call in calls:
        error = elsewhere(call)
        assert isinstance(error, ProtocolError), call
        assert "one thread drives a cache" in str(error)
    assert cache.stats() == before
    with step:
        error = elsewhere(step.run_ops)
        assert isinstance(error, ProtocolError)
        step.run_ops()
    lease.release()
    sequence.close()
    cache.flush()
    assert isinstance(elsewhere(lambda: cache.match(TOKENS)), ProtocolError), "after a flush as before it"
    settle(cache)


# ---------------------------------------------------------------- plugins that fail


class Failing(Component):
    """Answers what it is told to: each hook through the same door."""

    hook = ""
    answer: Any = None
    asked = 0

    def _say(self, hook: str) -> Any:
        if hook != self.hook:
            return None
        self.asked += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer

    @hookimpl
    def create_match_validator(self) -> Any:
        return lambda walk: walk.boundary if (said := self._say("create_match_validator")) is None else said

    @hookimpl
    def finalize_match_result(self) -> Any:
        return self._say("finalize_match_result")

    @hookimpl
    def commit_insert(self) -> Any:
        return self._say("commit_insert")

    @hookimpl
    def redistribute_on_node_split(self) -> Any:
        return self._say("redistribute_on_node_split")

    @hookimpl
    def acquire_component_lock(self) -> Any:
        return self._say("acquire_component_lock")

    @hookimpl
    def release_component_lock(self) -> Any:
        return self._say("release_component_lock")

    @hookimpl
    def evict_component(self) -> Any:
        return self._say("evict_component")

    @hookimpl
    def deferred_forward_ops(self) -> Any:
        return self._say("deferred_forward_ops")

    @hookimpl
    def run_forward_op(self) -> Any:
        return self._say("run_forward_op")


HARD = ("create_match_validator", "finalize_match_result", "acquire_component_lock", "deferred_forward_ops")
SOFT = ("commit_insert", "redistribute_on_node_split", "release_component_lock", "evict_component")
BAD: dict[str, list[Any]] = {
    "create_match_validator": [-1, "x", 1.5, Claim(), lambda: Claim(need=-1)],
    "finalize_match_result": [5, Receipt(), lambda: Claim(need=-1), lambda: Claim(ops=(5,)), lambda: Claim(branch="x")],
    "acquire_component_lock": [5, Claim(), Touch(), lambda: Receipt(positions=((1,),)), lambda: Receipt(positions=(3,)),
                               lambda: Receipt(positions=(("a", "b"),)), lambda: Receipt(positions=5)],
    "deferred_forward_ops": [5, "ops", [1], (5,), Claim()],
    "commit_insert": [5, Receipt(), Claim(keep=(3,)), lambda: Claim(keep=5), lambda: Claim(keep=(("a", "b"),))],
    "redistribute_on_node_split": [5, Claim(), lambda: __import__("prefixloom").values.SplitRule("both")],
    "release_component_lock": [5, Receipt(), lambda: Touch(positions=5), lambda: Touch(positions=((1,),))],
    "evict_component": [5, Touch(), Claim(keep=((0, 4),)), lambda: Claim(keep=5), lambda: Claim(keep=([],))],
}  # fmt: skip
WRONG = [(hook, answer) for hook, answers in BAD.items() for answer in [LookupError("no"), *answers]]
IDS = [f"{hook}-{i}" for i, (hook, _) in enumerate(WRONG)]


def failing(reach: Any, hook: str, answer: Any) -> tuple[Any, Failing]:
    """A cache with something in it, whose plugin fails from now on."""
    mine = part("mine", reach, kind=Failing)
    assert isinstance(mine, Failing)
    cache = cache_of(part("path", Path()), mine, part("state", Point()), tokens=96, slots=8)
    serve(cache, TOKENS, chunk=20)
    mine.hook, mine.answer = hook, answer
    return cache, mine


def traffic(cache: Any) -> None:
    """Every operation that asks a hook: a hit, a split, a publication, an eviction, releases."""
    serve(cache, [*TOKENS, 1, 2, 3, 4], chunk=20)
    serve(cache, [*TOKENS[:28], *[7] * 8])
    cache.lease(cache.match(TOKENS)).release()
    cache.evict({"mine": 5})
    serve(cache, [9] * 60)


@pytest.mark.parametrize("reach", [Path(), Window(10), Point(), Window(6).shift(2)], ids=repr)
@pytest.mark.parametrize(("hook", "answer"), WRONG, ids=IDS)
def test_a_hook_that_fails_neither_leaks_nor_stops_the_cache(hook: str, answer: Any, reach: Any) -> None:
    cache, mine = failing(reach, hook, answer)
    if hook in SOFT:
        traffic(cache)
        exempt = hook == "commit_insert" and isinstance(answer, Claim)  # of a state only whether it is empty counts
        harmless = isinstance(answer, Claim) and hook == "evict_component"  # no index among them: nothing held back
        if mine.asked and not exempt and not harmless:
            assert cache.stats().plugin_errors == mine.asked
    else:
        with pytest.raises(PluginError, match=f"component 'mine': {hook}"):
            traffic(cache)
    settle(cache)
    mine.hook = ""
    traffic(cache)
    assert held(cache, [9] * 60) == 60
    cache.flush()
    settle(cache)


def test_a_validator_that_cannot_be_made_refuses_the_composition() -> None:
    class Broken(Component):
        @hookimpl
        def create_match_validator(self) -> Any:
            raise LookupError("no")

    class Wrong(Component):
        @hookimpl
        def create_match_validator(self) -> Any:
            return 5

    for kind in (Broken, Wrong):
        with pytest.raises(CompositionError, match=r"component 'mine'.* create_match_validator"):
            cache_of(part("mine", Path(), kind=kind))


def test_every_error_is_of_one_family() -> None:
    from prefixloom import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 7
    assert all(issubclass(kind, PrefixloomError) for kind in kinds)
    assert issubclass(InputError, ValueError)
