"""Arguments: what the commands of the lab have in common, and the line that shows how far they are."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from ...compose.sizing import Traffic
from ...errors import CompositionError, InputError
from ..plan import running_in, traffic_of
from ..replay import CHUNK
from ..service import Service
from ..setup import Setup
from ..traces.reading import RequestFile, read_trace
from ..traces.requests import LabRequest

USUAL = Service()
INTERRUPTED = 130
"""The exit status of a command that was interrupted, after it has told what was measured."""


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is composed, except for its size and its order of eviction."""
    parser.add_argument(
        "--model", required=True, metavar="CONFIG", help="a model's config.json or its folder, or a profile (.toml)"
    )
    parser.add_argument("--page", type=int, metavar="N", help="tokens of a page (default: the profile's, or 16)")
    parser.add_argument("--admission", default="all", metavar="NAME", help="which states the cache takes")
    parser.add_argument("--host", metavar="SIZE", help="memory of a tier below the device")


def add_division_argument(parser: argparse.ArgumentParser) -> None:
    """Add what the memory is divided among the pools for."""
    parser.add_argument(
        "--divide", metavar="FOR",
        help='what --memory is divided for: "trace", or requests such as "prompt=16384,output=512,shared=0.3" '
        "(default: prompt=4096,output=512,shared=0.5)",
    )  # fmt: skip


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how requests overlap in time."""
    parser.add_argument("--in-turn", action="store_true", help="one request after the other, each at its arrival")
    parser.add_argument(
        "--max-running", type=int, default=USUAL.max_running, metavar="N", help="requests that run at once"
    )
    parser.add_argument("--chunk", type=int, default=CHUNK, metavar="N", help="tokens of a prompt that a step computes")
    parser.add_argument("--prefill", type=float, default=USUAL.prefill, metavar="RATE", help="prompt tokens a second")
    parser.add_argument(
        "--decode", type=float, default=USUAL.decode, metavar="RATE", help="tokens a second that each request decodes"
    )
    parser.add_argument(
        "--outputs",
        choices=("running", "published"),
        default="running",
        help="what becomes of answers: they take memory while they run, or are cached as well",
    )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how a trace is read."""
    parser.add_argument(
        "--block", type=int, metavar="N", help="tokens of a block of the trace, where its lines do not tell"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N requests only")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many processes work, and what is written."""
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="replays at a time, each in a process")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page of pictures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def setup_of(args: argparse.Namespace) -> Setup:
    """Return the setup that the arguments describe, without a size. What cannot be written later is refused now."""
    if args.jobs < 1:
        raise InputError(f"--jobs is a number of processes from 1 up, got {args.jobs}")
    if args.report is not None:
        write_report(args.report, "")
    service = None if args.in_turn else Service(args.prefill, args.decode, args.max_running, args.chunk)
    return Setup(
        args.model, page_size=args.page, admission=args.admission, host=args.host, service=service, chunk=args.chunk,
        outputs=args.outputs,
    )  # fmt: skip


def divided(setup: Setup, args: argparse.Namespace, trace: Iterable[LabRequest]) -> Setup:
    """Return the setup, with its memory divided as ``--divide`` says."""
    if args.divide is None:
        return setup
    if args.memory is None:
        raise InputError("--divide says what --memory is divided for: give a memory")
    running = running_in(setup)
    if args.divide == "trace":
        return attrs.evolve(setup, traffic=traffic_of(trace, running))
    return attrs.evolve(setup, traffic=Traffic.parse(args.divide, running=running, chunk=setup.chunk))


def write_report(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--report {path} cannot be written: {error.strerror}") from error


def trace_of(args: argparse.Namespace) -> RequestFile:
    return read_trace(args.trace, block=args.block, limit=args.limit)


def parse_capacity(text: str) -> int | Mapping[str, int]:
    """Return a capacity as a command line has it: "1000000", or "NAME=1000000,NAME=200"."""
    try:
        if "=" not in text:
            return int(text)
        pairs = [each.partition("=") for each in text.split(",")]
        return {name.strip(): int(value) for name, _, value in pairs}
    except ValueError:
        raise CompositionError(
            f"--capacity is a number of tokens, or NAME=NUMBER for each component, with commas; got {text!r}"
        ) from None


class TerminalLine:
    """A line on a terminal that is written anew. Where stderr is no terminal it shows nothing."""

    WIDTH = 30

    def __init__(self, file: Any = None) -> None:
        self._file = sys.stderr if file is None else file
        self.on = bool(self._file.isatty())
        self._length = 0

    def show(self, name: str, part: float, more: str) -> None:
        reached = int(part * self.WIDTH)
        text = f"{name} [{'#' * reached}{'.' * (self.WIDTH - reached)}] {part:4.0%}  {more}"
        print("\r" + text.ljust(self._length), end="", file=self._file, flush=True)
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            print("\r" + " " * self._length + "\r", end="", file=self._file, flush=True)
            self._length = 0


class ProgressBar(TerminalLine):
    """How far one replay is."""

    SECONDS = 0.2

    def __init__(self, trace: RequestFile, name: str, file: Any = None) -> None:
        super().__init__(file)
        self._trace, self._name = trace, name
        self._shown = 0.0

    def told(self, requests: int, now: float) -> None:
        if not self.on or time.monotonic() - self._shown < self.SECONDS:
            return
        self._shown = time.monotonic()
        part = self._trace.progress.part
        if self._trace.limit is not None:
            part = max(part, requests / self._trace.limit)
        self.show(self._name, part, f"{requests:,} requests")


class CountBar(TerminalLine):
    """How many of several replays are over."""

    def __init__(self, count: int, name: str, file: Any = None) -> None:
        super().__init__(file)
        self._count, self._name = count, name

    def told(self, done: int) -> None:
        if self.on:
            self.show(self._name, done / self._count, f"{done} of {self._count}")
