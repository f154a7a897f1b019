"""Verifies a stream of events: ``python -m prefixloom_events.verify tcp://127.0.0.1:5557``.

It follows the stream, and asks now and then for a snapshot of all there is. What it has rebuilt from single events must
be the same, and no event may contradict what came before. It says what it found, and exits with 1 if something was
wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from prefixloom import PrefixloomError

from .follower import ASK_FOR_ALL, EventFollower
from .rebuilt import RebuiltCache
from .wire import PAGES, beside, decode_batch


def same_as_snapshot(follower: EventFollower) -> bool | None:
    """Return whether the rebuilt cache equals a snapshot. None: there is no answer, or more events came meanwhile."""
    answers = follower.answers(ASK_FOR_ALL)
    if not answers:
        return None
    number, payload = answers[-1]
    until = time.monotonic() + 2
    while follower.stream.expected <= number and time.monotonic() < until:
        follower.poll(0.1)
    if follower.stream.expected != number + 1:
        return None
    there = RebuiltCache()
    there.apply(decode_batch(payload).events)
    return follower.cache.same_as(there)


def summary(follower: EventFollower) -> str:
    cache, counts = follower.cache, follower.counts
    names = {
        PAGES: "pages that lead to a boundary",
        **{group: name or "boundaries" for group, name in cache.names.items()},
    }
    lines = [
        f"{names.get(group, group)} on {medium}: {len(blocks)}"
        for (group, medium), blocks in sorted(cache.blocks.items())
        if blocks
    ]
    lines.append(
        f"batches {counts.applied}, events {cache.events}, gaps {counts.gaps}, repaired by replay {counts.repaired}, "
        f"snapshots {counts.snapshots}, late {counts.late}, malformed {counts.malformed}, faults {cache.fault_count}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m prefixloom_events.verify", description=__doc__)
    parser.add_argument("endpoint", help="where the publisher sends to, such as tcp://127.0.0.1:5557")
    parser.add_argument("--replay", help="where it answers (default: the next port)")
    parser.add_argument("--topic", default="")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to follow (default: 10)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one snapshot to the next (default: 2)")
    parser.add_argument("--keys", metavar="FILE", help="the publisher's, made by prefixloom.connections.write_keys")
    options = parser.parse_args(arguments)
    try:
        follower = EventFollower(
            options.endpoint, options.replay or beside(options.endpoint), topic=options.topic, keys=options.keys
        )
    except PrefixloomError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    with follower:
        compared = wrong = 0
        until, next_look = time.monotonic() + options.seconds, 0.0
        if not follower.catch_up():
            print("verify: the publisher does not answer, so that nothing can be compared", file=sys.stderr)
            return 1
        while (now := time.monotonic()) < until or not compared:
            follower.poll(0.1)
            if now >= next_look or now >= until:
                next_look = now + options.every
                same = same_as_snapshot(follower)
                compared += same is not None
                wrong += same is False
            if now > until + 10:
                break
        print(summary(follower))
        print(f"compared with {compared} snapshots, of which {wrong} differ")
        for fault in follower.cache.faults:
            print(f"fault: {fault}")
        return int(bool(wrong or not compared or follower.cache.fault_count))


if __name__ == "__main__":
    sys.exit(main())
