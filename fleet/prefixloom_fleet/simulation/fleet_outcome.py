"""FleetOutcome: what a simulation has measured, as figures, as data for JSON, and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from prefixloom.lab import ReplayOutcome
from prefixloom.lab.outcome import columns, percentile

MICROSECONDS = 1_000_000
DIGITS = 3
"""Times to first token are counted with so many digits, so that their number does not grow with the trace."""
SUMS = ("requests", "refused", "retracted", "prompt", "output", "hit", "restored", "ideal")
"""Figures of a replay that are summed up over the replicas."""


@attrs.frozen
class ReplicaFigures:
    """One replica.

    ``place``    among the fleet's places: a replica that joins again has the place of the one that died
    ``begun``    when it joined, in seconds from the first arrival; ``died`` when it died, None if it did not
    ``lost``     tokens that it computed of requests that it did not answer, since it died
    ``outcome``  as of a replay of its requests alone, without the samples of its memory; None: nothing was sent there
    """

    name: str
    place: int
    begun: float
    died: float | None
    lost: int
    outcome: ReplayOutcome | None

    def figure(self, name: str) -> int:
        """Return one of ``SUMS``, or the tokens that were ``computed``, with those that were lost."""
        found: int = 0 if self.outcome is None else getattr(self.outcome, name)
        return found + (self.lost if name == "computed" else 0)

    def as_dict(self) -> dict[str, Any]:
        told = attrs.asdict(self, filter=lambda field, _: field.name != "outcome")
        return told | {name: self.figure(name) for name in ("computed", *SUMS)}


@attrs.define
class FleetOutcome:
    """What was measured of a fleet. Its sums, which are made of the replicas, are those of ``ReplayOutcome``.

    ``bytes``       of all pools of one replica
    ``unanswered``  requests that no replica was there for until the end
    ``resent``      how many times a request was sent again since its replica had died
    ``waits``       how many requests had so many microseconds to their first token, of those that were answered. A
                    request that was sent again waits for the first token of the answer that it got
    ``read``, ``written``  bytes of the shared store
    ``prefill``     tokens of prompts that one replica computes in a second
    ``restored``    tokens that a tier below or the shared store brought
    ``ideal``       tokens that one cache of infinite memory would have computed
    ``computed``    tokens, with the ``lost`` ones of replicas that died
    ``missed``      tokens that did not hit, by the reason
    """

    trace: str
    model: str
    routing: str
    places: int
    bytes: int
    replicas: tuple[ReplicaFigures, ...]
    unanswered: int
    resent: int
    waits: Mapping[int, int]
    read: int
    written: int
    prefill: float
    span: float
    cpu: float
    complete: bool
    requests: int = attrs.field(init=False)
    refused: int = attrs.field(init=False)
    retracted: int = attrs.field(init=False)
    output: int = attrs.field(init=False)
    prompt: int = attrs.field(init=False)
    hit: int = attrs.field(init=False)
    restored: int = attrs.field(init=False)
    ideal: int = attrs.field(init=False)
    computed: int = attrs.field(init=False)
    lost: int = attrs.field(init=False)
    missed: Mapping[str, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        missed: Counter[str] = Counter()
        for each in self.replicas:
            missed.update({} if each.outcome is None else each.outcome.missed)
        sums = {name: sum(each.figure(name) for each in self.replicas) for name in ("computed", *SUMS)}
        self.lost, self.missed = sum(each.lost for each in self.replicas), dict(missed)
        for name, value in sums.items():
            setattr(self, name, value)

    @property
    def multiple(self) -> float:
        """The computed tokens as a multiple of the ideal."""
        return self.computed / self.ideal if self.ideal else 1.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were not computed."""
        return (self.hit + self.restored) / self.prompt if self.prompt else 0.0

    @property
    def imbalance(self) -> float:
        """The tokens that the busiest place computed, as a multiple of the mean of all places."""
        by_place = [0] * self.places
        for each in self.replicas:
            by_place[each.place] += each.figure("computed")
        return max(by_place) * self.places / sum(by_place) if any(by_place) else 1.0

    @property
    def busy(self) -> float:
        """The part of its time for which a replica computes prompts, on the mean."""
        return self.computed / (self.prefill * self.span * self.places) if self.span else 0.0

    def first_token(self, part: float) -> float:
        """Return the seconds to the first token within which this part of the requests had it: 0.5 for the median."""
        return percentile(self.waits, part) / MICROSECONDS

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        told = attrs.asdict(self, recurse=False)
        return told | {
            "multiple": self.multiple, "hit_rate": self.hit_rate, "imbalance": self.imbalance, "busy": self.busy,
            "p50": self.first_token(0.5), "p90": self.first_token(0.9), "p99": self.first_token(0.99),
            "waits": {str(wait): count for wait, count in sorted(self.waits.items())},
            "replicas": [each.as_dict() for each in self.replicas],
        }  # fmt: skip


def rounded_wait(seconds: float) -> int:
    """Return a time in microseconds, with few digits."""
    wait = round(seconds * MICROSECONDS)
    unit: int = 10 ** max(0, len(str(wait)) - DIGITS)
    return round(wait / unit) * unit


def describe_fleets(outcomes: Sequence[FleetOutcome]) -> list[str]:
    """Return outcomes of one trace as lines for a terminal."""
    first = outcomes[0]
    return [
        f"{first.requests:,} requests of {first.trace}, {first.prompt:,} tokens of prompts; {first.model}",
        f"The ideal, one cache of infinite memory, computes {first.ideal:,} tokens.",
        "",
        *columns([HEADS, *map(row_of, outcomes)]),
        *(["", "The simulation was interrupted: this is what was measured so far."] if not first.complete else []),
    ]


HEADS = (
    "routing", "replicas", "x ideal", "hit", "from store", "p50 s", "p90 s", "p99 s", "busy", "imbalance", "resent",
    "refused", "unanswered",
)  # fmt: skip


def row_of(each: FleetOutcome) -> tuple[str, ...]:
    return (
        each.routing, f"{each.places:,}", f"{each.multiple:.3f}", f"{each.hit_rate:.2%}",
        f"{each.restored / each.prompt:.2%}" if each.restored else "-",
        *(f"{each.first_token(part):.3f}" for part in (0.5, 0.9, 0.99)),
        f"{each.busy:.1%}", f"{each.imbalance:.2f}", f"{each.resent:,}", f"{each.refused:,}", f"{each.unanswered:,}",
    )  # fmt: skip
