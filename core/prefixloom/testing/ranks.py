"""Ranks: N caches in one process, each in a thread of its own, that must decide the same at every call.

``run`` gives every rank the same program. What a rank decides goes through ``Rank.decided`` and is compared with what
the others decided there; the first difference is a ``Diverged`` that says what it was. What completes does so when and
as the rank's ``Arrivals`` say: sooner, later, in part or not at all. Agreement is an argument, so that a test can see
what happens without it.

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

from ..errors import InvariantError
from ..tiers.consensus import Completions, Consensus, LocalConsensus, check_same, done_everywhere, least

PATIENCE = 60.0
"""Seconds after which a rank that does not come is taken for lost."""


class Diverged(InvariantError):
    """Two ranks decided differently."""


class Meeting:
    """Where ranks wait for each other and tell what they have."""

    def __init__(self, ranks: int) -> None:
        self._told: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def exchange(self, rank: int, what: Any) -> list[Any]:
        """What every rank told, by rank."""
        self._told[rank] = what
        self._barrier.wait(PATIENCE)
        told = list(self._told)
        self._barrier.wait(PATIENCE)
        return told

    def end(self) -> None:
        """Nobody waits any more."""
        self._barrier.abort()


class MeetingConsensus:
    """Consensus between the ranks of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def agree(self, done: Mapping[int, int]) -> dict[int, int]:
        return done_everywhere(self._meeting.exchange(self._rank, dict(done)))

    def agree_min(self, values: Mapping[str, int]) -> dict[str, int]:
        return least(self._meeting.exchange(self._rank, dict(values)))

    def agree_same(self, values: Mapping[str, str]) -> None:
        check_same(self._meeting.exchange(self._rank, dict(values)))


class Arrivals:
    """Completions of one rank: what was started is done some polls later, wholly, in part, or with nothing.

    ``slowest``: polls that it takes at most. ``failing``: the part of them that brings less than was asked for. All of
    it follows from ``seed``, which differs between ranks; time does not come in.
    """

    def __init__(self, completions: Completions, seed: int, slowest: int = 9, failing: float = 0.3) -> None:
        self._completions = completions
        self._choice = random.Random(seed)
        self._slowest, self._failing = slowest, failing
        self._now = 0
        self._due: list[tuple[int, int, int]] = []
        self._came: dict[int, int] = {}

    def start(self, amount: int) -> int:
        """Begin what brings ``amount`` at best; its ticket."""
        ticket = self._completions.open()
        got = self._choice.randrange(amount + 1) if self._choice.random() < self._failing else amount
        self._due.append((self._now + self._choice.randint(0, self._slowest), ticket, got))
        return ticket

    def poll(self) -> dict[int, int]:
        """Let time go on, and say what counts as done."""
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
        """Tickets that do not count as done yet."""
        return self._completions.waiting


class Rank:
    """One of the ranks, as its program sees it."""

    def __init__(self, meeting: Meeting, index: int, count: int, consensus: Consensus, arrivals: Arrivals) -> None:
        self._meeting = meeting
        self.index, self.count = index, count
        self.consensus, self.arrivals = consensus, arrivals
        self.decisions = 0

    def decided(self, what: str, *decisions: Any) -> None:
        """Compare with what the others decided at this point of their programs."""
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
    """Run ``program`` on so many ranks at once. ``slowest``: how slow each rank's completions are, in turn.

    Without ``agreeing`` each rank agrees with itself alone. An error of a rank ends them all, and is raised here.
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
