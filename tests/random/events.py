"""Random operations, their events, and what a subscriber rebuilds of them although messages are lost and reordered.

    python -m tests.random.events --ops 100000 --seed 1

After every few operations the subscriber repairs what it missed, by replays from a buffer that is too small and by
snapshots. Then it must have what ``Cache.contents`` says, and answer every prompt as ``Cache.peek`` does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from prefixloom import PageChain
from prefixloom.script import Op, heard
from prefixloom.testing.oracle.writer import SetsWriter
from prefixloom_events import EventBatch, Mirror, OrderedEvents, PageLabel, RebuiltCache, encode_batch
from prefixloom_events.follower import ASK_FOR_ALL
from prefixloom_events.hashes import block_hash, root_digest
from prefixloom_events.publisher import ReplayBuffer
from prefixloom_events.wire import MEDIUMS
from tests.random.property import SCRIPT
from tests.support.setups import setups


def salt_of(namespace: str) -> PageLabel:
    return PageLabel(namespace or None)


class Keyed(SetsWriter):
    """Some prompts have several extra keys, in any order. Their spans do not overlap: so the oracle can judge them.

    In half of the scripts, tokens of prompts differ in their highest byte alone.
    """

    def __init__(self, seed: str, *given: Any) -> None:
        super().__init__(seed, *given)
        self.shift = random.Random(seed).choice((0, 24))

    def prompt(self) -> tuple[int, ...]:
        return tuple(token << self.shift for token in super().prompt())

    def extra(self, tokens: tuple[int, ...]) -> tuple[tuple[int, int, Hashable], ...]:
        spans: list[tuple[int, int, Hashable]] = []
        for _ in range(self.chance.choice((1, 1, 15))):
            for start, end, key in super().extra(tokens):
                if all(end <= before or after <= start for before, after, _ in spans):
                    spans.append((start, end, key))
        return tuple(spans)


class Followed:
    """One cache, its events over a line that loses and reorders, and a subscriber."""

    def __init__(self, cache: Any, seed: object) -> None:
        self.cache = cache
        self.rng = random.Random(f"events {seed}")
        self.journal = cache.journal()
        self.mirror = Mirror(cache.composition, salt_of)
        self.buffer = ReplayBuffer(self.rng.choice((2, 8, 64)), 1 << 20)
        self.stream = OrderedEvents()
        self.sent = 0
        self.line: list[tuple[int, bytes]] = []
        """What is on its way."""
        self.counts: Counter[str] = Counter()
        self.send(self.mirror.apply(cache.contents()))

    def send(self, events: list[Any]) -> None:
        if events:
            self.counts["events"] += len(events)
            payload = encode_batch(EventBatch(time.time(), events, 0))
            self.buffer.add(self.sent, payload)
            self.line.append((self.sent, payload))
            self.sent += 1

    def step(self) -> None:
        """After an operation: announce what has changed, now or with the next operations, and deliver some of it."""
        rng = self.rng
        if rng.random() < 0.7:
            self.send(self.mirror.apply(self.journal.take()))
        while self.line and rng.random() < 0.6:
            number, payload = self.line.pop(rng.randrange(min(4, len(self.line))))
            fate = rng.random()
            if fate < 0.15:
                self.counts["lost"] += 1
                continue
            self.stream.receive(number, payload)
            if fate > 0.9:
                self.stream.receive(number, payload)

    def repair(self) -> None:
        """Deliver or lose what is on its way, and ask for what is missing."""
        self.send(self.mirror.apply(self.journal.take()))
        while self.line:
            if self.rng.random() < 0.5:
                self.stream.receive(*self.line.pop())
            else:
                self.line.pop()
        start = ASK_FOR_ALL if self.rng.random() < 0.05 else self.stream.expected
        answers = self.buffer.since(start)
        if answers is None:
            self.counts["snapshots"] += 1
            batch = EventBatch(time.time(), self.mirror.snapshot(), 0)
            answers = [(self.sent - 1, encode_batch(batch))]
        else:
            self.counts["replays"] += 1
        for number, payload in answers:
            self.stream.replayed(number, payload)

    # ------------------------------------------------------------ what must hold
    def check(self, asked: Sequence[tuple[Any, ...]]) -> None:
        """Compare what the subscriber has with the cache."""
        self.repair()
        follower = self.stream.cache
        assert self.stream.expected == self.sent, (self.stream.expected, self.sent)
        assert not follower.faults, follower.faults
        self.counts["checks"] += 1
        mine = {
            (name, medium): blocks
            for (group, medium), blocks in follower.blocks.items()
            if (name := follower.names.get(group))
        }
        right = self.contents()
        for where in mine.keys() | right.keys():
            assert mine.get(where, set()) == right.get(where, set()), (where, self.cache)
        fresh, anew = RebuiltCache(), Mirror(self.cache.composition, salt_of)
        fresh.apply(anew.apply(self.cache.contents()))
        assert follower.same_as(fresh), "a mirror that begins now says something else"
        assert anew.pages == self.mirror.pages, (anew.pages, self.mirror.pages)
        for namespace, tokens, extra, _ in asked:
            self.ask(namespace, list(tokens), extra)

    def contents(self) -> dict[tuple[str, str], set[int]]:
        """By component and medium, the hashes of what is cached: by the documented rule, from ``Cache.contents``."""
        composition = self.cache.composition
        sizes = {part.name: part.page_tokens for part in composition.parts}
        found: dict[tuple[str, str], set[int]] = {}
        for change in self.cache.contents():
            blocks = found.setdefault((change.component, MEDIUMS[change.tier]), set())
            chain = PageChain(composition.page, composition.lookahead)
            digests = chain.pages(change.tokens, root_digest(salt_of(change.namespace), chain))
            if change.boundary is not None:
                blocks.add(block_hash(digests[change.boundary // composition.page - 1]))
            size = sizes[change.component] or 1
            parts = composition.page // size
            for lo, hi in change.spans:
                for index in range(lo // size, hi // size):
                    blocks.add(block_hash(digests[index // parts], index % parts if parts > 1 else -1))
        return found

    def ask(self, namespace: str, tokens: list[int], extra: Any) -> None:
        """A subscriber says of a prompt what the cache says; a router that knows full attention alone no less."""
        follower = self.stream.cache
        plan = self.cache.match(tokens, namespace=namespace, extra=extra)
        named = {"salt": namespace or None, "extra": extra}
        tiers = [("GPU", plan.ready)]
        if self.cache.composition.tier is not None:
            tiers.append(("CPU", plan.restorable))
        for medium, right in tiers:
            said, pages = (
                follower.boundary(tokens, medium=medium, **named),
                follower.pages(tokens, medium=medium, **named),
            )
            exact = is_pinned(self.cache.composition)
            assert said == right if exact else said <= right, (medium, said, right, tokens, self.cache)
            assert pages >= said
            self.counts["asked"] += 1
            self.counts["hit"] += said > 0
            self.counts["exact"] += said == right
            self.counts["counted alike"] += pages == said


def is_pinned(composition: Any) -> bool:
    """Whether every boundary needs something right before it. Otherwise less may be announced than can be resumed."""
    for part in composition.parts:
        if part.reach.unit == "boundary":
            return True
        if all(any(lo < end == hi for lo, hi in part.reach.needs(end)) for end in range(1, 200)):
            return True
    return False


def follow(setup: Any, ops: Sequence[Op], seed: object) -> Counter[str]:
    """Run a script, and look after every few operations."""
    with heard():
        world = setup()
        followed = Followed(world.cache, seed)
        for at, op in enumerate(ops):
            world.apply(op)
            followed.step()
            if at % 7 == 6:
                followed.check(world.asked)
        world.finish()
        followed.check(world.asked)
    return followed.counts


def run(name: str, seed: object, count: int, writer: type[SetsWriter] = Keyed) -> Counter[str]:
    setup, counts, done = setups()[name], Counter[str](), 0
    while done < count:
        ops = writer(f"{seed} {name} {done} events", setup).script(min(SCRIPT, count - done))
        counts += follow(setup, ops, f"{seed} {name} {done}")
        done += len(ops)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What subscribers rebuild from events, over lines that lose some.")
    parser.add_argument("--ops", type=int, default=100_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--compositions", default="all", help="all, or part of the names")
    options = parser.parse_args(arguments)
    names = [name for name in setups() if options.compositions in ("all", name) or options.compositions in name]
    total: Counter[str] = Counter()
    for name in names:
        total += run(name, options.seed, -(-options.ops // len(names)))
        print(name, flush=True)
    print(", ".join(f"{what} {times}" for what, times in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
