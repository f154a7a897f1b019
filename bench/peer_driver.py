"""prefixloom behind the small interface of a peer comparison, through the public API alone.

``Leases`` drives match, lease and the page table apart; ``Sequences`` drives whole requests as an engine does. Pools
lie on the meta device: the figures are those of the cache's own work, as they are for the peers.
"""

from __future__ import annotations

from typing import Any

import prefixloom
from prefixloom import Buffer, Component, ComponentSpec, Manifest, Path, Point, Profile, Window

NAMES = {"F": "full", "S": "swa", "M": "mamba"}


class Foreign(Component):
    """A stranger's component, of the same reach as a built-in one."""


def spec(letter: str, window: int) -> ComponentSpec:
    """An installed component, as small as it can be."""
    kv = {"layers": (0,), "kv_heads": 1, "k_dim": 1, "v_dim": 1, "dtype": "bfloat16"}
    options = {"F": kv, "S": {**kv, "window": window}, "M": {"conv": (1, 1), "recurrent": (1,)}}[letter]
    return ComponentSpec(NAMES[letter], options=options)


def foreign(letter: str, window: int) -> Component:
    buffers = (Buffer("k", (1, 1)), Buffer("v", (1, 1)))
    reach = {"F": Path(), "S": Window(window), "M": Point()}[letter]
    return Foreign(NAMES[letter], Manifest(buffers), reach)


def make(comps: str, page: int, cap: int, states: int, window: int, strange: bool) -> prefixloom.Cache:
    """A cache of the installed plugins, or of strangers' components with the same reaches."""
    return prefixloom.compose(
        None if strange else Profile([spec(letter, window) for letter in comps]),
        plugins=[foreign(letter, window) for letter in comps] if strange else (),
        page_size=page,
        capacity={NAMES[letter]: states if letter == "M" else -(-cap // page) * page for letter in comps},
        device="meta",
        debug=False,
    )


class Match:
    __slots__ = ("length", "plan", "sequence", "tokens")


class Driver:
    native = "encoded int32"
    strange = False

    def __init__(
        self, comps: str = "F", page: int = 16, cap: int = 1 << 20, mamba_cap: int = 4096, window: int = 1024, **kw: Any
    ) -> None:
        self.name = type(self).__name__
        self.page = page
        self.states = "M" in comps
        self.lead = NAMES[comps[0]]
        self.cache = make(comps, page, cap, mamba_cap, window, self.strange)

    def prep(self, tokens: list[int]) -> Any:
        return prefixloom.encode(tokens)

    def reserve(self, n: int) -> None:
        pass

    def pre_evict(self) -> None:
        pass

    def evict(self, n: int) -> int:
        return self.cache.evict(n)[self.lead] * self.page

    def finish(self, prompt: Any, full: Any, m: Any, out: list[int]) -> Any:
        return self.insert(full, m)

    def compute(self, sequence: prefixloom.Sequence) -> None:
        """One forward pass over what is reserved: with running states it goes through a step, which runs their ops."""
        if self.states:
            with self.cache.step((sequence,)) as step:
                step.run_ops()
        else:
            sequence.commit()


class Leases(Driver):
    """match -> plan, indices -> its page numbers, lock -> a lease."""

    def match(self, key: Any) -> Match:
        m = Match()
        m.plan = plan = self.cache.match(key)
        m.length = plan.ready
        return m

    def indices(self, m: Match) -> Any:
        return m.plan.pages(self.lead)

    def lock(self, m: Match) -> Any:
        return self.cache.lease(m.plan)

    def unlock(self, lease: Any) -> None:
        lease.release()

    def insert(self, key: Any, m: Match) -> Any:
        with self.cache.open(key) as sequence:
            sequence.grow(sequence.named // self.page * self.page - sequence.ready)
            self.compute(sequence)
        return m


class Sequences(Driver):
    """match -> an open sequence; the turn grows, names, computes and closes it."""

    def match(self, key: Any) -> Match:
        m = Match()
        m.tokens = key
        m.sequence = sequence = self.cache.open(key)
        m.length = sequence.ready
        return m

    def indices(self, m: Match) -> Any:
        return m.sequence

    def lock(self, m: Match) -> Any:
        return m

    def unlock(self, m: Match) -> None:
        m.sequence.close()

    def insert(self, key: Any, m: Match) -> Any:
        sequence = m.sequence
        if len(key) > len(m.tokens):
            sequence.append(key.part(len(m.tokens) // 4))
        sequence.grow(sequence.named // self.page * self.page - sequence.reserved)
        self.compute(sequence)
        sequence.publish()
        return m

    def finish(self, prompt: Any, full: Any, m: Match, out: list[int]) -> Any:
        sequence = m.sequence
        sequence.grow(len(full) // 4 // self.page * self.page - sequence.reserved)  # whole pages, as the peers cache
        sequence.append(full.part(len(prompt) // 4))
        if self.states:
            self.compute(sequence)
        else:
            sequence.commit()
        sequence.close()
        return m


class Chunked(Sequences):
    """A prompt that is computed and published chunk by chunk."""

    chunks = True

    def chunk(self, m: Match, n: int) -> None:
        m.sequence.grow(n)
        self.compute(m.sequence)
        m.sequence.publish()


class StrangeSequences(Sequences):
    strange = True


class StrangeLeases(Leases):
    strange = True
