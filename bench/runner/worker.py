"""The program of a process that measures. It reads a function's name and arguments, and answers with a line of JSON.

Which prefixloom it measures depends on its import path alone; the benchmarks are the same for every side. With
``--as-written`` every cache is composed with ``fuse=False``, on commits whose ``compose`` has this option.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


class NoFuseOption(RuntimeError):
    """This prefixloom always runs its sources as they are written."""


def function_of(name: str) -> Callable[..., Any]:
    """Return the function ``module:function``."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def compose_as_written() -> None:
    """Make ``prefixloom.compose`` not fuse. Must be called before a workload imports it."""
    import prefixloom

    if "fuse" not in inspect.signature(prefixloom.compose).parameters:
        raise NoFuseOption("prefixloom.compose has no option fuse: it runs as written anyway, so omit --as-written")
    prefixloom.compose = partial(prefixloom.compose, fuse=False)


def refused(error: Exception) -> dict[str, Any]:
    return {"skipped": str(error)[:400], "error": type(error).__name__}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be read as an answer
    import torch

    torch.set_num_threads(1)
    useless: dict[str, Any] | None = None
    if "--as-written" in sys.argv[1:]:
        try:
            compose_as_written()
        except NoFuseOption as error:
            useless = refused(error)
    for line in sys.stdin:
        name, collector, arguments = json.loads(line)
        answer = useless
        if answer is None:
            gc.collect()
            if not collector:
                gc.disable()
            try:
                answer = {"rows": function_of(name)(**arguments)}
            except Exception as error:  # another commit may lack what a workload calls: that is an answer
                answer = refused(error)
            gc.enable()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
