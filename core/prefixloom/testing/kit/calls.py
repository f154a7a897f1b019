"""Calls whose results differ between two processes: clocks, random numbers, process ids, what a machine is like.

The interpreter tells of every call while a profile function is set. So it does not matter by which name, and from which
module, a hook calls such a function.
"""

from __future__ import annotations

import datetime
import os
import platform
import random
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

try:
    import resource
except ImportError:  # there is none on Windows
    resource = None  # type: ignore[assignment]

DIFFERENT: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (time, ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
            "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns")),
    (datetime.datetime, ("now", "utcnow", "today")),
    (datetime.date, ("today",)),
    (random, ("random", "randrange", "randint", "choice", "choices", "shuffle", "sample", "uniform", "getrandbits",
              "gauss", "randbytes")),
    (os, ("urandom", "times", "getpid", "getppid", "uname", "getloadavg")),
    (platform, ("node", "uname")), (socket, ("gethostname", "getfqdn")),
    (resource, ("getrusage",)), (threading, ("active_count", "enumerate", "get_native_id")),
    (uuid, ("uuid1", "uuid4")),
    (secrets, ("token_bytes", "token_hex", "randbelow", "randbits", "choice")),
    (torch, ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial")),
)  # fmt: skip
"""Functions that no hook may call, because its answer would differ between ranks."""


@cache
def _known() -> tuple[dict[Any, str], dict[CodeType, tuple[str, Any]]]:
    """The names of these functions: those in C by the function, those in Python by their code, with their object."""
    in_c: dict[Any, str] = {}
    in_python: dict[CodeType, tuple[str, Any]] = {}
    for home, names in DIFFERENT:
        for name in names:
            function, said = getattr(home, name, None), f"{home.__name__}.{name}"
            if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
                in_python[function.__func__.__code__] = (said, function.__self__)
            elif isinstance(function, FunctionType):
                in_python[function.__code__] = (said, None)
            elif function is not None:
                in_c[function] = said
    return in_c, in_python


def _name_of(frame: FrameType, event: str, function: Any) -> str | None:
    in_c, in_python = _known()
    if event == "c_call":
        try:
            return in_c.get(function)
        except TypeError:  # it cannot be hashed
            return None
    if event == "call" and frame.f_code in in_python:
        said, owner = in_python[frame.f_code]
        return said if owner is None or frame.f_locals.get("self") is owner else None
    return None


def _writes_a_log(frame: FrameType | None) -> bool:
    """Whether a call was made by ``logging``, which notes the time of each message."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False


@contextmanager
def calls_watched(told: Callable[[str], None]) -> Iterator[None]:
    """Inside this context, call ``told`` with the name of each such function that this thread calls."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        said = _name_of(frame, event, argument)
        if said is not None and not _writes_a_log(frame):
            told(said)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
