"""Worlds: what differs between two machines that run one model, such as dates, host names, cores and devices.

In a world, each question for one of these things gets another answer, drawn from a seed. So what a component says
differs between two worlds if it depends on any of them, by whatever way it comes to the answer.
"""

from __future__ import annotations

import builtins
import datetime
import io
import itertools
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OF_THE_MACHINE = ("/dev/", "/etc/", "/proc/", "/sys/")
"""Files under these folders say other things on another machine."""


OPEN = open
NUMBERS = (255, 1, 64, 3, 16, 31, 2, 96, 5, 8)
"""How many there are of anything. Every function has them in turn."""
MONTH = 30.2 * 86400


class Machine:
    """A machine of its own. ``replaced`` lists what it answers itself, as (module, name, function).

    Seven seeds that follow each other begin on all days of the week, in different months and at different hours.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self._chance, self._now = seed, random.Random(f"machine {seed}"), 1e9 + seed * MONTH
        self._lengths = itertools.cycle((*range(seed % 9, 9), *range(seed % 9)))
        self.replaced = [(module, name, new) for module, name, new in self._answers() if hasattr(module, name)]

    def now(self, *_: Any) -> float:
        """Return the time: weeks after the last time that anybody asked."""
        self._now += self._chance.uniform(0, 5e6)
        return self._now

    def word(self, *_: Any) -> str:
        return "".join(self._chance.choices("abcdefghijklmnop", k=3 + next(self._lengths)))

    def numbers(self) -> Callable[..., int]:
        """Return a function that answers another number each time."""
        every = itertools.cycle(NUMBERS[self.seed % 10 :] + NUMBERS[: self.seed % 10])
        return lambda *_: next(every)

    def _answers(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        for name in ("time", "monotonic", "perf_counter"):
            yield time, name, self.now
            yield time, f"{name}_ns", lambda *_: int(self.now() * 1e9)
        for name, at in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1), ("asctime", 0)):
            yield time, name, self._dated(getattr(time, name), at, as_tuple=name in ("strftime", "asctime"))
        yield datetime, "datetime", type("datetime", (datetime.datetime,), self._dates(datetime.datetime))
        yield datetime, "date", type("date", (datetime.date,), self._dates(datetime.date))
        for name in ("cpu_count", "process_cpu_count", "getpid"):
            yield os, name, self.numbers()
        cores = self.numbers()
        yield os, "sched_getaffinity", lambda _: set(range(cores()))
        yield os, "uname", lambda: os.uname_result([self.word() for _ in range(5)])
        for module, name in ((platform, "node"), (socket, "gethostname"), (socket, "getfqdn")):
            yield module, name, self.word
        for module, name in ((builtins, "open"), (io, "open")):
            yield module, name, self._opened
        for name in ("exists", "isdir", "isfile"):
            yield os.path, name, self._there(getattr(os.path, name))
        torch = sys.modules.get("torch")
        if torch is not None:
            yield torch.cuda, "device_count", self.numbers()
            yield torch, "get_num_threads", self.numbers()

    def _dated(self, real: Callable[..., Any], at: int, as_tuple: bool) -> Callable[..., Any]:
        """Return a function of a time, the argument at this place, which is now unless it is given."""

        def dated(*given: Any) -> Any:
            if len(given) > at and given[at] is not None:
                return real(*given)
            return real(*given[:at], time.gmtime(self.now()) if as_tuple else self.now())

        return dated

    def _dates(self, real: Any) -> dict[str, Any]:
        def now(cls: Any, tz: Any = None) -> Any:
            return real.fromtimestamp(self.now(), tz) if tz is not None else real.fromtimestamp(self.now())

        return {name: classmethod(now) for name in ("now", "today", "utcnow") if hasattr(real, name)}

    def _opened(self, file: Any, *args: Any, **options: Any) -> Any:
        """Open a file. One that tells of the machine has other digits, other words and another length."""
        got = OPEN(file, *args, **options)
        if not str(file).startswith(OF_THE_MACHINE) or not got.readable():
            return got
        with got:
            said = got.read()
        text = said if isinstance(said, str) else said.decode(errors="replace")
        text = "".join(self._chance.choice("123456789") if letter.isdigit() else letter for letter in text)
        text = text * self._chance.randrange(1, 4) if len(text.split()) > 1 else f"{self.word()}\n"
        return io.StringIO(text) if isinstance(said, str) else io.BytesIO(text.encode())

    def _there(self, real: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def there(path: Any) -> bool:
            return self._chance.random() < 0.5 if str(path).startswith(OF_THE_MACHINE) else real(path)

        return there


@contextmanager
def on_machine(machine: Machine | None) -> Iterator[None]:
    """Put this process into the world of ``machine`` for this context. None: leave it where it is."""
    before = [(module, name, getattr(module, name)) for module, name, _ in (machine.replaced if machine else ())]
    try:
        for module, name, new in machine.replaced if machine else ():
            setattr(module, name, new)
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)
