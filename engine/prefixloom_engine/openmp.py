"""The threads that torch computes with on a CPU, where a worker computes and the scheduling thread only plans.

Each thread that ever ran a parallel op keeps a team of its own. GNU OpenMP counts all of them, and where they are more
than the cores, no team waits by spinning any more: every op then puts its threads to sleep and wakes them, also those
of the worker, which takes a quarter to a half more time. The team of the scheduling thread, which it has from making
pools or weights, does nothing but be counted: so it is let go, and comes back with the next parallel op of this thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

SOFT = 1
"""OpenMP's omp_pause_soft: let go of the threads, keep the settings."""


def release_team() -> None:
    """Let go of the calling thread's team, if it has one. Does nothing where torch computes with something else."""
    if torch.get_num_threads() > 1:
        _pause()(SOFT)


@cache
def _pause() -> Callable[[int], int]:
    """``omp_pause_resource_all`` of the GNU OpenMP that torch has loaded, if it has."""
    home = Path(torch.__file__).parent
    for folder in (home / "lib", home.parent / "torch.libs"):
        for library in folder.glob("libgomp*.so*"):
            try:
                found = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
                return found.omp_pause_resource_all
            except (OSError, AttributeError):  # another one is loaded, or one from before OpenMP 5.0
                continue
    return lambda kind: 0
