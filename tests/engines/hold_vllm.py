"""Holds a load of the connector in the midst of its copies, so that its process can be killed there.

vLLM runs this in each of its processes, as a plugin. Once the folder that ``HOLD_LOADS`` names has the file ``armed``,
the next load stops after its first group of blocks, and says so by the file ``held``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ARMED, HELD = "armed", "held"
HOLD = 3.0


def register() -> None:
    from prefixloom_vllm import worker

    folder = Path(os.environ["HOLD_LOADS"])
    runs_of = worker.runs_of
    armed = 0  # calls since then: one for each group of a load

    def held(blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        nonlocal armed
        if threading.current_thread().name == "prefixloom loads" and (folder / ARMED).exists():
            armed += 1
            if armed == 2:
                (folder / ARMED).rename(folder / HELD)
                time.sleep(HOLD)
        return runs_of(blocks, slots)

    worker.runs_of = held
