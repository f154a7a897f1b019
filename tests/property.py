"""The property test: random scripts of operations against the oracle of ``model.py``.

    python tests/property.py --ops 1000000 --seed 1 --compositions all

That it can fail is seen with ``mutants.py``, which also has the table of what killed each mutant.
A script is plain data, made by a seed; a failure is shrunk and printed, and can be run again with ``replay``.
"""

from __future__ import annotations

import argparse
import logging
import pprint
import random
import re
import sys
import time
from collections.abc import Sequence

import setups as compositions
from operations import Op, Operations
from prefixloom import PrefixloomError
from serving import DOCUMENTS, document
from setups import Setup, setups

NAMESPACES = ("", "b")
SCRIPT = 250
"""Operations of one script: then everything is closed, and a new cache begins."""
WEIGHTS = {
    "turn": 12, "open": 9, "grow": 12, "append": 7, "step": 14, "commit": 6, "publish": 12, "rewind": 6, "close": 10,
    "evict": 3, "match": 8, "plan": 4, "open_plan": 4, "lease": 4, "release": 5, "drop_namespace": 0.5, "flush": 0.3,
    "poll": 1, "arrive": 2, "decode": 6, "illegal": 2,
}  # fmt: skip


class Writer:
    """Makes scripts from a seed, knowing nothing of what they will meet."""

    def __init__(self, seed: str, setup: Setup) -> None:
        self.chance = random.Random(seed)
        self.setup = setup
        self.ops: list[Op] = []

    def script(self, length: int) -> list[Op]:
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while len(self.ops) < length:
            (kind,) = self.chance.choices(kinds, weights)
            getattr(self, kind)()
        return self.ops[:length]

    def below(self, n: int) -> int:
        return self.chance.randrange(n)

    def say(self, *op: object) -> None:
        self.ops.append(tuple(op))

    def prompt(self) -> tuple[int, ...]:
        """The beginning of a document, sometimes changed near its end; at times empty or one token."""
        length = self.below(3) if self.below(20) == 0 else self.below(self.setup.longest + 1)
        tokens = document(self.below(DOCUMENTS))[:length]
        if tokens and self.below(4) == 0:
            kept = self.below(length + 1)
            tokens = tokens[:kept] + tuple(self.below(2) for _ in range(length - kept))
        return tokens

    def extra(self, tokens: tuple[int, ...]) -> tuple[tuple[int, int, str], ...]:
        if len(tokens) < 2 or self.below(5):
            return ()
        start = self.below(len(tokens))
        end = min(len(tokens), start + 1 + self.below(6))
        return ((start, end, f"image {self.below(2)}"),)

    def request(self) -> tuple[object, ...]:
        tokens = self.prompt()
        namespace = NAMESPACES[self.below(8) == 0]
        return namespace, tokens, self.chance.choice((0, 0, 1, 1, 3)), self.extra(tokens)

    def open(self) -> None:
        self.say("open", *self.request(), self.below(3), self.below(16))

    def turn(self) -> None:
        """A request from its start to its end, in order."""
        self.open()
        chunks = 1 + self.below(3)
        for chunk in range(chunks):
            if chunk < chunks - 1:
                self.say("grow", -1, 1 + self.below(self.setup.longest // 2))
            else:
                self.say("grow", -1, -1 - self.below(2) * self.below(3))
            self.say("step", 31, 0)
            if self.below(3) == 0:
                self.say("publish", -1, -1)
        if self.below(2):
            self.say("append", -1, 1 + self.below(6))
            self.say("grow", -1, -1)
            self.say("step", 31, 0)
        if self.below(3):
            self.say("close", -1, 0)

    def decode(self) -> None:
        """Some small steps of one request, of which a part is rejected."""
        number = self.below(5)
        for _ in range(1 + self.below(4)):
            tokens = 1 + self.below(4)
            self.say("append", number, tokens)
            self.say("grow", number, tokens)
            self.say("step", 31, 0)
            if self.below(12) == 0:
                self.say("grow", number, 1)
                self.say("step", 31, 8)
            if self.below(2):
                self.say("rewind", number, 1 + self.below(tokens), self.below(16))
            if self.below(4) == 0:
                self.say("publish", number, -1)

    def grow(self) -> None:
        self.say("grow", self.below(5), self.chance.choice((-1, -1, -2, 1, 2, 5, 1 + self.below(self.setup.longest))))

    def arrive(self) -> None:
        self.say("arrive", self.below(5), 1 + self.below(self.setup.longest))

    def append(self) -> None:
        self.say("append", self.below(5), self.chance.choice((1, 1, 2, 4, 9)))

    def step(self) -> None:
        self.say("step", self.chance.choice((31, 31, 1, 2, 3, 5)), self.below(9))

    def commit(self) -> None:
        self.say("commit", self.below(5), self.chance.choice((0, 0, 1, 2, 5)))

    def publish(self) -> None:
        self.say("publish", self.below(5), self.chance.choice((-1, 1, 2, self.below(8))))

    def rewind(self) -> None:
        number = self.below(5)
        for _ in range(1 + self.below(2)):
            self.say("rewind", number, self.chance.choice((0, 1, 2, 3, 8, 40)), self.below(16))

    def close(self) -> None:
        self.say("close", self.below(5), self.below(5))

    def evict(self) -> None:
        self.say("evict", self.below(7), self.chance.choice((0, 1, 2, 5, 30)))

    def match(self) -> None:
        self.say("match", *self.request())

    def plan(self) -> None:
        self.say("plan", *self.request())

    def open_plan(self) -> None:
        self.say("open_plan", self.below(4), self.below(16))

    def lease(self) -> None:
        self.say("lease", self.below(4))

    def release(self) -> None:
        self.say("release", self.below(4), self.below(3))

    def drop_namespace(self) -> None:
        self.say("drop_namespace", NAMESPACES[self.below(2)])

    def flush(self) -> None:
        self.say("flush")

    def poll(self) -> None:
        self.say("poll")

    def illegal(self) -> None:
        self.say("illegal", self.below(5), self.below(5))


def replay(setup: Setup, ops: Sequence[Op]) -> Operations:
    """Run a script to its end; whatever the cache gets wrong is raised."""
    log = logging.getLogger("prefixloom")
    before = log.level
    log.setLevel(logging.ERROR)  # dropped sequences are reported, and meant here
    try:
        world = Operations(setup.compose())
        for op in ops:
            world.apply(op)
        world.finish()
    finally:
        log.setLevel(before)
    return world


def fails(setup: Setup, ops: Sequence[Op]) -> BaseException | None:
    try:
        replay(setup, ops)
    except (
        AssertionError,
        PrefixloomError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        return error.with_traceback(None)
    return None


def shrink(setup: Setup, ops: Sequence[Op], limit: float = 60.0) -> list[Op]:
    """A shorter script that fails in the same way, by leaving out ever smaller parts, for at most ``limit`` seconds."""
    best = list(ops)
    kind = failure(fails(setup, best))
    end = time.monotonic() + limit
    size = len(best) // 2
    while size and time.monotonic() < end:
        at, before = 0, len(best)
        while at < len(best) and time.monotonic() < end:
            shorter = best[:at] + best[at + size :]
            if failure(fails(setup, shorter)) == kind:
                best = shorter
            else:
                at += size
        if size > 1 or len(best) == before:
            size //= 2
    return best


def failure(error: BaseException | None) -> str:
    """What kind of failure it is: its text without the numbers."""
    return "" if error is None else f"{type(error).__name__} {re.sub(r'[^a-z ]+', '', str(error))}"


def explain(name: str, ops: Sequence[Op], limit: float = 60.0) -> str:
    """A failing script, shrunk, with what it runs into."""
    setup = setups()[name]
    short = shrink(setup, ops, limit)
    error = fails(setup, short)
    script = pprint.pformat(short, width=110, compact=True)
    return f"{type(error).__name__}: {error}\n\nreplay(setups()[{name!r}],\n{script})"


def run(name: str, seed: object, count: int, patience: float = 60.0) -> dict[str, int]:
    """``count`` operations on one composition, in scripts; how often each thing happened."""
    setup = setups()[name]
    counts: dict[str, int] = {}
    done = script = 0
    while done < count:
        ops = Writer(f"{seed} {name} {script}", setup).script(min(SCRIPT, count - done))
        try:
            world = replay(setup, ops)
        except Exception as error:
            what = explain(name, ops, patience) if patience else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{name}, seed {seed}, script {script}: {what}") from error
        done += len(ops)
        script += 1
        for what, times in world.counts.items():
            counts[what] = counts.get(what, 0) + times
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random operations against a brute-force model.")
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--compositions", default="all", help="all, or part of the names")
    parser.add_argument("--first", action="store_true", help="stop at the first failure, and do not shrink it")
    parser.add_argument("--no-debug", action="store_true", help="without the cache's own checks: the model alone")
    options = parser.parse_args(arguments)
    compositions.DEBUG = not options.no_debug
    names = [name for name in setups() if options.compositions in ("all", name) or options.compositions in name]
    if not names:
        parser.error(f"no composition is called {options.compositions!r}; there are {', '.join(setups())}")
    each = -(-options.ops // len(names))
    total: dict[str, int] = {}
    done, start, failed = 0, time.monotonic(), 0
    for name in names:
        try:
            counts = run(name, options.seed, each, patience=0 if options.first else 60)
        except AssertionError as error:
            print(f"FAILED {error}\n", flush=True)
            failed += 1
            if options.first:
                return 1
            continue
        done += each
        for what, times in counts.items():
            total[what] = total.get(what, 0) + times
        print(f"{done:>9} operations, {done / (time.monotonic() - start):.0f}/s: {name}", flush=True)
    print(", ".join(f"{what} {times}" for what, times in sorted(total.items())))
    print(f"{failed} of {len(names)} compositions failed" if failed else "no difference from the model")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
