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

    @property
    def computed(self) -> int:
        """Tokens, with those that were lost."""
        return self.lost + (0 if self.outcome is None else self.outcome.computed)

    def as_dict(self) -> dict[str, Any]:
        told = attrs.asdict(self, filter=lambda field, _: field.name != "outcome")
        names = ("requests", "refused", "retracted", "prompt", "output", "hit", "restored", "ideal")
        return told | {
            "computed": self.computed,
            **{name: 0 if self.outcome is None else getattr(self.outcome, name) for name in names},
        }


@attrs.frozen
class FleetOutcome:
    """What was measured of a fleet. Its sums are those of its replicas.

    ``bytes``       of all pools of one replica
    ``unanswered``  requests that no replica was there for until the end
    ``resent``      how many times a request was sent again since its replica had died
    ``waits``       how many requests had so many microseconds to their first token, of those that were answered. A
                    request that was sent again waits for the first token of the answer that it got
    ``read``, ``written``  bytes of the shared store
    ``prefill``     tokens of prompts that one replica computes in a second
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

    def _sum(self, name: str) -> int:
        found: list[int] = [getattr(each.outcome, name) for each in self.replicas if each.outcome is not None]
        return sum(found)

    @property
    def requests(self) -> int:
        """That were answered."""
        return self._sum("requests")

    @property
    def refused(self) -> int:
        """That are too long for the pools."""
        return self._sum("refused")

    @property
    def prompt(self) -> int:
        return self._sum("prompt")

    @property
    def hit(self) -> int:
        return self._sum("hit")

    @property
    def restored(self) -> int:
        """Tokens that a tier below or the shared store brought."""
        return self._sum("restored")

    @property
    def ideal(self) -> int:
        """Tokens that one cache of infinite memory would have computed."""
        return self._sum("ideal")

    @property
    def computed(self) -> int:
        """Tokens, with those that were lost when replicas died."""
        return sum(each.computed for each in self.replicas)

    @property
    def lost(self) -> int:
        return sum(each.lost for each in self.replicas)

    @property
    def missed(self) -> Mapping[str, int]:
        """Tokens that did not hit, by the reason, as of a replay."""
        found: Counter[str] = Counter()
        for each in self.replicas:
            if each.outcome is not None:
                found.update(each.outcome.missed)
        return dict(found)

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
            by_place[each.place] += each.computed
        return max(by_place) * self.places / sum(by_place) if any(by_place) else 1.0

    @property
    def busy(self) -> float:
        """The part of its time for which a replica computes prompts, on the mean."""
        return self.computed / (self.prefill * self.span * self.places) if self.span else 0.0

    def first_token(self, part: float) -> float:
        """The seconds to the first token within which this part of the requests had it: 0.5 for the median."""
        return percentile(self.waits, part) / MICROSECONDS

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        names = (
            "trace", "model", "routing", "places", "bytes", "requests", "refused", "unanswered", "resent", "prompt",
            "hit", "restored", "computed", "lost", "ideal", "missed", "multiple", "hit_rate", "imbalance", "busy",
            "read", "written", "prefill", "span", "cpu", "complete",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "p50": self.first_token(0.5), "p90": self.first_token(0.9), "p99": self.first_token(0.99),
            "waits": {str(wait): count for wait, count in sorted(self.waits.items())},
            "replicas": [each.as_dict() for each in self.replicas],
        }  # fmt: skip


def rounded_wait(seconds: float) -> int:
    """A time in microseconds, with few digits."""
    wait = round(seconds * MICROSECONDS)
    unit: int = 10 ** max(0, len(str(wait)) - DIGITS)
    return round(wait / unit) * unit


def describe_fleets(outcomes: Sequence[FleetOutcome]) -> list[str]:
    """Outcomes of one trace as lines for a terminal."""
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
