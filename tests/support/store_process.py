"""A process that serves prompts and keeps them in a store, until it is killed: ``store_process.py URL``.

It prints the number of each prompt whose content the store has, with how many tokens that is.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

CAPACITY, LENGTH = 1 << 23, 60


def prompt(number: int) -> list[int]:
    """Two of three go on from the one before."""
    return [*range(1000 + number // 3, 1020 + number // 3), *([number] * (LENGTH - 20))]


def parts() -> list[Any]:
    from tests.support.helpers import every_reach, part

    return [part(name, every_reach()[name]) for name in ("path", "window", "point")]


def main() -> None:
    from prefixloom import open_store
    from tests.support.stores import composed, idle
    from tests.support.tiers import serve

    store = open_store(sys.argv[1])
    cache, _ = composed(*parts(), store=store, tokens=512, debug=False)
    for number in itertools.count():
        serve(cache, prompt(number), chunk=20)
        idle(cache)
        print(number, cache.peek([*prompt(number), 1]), flush=True)


if __name__ == "__main__":
    main()
