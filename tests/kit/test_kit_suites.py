"""The kit's suites of policies and stores: the built-in ones pass, and each law of a policy sees one that breaks it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import AdmissionPolicy, CompositionError, EvictionPolicy, TierManifest
from prefixloom.cli import main
from prefixloom.compose.registry import default_registry
from prefixloom.contract.admission import ADMISSIONS
from prefixloom.contract.policy import BUILT_IN
from prefixloom.contract.queues import ListQueue
from prefixloom.testing import AdmissionCase, ComponentCase, PolicyCase, parametrize_with_laws
from prefixloom.testing.conformance import verdict
from prefixloom_hicache import HostTier
from tests.support.helpers import Keeping

BUILT = [PolicyCase(lambda name=name: BUILT_IN[name], name) for name in BUILT_IN]
KEYED = PolicyCase(lambda: EvictionPolicy("shortest", key=lambda use: use.tokens), "a key")
ADMIT = [AdmissionCase(lambda name=name: ADMISSIONS[name], name) for name in ADMISSIONS]


@parametrize_with_laws(*BUILT, KEYED, *ADMIT)
def test_conformance(case: Any, law: Any) -> None:
    law(case)


# ---------------------------------------------------------------- broken policies


class LosesOnTouch(ListQueue):
    def touch(self, cell: Any) -> None:
        self.remove(cell)


class KeepsTheRemoved(ListQueue):
    """Marks what is removed, and lets it come out all the same."""

    def remove(self, cell: Any) -> None:
        if cell.number % 9:
            super().remove(cell)


class LeavesItsMark(ListQueue):
    def pop(self) -> Any:
        cell = super().pop()
        if cell is not None:
            cell.next = self
        return cell


class FirstIsLast(ListQueue):
    def add_first(self, cell: Any) -> None:
        self.add(cell)


class ByChance(ListQueue):
    def add(self, cell: Any) -> None:
        super().add_first(cell) if random.random() < 0.5 else super().add(cell)


class ForgetsUpperHalves(ListQueue):
    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        pass


class LooksAtAll(ListQueue):
    def touch(self, cell: Any) -> None:
        for _ in self:
            pass
        super().touch(cell)


def queue(kind: type[ListQueue]) -> Callable[[], EvictionPolicy]:
    return lambda: EvictionPolicy("broken", make=kind)


def key(function: Any) -> Callable[[], EvictionPolicy]:
    return lambda: EvictionPolicy("broken", key=function)


POLICIES: list[tuple[Callable[[], EvictionPolicy], str]] = [
    (queue(LosesOnTouch), "law_every_piece_comes_out_exactly_once"),
    (queue(KeepsTheRemoved), "law_what_is_protected_is_never_evicted"),
    (queue(LeavesItsMark), "law_a_piece_says_whether_it_stands_in_the_queue"),
    (queue(FirstIsLast), "law_what_is_put_first_goes_first"),
    (queue(ByChance), "law_the_same_calls_give_the_same_order"),
    (queue(ForgetsUpperHalves), "law_a_split_loses_neither_half"),
    (queue(Keeping), "law_nothing_is_kept_of_what_is_gone"),
    (key(lambda use: 1 // (use.uses - 1)), "law_the_smallest_key_goes_first"),
    (key(lambda use: use.tokens if use.uses % 2 else str(use.tokens)), "law_the_smallest_key_goes_first"),
    (key(lambda use: random.random()), "law_the_smallest_key_goes_first"),
    (queue(LooksAtAll), "law_a_large_queue_costs_what_a_small_one_does"),
]
ADMISSION: list[tuple[AdmissionPolicy, str]] = [
    (AdmissionPolicy("broken", admit=lambda state: None), "law_every_state_gets_an_answer"),  # type: ignore[arg-type, return-value]
    (AdmissionPolicy("broken", admit=lambda state: 8 // state.kept > 1), "law_every_state_gets_an_answer"),
    (AdmissionPolicy("broken", admit=lambda state: random.random() < 0.5), "law_the_answer_follows_from_the_view"),
    (AdmissionPolicy("broken", admit=lambda state: time.monotonic() < 1e8), "law_the_answer_follows_from_the_view"),
    (AdmissionPolicy("broken", admit=lambda state: state.component), "law_serving_goes_on_with_it"),  # type: ignore[arg-type, return-value]
]


def broken_by(case: Any, name: str) -> str:
    (law,) = [law for law in case.laws if law.__name__ == name]
    found = verdict(law, case)
    assert found.status == "broken", found
    return found.told


@pytest.mark.parametrize(("make", "law"), POLICIES, ids=[f"{number}-{law}" for number, (_, law) in enumerate(POLICIES)])
def test_a_broken_eviction_policy_is_killed_by_its_law(make: Callable[[], EvictionPolicy], law: str) -> None:
    assert len(broken_by(PolicyCase(make), law)) > 20


@pytest.mark.parametrize(("policy", "law"), ADMISSION, ids=[f"{n}-{law}" for n, (_, law) in enumerate(ADMISSION)])
def test_a_broken_admission_policy_is_killed_by_its_law(policy: AdmissionPolicy, law: str) -> None:
    assert len(broken_by(AdmissionCase(lambda: policy), law)) > 20


def test_every_law_of_a_policy_kills_something() -> None:
    assert {law for _, law in POLICIES} == {law.__name__ for law in KEYED.laws}
    assert {law for _, law in ADMISSION} == {law.__name__ for law in ADMIT[0].laws}


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", ["policy:slru", "admission:branch-and-last", "storage:memory", "storage:file"])
def test_the_command_tests_what_is_no_component_too(
    name: str, installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    statuses = [verdict["status"] for verdict in told["verdicts"]]
    assert told["broken"] == 0 and statuses.count("holds") >= 3
    assert told["untested"]
    if name == "storage:file":
        assert statuses.count("not applicable") == 1, "a store that lasts is reopened"


BAD = """
from prefixloom import EvictionPolicy, hookimpl
from prefixloom.contract.queues import ListQueue
from prefixloom.storage import BackendType

class Lazy(ListQueue):
    def touch(self, cell):
        self.remove(cell)

@hookimpl
def prefixloom_policy():
    return EvictionPolicy("lazy", make=Lazy)

@hookimpl
def prefixloom_storage():
    from prefixloom_hicache import MemoryBackend

    class Lying(MemoryBackend):
        def exists(self, keys):
            return tuple(True for _ in keys)

    return BackendType("lying", Lying)
"""


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("policy:lazy", "law_every_piece_comes_out_exactly_once"),
        ("storage:lying", "law_a_read_exists_if_and_only_if_it_hits"),
    ],
)
def test_the_command_tells_what_is_broken_in_a_policy_or_a_store(
    name: str, law: str, distribution: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution("prefixloom-bad", {"policy:lazy": "kit_bad_2", "storage:lying": "kit_bad_2"}, {"kit_bad_2": BAD})
    default_registry.cache_clear()
    assert main(["conformance", name]) == 1
    assert f"BROKEN  {law}" in capsys.readouterr().out
    default_registry.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["profile:mine"], "there are suites for a component's NAME, storage:NAME, policy:NAME, admission:NAME"),
        (["policy:lru", "--set", "a=1"], "takes no options, got a"),
        (["policy:nope"], "no installed distribution offers a policy named 'nope'"),
    ],
)
def test_the_command_says_what_it_cannot_test(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_tier_below_the_device_is_told_to_be_one() -> None:
    """It is registered like a component, so its name may be asked for."""
    case = ComponentCase(lambda: HostTier(TierManifest(capacity=64)), label="hicache")
    with pytest.raises(CompositionError, match="hicache is a tier below the device and no component"):
        case.component()
