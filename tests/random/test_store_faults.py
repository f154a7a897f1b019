"""Faults at every call of a store: some of the matrix here, all of it by ``python -m tests.random.store_faults``."""

from __future__ import annotations

import pytest

from tests.random.store_faults import FETCHES, HOWS, KEEPS, MATRIX, SETS, Drive, Faulty, faults_of
from tests.support.sampling import sampled


@pytest.mark.parametrize("comps", sampled(SETS, 3))
def test_whatever_a_store_does_content_is_right_and_nothing_is_left(comps: str) -> None:
    at = list(SETS).index(comps)
    for number, page in enumerate((1, 4)):
        case = (comps, page, FETCHES[(at + number) % 3], KEEPS[(at + 2 * number) % 3])
        assert sum(faults_of(case, some=6).values()) > 0


@pytest.mark.parametrize("comps", sampled(SETS, 2))
def test_without_a_fault_a_store_gets_and_brings_all_that_it_should(comps: str) -> None:
    for number, case in enumerate(MATRIX):
        if case[0] == comps:
            Drive(case, Faulty(), host=(84, 20)[number % 2]).run()


def test_the_traffic_meets_every_kind_of_call_and_brings_something() -> None:
    store = Faulty()
    drive = Drive(("FSM", 4, "wait", "through"), store)
    drive.run()
    assert set(store.kinds) == {"get", "put", "exists"}
    assert drive.told > 0 and len(HOWS) == 6
