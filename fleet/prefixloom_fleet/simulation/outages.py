"""Outages: replicas that die at a time, and join again with an empty cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import attrs

from prefixloom import InputError


@attrs.frozen
class Outage:
    """Replica ``replica``, counted from 0, dies at second ``at``, and joins again empty after ``seconds``.

    ``seconds`` is infinite if it never does.
    """

    replica: int
    at: float
    seconds: float = math.inf

    def __attrs_post_init__(self) -> None:
        if self.replica.__class__ is not int or self.replica < 0:
            raise InputError(f"replicas are counted from 0, got {self.replica!r}")
        if not (0 <= self.at < math.inf and self.seconds >= 0):
            raise InputError(
                f"a replica dies at a time from 0 on, for 0 seconds or more; got {self.at!r}, {self.seconds!r}"
            )

    @property
    def until(self) -> float:
        return self.at + self.seconds

    @classmethod
    def parse(cls, text: str) -> Outage:
        """Parse "2@600+120": replica 2 dies at second 600, and joins again 120 seconds later. "2@600": never."""
        replica, _, when = text.partition("@")
        at, _, seconds = when.partition("+")
        try:
            return cls(int(replica), float(at), float(seconds) if seconds else math.inf)
        except ValueError:
            raise InputError(f"an outage is REPLICA@SECOND+SECONDS, such as 2@600+120; got {text!r}") from None


def check_outages(outages: Iterable[Outage], replicas: int) -> tuple[Outage, ...]:
    """Return the outages in the order of their times. InputError: a replica is not there, or dies while it is away."""
    ordered = tuple(sorted(outages, key=lambda each: (each.at, each.replica)))
    for each in ordered:
        if each.replica >= replicas:
            raise InputError(f"replica {each.replica} cannot fail: there are {replicas}, counted from 0")
    for number in {each.replica for each in ordered}:
        for before, after in pairwise(each for each in ordered if each.replica == number):
            if after.at < before.until:
                raise InputError(f"replica {number} cannot fail at second {after.at:g}: it is away since {before.at:g}")
    return ordered
