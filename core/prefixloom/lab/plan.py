"""Plan: what a memory budget holds of a model's requests, measured on the composed cache.

Nothing is estimated from formulas here. What a request costs is read from a cache that serves one. How many users fit
follows from these costs and the pools. Hit rates are those of replays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from ..cache.cache import Cache
from ..compose.sizing import Traffic, size_text
from ..contract.manifest import parse_memory
from ..errors import CompositionError, InputError
from .outcome import ReplayOutcome, columns, table_of
from .setup import Setup, Trace, replay_all
from .traces.requests import LabRequest

LENGTHS = (1024, 4096, 16384, 65536, 131072)
"""The lengths of requests whose costs are told."""
SIZES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""The memories of the curve, as multiples of the budget."""
PAGES = (16, 32, 64, 128, 256)
GRIDS = (0, 256, 1024, 4096)
GAIN = 0.01
"""The knee is the least memory from which on twice as much gains less than this share of the tokens."""
CLOSELY = 8
"""One of so many requests is looked at closely: how far each component alone would have served it."""
FINE = 16
"""Prompts with known tokens are compared in pieces of so many."""
RUNNING = 32
"""Requests that run at once, where nothing says how many do."""
SAMPLE = 2000
"""So many requests of a trace say for which traffic the memory is divided."""


@attrs.frozen
class RequestCost:
    """What one request of ``tokens`` tokens takes, in pages or states by component.

    ``running``  the most that it holds while it runs
    ``kept``     what stays needed so that its next turn resumes at its end
    ``next``     as ``kept``, for one more request that has the traffic's common part with the first
    """

    tokens: int
    running: Mapping[str, int]
    kept: Mapping[str, int]
    next: Mapping[str, int]


@attrs.frozen
class Fit:
    """How many requests of the traffic fit, and which component is full first."""

    running: int
    running_limit: str
    cached: int
    cached_limit: str


@attrs.frozen
class CapacityPlan:
    """The plan of one budget.

    ``sizing``  a sentence about each pool
    ``costs``   of requests by length, and ``page_bytes`` of one page (state) by component
    ``fit``     how many requests of the traffic fit
    ``curve``   outcomes by memory, ``pages`` by page size and ``grids`` by tokens between checkpoints; the budget stays
                the same in the last two
    ``notes``   what could not be told, and why
    """

    model: str
    memory: int
    traffic: Traffic
    sizing: tuple[str, ...]
    page_bytes: Mapping[str, int]
    costs: tuple[RequestCost, ...]
    fit: Fit
    curve: tuple[ReplayOutcome, ...]
    pages: tuple[ReplayOutcome, ...]
    grids: tuple[ReplayOutcome, ...]
    notes: tuple[str, ...]

    @property
    def knee(self) -> ReplayOutcome | None:
        """The least memory of the curve from which on twice as much gains little; None: there is none up to its end."""
        curve = sorted(self.curve, key=lambda each: each.bytes)
        gains = [
            max(
                more.hit_rate - each.hit_rate
                for more in curve[at + 1 :]
                if more.bytes <= 2.1 * each.bytes or more is next_
            )
            for at, (each, next_) in enumerate(pairwise(curve))
        ]
        return next((each for at, each in enumerate(curve[:-1]) if max(gains[at:]) < GAIN), None)

    @property
    def short_first(self) -> str:
        """The component that alone would have served the fewest tokens at the budget; empty if all are alike."""
        at_budget = next((each for each in self.curve if each.policy == name_of(1.0)), None)
        uses = {} if at_budget is None else at_budget.components
        alone = {name: use.alone for name, use in uses.items() if use.alone is not None}
        return min(alone, key=lambda name: alone[name]) if len(set(alone.values())) > 1 else ""

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        told = attrs.asdict(self, filter=lambda field, _: field.name not in ("curve", "pages", "grids"))
        told |= {name: [each.as_dict() for each in getattr(self, name)] for name in ("curve", "pages", "grids")}
        knee = self.knee
        return told | {"knee": None if knee is None else knee.bytes, "short_first": self.short_first}


def name_of(multiple: float) -> str:
    """Return how the outcome of a multiple of the budget is called."""
    return f"{multiple:g} x the budget"


def make_plan(
    setup: Setup,
    trace: Trace,
    *,
    sizes: Sequence[float] = SIZES,
    pages: Sequence[int] = PAGES,
    grids: Sequence[int] = GRIDS,
    lengths: Sequence[int] = LENGTHS,
    jobs: int = 1,
    told: Callable[[int, int], None] | None = None,
) -> CapacityPlan:
    """Plan the memory of ``setup`` for a trace. ``told`` is called with how many replays are done, and of how many."""
    if setup.memory is None:
        raise InputError("a plan is made for a memory budget: say memory")
    budget = parse_memory(setup.memory)
    if setup.traffic is None:
        setup = attrs.evolve(setup, traffic=traffic_of(trace, running_in(setup)))
    traffic = setup.traffic
    assert traffic is not None
    setup = attrs.evolve(setup, closely=CLOSELY)
    cache = setup.compose()
    costs = tuple(cost_of(setup, length, 0) for length in lengths)
    notes: list[str] = []
    told_pages: set[int] = set()
    asked: list[tuple[str, Setup]] = []
    groups = (
        ("curve", [(name_of(part), attrs.evolve(setup, memory=round(budget * part))) for part in sizes]),
        ("pages", [(f"pages of {page}", attrs.evolve(setup, page_size=page)) for page in pages]),
        ("grids", [(_grid_name(grid), _with_grid(setup, cache, grid)) for grid in grids] if _states(cache) else []),
    )
    for group, members in groups:
        for name, each in members:
            try:
                page = each.compose().composition.page
            except CompositionError as error:
                notes.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            if group == "pages" and page in told_pages:
                continue  # a page of the tree is a multiple of all grids: this one is as large as one before
            told_pages.update({page} if group == "pages" else ())
            asked.append((group, attrs.evolve(each, name=f"pages of {page}" if group == "pages" else name)))
    done = 0

    def count(_: int, __: ReplayOutcome) -> None:
        nonlocal done
        done += 1
        if told is not None:
            told(done, len(asked))

    outcomes = replay_all([each for _, each in asked], trace, jobs=jobs, told=count)
    by_group: dict[str, list[ReplayOutcome]] = {"curve": [], "pages": [], "grids": []}
    for (group, _), outcome in zip(asked, outcomes, strict=True):
        by_group[group].append(outcome)
    stats = cache.stats()
    return CapacityPlan(
        model=cache.composition.name,
        memory=budget,
        traffic=traffic,
        sizing=stats.sizing,
        page_bytes={name: each.page_bytes for name, each in stats.components.items()},
        costs=costs,
        fit=fit_of(cache, cost_of(setup, traffic.length, traffic.common)),
        curve=tuple(by_group["curve"]),
        pages=tuple(by_group["pages"]),
        grids=tuple(by_group["grids"]),
        notes=tuple(notes),
    )


def running_in(setup: Setup) -> int:
    """Return how many requests run at once."""
    return RUNNING if setup.service is None else setup.service.max_running


def traffic_of(requests: Iterable[LabRequest], running: int) -> Traffic:
    """Return the traffic that the first requests of a trace are like.

    A conversation is a path that no other one goes on from. What is not a conversation's own counts as shared.
    """
    prompt = output = count = own = 0
    links: set[int] = set()
    inner: set[int] = set()
    for count, request in enumerate(requests, 1):
        prompt += request.prompt.count
        output += request.output
        unit, path = request.prompt.chain(request.namespace, FINE)
        own += unit * len(set(path) - links)
        links.update(path)
        inner.update(path[:-1])
        if count == SAMPLE:
            break
    if not count:
        raise InputError("the trace has no request")
    mean = max(1, prompt // count)
    conversations = max(1, len(links - inner))
    shared = min(max(0.0, 1 - own / conversations / mean), 1.0)
    return Traffic(running, mean, output // count, round(shared, 3))


def cost_of(setup: Setup, length: int, common: int) -> RequestCost:
    """Serve two requests of ``length`` tokens that have ``common`` in common, and read what they take."""
    chunk = setup.chunk if setup.service is None else setup.service.chunk
    room = 4 * (length + chunk) + 64 * 1024
    cache = attrs.evolve(setup, memory=None, traffic=None, capacity=room, service=None, host=None).compose()
    names = list(cache.stats().components)
    whole = length // cache.composition.page * cache.composition.page
    running = dict.fromkeys(names, 0)
    kept: list[dict[str, set[int]]] = []
    for number in (1, 2):
        tokens = array("i", [0]) * common + array("i", [number]) * (length - common)
        with cache.open(tokens, leave=0) as sequence:
            while sequence.reserved < length:
                end = min(sequence.reserved + chunk, length)
                if sequence.reserved < whole < end:
                    end = whole  # a state is needed where the last whole page ends
                sequence.grow(end - sequence.reserved)
                with cache.step([sequence]) as step:
                    step.run_ops()
                for name in names:
                    held = sum(page >= 0 for page in sequence.pages(name))
                    running[name] = max(running[name], held, sequence.owned(name))
                sequence.publish()
        plan = cache.match(tokens)
        kept.append({name: {page for page in plan.pages(name) if page >= 0} for name in names})
    first, second = kept
    return RequestCost(
        length,
        running,
        {name: len(first[name]) for name in names},
        {name: len(second[name] - first[name]) for name in names},
    )


def fit_of(cache: Cache, cost: RequestCost) -> Fit:
    """Return how many requests like this run at once, and how many are cached with nothing running."""
    capacity = {name: each.capacity for name, each in cache.stats().components.items()}
    running = {name: capacity[name] // most for name, most in cost.running.items() if most}
    cached = {}
    for name, first in cost.kept.items():
        if first > capacity[name]:
            cached[name] = 0
        elif cost.next[name]:
            cached[name] = 1 + (capacity[name] - first) // cost.next[name]
    if not cached:
        raise InputError(f"requests of {cost.tokens} tokens fill no page, so that nothing of them is ever cached")
    by_running, by_cached = min(running, key=running.__getitem__), min(cached, key=cached.__getitem__)
    return Fit(running[by_running], by_running, cached[by_cached], by_cached)


def _states(cache: Cache) -> list[str]:
    return [part.name for part in cache.composition.parts if not part.page_tokens]


def _grid_name(grid: int) -> str:
    return f"a checkpoint every {grid:,} tokens" if grid else "no checkpoints on the way"


def _with_grid(setup: Setup, cache: Cache, grid: int) -> Setup:
    """Return the setup with states that are kept every ``grid`` tokens."""
    more = {name: {**setup.options.get(name, {}), "checkpoint_every": grid} for name in _states(cache)}
    return attrs.evolve(setup, options={**setup.options, **more})


def cost_table(plan: CapacityPlan) -> list[tuple[str, ...]]:
    """Return what requests take in pages and states, a row for each length, below the heads."""
    rows = [("tokens", *(f"{name}, {kind}" for name in plan.page_bytes for kind in ("running", "kept")), "bytes kept")]
    for cost in plan.costs:
        cells = [f"{each[name]:,}" for name in plan.page_bytes for each in (cost.running, cost.kept)]
        size = sum(count * plan.page_bytes[name] for name, count in cost.kept.items())
        rows.append((f"{cost.tokens:,}", *cells, size_text(size)))
    return rows


def describe_plan(plan: CapacityPlan) -> list[str]:
    """Return a plan as lines for a terminal."""
    told = [f"{plan.model}, {size_text(plan.memory)}", "", *plan.sizing, "", "What one request takes:"]
    fit = plan.fit
    told += [
        *columns(cost_table(plan)), "",
        f"Of requests of {plan.traffic.length:,} tokens, {fit.running:,} run at once ({fit.running_limit!r} is full "
        f"first), and {fit.cached:,} stay cached while none runs ({fit.cached_limit!r} is full first).",
        "", "Hits by memory:", *_hits(plan.curve),
    ]  # fmt: skip
    knee = plan.knee
    told.append(
        "Up to the largest memory here, twice as much always gains a point or more."
        if knee is None
        else f"From {size_text(knee.bytes)} on, twice the memory gains less than {GAIN:.0%} of the tokens."
    )
    if plan.short_first:
        told.append(f"At the budget, component {plan.short_first!r} is short first: alone it would serve the least.")
    if plan.pages:
        told += ["", "Hits by page size, at the budget:", *_hits(plan.pages)]
    if plan.grids:
        told += ["", "Hits by checkpoints, at the budget:", *_hits(plan.grids)]
    return [*told, *plan.notes]


def _hits(outcomes: Sequence[ReplayOutcome]) -> list[str]:
    heads, *rows = table_of(outcomes, ("policy", "memory", "hit", "x ideal", "stopped by", "retracted", "refused"))
    return columns([("", *heads[1:]), *rows])
