"""Sizing: how many pages or state slots each pool gets, from a number of tokens or from a memory budget.

It is pure arithmetic over manifests, before anything is allocated. It knows no device and no tensor.

A memory budget is divided for a ``Traffic``. The model of the traffic is a set of paths of the same length with a
common beginning. A component that needs the whole path gets room for every token of every path. A component that needs
only the end of a path gets room for the most that running sequences hold, and for one end per cached path. A boundary
component gets the states of running sequences, and one or more states per cached path. As many paths are cached as the
budget allows, so that no single pool is too small. The result has one sentence per pool that explains its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from ..contract.manifest import Layout, Manifest
from ..contract.reach import Path, Reach
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


# ---------------------------------------------------------------- what is to be sized


def _at_least(low: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise CompositionError(f"traffic: {attribute.name} must be a whole number of at least {low}, got {value!r}")

    return check


def _part_of_one(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise CompositionError(f"traffic: {attribute.name} must be a part from 0 to 1, got {value!r}")


def parse_numbers(text: str, names: Collection[str]) -> dict[str, float]:
    """The numbers of a traffic as a command line has them, such as "prompt=4096,output=512,shared=0.5", by name."""
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

    running: int = attrs.field(default=32, validator=_at_least(1))
    prompt: int = attrs.field(default=4096, validator=_at_least(1))
    output: int = attrs.field(default=512, validator=_at_least(0))
    shared: float = attrs.field(default=0.5, validator=_part_of_one)
    chunk: int = attrs.field(default=2048, validator=_at_least(1))

    @classmethod
    def parse(cls, text: str, **given: Any) -> Traffic:
        """A traffic as a command line has it, such as "prompt=4096,output=512,shared=0.5". ``given``: its other fields,
        which ``text`` cannot have."""
        names = [field.name for field in attrs.fields(cls) if field.name not in given]
        numbers: dict[str, Any] = {**parse_numbers(text, names)}
        return cls(**given, **numbers)

    @property
    def length(self) -> int:
        """The tokens of one path: a prompt with its answer."""
        return self.prompt + self.output

    @property
    def common(self) -> int:
        """The tokens that all paths have in common; each path has at least one token of its own."""
        return min(int(self.prompt * self.shared), self.length - 1)


@attrs.frozen
class Demand:
    """What sizing must know of one component. ``page_tokens`` is 0 for state slots.

    ``live`` is the number of slots that only running states use, where cached states are stored in another form.
    """

    name: str
    manifest: Manifest
    page_tokens: int
    reach: Reach = attrs.field(factory=Path)
    live: int = 0
    layout: Layout = "layer_first"

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory of one pool page or one state slot."""
        entries = self.page_tokens // self.manifest.tokens_per_slot if self.page_tokens else 1
        return slot_bytes(self.layout, self.manifest, entries)

    def size(self, slots: int) -> int:
        """Bytes of so many slots."""
        live = min(self.live, slots)
        rest = Coder(self.manifest).stored.slot_bytes if self.live else self.slot_bytes
        return live * self.slot_bytes + (slots - live) * rest

    def slots(self, tokens: int, max_rewind: int = 0) -> int:
        """The number of pages for ``tokens`` tokens, or the default number of state slots for as many."""
        if self.page_tokens:
            return -(-tokens // self.page_tokens)
        return max(MIN_STATES, tokens // TOKENS_PER_STATE, self.states_needed(1, max_rewind))

    def _states(self, max_rewind: int) -> dict[str, int]:
        """The most state slots that one running sequence may hold at once, by their purpose."""
        steps = max_rewind + 1 if max_rewind else 0
        return {
            "that runs": 1,
            f"of the single tokens of a step (max_rewind={max_rewind})": steps,
            "kept on the way (checkpoint_every)": TRACKS if self.manifest.checkpoint_every else 0,
        }

    def live_of_one(self, max_rewind: int) -> int:
        """The part of ``states_of_one`` that is never cached in the same form."""
        return 1 + (max_rewind + 1 if max_rewind else 0)

    def states_of_one(self, max_rewind: int) -> int:
        """The state slots of one running sequence: its own, those of single tokens, and those of checkpoints."""
        return sum(self._states(max_rewind).values())

    def states_needed(self, running: int, max_rewind: int) -> int:
        """The state slots with which so many sequences can run, and one more state can be cached."""
        return running * self.states_of_one(max_rewind) + 1

    def states_in_words(self, running: int, max_rewind: int) -> str:
        """The parts of ``states_needed``, in words."""
        parts = [f"{count} {purpose}" for purpose, count in self._states(max_rewind).items() if count]
        text = " + ".join(parts)
        if running > 1:
            text = f"{self.states_of_one(max_rewind)} each" + (f" ({text})" if len(parts) > 1 else "")
        return f"{text}, and one to copy into"


# ---------------------------------------------------------------- sizes from tokens


def check_states(demands: Sequence[Demand], slots: Mapping[str, int], running: int, max_rewind: int) -> None:
    """Refuse state pools in which so many sequences cannot run at once."""
    for demand in demands:
        needed = demand.states_needed(running, max_rewind)
        if not demand.page_tokens and slots[demand.name] < needed:
            has, remedy = f"{slots[demand.name]} state slots", ", or say fewer running"
            who = f"{running} running sequences need {needed}"
            if running == 1:
                who, remedy = f"a single running sequence needs {needed}", ""
            raise CompositionError(
                f"component {demand.name!r} has {has.removesuffix('s') if has[:2] == '1 ' else has}, and {who}: "
                f"{demand.states_in_words(running, max_rewind)}. Give it more "
                f"(capacity={{{demand.name!r}: {needed}, ...}}){remedy}"
            )


def from_tokens(demands: Sequence[Demand], page: int, tokens: int, max_rewind: int) -> dict[str, int]:
    """Slots by component for the same number of tokens in every page component, with the default number of states."""
    _whole(tokens, "capacity")
    if tokens < page:
        raise CompositionError(
            f"capacity={tokens} tokens is less than one page of the tree, {page} tokens: give at least {page}"
        )
    return {demand.name: demand.slots(tokens, max_rewind) for demand in demands}


def from_mapping(demands: Sequence[Demand], page: int, capacity: Mapping[str, int]) -> dict[str, int]:
    """Slots by component, from a mapping of names to tokens (page components) or state slots (boundary components)."""
    known = {demand.name for demand in demands}
    unknown = sorted(str(name) for name in capacity if name not in known)
    missing = sorted(known - set(capacity))
    if unknown or missing:
        wrong = ([f"unknown {', '.join(unknown)}"] if unknown else []) + (
            [f"missing {', '.join(missing)}"] if missing else []
        )
        raise CompositionError(
            f"capacity must name every component ({', '.join(sorted(known))}) and no other: {'; '.join(wrong)}"
        )
    out: dict[str, int] = {}
    for demand in demands:
        asked = capacity[demand.name]
        if not demand.page_tokens:
            _whole(asked, f"capacity[{demand.name!r}]", "state slots")
            out[demand.name] = asked
            continue
        _whole(asked, f"capacity[{demand.name!r}]")
        if asked < page:
            raise CompositionError(
                f"capacity[{demand.name!r}]={asked} tokens is less than one page of the tree, {page} tokens: give at "
                f"least {page}"
            )
        out[demand.name] = demand.slots(asked)
    return out


def equal_tokens(demands: Sequence[Demand], page: int, budget: int, max_rewind: int) -> dict[str, int]:
    """Slots by component for the most tokens that fit into the budget, the same number for every page component."""

    def cost(pages: int) -> int:
        return sum(demand.size(demand.slots(pages * page, max_rewind)) for demand in demands)

    if cost(1) > budget:
        states = [f"{d.name}: {d.slots(page, max_rewind)} state slots" for d in demands if not d.page_tokens]
        besides = f" and {', '.join(states)}" if states else ""
        raise CompositionError(
            f"memory of {budget} bytes is too little: one page of {page} tokens{besides} takes {cost(1)} bytes"
        )
    low, high = 1, 2
    while cost(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return {demand.name: demand.slots(low * page, max_rewind) for demand in demands}


def _whole(value: object, what: str, unit: str = "tokens") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CompositionError(f"{what} must be a whole number of {unit}, got {value!r}")
    if value < 1:
        raise CompositionError(f"{what} must be at least 1 of {unit}, got {value}")


# ---------------------------------------------------------------- sizes in words


def size_text(size: int) -> str:
    """A number of bytes as text: "1.50 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} bytes"


def sizing_lines(demands: Sequence[Demand], slots: Mapping[str, int], why: str) -> tuple[str, ...]:
    """One sentence per pool: its size, and why."""
    return tuple(f"{size_of(demand, slots[demand.name])}: {why}" for demand in demands)


def size_of(demand: Demand, slots: int) -> str:
    """A pool's size as text: "near: 4,096 tokens in 256 pages, 1.00 MiB"."""
    size = size_text(demand.size(slots))
    if demand.page_tokens:
        return f"{demand.name}: {slots * demand.page_tokens:,} tokens in {slots:,} pages, {size}"
    if demand.live:
        return f"{demand.name}: {demand.live:,} running states and {slots - demand.live:,} at rest, {size}"
    return f"{demand.name}: {slots:,} states, {size}"


# ---------------------------------------------------------------- a budget divided for a traffic


@attrs.frozen
class Share:
    """The need of one component: ``running`` slots for each running sequence, ``cached`` slots for each cached path,
    and ``spare`` slots.

    ``whole``: it needs whole paths, and its slots follow from tokens instead. ``words`` explains the size.
    """

    demand: Demand
    whole: bool
    running: int
    cached: int
    spare: int
    words: str


@attrs.frozen
class Mix:
    """The shares of all components under one traffic, and what they cost together."""

    traffic: Traffic
    page: int
    shares: tuple[Share, ...]

    @property
    def has_paths(self) -> bool:
        return any(share.whole for share in self.shares)

    def tokens(self, paths: int) -> int:
        """The tokens of so many paths, with their common part counted once."""
        return self.traffic.common + paths * (self.traffic.length - self.traffic.common)

    def slots(self, paths: int, tokens: int) -> dict[str, int]:
        """Slots by component for ``tokens`` tokens of whole paths, and for the ends of ``paths`` paths."""
        running, out = self.traffic.running, {}
        for share in self.shares:
            if share.whole:
                out[share.demand.name] = -(-tokens // self.page) * (self.page // share.demand.page_tokens)
            else:
                out[share.demand.name] = running * share.running + (paths - running) * share.cached + share.spare
        return out

    def cost(self, paths: int, tokens: int) -> int:
        """Bytes of the ``slots`` of all components."""
        slots = self.slots(paths, tokens)
        return sum(share.demand.size(slots[share.demand.name]) for share in self.shares)


def from_traffic(
    demands: Sequence[Demand], page: int, budget: int, traffic: Traffic, max_rewind: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Divide a budget for a traffic: slots by component, and their explanation.

    It is refused if the budget is too small for the running sequences.
    """
    mix = Mix(traffic, page, tuple(_share(demand, page, traffic, max_rewind) for demand in demands))
    running, one = traffic.running, -(-traffic.length // page) * page
    least = mix.cost(running, one)
    if least > budget:
        raise CompositionError(
            f"memory of {budget} bytes is too little for {running} running sequences of {traffic.length} tokens: what "
            f"all of them hold of windows and states, and the whole path of one, takes {least} bytes "
            f"({size_text(least)}). Give more memory, or say a smaller traffic"
        )
    paths = running
    if mix.cost(paths + 1, mix.tokens(paths + 1)) > mix.cost(
        paths, mix.tokens(paths)
    ):  # or else nothing is ever cached
        paths = _most(lambda n: mix.cost(n, mix.tokens(n)) <= budget, paths)
    tokens = _most(lambda n: mix.cost(paths, n * page) <= budget, one // page) * page if mix.has_paths else 0
    slots = mix.slots(paths, tokens)
    return slots, _words(mix, budget, slots, paths, tokens)


def by_default(
    demands: Sequence[Demand], page: int, budget: int, max_rewind: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Divide a budget for the default traffic, with as many running sequences as fit.

    If none fits, all page components get the same number of tokens.
    """
    running = Traffic().running
    while running:
        try:
            return from_traffic(demands, page, budget, Traffic(running=running), max_rewind)
        except CompositionError:
            running //= 2
    slots = equal_tokens(demands, page, budget, max_rewind)
    return slots, sizing_lines(demands, slots, "the same tokens for all, as the budget is small")


def _most(fits: Callable[[int], bool], low: int) -> int:
    """The largest number from ``low`` on that fits; ``low`` if none does."""
    if not fits(low):
        return low
    step = 1
    while fits(low + step):
        step *= 2
    high = low + step
    low += step // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---------------------------------------------------------------- the need of one component


def _share(demand: Demand, page: int, traffic: Traffic, max_rewind: int) -> Share:
    if not demand.page_tokens:
        return _state_share(demand, traffic, max_rewind)
    if demand.reach.closed_upward:
        return Share(demand, True, 0, 0, 0, "")
    length, own = traffic.length, demand.page_tokens
    needed = reach_tokens(demand.reach, length)
    early = not math.isinf(demand.reach.until(length))
    most = min(length, needed + traffic.chunk + page + max_rewind) if early else length
    running = -(-most // own) + 1
    words = f"{traffic.running} running x {most:,} tokens"
    if early and most < length:
        words += f" ({needed:,} that it reaches, {traffic.chunk:,} of a step, a page)"
    cached = -(-needed // own) + 1 if needed else 0
    return Share(demand, False, running, cached, cached, f"{words}, {{cached}} cached ends x {needed:,} tokens")


def _state_share(demand: Demand, traffic: Traffic, max_rewind: int) -> Share:
    manifest = demand.manifest
    each = demand.states_of_one(max_rewind)
    kept = 1
    if manifest.checkpoint_every:
        kept = max(1, (traffic.length - traffic.common) // manifest.checkpoint_every)
    if manifest.states_per_path is not None:
        kept = min(kept, manifest.states_per_path)
    shared = 1 if traffic.common else 0
    words = f"{traffic.running} running x {each}, 1 to copy into, {{cached}} cached paths x {kept}"
    return Share(demand, False, each + kept - 1, kept, 1 + shared, words + ", 1 for what is shared" * shared)


def reach_tokens(reach: Reach, length: int) -> int:
    """The most tokens that a boundary up to ``length`` needs, of boundaries at equal distances."""
    step = max(1, length // SAMPLES)
    boundaries = [*range(step, length, step), length - 1, length]
    return max(sum(hi - lo for lo, hi in reach.needs(n)) for n in boundaries)


def _words(mix: Mix, budget: int, slots: dict[str, int], paths: int, tokens: int) -> tuple[str, ...]:
    """The explanation of a divided budget: a sentence about the traffic, and one per pool."""
    traffic = mix.traffic
    first = (
        f"{size_text(budget)} for {traffic.running} running sequences of {traffic.prompt:,} + {traffic.output:,} "
        f"tokens, {traffic.common:,} of them shared, in steps of {traffic.chunk:,}"
    )
    own = max(1, traffic.length - traffic.common)
    whole = min(paths, (tokens - traffic.common) // own) if mix.has_paths else paths
    if whole < traffic.running:
        first += f"; {max(1, whole)} of them fit at once when they are done"
    out = [first]
    for share in mix.shares:
        words = f"{max(1, whole):,} whole paths" if share.whole else share.words
        out.append(
            f"{size_of(share.demand, slots[share.demand.name])}: {words.format(cached=f'{paths - traffic.running:,}')}"
        )
    return tuple(out)
