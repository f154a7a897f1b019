"""A process of one side of a comparison: it reads names of workloads and answers each with a line of JSON.

Which prefixloom, or which peer, it measures is decided by its path and its arguments alone; this folder's scripts are
the same for every side.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def workload(name: str) -> Callable[..., Any]:
    if name == "beside peers":
        from peers.rows import measure

        return measure
    from workloads import WORKLOADS

    return WORKLOADS[name]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        gc.collect()
        gc.disable()
        told: dict[str, Any]
        try:
            told = {"rows": workload(name)(**arguments)}
        except Exception as error:  # an older commit may not have what a workload calls: that is an answer
            told = {"skipped": f"{type(error).__name__}: {error}"[:400]}
        gc.enable()
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
