"""Outcome: what a replay has measured, as figures, as data for JSON, and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..compose.sizing import size_text

SAMPLES = 512
"""The most moments at which the use of memory is kept."""
NEW, GONE, ROUNDED = "new", "gone", "rounded"
"""Why tokens missed, beside the names of components: nobody asked for them before; the keys are not there any more; a
hit ends at a multiple of some tokens, and this is the rest."""


@attrs.frozen
class PoolUse:
    """What one component did in a replay. Pages are state slots for a boundary component.

    ``capacity``    pages of its pool, of ``page_tokens`` tokens (0: states) and ``page_bytes`` bytes
    ``evicted``     pages that were evicted
    ``made``        pages that the tree took (what was brought back from below counts again)
    ``stopped``     tokens that hit in no other component either, since this one had nothing usable deeper, of ``stops``
                    requests
    ``alone``       the share of the tokens of the requests that were looked at closely that this component could have
                    served if it were alone; None if none was
    ``peak``        the most bytes in use, cached or running, of those moments that were looked at
    """

    capacity: int
    page_tokens: int
    page_bytes: int
    evicted: int
    made: int
    stopped: int
    stops: int
    alone: float | None
    peak: int


@attrs.frozen
class MemorySample:
    """The bytes in use at one moment, by component: of cached prefixes, and of running requests."""

    at: float
    cached: Mapping[str, int]
    running: Mapping[str, int]


@attrs.frozen
class ReplayOutcome:
    """What was measured.

    ``requests``    that were served; ``refused`` were too long for the pools, and are in no other figure
    ``prompt``      tokens of their prompts; ``output`` tokens of their answers
    ``hit``         tokens that hit on the device, and ``restored`` that a tier below brought
    ``computed``    tokens of prompts that were computed, with those computed again after a request was ``retracted``
    ``ideal``       tokens that a cache of infinite memory would have computed
    ``missed``      tokens that did not hit, by the reason: "new", "gone", or the component that stopped them
    ``states_used`` hits that went on from a state, and ``states_made`` states that the tree took
    ``skipped``     states that were not kept, since no slot could be had
    ``left``        by tokens that were left to compute: of how many requests
    ``memory``      the use of memory over time
    ``span``        virtual seconds from the first arrival to the end of the last request
    ``cpu``         seconds of the processor that the replay took
    ``complete``    whether all requests were served: False if the replay was interrupted
    """

    trace: str
    model: str
    policy: str
    page: int
    components: Mapping[str, PoolUse]
    requests: int
    refused: int
    retracted: int
    prompt: int
    output: int
    hit: int
    restored: int
    computed: int
    ideal: int
    missed: Mapping[str, int]
    states_made: int
    states_used: int
    skipped: int
    left: Mapping[int, int]
    memory: tuple[MemorySample, ...]
    span: float
    cpu: float
    complete: bool
    notes: tuple[str, ...] = ()

    @property
    def multiple(self) -> float:
        """The computed tokens as a multiple of the ideal."""
        return self.computed / self.ideal if self.ideal else 1.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were not computed."""
        return (self.hit + self.restored) / self.prompt if self.prompt else 0.0

    @property
    def ideal_rate(self) -> float:
        """The share of prompt tokens that a cache of infinite memory would not have computed."""
        return (self.prompt - self.ideal) / self.prompt if self.prompt else 0.0

    @property
    def bytes(self) -> int:
        """Of all pools together."""
        return sum(each.capacity * each.page_bytes for each in self.components.values())

    def to_compute(self, part: float) -> int:
        """Return the tokens to compute below or at which this part of the requests lies: 0.5 for the median."""
        return percentile(self.left, part)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        told = attrs.asdict(self)
        told["left"] = {str(tokens): count for tokens, count in sorted(self.left.items())}
        told |= {
            "multiple": self.multiple, "hit_rate": self.hit_rate, "ideal_rate": self.ideal_rate, "bytes": self.bytes,
            "p50": self.to_compute(0.5), "p99": self.to_compute(0.99),
        }  # fmt: skip
        return told

    def __str__(self) -> str:
        return "\n".join(describe(self))


def percentile(counts: Mapping[int, int], part: float) -> int:
    """Return the value below or at which this part of the counted lies; 0 if nothing was counted."""
    wanted, seen = part * sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return 0


COUNTED = ("refused", "retracted", "prompt", "output", "hit", "restored", "computed", "ideal", "states_used")
"""What an outcome has as it was summed up."""


class Tally:
    """Sums up a replay while it goes on. What it holds does not grow with the number of requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.refused = self.retracted = self.prompt = self.output = self.hit = self.restored = self.computed = 0
        self.ideal = self.states_used = 0
        self.missed: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.left: Counter[int] = Counter()
        self.alone: Counter[str] = Counter()
        self.looked_at = 0
        """Prompt tokens of the requests that were looked at closely."""
        self.peaks: dict[str, int] = {}
        self.memory: list[MemorySample] = []
        self.every = 1
        """A sample is kept of every so many moments."""
        self._moments = 0

    def sample_due(self) -> bool:
        """Return whether this moment is one of those that are kept."""
        self._moments += 1
        return self._moments % self.every == 0

    def sampled(self, at: float, cached: Mapping[str, int], running: Mapping[str, int]) -> None:
        self.memory.append(MemorySample(at, cached, running))
        for name, size in cached.items():
            self.peaks[name] = max(self.peaks.get(name, 0), size + running[name])
        if len(self.memory) >= SAMPLES:
            self.every *= 2
            del self.memory[::2]


def describe(outcome: ReplayOutcome) -> list[str]:
    """Return an outcome as lines for a terminal."""
    if not outcome.requests:
        why = f": {outcome.refused:,} were refused, which are too long for the pools" if outcome.refused else ""
        return [f"No request was served{why}.", *outcome.notes]
    served = f"{outcome.requests:,} requests of {outcome.trace}, {outcome.prompt:,} tokens of prompts"
    told = [
        f"{served}; {outcome.model}, pages of {outcome.page}, {size_text(outcome.bytes)}, policy {outcome.policy}",
        f"computed  {outcome.computed:,} tokens: {outcome.multiple:.3f} x the ideal of {outcome.ideal:,}",
        f"hit       {outcome.hit_rate:.2%} of the tokens (infinite memory: {outcome.ideal_rate:.2%})"
        + (f", {outcome.restored / outcome.prompt:.2%} from below the device" if outcome.restored else ""),
        f"left      to compute: {outcome.to_compute(0.5):,} tokens of the median request, "
        f"{outcome.to_compute(0.99):,} at p99",
        "missed    " + "; ".join(f"{part:.2%} {words}" for words, part in reasons(outcome)),
    ]
    if outcome.states_made:
        told.append(
            f"states    {outcome.states_made:,} made, {outcome.states_used:,} hits went on from one"
            + (f", {outcome.skipped:,} not kept for lack of a slot" if outcome.skipped else "")
        )
    if outcome.retracted:
        told.append(f"retracted {outcome.retracted:,} times a running request gave its room to others, and began again")
    if outcome.refused:
        told.append(f"refused   {outcome.refused:,} requests that are too long for the pools")
    rows: list[tuple[str, ...]] = [("component", "pool", "bytes", "peak", "evicted", "made", "alone", "stopped")]
    for name, each in outcome.components.items():
        unit = f"{each.capacity * each.page_tokens:,} tokens" if each.page_tokens else f"{each.capacity:,} states"
        alone = "" if each.alone is None else f"{each.alone:.2%}"
        size = each.capacity * each.page_bytes
        rows.append((
            name, unit, size_text(size), f"{each.peak / size:.0%}" if size else "", f"{each.evicted:,}",
            f"{each.made:,}", alone, f"{each.stopped / outcome.prompt:.2%} in {each.stops:,}",
        ))  # fmt: skip
    told += ["", *columns(rows), *outcome.notes]
    if not outcome.complete:
        told.append("The replay was interrupted: this is what was measured so far.")
    return told


def stopped_by(outcome: ReplayOutcome) -> str:
    """Return the components that stopped tokens, with their shares."""
    stopped = {name: use.stopped for name, use in outcome.components.items() if use.stopped}
    return ", ".join(f"{name} {count / outcome.prompt:.1%}" for name, count in sorted(stopped.items())) or "-"


FIGURES: Mapping[str, Callable[[ReplayOutcome], str]] = {
    "policy": lambda each: each.policy,
    "memory": lambda each: size_text(each.bytes),
    "x ideal": lambda each: f"{each.multiple:.3f}",
    "hit": lambda each: f"{each.hit_rate:.2%}",
    "p50": lambda each: f"{each.to_compute(0.5):,}",
    "p99": lambda each: f"{each.to_compute(0.99):,}",
    "states used": lambda each: f"{each.states_used:,} of {each.states_made:,}",
    "stopped by": stopped_by,
    "retracted": lambda each: f"{each.retracted:,}",
    "refused": lambda each: f"{each.refused:,}",
}
"""The columns of tables of replays: p50 and p99 are tokens that are left to compute."""


def table_of(
    outcomes: Iterable[ReplayOutcome], names: Sequence[str], **more: Callable[[ReplayOutcome], str]
) -> list[tuple[str, ...]]:
    """Return a row for each outcome, below the names of the columns: ``FIGURES``, or those of ``more``."""
    figures = {**FIGURES, **{name.replace("_", " "): figure for name, figure in more.items()}}
    return [tuple(names), *(tuple(figures[name](each) for name in names) for each in outcomes)]


def reasons(outcome: ReplayOutcome) -> Iterable[tuple[str, float]]:
    """Return (in words, share of the prompt tokens) of each reason why tokens missed, the largest first."""
    words = {NEW: "new", GONE: "evicted with their keys", ROUNDED: "behind the last place where a hit may end"}
    for reason, tokens in sorted(outcome.missed.items(), key=lambda each: -each[1]):
        if reason in words:
            yield words[reason], tokens / outcome.prompt
            continue
        use = outcome.components.get(reason)
        what = f"{reason}: " + ("no state" if use is not None and not use.page_tokens else "nothing usable") + " deeper"
        yield what, tokens / outcome.prompt


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows in aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
