"""One rank of ``test_consensus.py`` in a process of its own: ``rank_process.py RANK RANKS FILE SCENARIO``.

It prints what it got as JSON, one line a call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from prefixloom import RankError
from prefixloom.tiers.consensus import ROOM, GroupConsensus


def say(call: Callable[[], object]) -> None:
    begun = time.monotonic()
    try:
        answer = call()
    except RankError as error:
        answer = {"error": str(error), "seconds": time.monotonic() - begun}
    print(json.dumps(answer), flush=True)


def agreeing(rank: int, ranks: int) -> None:
    """Different numbers done, fewer and more than one exchange takes; settings alike and not."""
    consensus = GroupConsensus(timeout=20)
    rounds: list[list[dict[int, int]]] = [
        [{}, {}, {}],
        [{1: 5}, {}, {1: 5, 2: 6}],
        [{1: 5, 3: 9}, {1: 4, 2: 7, 3: 0}, {3: 9, 2: 6, 1: 8}],
        [{n: n for n in range(ROOM // 8 * (1 + 2 * r))} for r in range(3)],
        [{2**60: 2**61}] * 3,
    ]
    for done in rounds:
        say(lambda done=done: list(consensus.agree(done[rank]).items()))  # type: ignore[misc]
    say(lambda: consensus.agree_min({"kv": 100 - rank, "a state": 7 + rank, "überall": 3}))
    say(lambda: consensus.agree_min({}))
    say(lambda: consensus.agree_same({"model": "m" * 3000, "page": "16"}))


def differing(rank: int, ranks: int) -> None:
    """Other names, other settings, and at last other calls."""
    consensus = GroupConsensus(timeout=20)
    say(lambda: consensus.agree_min({"kv": 1, **({"window": 2} if rank else {})}))
    say(lambda: consensus.agree_same({"page": "16", "dtype": "bfloat16" if rank == 0 else "int8"}))
    say(lambda: list(consensus.agree({0: 1})))
    say(lambda: consensus.agree({}) if rank else consensus.agree_min({}))
    say(lambda: consensus.agree({}))


def dying(rank: int, ranks: int) -> None:
    """All agree, and then rank 1 is gone."""
    agreeing(rank, ranks)
    consensus = GroupConsensus(timeout=5)
    say(lambda: list(consensus.agree({0: 1})))
    if rank == 1:
        os._exit(0)
    say(lambda: consensus.agree({1: 1}))
    say(lambda: consensus.agree({1: 1}))


def hanging(rank: int, ranks: int) -> None:
    consensus = GroupConsensus(timeout=1)
    say(lambda: list(consensus.agree({0: 1})))
    if rank == 1:
        time.sleep(8)
        os._exit(0)
    say(lambda: consensus.agree({1: 1}))


def main() -> None:
    rank, ranks, file, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    store = dist.FileStore(file, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    globals()[scenario](rank, ranks)
    sys.stdout.flush()
    os._exit(0)  # a group whose ranks have come apart cannot be taken down together


if __name__ == "__main__":
    main()
