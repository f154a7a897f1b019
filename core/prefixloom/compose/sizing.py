"""Sizing: how many pages or state slots each pool gets, from tokens or from a memory budget.

Pure arithmetic over manifests, before anything is allocated. It knows no device and no tensor. How one budget is shared
out for a mix of traffic is ``mix``'s.

Mix: one memory budget shared out among the components of a cache, for a mix of traffic.

Requests are taken as paths of one length that begin alike. A component whose reach is a whole path gets every token of
every path; one whose reach ends soon, what running sequences hold at most and one end per cached path; states, those of
running sequences and one or more per cached path. As many paths are kept as the budget allows, so that no pool is the
only one that is too small. What each pool got, and why, is told in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import attrs

from ..contract.manifest import Layout, Manifest
from ..contract.reach import Path, Reach
from ..device.codecs import Coder
from ..device.layouts import slot_bytes
from ..errors import CompositionError
from ..tree.state_lane import TRACKS

TOKENS_PER_STATE = 2048
"""One state slot per this many tokens of capacity, where nothing else is said."""

MIN_STATES = 16
"""State slots that a pool gets at least, where nothing else is said: enough for a few running sequences."""

_SCALE = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _at_least(low: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise CompositionError(f"traffic: {attribute.name} must be a whole number of at least {low}, got {value!r}")

    return check


def _part_of_one(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise CompositionError(f"traffic: {attribute.name} must be a part from 0 to 1, got {value!r}")


@attrs.frozen
class Traffic:
    """The requests that a cache is sized for: typical ones, and how many at once. Nothing is enforced by it.

    ``running``  sequences at once
    ``prompt``   tokens of a prompt
    ``output``   tokens of an answer
    ``shared``   the part of a prompt that other requests begin with as well
    ``chunk``    tokens that one step prefills of one sequence
    """

    running: int = attrs.field(default=32, validator=_at_least(1))
    prompt: int = attrs.field(default=4096, validator=_at_least(1))
    output: int = attrs.field(default=512, validator=_at_least(0))
    shared: float = attrs.field(default=0.5, validator=_part_of_one)
    chunk: int = attrs.field(default=2048, validator=_at_least(1))

    @property
    def length(self) -> int:
        """Tokens of one path."""
        return self.prompt + self.output

    @property
    def common(self) -> int:
        """Tokens that all paths begin with; each has at least one of its own."""
        return min(int(self.prompt * self.shared), self.length - 1)


@attrs.frozen
class Demand:
    """What sizing must know of one component. ``page_tokens`` is 0 for state slots.

    ``live``: how many of its slots are for running states alone, where cached ones rest in another form.
    """

    name: str
    manifest: Manifest
    page_tokens: int
    reach: Reach = attrs.field(factory=Path)
    live: int = 0
    layout: Layout = "layer_first"

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that one pool page takes, or one state slot."""
        entries = self.page_tokens // self.manifest.tokens_per_slot if self.page_tokens else 1
        return slot_bytes(self.layout, self.manifest, entries)

    def size(self, slots: int) -> int:
        """Bytes of so many."""
        live = min(self.live, slots)
        rest = Coder(self.manifest).stored.slot_bytes if self.live else self.slot_bytes
        return live * self.slot_bytes + (slots - live) * rest

    def slots(self, tokens: int, max_rewind: int = 0) -> int:
        """Pages that hold at least ``tokens``; state slots that go with that many."""
        if self.page_tokens:
            return -(-tokens // self.page_tokens)
        return max(MIN_STATES, tokens // TOKENS_PER_STATE, self.states_needed(1, max_rewind))

    def _states(self, max_rewind: int) -> dict[str, int]:
        """State slots that one running sequence may hold at once, by what they are for."""
        steps = max_rewind + 1 if max_rewind else 0
        return {
            "that runs": 1,
            f"of the single tokens of a step (max_rewind={max_rewind})": steps,
            "kept on the way (checkpoint_every)": TRACKS if self.manifest.checkpoint_every else 0,
        }

    def live_of_one(self, max_rewind: int) -> int:
        """Of ``states_of_one``, those that are never cached as they are."""
        return 1 + (max_rewind + 1 if max_rewind else 0)

    def states_of_one(self, max_rewind: int) -> int:
        """State slots of one running sequence: its own, those of single steps, and those of tracked checkpoints."""
        return sum(self._states(max_rewind).values())

    def states_needed(self, running: int, max_rewind: int) -> int:
        """State slots with which so many sequences run, and one more can be cached, to be copied from."""
        return running * self.states_of_one(max_rewind) + self.manifest.shareable

    def states_told(self, running: int, max_rewind: int) -> str:
        """What ``states_needed`` is made of, in words."""
        made_of = [f"{count} {what}" for what, count in self._states(max_rewind).items() if count]
        told = " + ".join(made_of)
        if running > 1:
            told = f"{self.states_of_one(max_rewind)} each" + (f" ({told})" if len(made_of) > 1 else "")
        return f"{told}, and one to copy into" if self.manifest.shareable else told


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
                f"{demand.states_told(running, max_rewind)}. Give it more "
                f"(capacity={{{demand.name!r}: {needed}, ...}}){remedy}"
            )


def parse_memory(memory: int | str) -> int:
    """Bytes, from a number or a text such as "20GiB", "512 MiB" or "20GB"."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
        if match is None or (match[3] and not match[2]):
            raise CompositionError(f'memory={memory!r} is no size. Write bytes, or a text such as "20GiB" or "512MiB"')
        base = 1024 if match[3] else 1000
        memory = int(float(match[1]) * base ** _SCALE[match[2].upper()])
    if not isinstance(memory, int) or isinstance(memory, bool):
        raise CompositionError(f'memory must be bytes or a text such as "20GiB", got {memory!r}')
    if memory < 1:
        raise CompositionError(f"memory must be positive, got {memory} bytes")
    return memory


def from_tokens(demands: Sequence[Demand], page: int, tokens: int, max_rewind: int) -> dict[str, int]:
    """The same number of tokens for every page component, and the state slots that go with it."""
    _whole(tokens, "capacity")
    if tokens < page:
        raise CompositionError(
            f"capacity={tokens} tokens is less than one page of the tree, {page} tokens: give at least {page}"
        )
    return {demand.name: demand.slots(tokens, max_rewind) for demand in demands}


def from_mapping(demands: Sequence[Demand], page: int, capacity: Mapping[str, int]) -> dict[str, int]:
    """Tokens per page component and slots per boundary component, each said by name."""
    known = {demand.name for demand in demands}
    unknown = sorted(str(name) for name in capacity if name not in known)
    missing = sorted(known - set(capacity))
    if unknown or missing:
        told = ([f"unknown {', '.join(unknown)}"] if unknown else []) + (
            [f"missing {', '.join(missing)}"] if missing else []
        )
        raise CompositionError(
            f"capacity must name every component ({', '.join(sorted(known))}) and no other: {'; '.join(told)}"
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


def evenly(demands: Sequence[Demand], page: int, budget: int, max_rewind: int) -> dict[str, int]:
    """The most tokens that fit into the budget, the same number for every page component."""

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


def size_text(size: int) -> str:
    """Bytes in words: "1.50 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} bytes"


def told(demands: Sequence[Demand], slots: Mapping[str, int], why: str) -> tuple[str, ...]:
    """One sentence per pool."""
    return tuple(f"{size_of(demand, slots[demand.name])}: {why}" for demand in demands)


def size_of(demand: Demand, slots: int) -> str:
    """A pool's size in words: "near: 4,096 tokens in 256 pages, 1.00 MiB"."""
    size = size_text(demand.size(slots))
    if demand.page_tokens:
        return f"{demand.name}: {slots * demand.page_tokens:,} tokens in {slots:,} pages, {size}"
    if demand.live:
        return f"{demand.name}: {demand.live:,} running states and {slots - demand.live:,} at rest, {size}"
    return f"{demand.name}: {slots:,} states, {size}"


SAMPLES = 512
"""Boundaries at which a reach is asked how much it needs."""


@attrs.frozen
class Share:
    """What one component needs: ``running`` slots for each running sequence, ``cached`` for each cached path.

    ``whole``: it needs the paths themselves, and its slots follow from tokens instead. ``words`` says why.
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
        """Tokens of so many paths, whose common part is held once."""
        return self.traffic.common + paths * (self.traffic.length - self.traffic.common)

    def slots(self, paths: int, tokens: int) -> dict[str, int]:
        """Slots by component if ``tokens`` tokens of paths are held, and the ends of ``paths`` paths."""
        running, out = self.traffic.running, {}
        for share in self.shares:
            if share.whole:
                out[share.demand.name] = -(-tokens // self.page) * (self.page // share.demand.page_tokens)
            else:
                out[share.demand.name] = running * share.running + (paths - running) * share.cached + share.spare
        return out

    def cost(self, paths: int, tokens: int) -> int:
        slots = self.slots(paths, tokens)
        return sum(share.demand.size(slots[share.demand.name]) for share in self.shares)


def from_traffic(
    demands: Sequence[Demand], page: int, budget: int, traffic: Traffic, max_rewind: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Slots by component and the words for it; refused where not even the running sequences fit."""
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
    """A budget without a traffic: the default one, with as many running as fit; or else the same tokens for all."""
    running = Traffic().running
    while running:
        try:
            return from_traffic(demands, page, budget, Traffic(running=running), max_rewind)
        except CompositionError:
            running //= 2
    slots = evenly(demands, page, budget, max_rewind)
    return slots, told(demands, slots, "the same tokens for all, as the budget is small")


def _most(fits: Callable[[int], bool], low: int) -> int:
    """The largest number from ``low`` on that fits; ``low`` if that does not."""
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


# ---------------------------------------------------------------- what one component needs


def _share(demand: Demand, page: int, traffic: Traffic, max_rewind: int) -> Share:
    if not demand.page_tokens:
        return _state_share(demand, traffic, max_rewind)
    if demand.reach.closed_upward and demand.manifest.shareable:
        return Share(demand, True, 0, 0, 0, "")
    length, own = traffic.length, demand.page_tokens
    needed = reach_tokens(demand.reach, length)
    early = not math.isinf(demand.reach.until(length))
    most = min(length, needed + traffic.chunk + page + max_rewind) if early else length
    running = -(-most // own) + 1
    if not demand.manifest.shareable:
        return Share(demand, False, running, 0, 0, f"{traffic.running} running x {most:,} tokens, and none is cached")
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
    if not manifest.shareable:
        return Share(demand, False, each, 0, 1, f"{traffic.running} running x {each}, 1 spare, and none is cached")
    shared = 1 if traffic.common else 0
    words = f"{traffic.running} running x {each}, 1 to copy into, {{cached}} cached paths x {kept}"
    return Share(demand, False, each + kept - 1, kept, 1 + shared, words + ", 1 for what is shared" * shared)


def reach_tokens(reach: Reach, length: int) -> int:
    """The most tokens that any boundary up to ``length`` needs, asked at boundaries that lie evenly."""
    step = max(1, length // SAMPLES)
    boundaries = [*range(step, length, step), length - 1, length]
    return max(sum(hi - lo for lo, hi in reach.needs(n)) for n in boundaries)


def _words(mix: Mix, budget: int, slots: dict[str, int], paths: int, tokens: int) -> tuple[str, ...]:
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
