"""How fast a mover brings content from one process to another, against a plain loop of NIXL over the same buffers.

``python -m bench.workloads.movers [--mib 16] [--times 50] [--rounds 7]``

The plain loop prepares one read and posts it again and again, as NIXL's own benchmark does. The mover does for each
content what an answer takes: memory is given, a ticket is made and sent, content is fetched, and the memory is given
back. Both read the same bytes into memory that is registered, in turn. What passes is time, of all of it.

It needs the extra ``nixl``. A process that has used NIXL 1.5 ends with a segmentation fault where there is no GPU, so
this one ends without the interpreter's own end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from prefixloom_engine.disaggregation.nixl_mover import NixlMover


def agent_of(name: str, memory: torch.Tensor) -> Any:
    """NIXL itself, with this memory registered."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory(memory)
    return agent


def end() -> None:
    """End this process in the midst, as another program: without the interpreter's own end."""
    sys.stdout.flush()
    os.execvp("true", ["true"])


def sender(told: Connection, size: int) -> None:
    """The process that has the content."""
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    agent = agent_of("plain-sender", content)
    told.send((agent.get_agent_metadata(), agent.get_serialized_descs(agent.get_xfer_descs(content))))
    mover = NixlMover(2 * size)
    offer = mover.offer(size)
    assert offer is not None
    offer.memory[:] = memoryview(content.numpy())
    told.send(bytes(content.numpy()))
    mover.release(offer.ticket)  # the next one of this size has the same place, and so the same content
    while told.recv():
        offer = mover.offer(size)
        assert offer is not None
        told.send(offer.ticket)
        told.recv()
        mover.release(offer.ticket)
    end()


class PlainLoop:
    """One read, prepared once."""

    def __init__(self, told: Connection, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.agent = agent_of("plain-receiver", self.memory)
        metadata, descriptors = told.recv()
        name = bytes(self.agent.add_remote_agent(metadata)).decode()
        mine, theirs = self.agent.get_xfer_descs(self.memory), self.agent.deserialize_descs(descriptors)
        self.read = self.agent.initialize_xfer("READ", mine, theirs, name)

    def move(self) -> memoryview:
        self.agent.transfer(self.read)
        while self.agent.check_xfer_state(self.read) != "DONE":
            pass
        return memoryview(self.memory.numpy())


class MoverLoop:
    """A mover, with a ticket for each content."""

    def __init__(self, told: Connection, size: int) -> None:
        self.told, self.size, self.mover = told, size, NixlMover(2 * size)

    def move(self, right: bytes | None = None) -> None:
        self.told.send(True)
        landing = self.mover.fetch(self.told.recv(), self.size)
        while (content := landing.poll()) is None:
            pass
        assert right is None or content == right
        landing.close()
        self.told.send("fetched")


def seconds_of(loop: Any, times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        loop.move()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    size = given.mib << 20
    told, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=sender, args=(other, size))
    process.start()
    plain = PlainLoop(told, size)
    right = told.recv()
    mover = MoverLoop(told, size)
    assert bytes(plain.move()) == right
    mover.move(right)
    loops: dict[str, Any] = {"plain": plain, "mover": mover}
    took: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(given.rounds):
        for name in loops if turn % 2 else reversed(loops):
            took[name].append(seconds_of(loops[name], given.times))
    told.send(False)
    process.join()
    for name, seconds in took.items():
        print(f"{name:6} {given.times * size / statistics.median(seconds) / 1e6:7.0f} MB/s")
    ratios = sorted(a / b for a, b in zip(took["plain"], took["mover"], strict=True))
    print(f"ratio  {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    end()


if __name__ == "__main__":
    main()
