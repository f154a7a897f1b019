"""Frames come over as they were sent, whatever the socket takes and gives at a time."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from prefixloom_engine.disaggregation.wire import KINDS, Wire

Frame = tuple[bytes, int, bytes]


class Stingy:
    """A socket that takes and gives few bytes at a time, and sometimes none."""

    def __init__(self, connection: socket.socket, rng: random.Random, most: int) -> None:
        self.connection, self.rng, self.most = connection, rng, most

    def send(self, data: Any) -> int:
        if self.rng.random() < 0.3:
            raise BlockingIOError
        return self.connection.send(bytes(data[: self.rng.randrange(1, self.most)]))

    def recv(self, count: int) -> bytes:
        if self.rng.random() < 0.3:
            raise BlockingIOError
        return self.connection.recv(min(count, self.rng.randrange(1, self.most)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


@pytest.mark.parametrize("most", [2, 14, 600])
@pytest.mark.parametrize("seed", range(3))
def test_frames_come_over_in_order_and_whole(seed: int, most: int) -> None:
    rng = random.Random(f"{seed} {most}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    ends: list[Any] = [Wire(Stingy(each, rng, most)) for each in (near, far)]  # type: ignore[arg-type]
    sent: list[list[Frame]] = [[], []]
    got: list[list[Frame]] = [[], []]
    for turn in range(100_000):
        side = rng.randrange(2)
        if len(sent[side]) < 12 and rng.random() < 0.3:
            frame = rng.choice(KINDS), rng.randrange(1 << 32), rng.randbytes(rng.choice((0, 1, 13, 40, 400)))
            ends[side].send(*frame)
            sent[side].append(frame)
        got[1 - side] += ends[1 - side].receive()
        if turn > 100 and [len(each) for each in got] == [12, 12]:
            break
    assert got == sent[::-1]
    for here, there in ((0, 1), (1, 0)):
        assert ends[here].sent == sum(len(data) for _, _, data in sent[here])
        assert ends[there].received == ends[here].sent + 13 * 12
    for end in ends:
        end.close()
