"""Sizing: how many pages or states each pool gets, and how many of them one sequence needs.

It is arithmetic over manifests and reaches, before anything is allocated. It knows no device and no tensor.

A memory budget is divided for a ``Traffic``. The model of the traffic is a set of paths of the same length with a
common beginning. A component that needs the whole path gets room for every token of every path. A component that needs
only the end of a path gets room for the most that running sequences hold, and for one end per cached path. A component
of states gets the states of running sequences, and one or more states per cached path. As many paths are cached as the
budget allows, so that no single pool is too small. The result has one sentence per pool that explains its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from ..contract.checks import whole
from ..contract.composition import Composition, Part
from ..contract.manifest import Layout, parse_memory
from ..contract.reach import Reach
from ..device.codecs import Coder
from ..device.layouts import slot_bytes
from ..errors import CompositionError, InputError
from ..tree.holdings import TRACKS

TOKENS_PER_STATE = 2048
"""One state slot per this many tokens of capacity, by default."""

MIN_STATES = 16
"""The least number of state slots of a pool, by default: enough for a few running sequences."""

SAMPLES = 512
"""The number of boundaries at which ``reach_tokens`` asks a reach."""

Capacity = int | Mapping[str, int]

Sizes = tuple[dict[str, int], tuple[str, ...]]
"""Pages or states by component, and sentences that explain them."""


# ---------------------------------------------------------------- the traffic


def parse_numbers(text: str, names: Collection[str]) -> dict[str, float]:
    """Return the numbers of a command line's traffic, such as "prompt=4096,output=512,shared=0.5", by name."""
    numbers: dict[str, float] = {}
    for each in filter(None, text.split(",")):
        name, _, value = each.partition("=")
        name = name.strip()
        if name not in names:
            raise InputError(f"traffic: its numbers are {', '.join(names)}; got {name!r}")
        try:
            numbers[name] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise InputError(f"traffic: {name} is a number, got {value!r}") from None
    return numbers


@attrs.frozen
class Traffic:
    """The typical requests for which a cache is sized. It sets no limits.

    ``running``  number of sequences that run at once
    ``prompt``   tokens of a prompt
    ``output``   tokens of an answer
    ``shared``   the part of a prompt, from 0 to 1, that it has in common with other prompts
    ``chunk``    tokens of one sequence that one step prefills
    """

    running: int = 32
    prompt: int = 4096
    output: int = 512
    shared: float = 0.5
    chunk: int = 2048

    def __attrs_post_init__(self) -> None:
        for name in ("running", "prompt", "output", "chunk"):
            whole(getattr(self, name), f"traffic: {name}", 0 if name == "output" else 1)
        if not isinstance(self.shared, int | float) or isinstance(self.shared, bool) or not 0 <= self.shared <= 1:
            raise CompositionError(f"traffic: shared must be a part from 0 to 1, got {self.shared!r}")

    @classmethod
    def parse(cls, text: str, **given: float) -> Traffic:
        """Return a command line's traffic, such as "prompt=4096,output=512,shared=0.5".

        ``given``: its other fields, which ``text`` cannot have.
        """
        names = [field.name for field in attrs.fields(cls) if field.name not in given]
        return cls(**given, **parse_numbers(text, names))  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """The tokens of one path: a prompt with its answer."""
        return self.prompt + self.output

    @property
    def common(self) -> int:
        """The tokens that all paths have in common; each path has at least one token of its own."""
        return min(int(self.prompt * self.shared), self.length - 1)


# ---------------------------------------------------------------- one pool


@attrs.frozen
class Demand:
    """A part whose pool is to be sized. The capacity of the part does not count yet.

    ``rewind``  committed tokens that a sequence may take back
    ``layout``  the layout of the pool's pages
    """

    part: Part
    rewind: int = 0
    layout: Layout = "layer_first"

    @property
    def name(self) -> str:
        return self.part.name

    def size(self, slots: int) -> int:
        """Return the bytes of so many slots. Those of running states may have another form than those at rest."""
        part = self.part
        running = min(part.running, slots)
        entries = part.page_tokens // part.manifest.tokens_per_slot if part.page_tokens else 1
        each = slot_bytes(self.layout, part.manifest, entries)
        rest = Coder(part.manifest).stored.slot_bytes if part.running else each
        return running * each + (slots - running) * rest

    def size_text(self, slots: int) -> str:
        """Return the size of a pool as text: "near: 4,096 tokens in 256 pages, 1.00 MiB"."""
        part, size = self.part, size_text(self.size(slots))
        if part.page_tokens:
            return f"{part.name}: {slots * part.page_tokens:,} tokens in {slots:,} pages, {size}"
        if part.running:
            return f"{part.name}: {part.running:,} running states and {slots - part.running:,} at rest, {size}"
        return f"{part.name}: {slots:,} states, {size}"

    def slots(self, tokens: int) -> int:
        """Return the number of pages for ``tokens`` tokens, or the default number of states for as many."""
        if self.part.page_tokens:
            return -(-tokens // self.part.page_tokens)
        return max(MIN_STATES, tokens // TOKENS_PER_STATE, self.states_needed(1))

    @property
    def states(self) -> dict[str, int]:
        """The most states that one running sequence holds at once, by their purpose."""
        return {
            "that runs": 1,
            f"of the single tokens of a step (max_rewind={self.rewind})": self.rewind + 1 if self.rewind else 0,
            "kept on the way (checkpoint_every)": TRACKS if self.part.manifest.checkpoint_every else 0,
        }

    @property
    def states_of_one(self) -> int:
        """The states of one running sequence: its own, those of single tokens, and those of checkpoints."""
        return sum(self.states.values())

    def states_needed(self, running: int) -> int:
        """Return the states with which so many sequences can run, and one more state can be cached."""
        return running * self.states_of_one + 1

    def check_states(self, slots: int, running: int) -> None:
        """Refuse a pool of states in which so many sequences cannot run at once."""
        needed = self.states_needed(running)
        if self.part.page_tokens or slots >= needed:
            return
        made_of = [f"{count} {purpose}" for purpose, count in self.states.items() if count]
        text, who, remedy = " + ".join(made_of), "a single running sequence needs", ""
        if running > 1:
            text = f"{self.states_of_one} each" + (f" ({text})" if len(made_of) > 1 else "")
            who, remedy = f"{running} running sequences need", ", or say fewer running"
        raise CompositionError(
            f"component {self.name!r} has {slots} state slot{'s' * (slots != 1)}, and {who} {needed}: {text}, and one "
            f"to copy into. Give it more (capacity={{{self.name!r}: {needed}, ...}}){remedy}"
        )


def reach_tokens(reach: Reach, length: int) -> int:
    """Return the most tokens that a boundary up to ``length`` needs, of boundaries at equal distances."""
    step = max(1, length // SAMPLES)
    boundaries = [*range(step, length, step), length - 1, length]
    return max(sum(hi - lo for lo, hi in reach.needs(n)) for n in boundaries)


def size_text(size: int) -> str:
    """Return a number of bytes as text: "1.50 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} bytes"


# ---------------------------------------------------------------- sizes from tokens


def sizes_for(
    demands: Sequence[Demand], page: int, capacity: Capacity | None, memory: int | str | None, traffic: Traffic | None
) -> Sizes:
    """Return the pages or states of every pool, from tokens or from a memory budget.

    ``traffic``: the caller's. Without it, memory is divided for the default one, with as many running sequences as fit.
    """
    if capacity is not None and memory is not None:
        raise CompositionError(
            "say how large the cache is by capacity or by memory, not by both: capacity follows from memory"
        )
    if memory is not None:
        budget = parse_memory(memory)
        if traffic is not None:
            return from_traffic(demands, page, budget, traffic)
        running = Traffic().running
        while running:
            try:
                return from_traffic(demands, page, budget, Traffic(running=running))
            except CompositionError:
                running //= 2
        sizes = equal_tokens(demands, page, budget)
        return sizes, sizing_lines(demands, sizes, "the same tokens for all, as the budget is small")
    if capacity is None:
        raise CompositionError('say how large the cache is: capacity=<tokens> or memory="20GiB"; neither was given')
    sizes = from_capacity(demands, page, capacity)
    running = 1 if traffic is None else traffic.running
    for demand in demands:
        if isinstance(capacity, Mapping):
            demand.check_states(sizes[demand.name], running)
        elif not demand.part.page_tokens:
            sizes[demand.name] = max(sizes[demand.name], demand.states_needed(running))
    return sizes, sizing_lines(demands, sizes, "as capacity says")


def from_capacity(demands: Sequence[Demand], page: int, capacity: Capacity) -> dict[str, int]:
    """Return the slots by component: for the same tokens in all, or for the tokens or states that a mapping names."""

    def tokens(asked: int, what: str) -> int:
        if whole(asked, what, unit=" tokens") < page:
            raise CompositionError(
                f"{what}={asked} tokens is less than one page of the tree, {page} tokens: give at least {page}"
            )
        return asked

    if not isinstance(capacity, Mapping):
        return {demand.name: demand.slots(tokens(capacity, "capacity")) for demand in demands}
    known = {demand.name for demand in demands}
    unknown, missing = sorted(str(name) for name in capacity if name not in known), sorted(known - set(capacity))
    if unknown or missing:
        wrong = [f"{what} {', '.join(names)}" for what, names in (("unknown", unknown), ("missing", missing)) if names]
        raise CompositionError(
            f"capacity must name every component ({', '.join(sorted(known))}) and no other: {'; '.join(wrong)}"
        )
    sizes = {}
    for demand in demands:
        asked, what = capacity[demand.name], f"capacity[{demand.name!r}]"
        if demand.part.page_tokens:
            sizes[demand.name] = demand.slots(tokens(asked, what))
        else:
            sizes[demand.name] = whole(asked, what, unit=" state slots")
    return sizes


def equal_tokens(demands: Sequence[Demand], page: int, budget: int) -> dict[str, int]:
    """Return the slots by component for the most tokens that fit into the budget, the same number for all."""

    def cost(pages: int) -> int:
        return sum(demand.size(demand.slots(pages * page)) for demand in demands)

    if cost(1) > budget:
        states = [f"{each.name}: {each.slots(page)} state slots" for each in demands if not each.part.page_tokens]
        besides = f" and {', '.join(states)}" if states else ""
        raise CompositionError(
            f"memory of {budget} bytes is too little: one page of {page} tokens{besides} takes {cost(1)} bytes"
        )
    pages = _most(lambda pages: cost(pages) <= budget, 1)
    return {demand.name: demand.slots(pages * page) for demand in demands}


def sizing_lines(demands: Sequence[Demand], sizes: Mapping[str, int], why: str) -> tuple[str, ...]:
    """Return one sentence per pool: its size, and why."""
    return tuple(f"{demand.size_text(sizes[demand.name])}: {why}" for demand in demands)


def _most(fits: Callable[[int], bool], low: int) -> int:
    """Return the largest number from ``low`` on that fits; ``low`` if none does."""
    step = 1
    while fits(low + step):
        low, step = low + step, 2 * step
    while step := step // 2:
        if fits(low + step):
            low += step
    return low


# ---------------------------------------------------------------- a budget divided for a traffic


@attrs.frozen
class Share:
    """The slots of one component: ``fixed``, ``per_path`` for each cached path, and ``per_page`` for each page of the
    tree in whole paths. ``words`` explain their number.
    """

    demand: Demand
    fixed: int
    per_path: int
    per_page: int
    words: str

    def slots(self, cached: int, pages: int) -> int:
        return self.fixed + cached * self.per_path + pages * self.per_page


def from_traffic(demands: Sequence[Demand], page: int, budget: int, traffic: Traffic) -> Sizes:
    """Divide a budget for a traffic. It is refused if the budget is too small for the running sequences."""
    shares = [_share(demand, page, traffic) for demand in demands]
    running, common, own = traffic.running, traffic.common, traffic.length - traffic.common

    def cost(cached: int, pages: int) -> int:
        return sum(share.demand.size(share.slots(cached, pages)) for share in shares)

    def of_paths(cached: int) -> int:
        """Return the cost of so many cached paths beside the running ones, with their common part counted once."""
        return cost(cached, -(-(common + (running + cached) * own) // page))

    one = -(-traffic.length // page)
    least = cost(0, one)
    if least > budget:
        raise CompositionError(
            f"memory of {budget} bytes is too little for {running} running sequences of {traffic.length} tokens: what "
            f"all of them hold of windows and states, and the whole path of one, takes {least} bytes "
            f"({size_text(least)}). Give more memory, or say a smaller traffic"
        )
    cached, pages = 0, 0
    if of_paths(1) > of_paths(0):  # or else nothing is ever cached
        cached = _most(lambda cached: of_paths(cached) <= budget, 0)
    held = running + cached
    if any(share.per_page for share in shares):
        pages = _most(lambda pages: cost(cached, pages) <= budget, one)
        held = min(held, (pages * page - common) // own)
    told = (
        f"{size_text(budget)} for {running} running sequences of {traffic.prompt:,} + {traffic.output:,} tokens, "
        f"{common:,} of them shared, in steps of {traffic.chunk:,}"
    )
    if held < running:
        told += f"; {max(1, held)} of them fit at once when they are done"
    sizes = {share.demand.name: share.slots(cached, pages) for share in shares}
    lines = [
        f"{share.demand.size_text(sizes[share.demand.name])}: "
        + share.words.format(cached=f"{cached:,}", held=f"{max(1, held):,}")
        for share in shares
    ]
    return sizes, (told, *lines)


def _share(demand: Demand, page: int, traffic: Traffic) -> Share:
    part, length, running = demand.part, traffic.length, traffic.running
    if not part.page_tokens:
        return _share_of_states(demand, traffic)
    if part.reach.closed_upward:
        return Share(demand, 0, 0, page // part.page_tokens, "{held} whole paths")
    needed = reach_tokens(part.reach, length)
    most, words = length, ""
    if not math.isinf(part.reach.until(length)):
        most = min(length, needed + traffic.chunk + page + demand.rewind)
    if most < length:
        words = f" ({needed:,} that it reaches, {traffic.chunk:,} of a step, a page)"
    end = -(-needed // part.page_tokens) + 1 if needed else 0
    fixed = running * (-(-most // part.page_tokens) + 1) + end
    words = f"{running} running x {most:,} tokens{words}, {{cached}} cached ends x {needed:,} tokens"
    return Share(demand, fixed, end, 0, words)


def _share_of_states(demand: Demand, traffic: Traffic) -> Share:
    manifest, running, each, kept = demand.part.manifest, traffic.running, demand.states_of_one, 1
    if manifest.checkpoint_every:
        kept = max(1, (traffic.length - traffic.common) // manifest.checkpoint_every)
    words = f"{running} running x {each}, 1 to copy into, {{cached}} cached paths x {kept}"
    shared = 1 if traffic.common else 0
    fixed = running * (each + kept - 1) + 1 + shared
    return Share(demand, fixed, kept, 0, words + ", 1 for what is shared" * shared)


# ---------------------------------------------------------------- the needs of one sequence


@attrs.frozen
class PoolNeed:
    """What decides how much of one pool a sequence holds. ``states``: the slots that it holds of a pool of states."""

    name: str
    page_tokens: int
    reach: Reach
    capacity: int
    states: int


@attrs.frozen
class SequenceNeeds:
    """How many slots of every pool one sequence holds at most while it runs.

    It is plain data, without a cache: a scheduler asks whether a request fits, and a router in another process where it
    fits best. A path needs a page for every token of a sequence. A window needs the pages that its reach covers at the
    end of the sequence, and those that one step adds. Of states a sequence has those that ``compose`` counts for it.

    ``step``: the most tokens that one step adds, those included that may be taken back.
    """

    pools: tuple[PoolNeed, ...]
    step: int

    @classmethod
    def of(cls, composition: Composition, chunk: int) -> SequenceNeeds:
        """Return the needs in a cache of this composition, where one step of prefill computes ``chunk`` tokens."""
        rewind = composition.max_rewind
        pools = tuple(
            PoolNeed(part.name, part.page_tokens, part.reach, part.capacity, Demand(part, rewind).states_of_one)
            for part in composition.parts
        )
        return cls(pools, max(chunk, 1 + rewind) + rewind)  # a step computes a chunk, or a token and guesses

    def slots(self, length: int) -> dict[str, int]:
        """Return by component the pages or states that a sequence of ``length`` tokens holds."""
        return {pool.name: self._pages(pool, length) if pool.page_tokens else pool.states for pool in self.pools}

    def shares(self, length: int) -> dict[str, float]:
        """Return by component which part of the whole pool that is."""
        found = self.slots(length)
        return {pool.name: found[pool.name] / pool.capacity for pool in self.pools if pool.capacity}

    def _pages(self, pool: PoolNeed, length: int) -> int:
        size = pool.page_tokens
        kept = sum(-(-end // size) - start // size for start, end in pool.reach.needs(length))
        return min(-(-length // size), kept + -(-self.step // size) + 1)
