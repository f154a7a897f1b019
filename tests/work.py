"""Work counted, not timed: what one call of the cache does, in figures that no other load on the machine changes.

A ``Scene`` is a cache of the built-in components in a known state; ``operations`` are its calls in an order; a *lens*
runs one of them and says what it did:

``bytecodes``  that the interpreter executed     ``hooks``  calls of components' hooks
``nodes``      of the tree that were looked at    ``read``   bytes of their keys that were read, to compare or to cut
``blocks``     of memory kept when it was over    ``peak``   bytes in use at most, beyond those before it

``test_work.py`` holds them to ``work_table.tsv``, which ``python tests/work.py --renew`` writes anew: do that when a
change costs work for a good reason, and say the reason in the commit that has the new table.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from prefixloom.tree.radix import Node

from prefixloom import Component, Sequence, TierManifest, Tokens, compose, encode
from prefixloom.cache.cache import Cache
from prefixloom.contract.hookspecs import HOT_HOOKS
from prefixloom_full import FullComponent
from prefixloom_hicache import HostTier
from prefixloom_mamba import MambaComponent
from prefixloom_swa import SwaComponent

TABLE = Path(__file__).with_name("work_table.tsv")
FIGURES = ("bytecodes", "hooks", "nodes", "read", "blocks", "peak")
OPERATIONS = (
    "match cold", "match hot", "open", "grow", "append", "step", "publish", "fill", "close", "evict",
    "evict ten", "turn",
)  # fmt: skip
COMPOSITIONS = tuple((comps, tier) for comps in ("F", "FS", "FM", "FSM") for tier in (False, True))
PAGES = (1, 16)
NEW = 64
"""Tokens that a turn asks, and that it is answered."""

Work = dict[str, int]
Lens = Callable[["Scene", Callable[[], object]], Work]


class Case(NamedTuple):
    comps: str
    tier: bool
    page: int

    def __str__(self) -> str:
        return f"{self.comps}{'+host' if self.tier else ''}/{self.page}"


CASES = tuple(Case(comps, tier, page) for page in PAGES for comps, tier in COMPOSITIONS)


def components(comps: str) -> list[Component]:
    kv: dict[str, Any] = {"layers": (0,), "kv_heads": 1, "k_dim": 1, "v_dim": 1}
    made = {
        "F": lambda: FullComponent(**kv),
        "S": lambda: SwaComponent(**kv, window=256),
        "M": lambda: MambaComponent(conv=(1, 1), recurrent=(1,)),
    }
    return [made[letter]() for letter in comps]


class Scene:
    """One conversation of ``pieces`` pieces, ``cached`` tokens in all, and ``leaves`` other prompts of 64 tokens.

    All begin with the same 64 tokens. The tier is idle: composed, and nothing is ever copied to it.
    """

    def __init__(self, case: Case, leaves: int = 64, cached: int = 1024, pieces: int = 2) -> None:
        room = 2 * (64 + 64 * leaves + cached + 16 * NEW)  # half of it free: running requests give nothing back early
        parts = components(case.comps)
        tier = [HostTier(TierManifest(capacity=room, write="selective", hits=1 << 30))] if case.tier else []
        self.case = case
        self.cache: Cache = compose(
            None,
            plugins=[*parts, *tier],
            page_size=case.page,
            capacity={part.name: leaves + pieces + 4 if part.name == "mamba" else room for part in parts},
            debug=False,
        )
        self.count = 0
        system = self.text(64)
        for _ in range(leaves):
            self.serve(encode([*system, *self.text(64)]), 128)
        talk = [*system, *self.text(cached - 64)]
        self.serve(encode(talk), cached // pieces)
        self.asked, self.answer = encode([*talk, *self.text(NEW)]), encode(self.text(NEW))
        self.strange = encode(self.text(128))
        self.held: list[Sequence] = []

    def text(self, count: int) -> list[int]:
        """Tokens that no text before had."""
        self.count += count
        return list(range(self.count - count, self.count))

    def compute(self, sequence: Sequence) -> None:
        with self.cache.step((sequence,)) as step:
            step.run_ops()

    def serve(self, tokens: Tokens, chunk: int) -> None:
        with self.cache.open(tokens) as sequence:
            while sequence.reserved < sequence.named:
                self.chunk(sequence, min(chunk, sequence.named - sequence.reserved))

    def chunk(self, sequence: Sequence, count: int) -> None:
        sequence.grow(count)
        self.compute(sequence)
        sequence.publish()

    def turn(self) -> None:
        sequence = self.cache.open(self.strange)
        sequence.grow(self.strange.count - sequence.reserved)
        sequence.append(self.answer)
        sequence.grow(NEW)
        self.compute(sequence)
        sequence.close()

    def fill(self) -> None:
        """A few running requests take what is free, so that the next must evict."""
        free = {name: told.free for name, told in self.cache.stats().components.items()}
        for _ in range(free.pop("mamba", 1)):
            self.held.append(self.cache.open(self.strange))
        self.held[-1].grow(min(free.values()) * self.case.page)


def operations(scene: Scene) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls, in order; each is to be made before the next is asked for."""
    cache, held = scene.cache, scene.held
    yield "match cold", lambda: cache.match(scene.strange)
    yield "match hot", lambda: cache.match(scene.asked)
    yield "open", lambda: held.append(cache.open(scene.asked))
    sequence = held.pop()
    yield "grow", lambda: sequence.grow(NEW)
    yield "append", lambda: sequence.append(scene.answer)
    yield "step", lambda: scene.compute(sequence)
    yield "publish", sequence.publish
    sequence.grow(NEW)
    yield "fill", sequence.fill
    scene.compute(sequence)
    yield "close", sequence.close
    yield "evict", lambda: cache.evict(64)
    yield "evict ten", lambda: cache.evict(640)
    scene.fill()
    yield "turn", scene.turn


# ---------------------------------------------------------------- lenses


def executed(scene: Scene, call: Callable[[], object]) -> Work:
    """Bytecodes, and calls of hooks."""
    counts = {"bytecodes": 0, "hooks": 0}

    def follow(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts["bytecodes"] += 1
        elif event == "call" and frame.f_code.co_name in HOT_HOOKS:
            counts["hooks"] += 1
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
    return counts


def looked_at(scene: Scene, call: Callable[[], object]) -> Work:
    """Nodes that were looked at, and the bytes of keys that were read."""
    seen: set[int] = set()
    read = 0
    plain: dict[type[Node], type[Node]] = {}

    def watched(kind: type[Node]) -> type[Node]:
        def look(self: Node, name: str) -> Any:
            nonlocal read
            value = object.__getattribute__(self, name)
            seen.add(id(self))
            if name == "rest":
                read += len(value)
            return value

        made = type(f"Watched{kind.__name__}", (kind,), {"__slots__": (), "__getattribute__": look})
        plain[made] = kind
        return made

    tree = scene.cache._tree
    kinds: dict[type[Node], type[Node]] = {}
    nodes = all_nodes(scene)
    for node in nodes:
        kind = type(node)
        if kind not in kinds:
            kinds[kind] = watched(kind)
        node.__class__ = kinds[kind]
    usual = tree.kind
    tree.kind = kinds.setdefault(usual, watched(usual))
    try:
        call()
    finally:
        tree.kind = usual
        counts = {"nodes": len(seen), "read": read}
        for node in {id(node): node for node in [*nodes, *all_nodes(scene)]}.values():
            node.__class__ = plain.get(type(node), type(node))
    return counts


def all_nodes(scene: Scene) -> list[Node]:
    found: list[Node] = []
    stack: list[Node] = list(scene.cache._tree.roots.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children
    return found


def allocated(scene: Scene, call: Callable[[], object]) -> Work:
    """Blocks of memory that are kept, and the most bytes in use on the way."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()
        call()
        kept, peak = sys.getallocatedblocks() - blocks, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return {"blocks": kept, "peak": peak}


LENSES: tuple[Lens, ...] = (executed, looked_at, allocated)


def measure(make: Callable[[], Scene], lenses: tuple[Lens, ...] = LENSES) -> dict[str, Work]:
    """What each operation does: each lens looks at all of them, in a scene of its own, with the collector off."""
    found: dict[str, Work] = {name: {} for name in OPERATIONS}
    for lens in lenses:
        scene = make()
        for name, call in operations(scene):
            found[name] |= lens_alone(lens, scene, call)
    return found


def lens_alone(lens: Lens, scene: Scene, call: Callable[[], object]) -> Work:
    enabled = gc.isenabled()
    gc.disable()
    try:
        return lens(scene, call)
    finally:
        if enabled:
            gc.enable()


# ---------------------------------------------------------------- the table


def read_table() -> tuple[str, dict[tuple[str, str], Work]]:
    """The version of Python that its bytecodes and its memory are those of, and the figures."""
    first, names, *rows = TABLE.read_text().splitlines()
    columns = names.split("\t")[2:]
    found = {}
    for row in rows:
        case, operation, *figures = row.split("\t")
        found[case, operation] = dict(zip(columns, map(int, figures), strict=True))
    return first.split()[-1], found


def renew() -> None:
    lines = [f"# Written by: python tests/work.py --renew, with Python {version()}"]
    lines.append("\t".join(("case", "operation", *FIGURES)))
    for case in CASES:
        measure(lambda case=case: Scene(case))  # type: ignore[misc]  # what is made once is made
        for name, work in measure(lambda case=case: Scene(case)).items():  # type: ignore[misc]
            lines.append("\t".join((str(case), name, *(str(work[figure]) for figure in FIGURES))))
    TABLE.write_text("\n".join(lines) + "\n")


def version() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write the table anew")
    parser.add_argument("case", nargs="?", default="FSM/16", help="such as F/1 or FSM+host/16 (default: FSM/16)")
    given = parser.parse_args()
    if given.renew:
        renew()
        return
    (case,) = (case for case in CASES if str(case) == given.case)
    print(f"{given.case:12}" + "".join(f"{figure:>11}" for figure in FIGURES))
    for name, work in measure(lambda: Scene(case)).items():
        print(f"{name:12}" + "".join(f"{work[figure]:11}" for figure in FIGURES))


if __name__ == "__main__":
    main()
