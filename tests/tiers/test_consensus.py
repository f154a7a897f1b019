"""Consensus: what is done counts when every rank has it, by the least amount; over a real gloo group, too."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import CompositionError, ProtocolError, RankError
from prefixloom.tiers.consensus import (
    ROOM,
    Completions,
    Consensus,
    GroupConsensus,
    LocalConsensus,
)
from tests.support.sampling import slow

PROCESS = Path(__file__).parents[1] / "support" / "rank_process.py"


def ranks(scenario: str, folder: Path, count: int = 3) -> list[list[Any]]:
    """What each of so many processes printed."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(PROCESS)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(folder / "store"), scenario],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), [err for _, err in told]
    return [[json.loads(line) for line in out.splitlines()] for out, _ in told]


# ---------------------------------------------------------------- what follows


class Given(Consensus):
    """The values of all ranks are given."""

    def __init__(self, by_rank: list[Any]) -> None:
        self.by_rank = by_rank

    def exchange(self, call: str, values: Any) -> list[Any]:
        if call == "agree":
            return [{str(ticket): amount for ticket, amount in done.items()} for done in self.by_rank]
        return self.by_rank


def done_everywhere(by_rank: list[Any]) -> dict[int, int]:
    return Given(by_rank).agree({})


def least(by_rank: list[Any]) -> dict[str, int]:
    return Given(by_rank).agree_min({})


def check_same(by_rank: list[Any]) -> None:
    Given(by_rank).agree_same({})


def test_what_is_done_everywhere_is_the_intersection_with_the_least_amounts() -> None:
    assert done_everywhere([{3: 5, 1: 2, 9: 1}, {1: 4, 3: 0}, {7: 1, 3: 8, 1: 3}]) == {1: 2, 3: 0}
    assert list(done_everywhere([{5: 1, 2: 1}, {2: 1, 5: 1}])) == [2, 5]
    for seed in range(200):
        choice = random.Random(seed)
        told = [{n: choice.randrange(9) for n in range(12) if choice.random() < 0.7} for _ in range(3)]
        wanted = {n: min(t[n] for t in told) for n in range(12) if all(n in t for t in told)}
        assert done_everywhere(told) == wanted
        assert done_everywhere(told[::-1]) == wanted


def test_the_least_of_each_value_and_a_difference_by_name() -> None:
    assert least([{"kv": 4, "s": 1}, {"s": 0, "kv": 9}]) == {"kv": 4, "s": 0}
    with pytest.raises(RankError, match="ranks 0 and 2 do not have the same: only one of them has window"):
        least([{"kv": 4}, {"kv": 4}, {"kv": 4, "window": 1}])
    check_same([{"a": "1"}, {"a": "1"}])
    with pytest.raises(RankError, match="b is None on rank 0 and '2' on rank 1"):
        check_same([{"a": "1"}, {"a": "1", "b": "2"}])


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_of_several_differences_all_ranks_name_the_first_by_name(first: int) -> None:
    names = [f"{number:02}" for number in range(60)]
    values = dict.fromkeys(reversed(names), "1")
    with pytest.raises(RankError, match=f"^{first:02} is '1' on rank 0 and '2' on rank 2"):
        check_same([values, values, {**values, **dict.fromkeys(names[first:], "2")}])
    with pytest.raises(RankError, match=f"only one of them has {', '.join(names[first:])}"):
        least([dict.fromkeys(names[:first], 1), dict.fromkeys(reversed(names), 1)])


def test_one_rank_agrees_with_itself() -> None:
    local = LocalConsensus()
    assert local.agree({2: 3, 1: 0}) == {1: 0, 2: 3}
    assert local.agree_min({"kv": 3}) == {"kv": 3}
    local.agree_same({"dtype": "int8"})


# ---------------------------------------------------------------- completions


class Slow(LocalConsensus):
    """The other rank has only what is in ``there``."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.asked = 0

    def agree(self, done: Any) -> dict[int, int]:
        self.asked += 1
        return done_everywhere([done, self.there])


def test_a_ticket_counts_once_when_all_ranks_have_it() -> None:
    other = Slow()
    completions = Completions(other)
    assert completions.poll() == {} and other.asked == 0
    tickets = [completions.open() for _ in range(3)]
    assert tickets == [0, 1, 2]
    completions.done(2, 7)
    completions.done(0, 5)
    assert completions.poll() == {}
    other.there = {2: 9, 1: 1}
    assert completions.poll() == {2: 7}
    other.there = {1: 1, 0: 2}
    assert completions.poll() == {0: 2}
    assert completions.waiting == (1,)
    completions.done(1, 0)
    assert completions.poll() == {1: 0}
    assert completions.waiting == () and completions.poll() == {}


def test_a_ticket_is_done_once_and_was_opened() -> None:
    completions = Completions(LocalConsensus())
    ticket = completions.open()
    for number in (1, -1):
        with pytest.raises(ProtocolError, match="is not open"):
            completions.done(number, 1)
    with pytest.raises(ProtocolError, match="-1 cannot have arrived"):
        completions.done(ticket, -1)
    completions.done(ticket, 1)
    with pytest.raises(ProtocolError, match="done before"):
        completions.done(ticket, 1)
    completions.poll()
    with pytest.raises(ProtocolError, match="is not open"):
        completions.done(ticket, 1)


def test_the_tickets_that_wait_are_told_in_their_order() -> None:
    completions = Completions(LocalConsensus())
    for ticket in range(100):
        assert completions.open() == ticket
        if ticket not in (1, 64):
            completions.done(ticket, 1)
            completions.poll()
    assert completions.waiting == (1, 64)


def test_threads_complete_while_one_polls() -> None:
    completions = Completions(LocalConsensus())
    tickets = [completions.open() for _ in range(2000)]
    threads = [
        threading.Thread(target=lambda k=k: [completions.done(t, t) for t in tickets[k::4]])  # type: ignore[misc]
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    found: dict[int, int] = {}
    while completions.waiting:
        new = completions.poll()
        assert not new.keys() & found.keys()
        found |= new
    for thread in threads:
        thread.join()
    assert found == {ticket: ticket for ticket in tickets}


# ---------------------------------------------------------------- over a group


class Threads:
    """The gloo group of ``torch.distributed``, between threads of this process: each is a rank."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30)
        self.here = threading.local()
        self.board: list[Any] = [None] * count
        self.exchanges = 0

    def all_gather(self, every: list[Any], mine: Any, group: Any, async_op: bool) -> Any:
        assert async_op and len(every) == len(self.board)
        self.board[self.here.rank] = mine.clone()
        self.exchanges += self.here.rank == 0
        self.barrier.wait()
        if len({tuple(each.shape) for each in self.board}) > 1:
            raise RuntimeError("the tensors of the ranks differ in size\nmore of it")
        for target, source in zip(every, self.board, strict=True):
            target.copy_(source)
        self.barrier.wait()
        return SimpleNamespace(wait=lambda timeout: None)

    def of_all(self, call: Callable[[GroupConsensus, int], Any], group: list[GroupConsensus]) -> list[Any]:
        """What ``call`` gives on each rank, or the ``RankError``."""
        answers: list[Any] = [None] * len(group)

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                answers[rank] = call(group[rank], rank)
            except RankError as error:
                answers[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(group))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


def cut(*_: Any, **options: Any) -> Any:
    raise RuntimeError("the wire is cut\nmore of it")


@pytest.mark.parametrize("seed", range(6))
def test_a_group_agrees_as_sets_do_whatever_fits_into_an_exchange(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = random.Random(seed)
    room = choice.choice((70, 71))
    monkeypatch.setattr("prefixloom.tiers.consensus.ROOM", room)
    threads = Threads(3)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 3)
    monkeypatch.setattr("torch.distributed.all_gather", threads.all_gather)
    group = [GroupConsensus(timeout=20) for _ in range(3)]
    for _ in range(12):
        there = range(choice.choice((3, 4, 5, 22, 60)))
        told = [{t << 40: choice.randrange(1 << 61) for t in there if choice.random() < 0.8} for _ in range(3)]
        before = threads.exchanges
        wanted = done_everywhere(told)
        assert threads.of_all(lambda one, rank: one.agree(told[rank]), group) == [wanted] * 3  # noqa: B023
        twice = max(len(json.dumps(done)) for done in told) > room
        assert threads.exchanges - before == 1 + twice
        values = [{"a" * choice.randrange(9): 0, "kv": choice.randrange(-9, 9)} for _ in range(2)]
        names = [values[0], values[0], choice.choice(values)]
        answers = threads.of_all(lambda one, rank: one.agree_min(names[rank]), group)  # noqa: B023
        if names[2].keys() != names[0].keys():
            assert all(isinstance(answer, RankError) for answer in answers)
            break
        assert answers == [least(names)] * 3
    fresh = [GroupConsensus() for _ in range(3)]
    assert threads.of_all(lambda one, rank: one.agree_same({"a": "ü" * 3000}), fresh) == [None] * 3
    apart = threads.of_all(lambda one, rank: one.agree({}) if rank else one.agree_min({}), fresh)
    assert all("come apart" in str(error) and "at call 2" in str(error) for error in apart)
    assert "'agree_min'" in str(apart[1]) and "'agree'" in str(apart[0])
    assert all("have come apart before" in str(each) for each in threads.of_all(lambda one, rank: one.agree({}), fresh))
    alone = GroupConsensus(timeout=20)
    monkeypatch.setattr("torch.distributed.all_gather", cut)
    for told in (
        r"3 ranks did not agree at call 1, 'agree': .* for 20 s\. .*\(the wire is cut\)",
        "have come apart before",
    ):
        with pytest.raises(RankError, match=told):
            alone.agree({})


@pytest.mark.slow
def test_what_differs_is_refused_on_every_rank_by_its_name_and_other_calls_end_it(tmp_path: Path) -> None:
    for names, settings, fine, calls, after in ranks("differing", tmp_path, 2):
        assert "only one of them has window" in names["error"]
        assert "dtype is 'bfloat16' on rank 0 and 'int8' on rank 1" in settings["error"]
        assert fine == [0]
        assert "at call 4, 'agree_min'" in calls["error"] and "at call 4, 'agree'" in calls["error"]
        assert "have come apart before" in after["error"]


@pytest.mark.parametrize("scenario", ["dying", slow("hanging")])
def test_ranks_of_a_group_agree_until_one_does_not_answer_which_is_an_error(scenario: str, tmp_path: Path) -> None:
    told = ranks(scenario, tmp_path)
    if scenario == "dying":
        agreed, told = [each[:8] for each in told], [each[8:] for each in told]
        assert agreed[0] == agreed[1] == agreed[2]
        assert agreed[0][:3] == [[], [], [[1, 4], [3, 0]]]
        assert agreed[0][3] == [[n, n] for n in range(ROOM // 8)]
        assert agreed[0][4:] == [[[2**60, 2**61]], {"kv": 98, "a state": 7, "überall": 3}, {}, None]
    assert told[1] == [[0]]
    for answers in (told[0], told[2]):
        assert answers[0] == [0]
        assert "one of them died, or did not answer for" in answers[1]["error"]
        assert answers[1]["seconds"] < (5 if scenario == "hanging" else 15)  # who hangs is gone after 8
        assert all("have come apart before" in answer["error"] for answer in answers[2:])


def test_a_group_must_be_there() -> None:
    with pytest.raises(CompositionError, match="call init_process_group first"):
        GroupConsensus()


def test_values_of_another_version_are_a_rank_error_and_no_call_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    consensus = GroupConsensus()
    numbers = struct.pack("<4q", 1, 2, 1, 1 << 40).ljust(1024, b"\0")  # what a version sent that exchanged numbers
    monkeypatch.setattr(consensus, "_gather", lambda text, size: [text.ljust(size), numbers])
    for told in ("another rank's values cannot be read: start all ranks with the same version", "come apart before"):
        with pytest.raises(RankError, match=told):
            consensus.agree_same({"pages": "16"})
