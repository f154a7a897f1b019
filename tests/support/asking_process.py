"""A decode process to be killed: ``python asking_process.py ADDRESS`` says that it begins, and asks for prompts."""

from __future__ import annotations

import sys
import time

import torch

from prefixloom_engine import Engine, Request
from tests.support.engines import cache_for, connected, model, prompt


def main() -> None:
    torch.set_num_threads(1)
    print("begins", flush=True)
    decode = connected(Engine(model(), cache_for(model(), debug=False)), sys.argv[1])
    for n in range(4):
        decode.add(Request(prompt(n, 1900), 2))
    assert decode.awaited == 4
    time.sleep(600)


if __name__ == "__main__":
    main()
