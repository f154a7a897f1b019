"""Ranks: several caches in one process, each in a thread of its own, that must make the same decisions.

``run`` gives every rank the same program. The program passes each decision to ``Rank.decided``, which compares it with
the decisions of the other ranks; the first difference raises ``Diverged``. The rank's ``Arrivals`` say when transfers
complete: soon, late, in part or not at all. A test can switch agreement off, to see what happens without it.

    def program(rank: Rank) -> None:
        cache = compose(..., capacity=rank.consensus.agree_min(rank.capacity))
        ...
        rank.decided("open", sequence.ready, sequence.pages("kv"), figures(cache))
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixloom.errors import InvariantError
from prefixloom.tiers.consensus import Completions, Consensus, LocalConsensus, V

PATIENCE = 60.0
"""After so many seconds, a rank that does not arrive is taken for lost."""


class Diverged(InvariantError):
    """Two ranks made different decisions."""


class Meeting:
    """Where ranks wait for each other and exchange values."""

    def __init__(self, ranks: int) -> None:
        self._told: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def exchange(self, rank: int, what: Any) -> list[Any]:
        """Wait for all ranks. Return what each rank gave, by rank."""
        self._told[rank] = what
        self._barrier.wait(PATIENCE)
        told = list(self._told)
        self._barrier.wait(PATIENCE)
        return told

    def end(self) -> None:
        """Stop the waiting of all ranks."""
        self._barrier.abort()


class MeetingConsensus(Consensus):
    """Consensus between the ranks of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def exchange(self, call: str, values: Mapping[str, V]) -> list[dict[str, V]]:
        return self._meeting.exchange(self._rank, dict(values))


class Arrivals:
    """Transfers of one rank, which complete after some polls: wholly, in part, or with nothing.

    ``slowest``: the most polls that a transfer takes. ``failing``: the share of transfers that bring less than was
    asked for. Both are drawn from ``seed``, which differs between ranks; no clock is read.
    """

    def __init__(self, completions: Completions, seed: int, slowest: int = 9, failing: float = 0.3) -> None:
        self._completions = completions
        self._choice = random.Random(seed)
        self._slowest, self._failing = slowest, failing
        self._now = 0
        self._due: list[tuple[int, int, int]] = []
        self._came: dict[int, int] = {}

    def start(self, amount: int) -> int:
        """Start a transfer that brings at most ``amount``. Return its ticket."""
        ticket = self._completions.open()
        got = self._choice.randrange(amount + 1) if self._choice.random() < self._failing else amount
        self._due.append((self._now + self._choice.randint(0, self._slowest), ticket, got))
        return ticket

    def poll(self) -> dict[int, int]:
        """Let one poll pass. Return the tickets that all ranks agree are done, with their amounts."""
        self._now += 1
        for _, ticket, got in (over := [each for each in self._due if each[0] < self._now]):
            self._completions.done(ticket, got)
            self._came[ticket] = got
        self._due = [each for each in self._due if each not in over]
        agreed = self._completions.poll()
        for ticket, amount in agreed.items():
            if amount > self._came.get(ticket, -1):
                raise InvariantError(f"ticket {ticket} counts with {amount}, and here came {self._came.get(ticket)}")
        return agreed

    @property
    def waiting(self) -> tuple[int, ...]:
        """The tickets that are not agreed to be done."""
        return self._completions.waiting


class Rank:
    """One rank, as its program sees it."""

    def __init__(self, meeting: Meeting, index: int, count: int, consensus: Consensus, arrivals: Arrivals) -> None:
        self._meeting = meeting
        self.index, self.count = index, count
        self.consensus, self.arrivals = consensus, arrivals
        self.decisions = 0

    def decided(self, what: str, *decisions: Any) -> None:
        """Compare decisions with those of the other ranks at the same point of the program."""
        self.decisions += 1
        mine = (what, *(repr(decision) for decision in decisions))
        told = self._meeting.exchange(self.index, mine)
        for rank, other in enumerate(told):
            if other != told[0]:
                pairs = [(a, b) for a, b in zip(told[0], other, strict=False) if a != b]
                first, second = pairs[0] if pairs else (told[0], other)
                raise Diverged(
                    f"decision {self.decisions} ({told[0][0]}): rank 0 has {first[:300]}, and rank {rank} has "
                    f"{second[:300]}"
                )


def run(
    program: Callable[[Rank], None],
    ranks: int,
    seed: int,
    *,
    agreeing: bool = True,
    slowest: Sequence[int] = (2, 9, 5),
    failing: float = 0.3,
) -> list[Rank]:
    """Run ``program`` on ``ranks`` ranks at once. ``slowest``: how slow the completions of each rank are, in turn.

    Without ``agreeing`` each rank agrees only with itself. An error in one rank ends all ranks and is raised here.
    """
    meeting = Meeting(ranks)
    failures: list[tuple[int, BaseException]] = []
    made: list[Rank] = []
    for index in range(ranks):
        consensus: Consensus = MeetingConsensus(meeting, index) if agreeing else LocalConsensus()
        slow = slowest[index % len(slowest)]
        arrivals = Arrivals(Completions(consensus), seed * ranks + index, slow, failing)
        made.append(Rank(meeting, index, ranks, consensus, arrivals))

    def driven(rank: Rank) -> None:
        try:
            program(rank)
        except BaseException as error:
            failures.append((rank.index, error))
            meeting.end()

    threads = [threading.Thread(target=driven, args=(rank,), name=f"rank {rank.index}", daemon=True) for rank in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures.sort(key=lambda failure: (isinstance(failure[1], threading.BrokenBarrierError), failure[0]))
    for _, error in failures:
        raise error
    return made
