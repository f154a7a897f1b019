"""Two engines in one process that has 5,000 descriptors open; prints what was handed over."""

from __future__ import annotations

import os
import resource

import torch

from prefixloom_engine import Engine, Request
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from tests.support.engines import cache_for, model, plain, prompt
from tests.support.transports import greeted, served_by


def main() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(5000)]
    server = PrefillServer(Engine(model(), cache_for(model())))
    request = Request(prompt(1, 150), 4)
    with DecodeEngine(Engine(model(), cache_for(model())), server.address) as decode:
        assert greeted(decode, server.serve_once)
        assert served_by(decode, server.serve_once, [request]) == plain(model(), [request])
        assert max(os.listdir("/proc/self/fd"), key=int) >= "5000"
        print(decode.handed_over, len(opened))
    server.close()


if __name__ == "__main__":
    main()
