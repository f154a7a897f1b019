"""prefixloom behind the small interface of a peer comparison, through the public API alone.

``Leases`` drives match, lease and the page table apart; ``Sequences`` drives whole requests as an engine does. Pools
lie on the meta device: the figures are those of the cache's own work, as they are for the peers.
"""

from __future__ import annotations

from typing import Any

import prefixloom
from prefixloom import Buffer, Component, ComponentSpec, Manifest, Path, Profile

OPTIONS = {"layers": (0,), "kv_heads": 1, "k_dim": 1, "v_dim": 1, "dtype": "bfloat16"}


class Foreign(Component):
    """A stranger's component of the same reach as the built-in one."""


def make(comps: str, page: int, cap: int, foreign: bool = False) -> prefixloom.Cache:
    if comps != "F":
        raise ValueError(f"only F can be composed so far, not {comps}")
    cap = -(-cap // page) * page
    if foreign:
        plugin = Foreign("foreign", Manifest((Buffer("k", (1, 1)), Buffer("v", (1, 1)))), Path())
        return prefixloom.compose(None, plugins=[plugin], page_size=page, capacity=cap, device="meta", debug=False)
    profile = Profile((ComponentSpec("full", options=OPTIONS),), page_size=page)
    return prefixloom.compose(profile, capacity=cap, device="meta", debug=False)


class Match:
    __slots__ = ("length", "lists", "plan", "sequence", "tokens")


class Driver:
    native = "encoded int32"
    foreign = False

    def __init__(self, comps: str = "F", page: int = 16, cap: int = 1 << 20, mamba_cap: int = 0, **kw: Any) -> None:
        self.name = type(self).__name__
        self.page = page
        self.cache = make(comps, page, cap, self.foreign)
        self.component = "foreign" if self.foreign else "full"

    def prep(self, tokens: list[int]) -> Any:
        return prefixloom.encode(tokens)

    def reserve(self, n: int) -> None:
        pass

    def pre_evict(self) -> None:
        pass

    def evict(self, n: int) -> int:
        return self.cache.evict(n)[self.component] * self.page

    def finish(self, prompt: Any, full: Any, m: Any, out: list[int]) -> Any:
        return self.insert(full, m)


class Leases(Driver):
    """match -> plan, indices -> its page numbers, lock -> a lease."""

    def match(self, key: Any) -> Match:
        m = Match()
        m.plan = plan = self.cache.match(key)
        m.length = plan.ready
        return m

    def indices(self, m: Match) -> Any:
        return m.plan.pages(self.component)

    def lock(self, m: Match) -> Any:
        return self.cache.lease(m.plan)

    def unlock(self, lease: Any) -> None:
        lease.release()

    def insert(self, key: Any, m: Match) -> Any:
        with self.cache.open(key) as sequence:
            sequence.grow(sequence.named - sequence.ready)
            sequence.commit()
        return m


class Sequences(Driver):
    """match -> an open sequence; the turn grows, names, commits and closes it."""

    def match(self, key: Any) -> Match:
        m = Match()
        m.tokens = key
        m.sequence = sequence = self.cache.open(key)
        m.length = sequence.ready
        return m

    def indices(self, m: Match) -> Any:
        return m.sequence

    def lock(self, m: Match) -> Any:
        return m.sequence

    def unlock(self, sequence: Any) -> None:
        sequence.close()

    def insert(self, key: Any, m: Match) -> Any:
        sequence = m.sequence
        if len(key) > len(m.tokens):
            sequence.append(key.part(len(m.tokens) // 4))
        sequence.grow(sequence.named - sequence.reserved)
        sequence.commit()
        sequence.publish()
        return m

    def finish(self, prompt: Any, full: Any, m: Match, out: list[int]) -> Any:
        sequence = m.sequence
        sequence.grow(len(full) // 4 - sequence.reserved)
        sequence.append(full.part(len(prompt) // 4))
        sequence.commit()
        sequence.close()
        return m


class Chunked(Sequences):
    chunks = True

    def unlock(self, m: Match) -> None:
        m.sequence.close()

    def chunk(self, m: Match, n: int) -> None:
        m.sequence.grow(n)
        m.sequence.commit()
        m.sequence.publish()


class ForeignSequences(Sequences):
    foreign = True


class ForeignLeases(Leases):
    foreign = True
