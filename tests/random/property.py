"""The property test: random scripts of operations against the oracle of ``prefixloom.testing.oracle``.

    python -m tests.random.property --ops 1000000 --seed 1 --compositions all

That it can fail is seen with ``mutants.py``, which also has the table of what killed each mutant.
A script is plain data, made by a seed; a failure is shrunk and printed, and can be run again with ``play``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from prefixloom.script import Op, as_code, failure, play, shrink
from prefixloom.testing.oracle.writer import ARRIVALS, TIMES, WEIGHTS, SetsWriter
from tests.support import setups as compositions
from tests.support.setups import setups

SCRIPT = 250
"""How many operations a script has. After it everything is closed, and the next script gets a new cache."""


def explain(name: str, ops: Sequence[Op], work: int) -> str:
    """A failing script, shrunk, with what it runs into."""
    short = shrink(setups()[name], ops, work)
    return f"{failure(setups()[name], short)}\n\n{as_code(f'setups()[{name!r}]', short)}"


def run(name: str, seed: object, count: int, work: int = 20_000, of: Mapping[str, float] = WEIGHTS) -> dict[str, int]:
    """``count`` operations on one composition, in scripts; how often each thing happened."""
    setup = setups()[name]
    counts: dict[str, int] = {}
    done = script = 0
    while done < count:
        ops = SetsWriter(f"{seed} {name} {script}", setup).script(min(SCRIPT, count - done), of)
        try:
            world = play(setup, ops)
        except Exception as error:
            what = explain(name, ops, work) if work else str(error)
            raise AssertionError(f"{name}, seed {seed}, script {script}: {what}") from error
        enough = len(ops) < SCRIPT or world.operations >= len(ops) // 8  # a short script may do next to nothing
        assert enough, f"{name}: all was compared {world.operations} times"
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
    parser.add_argument("--arrivals", action="store_true", help="much is computed elsewhere, and arrives")
    parser.add_argument("--times", action="store_true", help="much is wanted for some time only")
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
            of = ARRIVALS if options.arrivals else TIMES if options.times else WEIGHTS
            counts = run(name, options.seed, each, 0 if options.first else 4000, of)
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
