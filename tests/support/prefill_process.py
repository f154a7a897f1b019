"""A prefill process of its own, to be killed: ``python prefill_process.py [nixl]``; prints its address."""

from __future__ import annotations

import sys

import torch

from prefixloom_engine import Engine
from prefixloom_engine.disaggregation import PrefillServer
from prefixloom_engine.disaggregation.nixl_mover import NixlMover
from tests.support.engines import cache_for, model


def main() -> None:
    torch.set_num_threads(1)
    mover = NixlMover(64 << 20) if "nixl" in sys.argv else None
    server = PrefillServer(Engine(model(), cache_for(model(), debug=False), chunk=64), mover=mover)
    print(server.address, flush=True)
    server.run()


if __name__ == "__main__":
    sys.exit(main())
