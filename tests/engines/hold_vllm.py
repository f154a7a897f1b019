"""Holds a load of the connector in the midst of its copies, so that its process can be killed there.

vLLM runs this in each of its processes, as a plugin. Once the folder that ``HOLD_LOADS`` names has the file ``armed``,
the next load stops after its first group of blocks, and says so by the file ``held``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

ARMED, HELD = "armed", "held"
HOLD = 3.0


def register() -> None:
    from prefixloom_vllm import worker

    folder = Path(os.environ["HOLD_LOADS"])
    move_slots = worker.move_slots
    armed = 0  # calls since then: one for each group of a load

    def held(*moved: Any) -> None:
        nonlocal armed
        if threading.current_thread().name == "prefixloom loads" and (folder / ARMED).exists():
            armed += 1
            if armed == 2:
                (folder / ARMED).rename(folder / HELD)
                time.sleep(HOLD)
        move_slots(*moved)

    worker.move_slots = held  # type: ignore[assignment]
