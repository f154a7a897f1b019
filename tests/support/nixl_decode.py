"""A decode process whose content NIXL moves, with a prefill process that is stopped, goes on and is killed.

It is a process of its own, which says how it went and ends at once: NIXL 1.5 over UCX ends a process without a GPU by a
segmentation fault when the interpreter ends, whatever was done with it before.
"""

from __future__ import annotations

import os
import signal
import traceback

import torch

from prefixloom_engine import Engine
from prefixloom_engine.disaggregation.nixl_mover import NixlLanding, NixlMover
from prefixloom_engine.disaggregation.transport import MoveFailed
from tests.support.engines import cache_for, connected, mixed, model, nothing_left, plain
from tests.support.processes import spoken

ROOM = 64 << 20


class CountingMover(NixlMover):
    fetched = 0

    def fetch(self, ticket: bytes, size: int) -> NixlLanding:
        self.fetched += 1
        return super().fetch(ticket, size)


def move_all(mover: CountingMover) -> None:
    requests = mixed(8)
    right = plain(model(), requests)
    cache = cache_for(model())
    with (
        spoken("prefill_process", "nixl", begins="tcp://") as (prefill, address),
        connected(Engine(model(), cache), address, mover=mover, patience=0.5) as decode,
    ):
        assert [answer.tokens for answer in decode.generate(requests)] == right
        moved = decode.handed_over
        assert moved == mover.fetched > 4, (moved, mover.fetched)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            cache.flush()
            prefill.send_signal(number)
            if number == signal.SIGCONT:
                assert decode.connect(30)
            assert [answer.tokens for answer in decode.generate(requests)] == right
        cache.flush()
        pending = [decode.add(request) for request in requests]
        prefill.kill()
        while not all(each.done for each in pending):
            decode.step()
        assert [each.tokens for each in pending] == right
        assert decode.handed_over > moved
        assert decode.lost > 0
    nothing_left(cache)
    whole = mover.offer(ROOM)
    assert whole is not None, "a read holds a part of the block"
    mover.release(whole.ticket)


def refuse_tickets(mover: CountingMover) -> None:
    for ticket in (b"", b"1234", bytes(4), bytes(300), b"\xff" * 300):
        try:
            mover.fetch(ticket, 100)
        except MoveFailed:
            continue
        raise AssertionError(f"{ticket!r} is no ticket")


def main() -> None:
    torch.set_num_threads(1)
    try:
        mover = CountingMover(ROOM)
        move_all(mover)
        refuse_tickets(mover)
        mover.close()
        mover.close()
        print("\nall is well", flush=True)
    except BaseException:
        print("\n" + traceback.format_exc().replace("\n", " | "), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
